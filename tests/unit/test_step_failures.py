"""Steps that raise: who fails, who goes on, and what is left of it."""

from __future__ import annotations

import logging
import subprocess
import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import engine.core
from engine.capture.sink import StagedSink
from engine.errors import EngineError, SaveError, StepFailed
from engine.execution.faults import is_out_of_memory
from engine.execution.probe import PROBE_REQUEST
from engine.request import EngineRequest, SamplingParams
from engine.saves.spec import SaveSpec
from tests.unit.core_fakes import Bench, FakeJob, Target
from tests.unit.faulty_runner import FaultyRunner, LateFaultyRunner, StagedFaultyRunner, run_out_of_memory

RUNNERS = [FaultyRunner, LateFaultyRunner, StagedFaultyRunner]
PROMPT = [0, 1, 2, 3, 4, 0, 2, 4, 1]


@pytest.fixture(autouse=True)
def quiet(caplog: pytest.LogCaptureFixture) -> None:
    """Tracebacks of faults on purpose need not be kept."""
    caplog.set_level(logging.CRITICAL + 1)


def make(runner: type[FaultyRunner] = FaultyRunner, **settings: int) -> tuple[Bench, FaultyRunner]:
    bench = Bench(runner=runner, **settings)  # type: ignore[arg-type]  # all numbers
    assert isinstance(bench.runner, FaultyRunner)
    return bench, bench.runner


def add_some(bench: Bench, count: int) -> list[str]:
    """Requests of every kind: plain, saving the prompt to two depths, saving what is generated."""
    kinds: list[dict[str, object]] = [{"max_tokens": 3}, {"layers": (1,)}, {"layers": (2, "norm"), "max_tokens": 3, "output": True}]
    names = [f"r{i}" for i in range(count)]
    for i, name in enumerate(names):
        bench.add(name, PROMPT[: 3 + i % 6], salt=name, **kinds[i % 3])  # type: ignore[arg-type]
    return names


def ends(bench: Bench, name: str) -> tuple[str | None, type[EngineError] | None]:
    output = bench.listener.outputs[name][-1]
    return output.finish_reason, None if output.error is None else type(output.error)


def assert_failed(bench: Bench, name: str) -> None:
    assert ends(bench, name) == ("error", StepFailed)
    if name in bench.jobs:
        error = bench.jobs[name].error
        assert error is not None
        assert error.code == "engine_error"


@pytest.mark.parametrize("runner", RUNNERS)
@pytest.mark.parametrize("bad", range(7))
def test_one_bad_request_fails_alone(runner: type[FaultyRunner], bad: int) -> None:
    bench, faulty = make(runner)
    names = add_some(bench, 7)
    faulty.bad = {names[bad]}
    bench.run()
    assert_failed(bench, names[bad])
    bench.check_results(but=frozenset(faulty.bad))
    assert bench.core.num_step_failures == 1


def test_a_request_that_turns_bad_while_it_generates_fails_alone_and_at_once() -> None:
    bench, faulty = make()
    names = add_some(bench, 5)
    bench.step()
    faulty.bad = {"r3"}
    bench.step()
    assert_failed(bench, "r3")
    bench.run()
    bench.check_results(but=frozenset({"r3"}))
    assert [name for name in names if ends(bench, name)[0] == "error"] == ["r3"]


def test_several_bad_requests_fail_and_no_others() -> None:
    bench, faulty = make()
    add_some(bench, 9)
    faulty.bad = {"r0", "r4", "r5"}
    bench.run()
    for name in faulty.bad:
        assert_failed(bench, name)
    bench.check_results(but=frozenset(faulty.bad))


def test_finding_a_bad_request_takes_few_attempts() -> None:
    bench, faulty = make(budget=200, full_blocks=200, sliding_blocks=200)
    for i in range(16):
        bench.add(f"r{i}", [1, 2, 3], max_tokens=1, salt=f"{i}")
    faulty.bad = {"r11"}
    bench.step()
    assert len(faulty.computed) == 4  # 8, 2, 4 and 1 others
    assert sorted(map(len, faulty.computed)) == [1, 2, 4, 8]


def test_a_bad_request_gives_blocks_and_pages_back_at_once() -> None:
    bench, faulty = make()
    faulty.bad = {"bad"}
    bench.add("bad", PROMPT, max_tokens=2, layers=(1, "norm"))
    bench.step()
    assert bench.kv.stats().referenced == bench.store.pool.stats().referenced == 0
    assert bench.kv.stats().cached == bench.store.pool.stats().cached == 0
    bench.core.check_integrity()


