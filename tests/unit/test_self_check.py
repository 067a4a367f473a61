"""The self-check at start refuses an engine that computes wrongly, whatever the reason."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine import build
from engine.attention.sdpa import SdpaContext
from engine.build import build_engine
from engine.cache.kv import KVCache
from engine.config import EngineConfig
from engine.errors import ConfigError
from engine.execution.runner import ModelRunner
from engine.execution.self_check import States, check_model
from engine.execution.step_input import StepInput
from engine.models.base import AttentionOptions
from tests.unit.small_engine import save_tiny_llama, small_config

Attend = Callable[..., torch.Tensor]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tiny")
    save_tiny_llama(path)
    return path


def outcome(config: EngineConfig) -> str:
    threads = torch.get_num_threads()
    try:
        parts = build_engine(config, lambda event: None)
    finally:
        torch.set_num_threads(threads)
    parts.writer.close()
    assert parts.core.kv.stats().referenced == 0
    return parts.info.self_check


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_model_that_is_right_passes_and_says_how_near_the_two_ways_are(folder: Path, dtype: str) -> None:
    said = outcome(small_config(folder, dtype=dtype))
    assert said.startswith("passed: rows differ by at most" if dtype == "float32" else "passed: the median row differs by")


def test_it_can_be_turned_off_and_is_left_out_where_the_context_is_too_short(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SdpaContext, "attend", _without_the_past(SdpaContext.attend))
    assert outcome(small_config(folder, self_check=False)) == "off"
    assert outcome(small_config(folder, max_model_len=2)).startswith("passed")


def _without_the_past(attend: Attend) -> Attend:
    """As a backend that doesn't read what earlier steps have written."""

    def broken(
        self: SdpaContext, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, options: AttentionOptions
    ) -> torch.Tensor:
        out = attend(self, layer, query, key, value, options)
        return out if int(self._rows.starts[0]) == 0 else out * 0.5

    return broken


def test_rows_that_depend_on_how_a_prompt_is_cut_are_found(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SdpaContext, "attend", _without_the_past(SdpaContext.attend))
    with pytest.raises(ConfigError, match=r"the self-check failed: computed in parts, a row differs by .* \(limit 1e-03\)"):
        outcome(small_config(folder))


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("model.layers.1.mlp.down_proj.weight", float("nan"), "the states of layer 2 are not finite"),
        ("model.embed_tokens.weight", 0.0, "the states of layer 0 are all zero"),
        ("model.embed_tokens.weight", 1.0, "the states of layer 0 are the same for every token"),
        ("model.norm.weight", 0.0, "the states of layer norm are all zero"),
    ],
)
def test_damaged_weights_are_found(folder: Path, tmp_path: Path, name: str, value: float, message: str) -> None:
    weights = load_file(folder / "model.safetensors")
    for file in folder.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    save_file({**weights, name: torch.full_like(weights[name], value)}, tmp_path / "model.safetensors")
    with pytest.raises(ConfigError, match=message):
        outcome(small_config(tmp_path))


@pytest.mark.parametrize("failing", [1, 2, 3])
def test_a_step_that_fails_leaves_no_block_behind(folder: Path, monkeypatch: pytest.MonkeyPatch, failing: int) -> None:
    held: list[int] = []
    steps, states = iter(range(1, 9)), ModelRunner.states

    def fail(self: ModelRunner, step: StepInput) -> States:
        if next(steps) == failing:
            raise RuntimeError("no kernel image is available")
        return states(self, step)

    def check(runner: ModelRunner, kv: KVCache, **settings: Any) -> float:  # noqa: ANN401 - as they are given
        try:
            return check_model(runner, kv, **settings)
        finally:
            held.append(kv.stats().referenced)

    monkeypatch.setattr(ModelRunner, "states", fail)
    monkeypatch.setattr(build, "check_model", check)
    with pytest.raises(RuntimeError, match="no kernel image"):
        outcome(small_config(folder))
    assert held == [0]


def test_caches_without_room_for_its_prompt_are_told_of(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(KVCache, "extend", lambda self, tables, start, end: start)
    with pytest.raises(ConfigError, match="the self-check failed: the caches have no room for a prompt of 24 tokens"):
        outcome(small_config(folder))
