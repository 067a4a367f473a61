"""The engine on its thread when something of its own breaks, and when it is stopped in the middle: nobody is left without an answer."""

from __future__ import annotations

import logging
import os
import random
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.numpy import load_file

from engine.capture.row_capture import RowCapture
from engine.core import EngineCore
from engine.engine import Engine
from engine.errors import EngineError, EngineUnavailable, QueueFull, RequestAborted, SaveError, StepFailed
from engine.execution.executor import LaunchedStep, StepExecutor
from engine.execution.runner import ModelRunner, StepOutput
from engine.execution.step_input import StepInput
from engine.request import EngineRequest
from engine.saves.builder import FileBuilder, FinishedFile
from engine.saves.chunk import SaveEnd
from engine.saves.convert import Scratch
from engine.saves.selection import IntArray, Range, RowSelection
from engine.scheduling.scheduler import Scheduler
from tests.unit.small_engine import Recorder, make_request, save_tiny_llama, small_config

ROUNDS = int(os.environ.get("STRATA_STRESS_ROUNDS", "12"))
"""Of the stress tests."""


@pytest.fixture(autouse=True)
def quiet(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL + 1)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tiny")
    save_tiny_llama(path)
    return path


Start = Callable[..., tuple[Engine, Recorder]]


@pytest.fixture
def start(folder: Path) -> Iterator[Start]:
    """`start(**settings)`: an engine that runs and its listener."""
    engines: list[Engine] = []

    def make(**settings: object) -> tuple[Engine, Recorder]:
        recorder = Recorder()
        engines.append(Engine(small_config(folder, **settings), recorder))
        engines[-1].start()
        return engines[-1], recorder

    yield make
    for engine in engines:
        engine.stop()


def finish(engine: Engine) -> None:
    assert engine.wait_idle(60)


def check(holds: bool) -> None:
    assert holds


def assert_dead(engine: Engine, recorder: Recorder, error: type[BaseException]) -> None:
    assert recorder.ended.wait(60)
    assert [type(e) for e in recorder.died] == [error]
    assert engine.state == "dead"
    with pytest.raises(EngineUnavailable, match="dead"):
        engine.submit(make_request("late"))
    finish(engine)
    engine.stop()
    assert engine.state == "dead"


# Steps that raise, in the real runner.


def failing(monkeypatch: pytest.MonkeyPatch, owner: type, name: str, is_bad: Callable[..., bool]) -> None:
    """Makes a method raise at the end of its work wherever `is_bad` says so of its arguments."""
    method = getattr(owner, name)

    def maybe(*arguments: object) -> object:
        result = method(*arguments)
        if is_bad(*arguments):
            raise RuntimeError("the model stumbled")
        return result

    monkeypatch.setattr(owner, name, maybe)


