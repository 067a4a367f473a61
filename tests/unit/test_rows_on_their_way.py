"""Captured rows that are computed but don't stand in their pages yet: nobody reads them, whatever happens meanwhile."""

from __future__ import annotations

import pytest

from engine.errors import EngineUnavailable, SaveError
from tests.unit.core_fakes import Bench
from tests.unit.staged_runner import StagedRunner

PROMPT = [0, 1, 2, 3, 4, 1, 0, 3]


def staged(**settings: object) -> tuple[Bench, StagedRunner]:
    bench = Bench(runner=StagedRunner, **settings)  # type: ignore[arg-type]  # settings of a test
    assert isinstance(bench.runner, StagedRunner)
    return bench, bench.runner


def test_a_step_waits_for_no_copy_of_the_steps_before_it() -> None:
    bench, runner = staged(budget=2)
    bench.add("a", PROMPT, layers=(1, 2))
    for _ in range(2):
        bench.step()
    assert (runner.stream.num_waits, len(runner.stream.pending)) == (0, 2)
    assert not bench.jobs["a"].chunks, "rows that haven't landed were given to the writer"
    runner.stream.advance()
    bench.step()
    assert [list(chunk.ranges) for chunk in bench.jobs["a"].chunks] == [[(0, 2)]]
    assert runner.stream.num_waits == 0
    bench.run()
    bench.check_results()


def test_rows_may_land_while_the_next_step_is_computed() -> None:
    bench, runner = staged(budget=2, page_size=2, prefix_cache=False)
    runner.lands_midway = True
    bench.add("a", PROMPT, 3, (1, 2), output=True)
    bench.run()
    bench.check_results()


def test_only_the_third_step_under_way_waits_for_a_buffer() -> None:
    bench, runner = staged(budget=2)
    bench.add("a", PROMPT, layers=(1,))
    for waits in (0, 0, 1, 2):
        bench.step()
        assert runner.stream.num_waits == waits


def test_a_text_that_is_done_is_answered_while_its_last_rows_are_on_their_way() -> None:
    bench, runner = staged()
    bench.add("a", PROMPT, 1, (1,))
    bench.step()
    assert bench.listener.outputs["a"][-1].finish_reason == "length"
    assert bench.jobs["a"].end is None
    assert bench.core.has_work, "nobody would see to the rows"
    assert bench.kv.stats().referenced == 0
    assert bench.step(), "waiting for rows is progress"
    assert bench.jobs["a"].end is not None
    assert (bench.core.has_work, runner.stream.num_waits) == (False, 1)
    bench.run()
    bench.check_results()


def test_pages_are_offered_to_later_requests_once_their_rows_have_landed() -> None:
    bench, runner = staged(budget=8)
    bench.add("a", PROMPT, layers=(1,))
    bench.step()
    bench.add("b", PROMPT, layers=(1,))
    bench.step()
    assert bench.num_cached("b") == 0
    bench.run()
    bench.add("c", PROMPT, layers=(1,))
    bench.step()
    assert bench.num_cached("c") == len(PROMPT)
    bench.run()
    bench.check_results()
    assert runner.stream.num_waits > 0


@pytest.mark.parametrize("done", [False, True])
def test_pages_of_an_aborted_request_are_held_until_its_rows_have_landed(done: bool) -> None:
    """Else the rows would fall into the pages of whoever gets them next."""
    bench, runner = staged(pages=4, budget=8, prefix_cache=False)
    bench.add("a", PROMPT if done else [*PROMPT, 2], 1 if done else 0, (1,))
    bench.step()
    bench.core.abort("a")
    assert bench.jobs["a"].error is not None
    assert bench.store.pool.stats().referenced == 4
    bench.add("b", PROMPT[1:], layers=(2,))
    assert bench.step(), "waits for the rows of a request that is gone"
    assert runner.stream.num_waits == 1
    assert bench.store.pool.stats().referenced == 0
    bench.run()
    assert bench.jobs["a"].end is None, "an aborted save was completed when its rows landed"
    bench.check_results(but=frozenset({"a"}))


def test_a_save_that_fails_with_rows_on_their_way_ends_once_and_gives_its_pages_back() -> None:
    bench, _ = staged(budget=4)
    bench.add("a", PROMPT, layers=(1,))
    bench.step()
    bench.jobs["a"].error = SaveError("io_error", "the disk is gone")
    bench.step()
    bench.run()
    assert bench.listener.outputs["a"][-1].finish_reason == "error"
    assert bench.jobs["a"].end is None


def test_rows_of_a_preempted_request_go_on_to_its_file_when_they_land() -> None:
    bench, runner = staged(full_blocks=20, pages=16, budget=20, prefix_cache=False)
    bench.add("young", PROMPT, 14, (1, 2), output=True, priority=1)
    bench.step()
    bench.add("old", [4, *PROMPT] * 2, 20)
    while not bench.scheduler.num_preemptions:
        runner.stream.advance(0)
        assert bench.step()
    bench.run()
    bench.check_results()


def test_a_core_that_dies_leaves_no_save_open_whose_rows_were_on_their_way() -> None:
    bench, _ = staged()
    bench.add("a", PROMPT, 1, (1,))
    bench.step()
    bench.core.fail_all(EngineUnavailable("the engine is dead"))
    assert bench.jobs["a"].error is not None
