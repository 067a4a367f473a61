"""Graphs are recorded when the engine is put together: room is left for them, and where there are none a reason is told."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch

from benchmarks.gpu.model import TINY, random_model
from engine import build
from engine.attention.facade import cache_of
from engine.attention.sdpa import SdpaBackend
from engine.attention.select import Selection
from engine.attention.varlen import VarlenBackend
from engine.build import EngineParts, assemble
from engine.cache import sizing
from engine.cache.groups import KVGroup
from engine.cache.spec import group_layers
from engine.config import EngineConfig, Switch
from engine.errors import ConfigError
from engine.execution.graphs import DecodeGraphs, Replay
from engine.execution.recording import GraphRecording
from tests.unit.decode_bench import CPU, GRAPH_BYTES, MAX_LEN, FakeRecorder, make_backend
from tests.unit.paged_kernels import FakeVarlen

GIB = 1 << 30
NUM_GRAPHS = 10
"""For up to 16 requests: sizes 16, 8, 4, 2 and 1, with and without captured rows."""


class FailingRecorder(FakeRecorder):
    """Records some graphs, and raises at the next one."""

    def __init__(self, failure: type[Exception], after: int) -> None:
        super().__init__()
        self.failure, self.after = failure, after

    def record(self, work: object) -> Replay:
        if self.recorded >= self.after:
            raise self.failure("no")
        return super().record(work)  # type: ignore[arg-type]  # what a recorder is given


@pytest.fixture(autouse=True)
def quiet(caplog: pytest.LogCaptureFixture) -> None:
    """A log record that is kept would keep the exception's traceback, and what was recorded with it."""
    caplog.set_level(logging.CRITICAL + 1)


@contextmanager
def engine(
    monkeypatch: pytest.MonkeyPatch, recorder: FakeRecorder | None, backend: str = "varlen", **settings: object
) -> Iterator[EngineParts]:
    """With doubles of a GPU's attention and graphs, in memory of eight GiB."""
    chosen = SdpaBackend(CPU) if backend == "sdpa" else make_backend(backend)
    monkeypatch.setattr(build, "select_backend", lambda *arguments: Selection(chosen, chosen.default_block_size, "a double"))
    monkeypatch.setattr(build, "recorder_for", lambda device: recorder)
    monkeypatch.setattr(sizing, "available_memory", lambda: 8 * GIB)
    known = {"max_running": 16, "state_cache_memory": 1 << 20, "native_kernels": "off"}
    config = EngineConfig("random", **{**known, **settings})  # type: ignore[arg-type]  # settings of a test
    parts = assemble(random_model(TINY, CPU), config, lambda event: None, max_model_len=MAX_LEN, threads=1)
    yield parts
    parts.writer.close()