def test_seeded_text_and_saved_rows_are_the_same_whether_or_not_a_neighbour_fails(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(folder: Path, *bad: str) -> Recorder:
        folder.mkdir()
        engine, recorder = start(prefix_cache=False)
        for i in range(5):
            engine.submit(make_request(f"r{i}", folder, max_tokens=12, seed=i))
        for name in bad:
            engine.submit(make_request(name, folder, max_tokens=12, seed=7))
        finish(engine)
        engine.check_integrity()
        return recorder

    expected = run(tmp_path / "alone")

    def is_bad(executor: StepExecutor, step: LaunchedStep) -> bool:
        sequences = [chunk.sequence for chunk in step.chunks]
        return any(s.request.request_id == "bad" and s.num_output_tokens == 5 for s in sequences)

    failing(monkeypatch, StepExecutor, "finish", is_bad)
    found = run(tmp_path / "beside", "bad")
    assert found.ends("bad") == [("error", StepFailed)]
    for i in range(5):
        assert found.ends(f"r{i}") == [("length", type(None))]
        assert found.tokens(f"r{i}") == expected.tokens(f"r{i}")
        rows, wanted = (load_file(tmp_path / where / f"r{i}") for where in ("beside", "alone"))
        assert all(abs(rows[name] - wanted[name]).max() < 1e-5 for name in wanted)
    assert len({tuple(found.tokens(f"r{i}")) for i in range(5)}) == 5
    assert sorted(path.name for path in (tmp_path / "beside").iterdir()) == [f"r{i}" for i in range(5)]


def test_bad_requests_one_after_the_other_leave_the_engine_as_it_was(start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, recorder = start(prefix_cache=False)
    engine.submit(make_request("before", tmp_path))
    finish(engine)

    def is_bad(executor: StepExecutor, step: LaunchedStep) -> bool:
        return any(chunk.sequence.request.request_id.startswith("bad") for chunk in step.chunks)

    failing(monkeypatch, StepExecutor, "finish", is_bad)
    for i in range(7):
        engine.submit(make_request(f"bad{i}", tmp_path))
        finish(engine)
        assert recorder.ends(f"bad{i}") == [("error", StepFailed)]
    engine.submit(make_request("after", tmp_path))
    finish(engine)
    engine.check_integrity()
    assert (engine.state, engine.stats().step_failures_total) == ("running", 7)
    assert recorder.tokens("after") == recorder.tokens("before")
    rows, wanted = load_file(tmp_path / "after"), load_file(tmp_path / "before")
    assert all((rows[name] == wanted[name]).all() for name in wanted)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["after", "before"]


def test_where_every_second_attempt_at_a_step_fails_seeded_text_is_what_it_would_be(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    def run() -> list[list[int]]:
        engine, recorder = start(prefix_cache=False)
        gate = threading.Event()
        engine._commands.put(lambda: check(gate.wait()))  # so that they run in the same steps
        for i in range(4):
            engine.submit(make_request(f"r{i}", max_tokens=10, seed=i))
        gate.set()
        finish(engine)
        return [recorder.tokens(f"r{i}") for i in range(4)]

    expected = run()
    failing(monkeypatch, StepExecutor, "finish", iter_attempts())
    assert run() == expected


def iter_attempts() -> Callable[..., bool]:
    """Bad are the first attempts at a step over several requests: the sampler has drawn for all of them by then."""
    count = 0

    def is_bad(*_: object) -> bool:
        nonlocal count
        count += 1
        return count % 3 == 1

    return is_bad


def test_failed_steps_are_counted(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, _ = start()
    failing(monkeypatch, StepExecutor, "finish", iter_attempts())
    engine.submit(make_request("r"))
    finish(engine)
    assert engine.stats().step_failures_total >= 1


# Our own books.


def broken(*_: object, **__: object) -> None:
    raise AssertionError("the books don't agree")


OWN_CODE: list[tuple[type, str]] = [
    (Scheduler, "schedule"),
    (Scheduler, "add"),
    (Scheduler, "remove"),
    (RowCapture, "commit"),
    (RowCapture, "submit_rows"),
    (RowCapture, "finish"),
    (RowCapture, "cancel"),
    (EngineCore, "_end_failed_saves"),
    (EngineCore, "release_pages"),
    (EngineCore, "save_ended"),
]


@pytest.mark.parametrize(("owner", "name"), OWN_CODE)
def test_a_fault_in_our_own_books_ends_the_engine_and_everybody_is_answered_once(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, owner: type, name: str
) -> None:
    engine, recorder = start(max_running=2)
    monkeypatch.setattr(owner, name, broken)
    submitted = []
    for i in range(5):
        try:
            engine.submit(make_request(f"r{i}", tmp_path, max_tokens=30))
            submitted.append(f"r{i}")
        except EngineUnavailable:
            break
    if name in ("cancel", "remove"):
        engine.abort("r0")
    assert_dead(engine, recorder, AssertionError)
    for request_id in submitted:
        assert len(recorder.ends(request_id)) == 1
        assert recorder.last_status(f"save-{request_id}") in ("failed", "completed")
    whole = {f"r{i}" for i in range(5) if f"save-r{i}" in recorder.events and recorder.last_status(f"save-r{i}") == "completed"}
    assert {path.name for path in tmp_path.iterdir()} == whole


def test_blocks_that_nobody_holds_end_an_idle_engine(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.engine._INTEGRITY_SECONDS", 0.0)
    engine, recorder = start()
    engine.submit(make_request("r"))
    finish(engine)
    engine._parts.core.kv.groups[0].pool.allocate(1)
    assert_dead(engine, recorder, AssertionError)


def test_a_command_that_raises_ends_the_engine_and_everybody_is_answered(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, recorder = start(max_running=1)
    monkeypatch.setattr(EngineCore, "abort", broken)
    for i in range(3):
        engine.submit(make_request(f"r{i}", max_tokens=100))
    engine.abort("r1")
    assert_dead(engine, recorder, AssertionError)
    assert all(recorder.ends(f"r{i}") == [("error", EngineUnavailable)] for i in range(3))


def test_a_core_that_can_not_even_answer_does_not_keep_the_engine_from_it(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, recorder = start(max_running=1)
    monkeypatch.setattr(EngineCore, "step", broken)
    monkeypatch.setattr(EngineCore, "fail_all", broken)
    for i in range(3):
        try:
            engine.submit(make_request(f"r{i}"))
        except EngineUnavailable:
            recorder.outputs.setdefault(f"r{i}", [])
    assert_dead(engine, recorder, AssertionError)
    assert recorder.ends("r0") == [("error", EngineUnavailable)]
    assert all(len(recorder.ends(name)) == 1 for name, outputs in recorder.outputs.items() if outputs)


def test_looking_at_the_books_of_a_dead_engine_is_refused(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, recorder = start()
    monkeypatch.setattr(EngineCore, "step", broken)
    engine.submit(make_request("r"))
    assert recorder.ended.wait(60)
    with pytest.raises(EngineUnavailable, match="dead"):
        engine.check_integrity()


# Listeners that raise.


@pytest.mark.parametrize("error", [RuntimeError("no loop"), SystemExit("out")])
def test_a_listener_that_does_not_take_outputs_ends_the_engine(start: Start, tmp_path: Path, error: BaseException) -> None:
    engine, recorder = start()
    recorder.step_error = error
    engine.submit(make_request("r", tmp_path))
    assert_dead(engine, recorder, type(error))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("error", [RuntimeError("no loop"), SystemExit("out")])
def test_a_listener_that_does_not_take_the_end_of_a_save_ends_the_engine(start: Start, tmp_path: Path, error: BaseException) -> None:
    engine, recorder = start(writer_threads=1)
    recorder.save_error = error
    engine.submit(make_request("r", tmp_path))
    assert_dead(engine, recorder, type(error))


def test_a_listener_that_does_not_want_to_know_of_the_death_changes_nothing(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, recorder = start()
    recorder.dead_error = RuntimeError("no loop")
    monkeypatch.setattr(EngineCore, "step", broken)
    engine.submit(make_request("r"))
    assert_dead(engine, recorder, AssertionError)
    assert recorder.ends("r") == [("error", EngineUnavailable)]


@pytest.mark.parametrize("error", [RuntimeError("bad"), SystemExit("out")])
def test_a_writer_thread_survives_whatever_a_save_raises(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    engine, recorder = start(writer_threads=1)

    def bad(*_: object, **__: object) -> None:
        raise error

    with monkeypatch.context() as patched:
        patched.setattr(FileBuilder, "add_rows", bad)
        patched.setattr(FileBuilder, "discard", bad)
        engine.submit(make_request("bad", tmp_path))
        finish(engine)
    assert recorder.last_status("save-bad") == "failed"
    engine.submit(make_request("good", tmp_path))
    finish(engine)
    assert recorder.last_status("save-good") == "completed"
    engine.check_integrity()


# Saves that fail while their request runs.


def full(*_: object, **__: object) -> None:
    raise SaveError("no_space", "the disk is full")


def test_a_save_that_fails_ends_its_request_with_the_same_error(start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, recorder = start()
    monkeypatch.setattr(FileBuilder, "add_rows", full)
    engine.submit(make_request("r", tmp_path, max_tokens=110))
    finish(engine)
    error = recorder.outputs["r"][-1].error
    assert isinstance(error, SaveError)
    assert (error.code, str(error)) == ("no_space", "the disk is full")
    assert len(recorder.tokens("r")) < 110
    assert recorder.events["save-r"][-1].error == error
    engine.check_integrity()


def test_an_engine_in_which_everything_starves_of_pages_notices_a_save_that_fails(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = 8 * 32 * 4
    engine, recorder = start(state_cache_memory=3 * page, writer_threads=1)
    gate = threading.Event()

    def slow_then_full(*_: object, **__: object) -> None:
        gate.wait()
        full()

    monkeypatch.setattr(FileBuilder, "add_rows", slow_then_full)
    engine.submit(make_request("r", tmp_path, max_tokens=100))
    while (engine.stats().computed_tokens_total, engine.stats().writer_queue_depth) != (8, 1):
        pass  # one block of two layers, then there is no page left
    gate.set()
    finish(engine)
    assert recorder.ends("r") == [("error", SaveError)]
    engine.check_integrity()
    assert engine.stats().state_pages.referenced == 0


# What is taken over, and what isn't.


def refusal(engine: Engine, request: EngineRequest) -> str | None:
    try:
        engine.submit(request)
    except EngineError as error:
        return str(error)
    return None


def test_the_id_of_a_request_is_in_use_until_its_save_has_ended(start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, recorder = start()
    gate, complete = threading.Event(), FileBuilder.complete

    def slow(builder: FileBuilder, end: SaveEnd, scratch: Scratch) -> FinishedFile:
        gate.wait()
        return complete(builder, end, scratch)

    monkeypatch.setattr(FileBuilder, "complete", slow)
    first = make_request("r", tmp_path)
    engine.submit(first)
    while not recorder.ends("r"):
        pass
    engine.submit(make_request("after"))
    while not recorder.ends("after"):
        pass
    refusals = [refusal(engine, request) for request in (make_request("r"), replace(first, request_id="other"))]
    gate.set()
    finish(engine)
    assert refusals == ["request id r is in use", "save id save-r is in use"]
    assert recorder.last_status("save-r") == "completed"
    engine.submit(make_request("r"))
    finish(engine)
    assert recorder.ends("r") == [("length", type(None))] * 2
    engine.check_integrity()


def test_ranges_are_not_computed_under_the_lock_that_every_step_needs(start: Start, tmp_path: Path) -> None:
    engine, recorder = start()
    held: list[bool] = []

    class Watched(RowSelection):
        def ranges(self, total: int) -> list[Range]:
            held.append(engine._changed._is_owned())  # type: ignore[attr-defined]  # who else holds it doesn't matter
            return super().ranges(total)

        def spans(self, total: int) -> tuple[IntArray, IntArray]:
            held.append(engine._changed._is_owned())  # type: ignore[attr-defined]
            return super().spans(total)

    request = make_request("r", tmp_path)
    assert request.save is not None
    engine.submit(replace(request, save=replace(request.save, rows=Watched(((0, 2), (4, None))))))
    finish(engine)
    assert recorder.last_status("save-r") == "completed"
    assert held
    assert not any(held)


# Stopping.


def test_stop_while_the_model_loads_wins(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recorder = Recorder()
    engine = Engine(small_config(folder), recorder)
    threads = threading.active_count()
    with pytest.raises(EngineUnavailable, match="stopped while it started"):
        engine.start(progress=lambda done, total: engine.stop())
    assert engine.state == "stopped"
    assert threading.active_count() == threads
    engine.stop()


def test_stopping_from_many_threads_at_once_is_one_stop(start: Start, tmp_path: Path) -> None:
    engine, recorder = start()
    for i in range(4):
        engine.submit(make_request(f"r{i}", tmp_path, max_tokens=100))
    stoppers = [threading.Thread(target=engine.stop) for _ in range(8)]
    for thread in stoppers:
        thread.start()
    for thread in stoppers:
        thread.join()
    engine.stop()
    assert engine.state == "stopped"
    assert engine.wait_idle(0)
    assert all(len(recorder.ends(f"r{i}")) == 1 for i in range(4))
    assert not any(thread.name == "engine" for thread in threading.enumerate())


class Crowd:
    """Threads that submit and abort until the engine doesn't take any more."""

    def __init__(self, engine: Engine, folder: Path, seed: int) -> None:
        self.accepted: list[str] = []
        self.saved: list[str] = []
        self._engine = engine
        self._folder = folder
        self._seed = seed
        self._threads = [threading.Thread(target=self._submit, args=(number,)) for number in range(4)]
        for thread in self._threads:
            thread.start()

    def join(self) -> None:
        for thread in self._threads:
            thread.join()

    def _submit(self, number: int) -> None:
        chance = random.Random(self._seed * 10 + number)
        for i in range(10**6):
            name = f"{number}-{i}"
            request = make_request(name, self._folder if chance.random() < 0.3 else None, max_tokens=chance.randint(0, 20))
            try:
                self._engine.submit(request)
            except QueueFull:
                self._abandon(request.save)
                continue
            except EngineUnavailable:
                self._abandon(request.save)
                return
            self.accepted.append(name)
            if request.save is not None:
                self.saved.append(name)
            if chance.random() < 0.2:
                self._engine.abort(name)

    def _abandon(self, save: object) -> None:
        """The target of a request that was refused is the caller's."""
        if save is not None:
            save.target.abandoned()  # type: ignore[attr-defined]


@pytest.mark.parametrize("way", ["stop", "drain", "die in a step", "die in a command", "model fails", "model fails at times"])
def test_every_request_that_was_taken_is_answered_once_whenever_the_engine_ends(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    for number in range(ROUNDS):
        folder = tmp_path / f"{way}-{number}"
        folder.mkdir()
        chance = random.Random(number)
        engine, recorder = start(max_queued=16, max_running=4)
        crowd = Crowd(engine, folder, number)
        while len(crowd.accepted) < chance.randint(1, 60):
            pass
        with monkeypatch.context() as patched:
            end(engine, way, patched, chance)
            crowd.join()
            assert engine.wait_idle(60)
            engine.stop()
        check_answers(crowd, recorder, folder)


def end(engine: Engine, way: str, patched: pytest.MonkeyPatch, chance: random.Random) -> None:
    if way == "stop":
        engine.stop()
    elif way == "drain":
        engine.drain()
    elif way == "die in a step":
        patched.setattr(Scheduler, "schedule", broken)
    elif way == "die in a command":
        engine._commands.put(broken)
    elif way == "model fails":
        patched.setattr(ModelRunner, "run", broken)
    else:
        run = ModelRunner.run

        def at_times(runner: ModelRunner, step: StepInput, sampled_before: torch.Tensor | None = None) -> StepOutput:
            if chance.random() < 0.5:
                raise RuntimeError("the model stumbled")
            return run(runner, step, sampled_before)

        patched.setattr(ModelRunner, "run", at_times)
        while chance.random() < 0.95 and engine.state == "running":
            engine.wait_idle(0.001)
        engine.stop()


def check_answers(crowd: Crowd, recorder: Recorder, folder: Path) -> None:
    reasons = {"length": type(None), "abort": RequestAborted, "error": None}
    for name in crowd.accepted:
        ends = recorder.ends(name)
        assert len(ends) == 1, f"{name} was answered {len(ends)} times"
        assert ends[0][0] in reasons
    published = {name for name in crowd.saved if recorder.last_status(f"save-{name}") == "completed"}
    for name in crowd.saved:
        statuses = [event.status for event in recorder.events[f"save-{name}"]]
        assert sum(status in ("completed", "failed", "cancelled") for status in statuses) == 1
    assert {path.name for path in folder.iterdir()} == published