def test_a_bad_request_does_not_count_as_a_broken_engine_while_others_can_be_computed() -> None:
    bench, faulty = make(max_running=2)
    bench.add("good", PROMPT, max_tokens=12)
    for i in range(8):
        bench.add(f"bad{i}", PROMPT, max_tokens=1, salt=f"{i}")
        faulty.bad.add(f"bad{i}")
    bench.run()
    bench.check_results(but=frozenset(faulty.bad))
    assert bench.core.num_step_failures == 8


@pytest.mark.parametrize("runner", RUNNERS)
def test_any_number_of_bad_requests_in_a_row_fails_alone_and_the_engine_lives(runner: type[FaultyRunner]) -> None:
    bench, faulty = make(runner, max_running=1)
    faulty.bad = {f"bad{i}" for i in range(12)}
    for i in range(12):
        bench.add(f"bad{i}", PROMPT, max_tokens=2, layers=(1, "norm"), salt=f"{i}")
        bench.step()
        assert_failed(bench, f"bad{i}")
        assert bench.kv.stats().referenced == bench.store.pool.stats().referenced == 0
        bench.core.check_integrity()
    bench.add("good", PROMPT, max_tokens=4, layers=(1, "norm"), output=True)
    bench.run()
    bench.check_results(but=frozenset(faulty.bad))
    assert bench.core.num_step_failures == 12
    assert faulty.computed[:12] == [[PROBE_REQUEST]] * 12


def test_bad_requests_all_in_one_step_after_the_other_do_not_end_the_engine() -> None:
    bench, faulty = make(max_running=4)
    for i in range(24):
        bench.add(f"bad{i}", PROMPT, max_tokens=1, salt=f"{i}")
        faulty.bad.add(f"bad{i}")
    bench.run()
    bench.check_results(but=frozenset(faulty.bad))
    assert bench.core.num_step_failures >= 6


def test_a_runner_that_computes_nothing_ends_the_engine_after_three_steps() -> None:
    bench, faulty = make(max_running=1)
    bench.add("good", PROMPT, max_tokens=1)
    bench.run()
    faulty.error = RuntimeError("the device is lost")
    for i in range(2):
        bench.add(f"r{i}", PROMPT, max_tokens=1, salt=f"{i}")
        bench.step()
        assert_failed(bench, f"r{i}")
    bench.add("r2", PROMPT, max_tokens=1, salt="2")
    with pytest.raises(StepFailed, match="3 steps in a row"):
        bench.step()
    bench.core.check_integrity()


def test_a_runner_that_recovers_in_time_has_all_its_attempts_again() -> None:
    bench, faulty = make(max_running=1)
    for i in range(9):
        faulty.error = RuntimeError("the device stumbles") if i % 3 else None
        faulty.bad = {f"r{i}"}
        bench.add(f"r{i}", PROMPT, max_tokens=1, salt=f"{i}")
        bench.step()
        assert_failed(bench, f"r{i}")


def test_where_others_hold_every_block_a_bad_request_proves_nothing() -> None:
    bench, faulty = make(full_blocks=4, sliding_blocks=4, prefix_cache=False)
    held = [group.pool.allocate(3) for group in bench.kv.groups]
    faulty.bad = {"bad0", "bad1", "bad2", "bad3"}
    for i in range(4):
        bench.add(f"bad{i}", [1], layers=(1,), salt=f"{i}")  # one layer deep: the second group's last block is not its own
        taken = bench.kv.groups[1].pool.allocate(1)
        bench.step()
        assert_failed(bench, f"bad{i}")
        assert taken is not None
        bench.kv.groups[1].pool.release(taken)
    assert faulty.computed == []
    assert all(blocks is not None for blocks in held)


@pytest.mark.parametrize("runner", RUNNERS)
@pytest.mark.parametrize("room", [1, 2, 5, 17])
def test_where_memory_runs_out_everything_is_computed_in_smaller_parts(runner: type[FaultyRunner], room: int) -> None:
    bench, faulty = make(runner)
    add_some(bench, 7)
    faulty.room = room
    bench.run()
    bench.check_results()
    assert bench.core.num_step_failures > 0


def test_a_request_that_is_too_large_even_alone_fails_and_the_others_go_on() -> None:
    bench, faulty = make()
    add_some(bench, 5)
    faulty.large = {"r1"}
    bench.run()
    assert_failed(bench, "r1")
    assert "not enough memory" in str(bench.listener.outputs["r1"][-1].error)
    bench.check_results(but=frozenset({"r1"}))


def test_where_nobody_has_room_the_youngest_goes_and_the_others_are_computed_when_there_is_memory_again() -> None:
    bench, faulty = make(budget=100)
    names = add_some(bench, 5)
    faulty.room = 0
    bench.step()
    assert_failed(bench, "r4")
    assert all(s.capture is None or s.capture.planned_end == s.capture.captured_end for s in bench.scheduler.running)
    bench.step()
    assert_failed(bench, "r3")
    faulty.room = None
    bench.run()
    assert [name for name in names if ends(bench, name)[0] == "error"] == ["r3", "r4"]
    bench.check_results(but=frozenset({"r3", "r4"}))


