"""A checkpoint without an LM head: hidden states as ever, and a clear refusal of text."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from engine.build import build_engine
from engine.capture.transfers import PagesInFlight
from engine.engine import Engine
from engine.errors import ConfigError, InvalidRequest
from engine.execution.executor import StepExecutor
from engine.offline import LocalTarget, OfflineEngine
from engine.request import EngineRequest, SamplingParams
from engine.saves.spec import SaveSpec
from tests.unit.small_engine import PROMPT, Recorder, make_request, save_tiny_llama, small_config


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    save_tiny_llama(folder)
    weights = load_file(folder / "model.safetensors")
    del weights["lm_head.weight"]
    save_file(weights, folder / "model.safetensors")
    return folder


def test_states_of_a_model_without_a_head_are_saved(folder: Path, tmp_path: Path) -> None:
    save = SaveSpec("s", LocalTarget(tmp_path / "rows"), (0, 1, 2, "norm"), "float32")
    with OfflineEngine(small_config(folder)) as offline:
        assert not offline.engine.info.model.has_head
        offline.generate([EngineRequest("r", PROMPT, SamplingParams(max_tokens=0), save)])
    assert load_file(tmp_path / "rows")["hidden_states"].shape == (len(PROMPT), 4, 32)


@pytest.mark.parametrize(
    ("sampling", "field"),
    [(SamplingParams(max_tokens=1), "max_tokens"), (SamplingParams(max_tokens=0, prompt_logprobs=1), "prompt_logprobs")],
)
def test_text_and_log_probabilities_are_refused_by_the_fields_name(sampling: SamplingParams, field: str, folder: Path) -> None:
    engine = Engine(small_config(folder), Recorder())
    engine.start()
    try:
        with pytest.raises(InvalidRequest, match="no LM head") as caught:
            engine.submit(EngineRequest("r", PROMPT, sampling))
        assert caught.value.param == field
    finally:
        engine.stop()


def test_the_engines_own_step_needs_no_head(folder: Path) -> None:
    """It tells whether a step that failed was the requests' fault."""
    parts = build_engine(small_config(folder), lambda event: None)
    core = parts.core
    try:
        pages = PagesInFlight(core.states.pool)
        steps = StepExecutor(core.runner, core.sampler, core.scheduler, core.kv, pages, 2, core.device, has_head=core.limits.has_head)
        assert steps.can_compute() is True
    finally:
        parts.writer.close()


def test_a_longer_context_is_allowed_only_where_the_scaling_is_made_for_it(tmp_path: Path) -> None:
    save_tiny_llama(tmp_path)
    with pytest.raises(ConfigError, match="--max-model-len 256 is above what the model was made for, 128"):
        Engine(small_config(tmp_path, max_model_len=256), Recorder()).start()
    config = json.loads((tmp_path / "config.json").read_text())
    config["rope_parameters"] = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with OfflineEngine(small_config(tmp_path, max_model_len=256)) as offline:
        offline.generate([make_request("r")])
        assert offline.engine.info.max_model_len == 256
