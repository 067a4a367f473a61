"""The engine on its thread: queues, stopping, draining, dying, with a tiny model and real files."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from engine.config import EngineConfig
from engine.engine import Engine
from engine.errors import ConfigError, EngineError, EngineUnavailable, InvalidRequest, QueueFull, RequestAborted, SaveError, StepFailed
from engine.execution.runner import ModelRunner, StepOutput
from engine.execution.step_input import StepInput
from engine.offline import LocalTarget, OfflineEngine
from engine.request import EngineRequest, RequestOutput, SamplingParams
from engine.saves.spec import SaveEvent, SaveSpec

PROMPT = [5, 9, 30, 7, 8, 60, 11, 3, 17]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of two narrow layers."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=97,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        bos_token_id=1,
        eos_token_id=2,
    )
    path = tmp_path_factory.mktemp("tiny")
    LlamaForCausalLM(config).save_pretrained(path)
    return path


class Recorder:
    """Keeps what the engine says; while `gate` is closed, the engine thread waits in `on_step`."""

    def __init__(self) -> None:
        self.outputs: dict[str, list[RequestOutput]] = {}
        self.events: dict[str, list[SaveEvent]] = {}
        self.died: list[BaseException] = []
        self.gate = threading.Event()
        self.gate.set()
        self.in_step = threading.Event()

    def on_step(self, outputs: Sequence[RequestOutput], num_tokens: int, seconds: float) -> None:
        for output in outputs:
            self.outputs.setdefault(output.request_id, []).append(output)
        self.in_step.set()
        self.gate.wait()

    def on_save(self, event: SaveEvent) -> None:
        self.events.setdefault(event.save_id, []).append(event)

    def on_dead(self, error: BaseException) -> None:
        self.died.append(error)

    def last(self, request_id: str) -> tuple[str | None, type[EngineError] | None]:
        output = self.outputs[request_id][-1]
        return output.finish_reason, None if output.error is None else type(output.error)

    def statuses(self, save_id: str) -> list[str]:
        return [event.status for event in self.events[save_id]]


Start = Callable[..., tuple[Engine, Recorder]]


@pytest.fixture
def start(folder: Path) -> Iterator[Start]:
    """`start(**settings)`: an engine that runs and its listener."""
    engines: list[tuple[Engine, Recorder]] = []

    def make(**settings: object) -> tuple[Engine, Recorder]:
        defaults: dict[str, object] = {"dtype": "float32", "kv_cache_tokens": 512, "block_size": 8, "state_cache_memory": 1 << 17}
        recorder = Recorder()
        config = EngineConfig(str(folder), device="cpu", threads=1, durability="none", poison=True, **{**defaults, **settings})
        engine = Engine(config, recorder)
        engines.append((engine, recorder))
        engine.start()
        return engine, recorder

    yield make
    for engine, recorder in engines:
        recorder.gate.set()
        engine.stop()


def request(name: str, max_tokens: int = 4, path: Path | None = None) -> EngineRequest:
    save = None if path is None else SaveSpec(f"save-{name}", LocalTarget(path / name), (1, "norm"), "float32", include_output_tokens=True)
    return EngineRequest(name, PROMPT, SamplingParams(max_tokens=max_tokens, temperature=0, ignore_eos=True), save)


def finish(engine: Engine) -> None:
    assert engine.wait_idle(60)


def test_requests_are_answered_and_files_published(start: Start, tmp_path: Path) -> None:
    engine, recorder = start()
    for i in range(3):
        engine.submit(request(f"r{i}", path=tmp_path))
    finish(engine)
    assert all(recorder.last(f"r{i}") == ("length", None) for i in range(3))
    assert all(recorder.statuses(f"save-r{i}") == ["running", "writing", "completed"] for i in range(3))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["r0", "r1", "r2"]
    engine.check_integrity()
    stats = engine.stats()
    assert (stats.running, stats.waiting, stats.writer_queue_depth) == (0, 0, 0)
    assert stats.kv_blocks.referenced == stats.state_pages.referenced == 0
    assert stats.bytes_written_total >= 3 * (len(PROMPT) + 3) * 2 * 32 * 4


def test_what_was_resolved_at_start_can_be_read(start: Start) -> None:
    engine, _ = start(max_model_len=100, max_batch_tokens=33, state_cache_memory=10 * 16 * 32 * 4, state_page_size=16)
    info = engine.info
    assert (info.device, info.dtype, info.max_model_len, info.block_size, info.max_batch_tokens) == ("cpu", "float32", 100, 8, 33)
    assert (info.kv_cache_tokens, info.state_cache_rows, info.state_page_size, info.model.num_layers) == (512, 160, 16, 2)


def test_settings_that_cannot_work_are_refused_at_start(start: Start) -> None:
    with pytest.raises(ConfigError, match="--max-model-len 200 is above"):
        start(max_model_len=200)
    with pytest.raises(ConfigError, match="smaller than one request"):
        start(kv_cache_tokens=64)


def test_a_refused_request_is_not_taken_over(start: Start) -> None:
    engine, recorder = start()
    with pytest.raises(InvalidRequest):
        engine.submit(EngineRequest("bad", [97]))
    assert engine.wait_idle(0)
    assert not recorder.outputs


def test_a_request_id_can_be_used_again_only_once_it_is_free(start: Start) -> None:
    engine, recorder = start()
    recorder.gate.clear()
    engine.submit(request("r"))
    with pytest.raises(EngineError, match="r is in use"):
        engine.submit(request("r"))
    recorder.gate.set()
    finish(engine)
    engine.submit(request("r"))
    finish(engine)


def test_a_full_queue_refuses_and_takes_again_once_there_is_room(start: Start) -> None:
    engine, recorder = start(max_queued=2, max_running=1)
    recorder.gate.clear()
    engine.submit(request("running"))
    assert recorder.in_step.wait(60)
    engine.submit(request("first"))
    engine.submit(request("second"))
    assert engine.stats().waiting == 2
    with pytest.raises(QueueFull, match="2 requests are waiting"):
        engine.submit(request("third"))
    recorder.gate.set()
    finish(engine)
    engine.submit(request("third"))
    finish(engine)
    assert recorder.last("third") == ("length", None)


def scored_request(name: str, path: Path | None = None, num_top: int = 5) -> EngineRequest:
    plain = request(name, 100, path)
    return replace(plain, sampling=replace(plain.sampling, prompt_logprobs=num_top))


SCORES_BYTES = (len(PROMPT) - 1) * 4 * (3 + 2 * 5)
"""Of one `scored_request`."""


def test_prompt_logprobs_that_can_never_fit_are_refused_with_the_bound(start: Start) -> None:
    engine, _ = start(prompt_logprobs_memory=SCORES_BYTES)
    with pytest.raises(InvalidRequest, match=f"take {SCORES_BYTES + 8 * (len(PROMPT) - 1)} bytes, at most {SCORES_BYTES}") as error:
        engine.submit(scored_request("large", num_top=6))
    assert error.value.param == "prompt_logprobs"
    engine.submit(scored_request("fits"))
    finish(engine)


def test_prompt_logprobs_that_do_not_fit_beside_others_are_refused_until_those_have_ended(start: Start, tmp_path: Path) -> None:
    engine, recorder = start(prompt_logprobs_memory=2 * SCORES_BYTES)
    recorder.gate.clear()
    for name in ("first", "second"):
        engine.submit(scored_request(name))
    assert recorder.in_step.wait(60)
    with pytest.raises(QueueFull, match=f"{2 * SCORES_BYTES} bytes that others hold; there is room for {2 * SCORES_BYTES}"):
        engine.submit(scored_request("third", tmp_path))
    engine.submit(request("plain"))
    engine.abort("first")
    recorder.gate.set()
    finish(engine)
    assert [recorder.last(name)[0] for name in ("first", "second", "plain")] == ["abort", "length", "length"]
    assert not recorder.events
    for name in ("third", "fourth"):
        engine.submit(scored_request(name, tmp_path))
    finish(engine)
    assert [recorder.last(name)[0] for name in ("third", "fourth")] == ["length", "length"]


def test_an_abort_ends_running_and_waiting_requests_and_leaves_no_file(start: Start, tmp_path: Path) -> None:
    engine, recorder = start(max_running=1)
    recorder.gate.clear()
    for name in ("running", "waiting"):
        engine.submit(request(name, max_tokens=100, path=tmp_path))
    assert recorder.in_step.wait(60)
    for name in ("running", "waiting", "nobody"):
        engine.abort(name)
    recorder.gate.set()
    finish(engine)
    for name in ("running", "waiting"):
        assert recorder.last(name) == ("abort", RequestAborted)
        assert recorder.statuses(f"save-{name}")[-1] == "cancelled"
    assert list(tmp_path.iterdir()) == []
    engine.check_integrity()


def test_a_draining_engine_goes_on_with_what_it_has_and_takes_nothing_new(start: Start, tmp_path: Path) -> None:
    engine, recorder = start()
    recorder.gate.clear()
    engine.submit(request("before", path=tmp_path))
    engine.drain()
    assert engine.state == "draining"
    assert not engine.wait_idle(0)
    with pytest.raises(EngineUnavailable, match="draining"):
        engine.submit(request("after"))
    recorder.gate.set()
    finish(engine)
    assert recorder.last("before") == ("length", None)
    assert recorder.statuses("save-before")[-1] == "completed"


def test_stopping_answers_what_is_left_and_cancels_its_saves(start: Start, tmp_path: Path) -> None:
    engine, recorder = start(max_running=1)
    recorder.gate.clear()
    for name in ("running", "waiting"):
        engine.submit(request(name, max_tokens=100, path=tmp_path))
    assert recorder.in_step.wait(60)
    stopping = threading.Thread(target=engine.stop)
    stopping.start()
    while engine.state != "stopped":
        stopping.join(0.001)
    recorder.gate.set()
    stopping.join()
    for name in ("running", "waiting"):
        assert recorder.last(name) == ("error", EngineUnavailable)
        assert recorder.statuses(f"save-{name}")[-1] == "failed"
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(EngineUnavailable, match="stopped"):
        engine.submit(request("after"))
    engine.stop()


def test_an_engine_that_was_never_started_can_be_stopped(folder: Path) -> None:
    engine = Engine(EngineConfig(str(folder)), Recorder())
    engine.stop()
    assert engine.state == "stopped"


def failing(monkeypatch: pytest.MonkeyPatch, *failures: int) -> None:
    """Makes the steps with these numbers fail."""
    run, steps = ModelRunner.run, iter(range(1000))

    def maybe(self: ModelRunner, step: StepInput, sampled_before: torch.Tensor | None = None) -> StepOutput:
        if next(steps) in failures:
            raise RuntimeError("the model stumbled")
        return run(self, step, sampled_before)

    monkeypatch.setattr(ModelRunner, "run", maybe)


def test_a_step_that_raises_fails_its_requests_and_the_engine_goes_on(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, recorder = start(max_running=1)
    failing(monkeypatch, 0)
    for name in ("failed", "good"):
        engine.submit(request(name, path=tmp_path))
    finish(engine)
    assert recorder.last("failed") == ("error", StepFailed)
    event = recorder.events["save-failed"][-1]
    assert event.status == "failed"
    assert isinstance(event.error, SaveError)
    assert event.error.code == "engine_error"
    assert recorder.last("good") == ("length", None)
    assert [path.name for path in tmp_path.iterdir()] == ["good"]
    assert engine.state == "running"
    engine.check_integrity()


def test_three_failed_steps_in_a_row_kill_the_engine_and_everybody_is_answered(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, recorder = start(max_running=1)
    recorder.gate.clear()
    hear, states = recorder.on_step, []

    def see_the_state_too(outputs: Sequence[RequestOutput], num_tokens: int, seconds: float) -> None:
        states.extend(engine.state for output in outputs if output.error is not None)
        hear(outputs, num_tokens, seconds)

    monkeypatch.setattr(recorder, "on_step", see_the_state_too)
    failing(monkeypatch, *range(6))  # each of the three, and the engine's own probe after it
    for i in range(5):
        engine.submit(request(f"r{i}", path=tmp_path))
    recorder.gate.set()
    finish(engine)
    assert [recorder.last(f"r{i}")[1] for i in range(5)] == [StepFailed] * 3 + [EngineUnavailable] * 2
    assert states == ["running"] * 2 + ["dead"] * 3  # whoever asks after the last answer finds no healthy engine
    assert all(recorder.statuses(f"save-r{i}")[-1] == "failed" for i in range(5))
    with pytest.raises(EngineUnavailable, match="dead"):
        engine.submit(request("late"))
    engine.stop()
    assert engine.state == "dead"
    assert [type(error) for error in recorder.died] == [StepFailed]
    assert list(tmp_path.iterdir()) == []


def test_an_exception_that_is_no_failed_step_kills_the_engine_too(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, recorder = start()

    def broken(self: ModelRunner, step: StepInput, sampled_before: torch.Tensor | None = None) -> StepOutput:
        raise SystemExit("gone")

    monkeypatch.setattr(ModelRunner, "run", broken)
    engine.submit(request("r"))
    finish(engine)
    assert recorder.last("r") == ("error", EngineUnavailable)
    engine.stop()
    assert [type(error) for error in recorder.died] == [SystemExit]


def test_a_save_that_cannot_be_taken_over_leaves_nothing_open(start: Start, tmp_path: Path) -> None:
    engine, _ = start()
    engine._parts.writer.close()
    with pytest.raises(EngineUnavailable, match="writer has been closed"):
        engine.submit(request("r", path=tmp_path))
    assert engine.wait_idle(0)


def test_bytes_of_a_save_that_is_not_running_are_none(start: Start) -> None:
    engine, _ = start()
    assert engine.save_bytes_written("nobody") == 0


def test_offline_the_completions_come_in_order_even_through_a_queue_that_is_too_short(folder: Path, tmp_path: Path) -> None:
    config = EngineConfig(
        str(folder), device="cpu", dtype="float32", kv_cache_tokens=256, state_cache_memory=1 << 17, max_queued=1, threads=1
    )
    seen: list[str] = []
    with OfflineEngine(config) as engine:
        requests = [request(f"r{i}", path=tmp_path if i % 2 else None) for i in range(5)]
        completions = engine.generate(requests, progress=lambda completion: seen.append(completion.request_id))
    assert seen == [completion.request_id for completion in completions] == [f"r{i}" for i in range(5)]
    assert len({tuple(completion.token_ids) for completion in completions}) == 1
    assert [completion.file is not None for completion in completions] == [False, True] * 2 + [False]


def test_offline_a_save_that_fails_is_told_with_its_completion(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "r").write_text("in the way")
    config = EngineConfig(str(folder), device="cpu", dtype="float32", kv_cache_tokens=256, state_cache_memory=1 << 17, threads=1)
    with OfflineEngine(config) as engine:
        (completion,) = engine.generate([request("r", path=tmp_path)])
    assert isinstance(completion.error, SaveError)
    assert completion.error.code == "conflict"
    assert completion.finish_reason == "length"
    assert (tmp_path / "r").read_text() == "in the way"