def test_what_graphs_take_is_left_free_when_the_kv_cache_is_sized(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    kept: list[int] = []
    recorder, sized = FakeRecorder(), build.kv_blocks

    def kv_blocks(*arguments: object, workspace_bytes: int, **options: object) -> list[int]:
        asked.append(workspace_bytes)
        kept.append(recorder.memory - recorder.free_bytes())
        return sized(*arguments, workspace_bytes=workspace_bytes, **options)  # type: ignore[arg-type]  # as they came

    monkeypatch.setattr(build, "kv_blocks", kv_blocks)
    with engine(monkeypatch, recorder) as parts:
        assert asked == [NUM_GRAPHS * GRAPH_BYTES]
        assert kept == [0], "graphs of the trial are still there when the KV cache is made"
        assert len(recorder.alive) == NUM_GRAPHS
        assert parts.core.runner.has_graphs


def test_a_kv_cache_whose_size_was_asked_for_needs_no_trial(monkeypatch: pytest.MonkeyPatch) -> None:
    recorder = FakeRecorder()
    for setting in ({"kv_cache_tokens": 1024}, {"kv_cache_memory": 1 << 26}):
        recorder.recorded = 0
        with engine(monkeypatch, recorder, **setting) as parts:
            assert recorder.recorded == NUM_GRAPHS
            assert parts.core.runner.has_graphs


def test_how_many_graphs_there_are_and_how_long_that_took_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    with engine(monkeypatch, FakeRecorder(), kv_cache_tokens=1024) as parts:
        told = parts.info.cuda_graphs
    assert told.startswith("10 recorded in ")
    assert told.endswith(" s, for steps of up to 16 sequences")


def test_the_largest_size_is_recorded_first() -> None:
    kernel = FakeVarlen()
    backend, model = VarlenBackend(CPU, kernel), random_model(TINY, CPU)
    specs = group_layers(model.cache_layers(), backend.default_block_size, model.dtype)
    graphs = DecodeGraphs(model, backend, FakeRecorder(), max_len=MAX_LEN, max_batch=11)
    graphs.record([cache_of(KVGroup(spec, 1, CPU)) for spec in specs])
    sizes = [len(call["seqused_k"]) for call in kernel.calls]
    assert list(dict.fromkeys(sizes)) == [16, 8, 4, 2, 1]
    assert sizes == sorted(sizes, reverse=True)


REASONS: list[tuple[Callable[[], FakeRecorder | None], str, str]] = [
    (lambda: FakeRecorder(error=torch.OutOfMemoryError("no")), "varlen", "there was not enough memory"),
    (lambda: FakeRecorder(error=ValueError("what is this")), "flashinfer", "recording failed: ValueError: what is this"),
    (lambda: FailingRecorder(MemoryError, 7), "varlen", "there was not enough memory"),
    (FakeRecorder, "sdpa", "attention sdpa on cpu has none"),
    (lambda: None, "varlen", "attention varlen on cpu has none"),
]


@pytest.mark.parametrize(("make_recorder", "backend", "reason"), REASONS)
def test_where_there_are_no_graphs_the_engine_runs_without_and_says_why(
    monkeypatch: pytest.MonkeyPatch, make_recorder: Callable[[], FakeRecorder | None], backend: str, reason: str
) -> None:
    recorder = make_recorder()
    with engine(monkeypatch, recorder, backend) as parts:
        assert parts.info.cuda_graphs == reason
        assert not parts.core.runner.has_graphs
    assert recorder is None or recorder.free_bytes() == recorder.memory, "what was recorded before the fault is still there"


@pytest.mark.parametrize(("make_recorder", "backend", "reason"), REASONS)
def test_graphs_that_must_be_had_and_can_not_end_the_start_with_the_reason(
    monkeypatch: pytest.MonkeyPatch, make_recorder: Callable[[], FakeRecorder | None], backend: str, reason: str
) -> None:
    expected = pytest.raises(ConfigError, match=f"--cuda-graphs is on, but {reason}")
    with expected, engine(monkeypatch, make_recorder(), backend, cuda_graphs="on"):
        pass


def test_graphs_that_are_switched_off_are_not_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    recorder = FakeRecorder()
    with engine(monkeypatch, recorder, cuda_graphs="off") as parts:
        assert (parts.info.cuda_graphs, recorder.recorded) == ("off", 0)


def test_graphs_that_fail_over_the_real_cache_are_told_of_like_those_of_the_trial(monkeypatch: pytest.MonkeyPatch) -> None:
    recorder = FailingRecorder(torch.OutOfMemoryError, NUM_GRAPHS + 3)
    with engine(monkeypatch, recorder) as parts:
        assert parts.info.cuda_graphs == "there was not enough memory"
    assert recorder.free_bytes() == recorder.memory


def test_a_trial_that_failed_is_not_repeated() -> None:
    recorder, model = FailingRecorder(RuntimeError, 2), random_model(TINY, CPU)
    recording = GraphRecording("auto", model, make_backend("varlen"), max_len=MAX_LEN, max_batch=16, make_recorder=lambda device: recorder)
    assert recording.bytes_needed(group_layers(model.cache_layers(), 256, TINY.dtype)) == 0
    assert recording.record([]) is None
    assert recorder.recorded == 2


@pytest.mark.parametrize("switch", ["auto", "on"])
def test_models_whose_layers_wait_for_the_device_have_no_graphs(switch: Switch) -> None:
    recorder, model = FakeRecorder(), random_model(TINY, CPU)
    model.config = replace(model.config, recordable=False)

    def recording() -> GraphRecording:
        backend = make_backend("varlen")
        return GraphRecording(switch, model, backend, max_len=MAX_LEN, max_batch=16, make_recorder=lambda device: recorder)

    if switch == "on":
        with pytest.raises(ConfigError, match="some layers of the model wait for the device"):
            recording()
        return
    tried = recording()
    assert tried.bytes_needed([]) == 0
    assert tried.record([]) is None
    assert tried.status.startswith("some layers of the model wait for the device")
    assert recorder.recorded == 0
