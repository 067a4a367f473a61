"""Requests that end otherwise than well: aborted, failed, with a save that failed."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from engine.errors import EngineError, EngineUnavailable, RequestAborted, SaveError, StepFailed
from engine.execution.runner import StepOutput
from engine.execution.step_input import StepInput
from engine.scheduling.plan import Chunk
from tests.unit.core_fakes import Bench, FakeRunner

PROMPT = [0, 1, 2, 3, 4, 0, 2, 4, 1]


def assert_nothing_is_held(bench: Bench) -> None:
    bench.write()
    bench.core.check_integrity()
    assert bench.kv.stats().referenced == 0
    assert bench.store.pool.stats().referenced == 0


def ends(bench: Bench, name: str) -> list[tuple[str, type[Exception]]]:
    """Finish reasons of all last outputs that the request had, and the types of their errors."""
    return [(o.finish_reason, type(o.error)) for o in bench.listener.outputs.get(name, []) if o.finish_reason]


def test_a_waiting_request_is_aborted() -> None:
    bench = Bench(max_running=1)
    bench.add("running", PROMPT, max_tokens=3)
    bench.add("waiting", PROMPT, max_tokens=3, layers=(1,))
    bench.step()
    bench.core.abort("waiting")
    assert ends(bench, "waiting") == [("abort", RequestAborted)]
    assert bench.num_cached("waiting") == 0
    error = bench.jobs["waiting"].error
    assert error is not None
    assert error.code == "cancelled"
    bench.run()
    bench.check_results(but=frozenset({"waiting"}))


def test_a_running_request_is_aborted_and_gives_everything_back_at_once() -> None:
    bench = Bench(budget=5)
    bench.add("running", PROMPT, max_tokens=3, layers=(1, 2))
    bench.step()
    bench.core.abort("running")
    assert ends(bench, "running") == [("abort", RequestAborted)]
    assert not bench.core.has_work
    assert_nothing_is_held(bench)


def test_a_request_of_which_only_the_writing_is_left_is_aborted_without_another_output() -> None:
    bench = Bench()
    bench.add("writing", PROMPT, max_tokens=1, layers=(1,))
    while bench.core.has_work:
        bench.step()
    bench.core.abort("writing")
    assert [o.finish_reason for o in bench.listener.outputs["writing"]] == ["length"]
    assert bench.jobs["writing"].failed
    assert_nothing_is_held(bench)


def test_a_save_that_has_ended_is_not_cancelled_any_more() -> None:
    bench = Bench()
    bench.add("done", PROMPT, layers=(1,))
    bench.run()
    bench.core.save_ended("done")
    bench.core.abort("done")
    assert not bench.jobs["done"].failed


def test_a_request_whose_text_is_done_but_not_its_last_row_is_aborted_without_another_output() -> None:
    bench = Bench()
    bench.add("last row", PROMPT, max_tokens=1, layers=(1,), last=True)
    bench.step()
    assert bench.core.has_work
    bench.core.abort("last row")
    assert [o.finish_reason for o in bench.listener.outputs["last row"]] == ["length"]
    assert bench.jobs["last row"].failed
    assert_nothing_is_held(bench)


def test_aborting_an_unknown_request_does_nothing() -> None:
    bench = Bench()
    bench.core.abort("nobody")
    assert not bench.listener.outputs


def test_a_failed_step_fails_the_requests_that_were_in_it_and_no_others() -> None:
    bench = Bench(max_running=2)
    for name in ("a", "b", "c"):
        bench.add(name, PROMPT, max_tokens=2, layers=(1,), salt=name)
    bench.runner.error = RuntimeError("out of luck")
    bench.step()
    bench.runner.error = None
    bench.run()
    assert ends(bench, "a") == ends(bench, "b") == [("error", StepFailed)]
    assert all(bench.jobs[name].error is not None for name in "ab")
    bench.check_results(but=frozenset("ab"))
    assert_nothing_is_held(bench)


def test_a_failed_step_leaves_nothing_in_the_prefix_cache() -> None:
    bench = Bench()
    bench.add("failed", PROMPT, max_tokens=1, layers=(1,))
    bench.runner.error = RuntimeError("out of luck")
    bench.step()
    assert bench.kv.stats().cached == bench.store.pool.stats().cached == 0


def test_three_failed_steps_in_a_row_are_the_end_but_not_with_a_good_one_between() -> None:
    bench = Bench(max_running=1)
    for i in range(6):
        bench.add(f"r{i}", PROMPT, max_tokens=1)
    for good in (False, False, True, False, False):
        bench.runner.error = None if good else RuntimeError("out of luck")
        bench.step()
    with pytest.raises(StepFailed, match="3 steps in a row"):
        bench.step()
    assert ends(bench, "r5") == []  # `fail_all` tells, once the engine is known to be dead
    bench.core.fail_all(EngineUnavailable("the engine is dead"))
    assert ends(bench, "r2") == [("length", type(None))]
    assert ends(bench, "r5") == [("error", StepFailed)]


def test_who_ended_for_another_reason_in_the_last_step_of_a_dying_engine_is_answered_too() -> None:
    bench = Bench(max_running=2)
    for i in range(3):
        bench.add(f"r{i}", PROMPT, max_tokens=1)
    bench.add("disk", PROMPT, max_tokens=1, layers=(1,), salt="x")
    bench.runner.error = RuntimeError("out of luck")
    bench.scheduler._max_running = 1
    bench.step()
    bench.step()
    bench.jobs["disk"].cancel(SaveError("io_error", "the disk is gone"))
    with pytest.raises(StepFailed):
        bench.step()
    bench.core.fail_all(EngineUnavailable("the engine is dead"))
    assert ends(bench, "disk") == [("error", SaveError)]


def test_failing_everything_answers_running_and_waiting_ones_and_fails_what_is_being_written() -> None:
    bench = Bench(max_running=1)
    bench.add("writing", PROMPT, layers=(1,))
    bench.step()
    bench.add("running", PROMPT, max_tokens=4)
    bench.add("waiting", PROMPT, max_tokens=4, layers=(2,))
    bench.step()
    bench.core.fail_all(EngineUnavailable("the engine is dead"))
    assert ends(bench, "running") == ends(bench, "waiting") == [("error", EngineUnavailable)]
    assert bench.jobs["writing"].failed
    assert bench.jobs["waiting"].failed
    assert not bench.core.has_work
    assert_nothing_is_held(bench)


def test_a_request_whose_save_failed_is_not_computed_any_further() -> None:
    bench = Bench(budget=4)
    bench.add("broken", PROMPT, max_tokens=9, layers=(1,))
    bench.add("sound", PROMPT, max_tokens=9)
    bench.step()
    bench.jobs["broken"].cancel(SaveError("no_space", "the disk is full"))
    bench.step()
    assert ends(bench, "broken") == [("error", SaveError)]
    bench.run()
    bench.check_results(but=frozenset({"broken"}))
    assert_nothing_is_held(bench)


class _OneBadRow(FakeRunner):
    """A model that gives nothing to choose a token from for one request."""

    def compute(self, step: StepInput, chunks: Sequence[Chunk], sampled_before: torch.Tensor | None) -> StepOutput:
        output = super().compute(step, chunks, sampled_before)
        for place, chunk in enumerate(chunk for chunk in chunks if chunk.samples):
            if output.logits is not None and chunk.sequence.request.request_id == "bad":
                output.logits[place] = torch.nan
        return output


def test_a_row_that_cannot_be_sampled_fails_its_request_alone() -> None:
    bench = Bench(runner=_OneBadRow)
    bench.add("good", PROMPT, max_tokens=3, layers=(1,))
    bench.add("bad", PROMPT, max_tokens=3, layers=(2,), salt="x")
    bench.run()
    assert ends(bench, "bad") == [("error", EngineError)]
    assert bench.jobs["bad"].failed
    bench.check_results(but=frozenset({"bad"}))


def test_blocks_that_are_held_by_nobody_known_are_noticed() -> None:
    bench = Bench()
    bench.kv.groups[0].pool.allocate(1)
    with pytest.raises(AssertionError, match="no request is left"):
        bench.core.check_integrity()