def test_no_room_for_anybody_in_several_steps_is_the_end_of_the_engine() -> None:
    bench, faulty = make()
    add_some(bench, 9)
    faulty.room = 0
    bench.step()
    bench.step()
    with pytest.raises(StepFailed, match="3 steps in a row"):
        bench.step()


def test_after_memory_ran_out_steps_are_smaller_and_grow_to_their_full_size_again() -> None:
    bench, faulty = make(budget=16)
    bench.add("old", [1] * 16, max_tokens=24)
    faulty.room = 8
    bench.step()
    faulty.room = None
    bench.step()
    assert list(bench.steps_of("old").values()) == [16, 8, 8], "what ran out of memory, the half of it that didn't, and a step as large"
    bench.add("new", [2] * 30, salt="x")
    bench.run()
    later = list(bench.steps_of("new").values())
    assert later[0] < 15
    bench.add("last", [3] * 16, salt="y")
    bench.step()
    assert next(iter(bench.steps_of("last").values())) == 16
    bench.check_results(but=frozenset({"last"}))


def test_what_running_out_of_memory_looks_like() -> None:
    with pytest.raises(RuntimeError, match="can't allocate memory") as host:
        run_out_of_memory()
    assert is_out_of_memory(host.value)
    assert is_out_of_memory(MemoryError())
    assert is_out_of_memory(torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"))
    assert is_out_of_memory(RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"))
    assert not is_out_of_memory(RuntimeError("CUDA error: device-side assert triggered"))
    assert not is_out_of_memory(ValueError("can't allocate memory"))


def test_the_tensors_of_an_attempt_are_gone_before_the_next_one() -> None:
    """In a process of its own: a log handler of the tests would keep the traceback, and so the tensors."""
    program = """
import gc, logging, weakref
import torch
from tests.unit.core_fakes import Bench, FakeRunner
logging.disable()
gc.disable()
left = []
class Runner(FakeRunner):
    def compute(self, step, chunks, sampled_before):
        assert all(reference() is None for reference in left)
        if len(chunks) > 1:
            large = torch.zeros(1000)
            left.append(weakref.ref(large))
            raise RuntimeError("no")
        return super().compute(step, chunks, sampled_before)
bench = Bench(runner=Runner)
for i in range(4):
    bench.add(str(i), [1, 2, 3], max_tokens=1, salt=str(i))
bench.run()
bench.check_results()
assert len(left) == 3
"""
    subprocess.run([sys.executable, "-c", program], check=True)


class _Checker:
    """A stop condition that breaks at the second token."""

    def __init__(self, error: BaseException) -> None:
        self._error = error
        self._asked = 0

    def completes_stop(self, token_id: int) -> bool:
        self._asked += 1
        if self._asked == 2:
            raise self._error
        return False


@pytest.mark.parametrize("error", [ValueError("no text"), SystemExit("a panic in foreign code")])
def test_a_stop_condition_that_raises_fails_its_request_alone(error: BaseException) -> None:
    bench, _ = make()
    bench.add("good", PROMPT, max_tokens=4, layers=(1,))
    save = SaveSpec("bad", Target(), (1,), "float32")
    job = FakeJob(save, bench.store)
    bench.core.add(EngineRequest("bad", PROMPT, SamplingParams(max_tokens=4), save, stop_checker=_Checker(error)), job)
    for _ in range(10):
        bench.step()
    assert ends(bench, "bad") == ("error", StepFailed)
    assert job.error is not None
    assert job.error.code == "engine_error"
    job.write_all()
    bench.run()
    bench.check_results()


def test_a_request_that_cannot_be_taken_in_fails_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    bench, _ = make()
    bench.add("before", PROMPT, max_tokens=2)
    with monkeypatch.context() as broken:
        broken.setattr(engine.core, "HashChain", lambda *_: run_out_of_memory())
        bench.add("bad", PROMPT, max_tokens=2, layers=(1,))
    assert_failed(bench, "bad")
    bench.add("after", PROMPT, max_tokens=2)
    bench.run()
    bench.check_results(but=frozenset({"bad"}))


@pytest.mark.parametrize("max_running", [1, 2])
def test_a_request_whose_save_failed_ends_with_what_the_save_says_running_or_waiting(max_running: int) -> None:
    bench = Bench(budget=14, max_running=max_running)
    bench.add("sound", PROMPT, max_tokens=6)
    bench.add("broken", PROMPT, max_tokens=9, layers=(1,), output=True, salt="x")
    bench.step()
    assert ("broken" in bench.running) == (max_running == 2)
    error = SaveError("no_space", "the disk is full")
    bench.jobs["broken"].cancel(error)
    bench.step()
    assert bench.listener.outputs["broken"][-1].error is error
    bench.run()
    bench.check_results(but=frozenset({"broken"}))


def test_a_request_whose_save_failed_while_it_starves_of_pages_ends_and_the_next_one_gets_them() -> None:
    bench = Bench(pages=3, budget=64)
    bench.add("starving", PROMPT, layers=(1,))
    bench.add("next", PROMPT, layers=(2,), salt="x")
    while bench.step():
        pass
    bench.jobs["starving"].cancel(SaveError("io_error", "the disk is gone"))
    bench.step()
    assert ends(bench, "starving") == ("error", SaveError)
    bench.run()
    bench.check_results(but=frozenset({"starving"}))


def test_rows_of_a_failed_step_do_not_reach_pages_with_the_next_one() -> None:
    pages = torch.zeros(6, 2)
    sink = StagedSink(pages, 3, torch.device("cpu"))
    sink.put(torch.full((3, 2), 7.0), torch.tensor([0, 1, 2]))
    sink.discard()
    sink.put(torch.full((2, 2), 5.0), torch.tensor([3, 4]))
    sink.flush()
    sink.collect(wait=True)
    assert pages[:, 0].tolist() == [0, 0, 0, 5, 5, 0]


def staged(*, overlap: bool) -> tuple[Bench, StagedFaultyRunner]:
    bench = Bench(runner=StagedFaultyRunner, overlap=overlap)
    assert isinstance(bench.runner, StagedFaultyRunner)
    return bench, bench.runner


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("room", [1, 5, 8, 12])
def test_saves_of_a_step_that_was_split_for_memory_complete_although_rows_of_its_parts_land_late(room: int, overlap: bool) -> None:
    bench, faulty = staged(overlap=overlap)
    for number in range(4):
        bench.add(f"r{number}", PROMPT, layers=(1, 2), salt=f"{number}")
    faulty.room = room
    bench.run()
    assert bench.core.num_step_failures > 0
    assert all(job.end is not None for job in bench.jobs.values())
    bench.check_results()


@pytest.mark.parametrize("overlap", [False, True])
def test_saves_of_a_step_with_one_bad_request_complete_although_rows_of_its_parts_land_late(overlap: bool) -> None:
    bench, faulty = staged(overlap=overlap)
    names = add_some(bench, 9)
    faulty.bad = {names[4]}
    bench.run()
    assert_failed(bench, names[4])
    bench.check_results(but=frozenset(faulty.bad))


@pytest.mark.parametrize("overlap", [False, True])
def test_an_aborted_save_of_a_split_step_holds_no_page_once_its_rows_have_landed(overlap: bool) -> None:
    bench, faulty = staged(overlap=overlap)
    for number in range(4):
        bench.add(f"r{number}", PROMPT, 3, (1, 2), salt=f"{number}", output=True)
    faulty.room = 12
    bench.step()
    assert bench.runner.busy
    for number in range(4):
        bench.core.abort(f"r{number}")
    assert bench.store.pool.stats().referenced > 0, "rows are on their way to these pages"
    bench.run()  # until no page is held
    assert not bench.runner.busy
    assert all(job.end is None and job.failed for job in bench.jobs.values())


@settings(max_examples=60, deadline=None)
@given(
    data=st.data(),
    runner=st.sampled_from(RUNNERS),
    budget=st.integers(2, 40),
    max_running=st.integers(1, 6),
    page_size=st.integers(1, 3),
)
def test_under_random_faults_only_bad_requests_fail(
    data: st.DataObject, runner: type[FaultyRunner], budget: int, max_running: int, page_size: int
) -> None:
    logging.disable()
    bench, faulty = make(runner, budget=budget, max_running=max_running, full_blocks=24, sliding_blocks=14, pages=24, page_size=page_size)
    names = add_some(bench, data.draw(st.integers(1, 12)))
    doomed: set[str] = set()
    try:
        while bench.core.has_work:
            turned = data.draw(st.sampled_from([None, *names]))
            faulty.bad = set() if turned is None else {turned}
            faulty.room = data.draw(st.sampled_from([None, None, 1, 3, 9]))
            before = {name for name in names if name in bench.listener.outputs and ends(bench, name)[0] is not None}
            bench.step()
            failed = {name for name in names if name in bench.listener.outputs and ends(bench, name) == ("error", StepFailed)} - before
            assert failed <= faulty.bad
            doomed |= failed
            if data.draw(st.booleans()):
                bench.write()
    finally:
        logging.disable(logging.NOTSET)
    bench.run()
    bench.check_results(but=frozenset(doomed))
