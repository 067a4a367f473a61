"""Leaving out unwanted rows, compiled kernels, packed weights: the same tokens and files as without them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from engine.cache.groups import KVGroup
from engine.cache.spec import KVSpec, LayerKV
from engine.cache.states import StateStore
from engine.engine import Engine
from engine.errors import ConfigError
from engine.execution.runner import ModelRunner, StepOutput
from engine.execution.step_input import StepInput
from engine.layers import LayerId
from engine.native import compiler
from engine.native.compiler import NoKernels
from engine.native.kernels import load_kernels
from engine.offline import Completion, LocalTarget, OfflineEngine
from engine.request import EngineRequest, SamplingParams
from engine.saves.selection import ALL_ROWS, LAST_ROW, RowSelection
from engine.saves.spec import SaveSpec
from tests.products import packed_linears
from tests.unit.small_engine import PROMPT, Recorder, save_tiny_llama, small_config


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path: Path = tmp_path_factory.mktemp("tiny")
    save_tiny_llama(path)
    return path


def save(target: Path, *layers: LayerId, rows: RowSelection = ALL_ROWS, output: bool = False, last: bool = False) -> SaveSpec:
    return SaveSpec(target.name, LocalTarget(target), layers, "float32", output, last, rows)


def requests(folder: Path) -> list[EngineRequest]:
    """Of every kind, more than a step holds: embeddings alone, half of the layers, scored prompts, single rows, text."""
    prompt = [*PROMPT, *reversed(PROMPT)]
    nothing, scored = SamplingParams(max_tokens=0), SamplingParams(max_tokens=0, prompt_logprobs=2)
    text = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)
    scored_text = SamplingParams(max_tokens=3, temperature=0.0, ignore_eos=True, prompt_logprobs=0)
    some = RowSelection(((1, 3), (-2, None)))
    return [
        EngineRequest("text", prompt[:5], text),
        EngineRequest("text and its rows", prompt[:7], text, save(folder / "a", 1, "norm", output=True)),
        EngineRequest("prompt rows", prompt[:11], text, save(folder / "b", 2)),
        EngineRequest("last token", prompt[:3], text, save(folder / "c", 1, 2, last=True)),
        EngineRequest("embeddings", prompt, nothing, save(folder / "d", 0)),
        EngineRequest("half", prompt[2:], nothing, save(folder / "e", 0, 1)),
        EngineRequest("one row", prompt[1:], nothing, save(folder / "f", 2, "norm", rows=LAST_ROW)),
        EngineRequest("scores", prompt[3:], scored),
        EngineRequest("scores and rows", prompt[:13], scored, save(folder / "g", "norm", rows=some)),
        EngineRequest("scores and text", prompt[4:], scored_text, save(folder / "h", 1, 2, rows=some, output=True)),
        EngineRequest("text of one token", prompt[5:6], text),
    ]


@dataclass
class Run:
    """What a run gave."""

    completions: list[Completion]
    files: dict[str, dict[str, torch.Tensor]]
    was_trimmed: bool
    native_kernels: str
    packed_weights: str


def run(folder: Path, target: Path, *, trim: bool, kernels: str, packed: str = "off") -> Run:
    trimmed = False
    compute = ModelRunner.run

    def watched(runner: ModelRunner, step: StepInput, sampled_before: torch.Tensor | None = None) -> StepOutput:
        nonlocal trimmed
        trimmed |= step.final_rows is not None
        return compute(runner, step, sampled_before)

    target.mkdir()
    config = small_config(folder, trim_last_layer=trim, native_kernels=kernels, packed_weights=packed, max_batch_tokens=16, threads=2)
    with pytest.MonkeyPatch.context() as patch, OfflineEngine(config) as engine:
        patch.setattr(ModelRunner, "run", watched)
        completions = engine.generate(requests(target))
        info = engine.engine.info
    files = {path.name: load_file(path) for path in sorted(target.iterdir())}
    return Run(completions, files, trimmed, info.native_kernels, info.packed_weights)


@pytest.fixture(scope="module")
def plain(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    found = run(folder, tmp_path_factory.mktemp("plain") / "files", trim=False, kernels="off")
    assert (found.was_trimmed, found.native_kernels, found.packed_weights) == (False, "off", "off")
    assert len(found.files) == 8
    return found


def assert_alike(found: Run, expected: Run) -> None:
    for completion, plain in zip(found.completions, expected.completions, strict=True):
        assert completion.error is plain.error is None
        assert completion.token_ids == plain.token_ids
        assert scores(completion) == pytest.approx(scores(plain), abs=1e-4)
    assert list(found.files) == list(expected.files)
    for name, tensors in expected.files.items():
        assert list(found.files[name]) == list(tensors)
        for key, tensor in tensors.items():
            assert relative(found.files[name][key], tensor) <= 1e-5, f"{key} of {name}"


def scores(completion: Completion) -> Sequence[float]:
    return [score.logprob for score in completion.prompt_logprobs or () if score is not None]


def relative(found: torch.Tensor, expected: torch.Tensor) -> float:
    assert (found.dtype, found.shape) == (expected.dtype, expected.shape)
    return float((found.double() - expected.double()).norm() / expected.double().norm())


def test_tokens_scores_and_files_are_the_same_without_unwanted_rows(folder: Path, plain: Run, tmp_path: Path) -> None:
    found = run(folder, tmp_path / "files", trim=True, kernels="off")
    assert found.was_trimmed
    assert_alike(found, plain)


@pytest.mark.parametrize("trim", [False, True], ids=["whole", "trimmed"])
def test_tokens_scores_and_files_are_the_same_with_compiled_kernels(folder: Path, plain: Run, tmp_path: Path, trim: bool) -> None:
    try:
        load_kernels(torch.float32, 1)
    except NoKernels as error:
        pytest.skip(f"no native kernels here: {error}")
    found = run(folder, tmp_path / "files", trim=trim, kernels="on")
    assert (found.was_trimmed, found.native_kernels) == (trim, "compiled for this processor")
    assert_alike(found, plain)


@pytest.mark.parametrize("trim", [False, True], ids=["whole", "trimmed"])
def test_tokens_scores_and_files_are_the_same_with_packed_weights(folder: Path, plain: Run, tmp_path: Path, trim: bool) -> None:
    packed_linears(torch.float32)
    found = run(folder, tmp_path / "files", trim=trim, kernels="off", packed="on")
    assert (found.was_trimmed, found.packed_weights) == (trim, "on")
    assert_alike(found, plain)


@pytest.mark.parametrize(("prefault", "poison", "touches"), [(True, False, True), (False, False, False), (True, True, False)])
def test_caches_are_touched_at_start_where_that_is_asked_for(
    folder: Path, monkeypatch: pytest.MonkeyPatch, prefault: bool, poison: bool, touches: bool
) -> None:
    touched: list[object] = []
    for cache in (KVGroup, StateStore):
        monkeypatch.setattr(cache, "touch", lambda self: touched.append(self))
    with OfflineEngine(small_config(folder, prefault_caches=prefault, poison=poison)):
        assert {type(cache) for cache in touched} == ({KVGroup, StateStore} if touches else set())


def test_touched_caches_are_in_memory() -> None:
    spec = KVSpec(LayerKV(2, 8), (0, 1), 4, torch.float32)
    group, store = KVGroup(spec, 3, torch.device("cpu")), StateStore(5, 4, 6, torch.float32)
    for tensor in (group.keys, group.values, store.pages):
        tensor.fill_(7.0)
    group.touch()
    store.touch()
    assert not any(tensor.any() for tensor in (group.keys, group.values, store.pages))


@pytest.fixture
def no_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And nothing that was compiled before."""
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(compiler, "PREBUILT", tmp_path)
    monkeypatch.setattr(
        compiler, "cpu_flags", lambda: frozenset().union(*(f.needs for all_of in compiler.FAMILIES.values() for f in all_of))
    )


@pytest.mark.usefixtures("no_compiler")
def test_kernels_that_are_asked_for_and_cannot_be_had_are_a_config_error(folder: Path) -> None:
    with pytest.raises(ConfigError, match="there are no native kernels: there is no C compiler"):
        Engine(small_config(folder, native_kernels="on"), Recorder()).start()


@pytest.mark.usefixtures("no_compiler")
def test_kernels_that_are_not_asked_for_may_be_missing_and_the_reason_is_told(folder: Path) -> None:
    with OfflineEngine(small_config(folder, native_kernels="auto")) as offline:
        assert offline.engine.info.native_kernels == "there is no C compiler (gcc)"


def test_kernels_for_a_dtype_that_has_none_are_a_config_error(folder: Path) -> None:
    with pytest.raises(ConfigError, match="not written for float16"):
        Engine(small_config(folder, native_kernels="on", dtype="float16"), Recorder()).start()
