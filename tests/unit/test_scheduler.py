"""Who runs when: budgets, turns, priorities, preemption, and what happens while pages are short."""

from __future__ import annotations

from itertools import pairwise

import pytest

from engine.saves.spec import RowSelection
from tests.unit.core_fakes import Bench

LONG = [0, 1, 2, 3, 4, 0, 2] * 5
"""35 tokens."""


def test_decodes_go_on_in_every_step_under_a_stream_of_long_prompts() -> None:
    bench = Bench(budget=8, full_blocks=400, sliding_blocks=400)
    bench.add("decode", [0, 1, 2], max_tokens=20)
    bench.step()
    for i in range(19):
        bench.add(f"long{i}", LONG, salt="x" * i)
        bench.step()
    assert bench.tokens("decode")
    assert list(bench.steps_of("decode").values()) == [3] + [1] * 19
    assert all(sum(end - start for _, start, end in step) == 8 for step in bench.runner.steps[2:])
    bench.run()
    bench.check_results()


def test_a_prompt_that_runs_goes_on_in_every_step_beside_more_decodes_than_a_step_holds() -> None:
    bench = Bench(budget=8, max_running=40, full_blocks=600, sliding_blocks=600)
    for i in range(8):
        bench.add(f"decode{i}", [i % 5], max_tokens=39, salt="x" * i)
    bench.step()
    bench.add("prompt", LONG, max_tokens=1)
    before = len(bench.runner.steps)
    for _ in range(20):
        bench.step()
    assert [bench.steps_of("prompt")[step] for step in range(before, before + 17)] == [2] * 17
    assert len(bench.tokens("prompt")) == 1
    bench.run()
    bench.check_results()


def test_decodes_that_do_not_fit_a_step_take_turns() -> None:
    bench = Bench(budget=3, full_blocks=400, sliding_blocks=400)
    for i in range(7):
        bench.add(f"decode{i}", [i % 5], max_tokens=30, salt="x" * i)
    while bench.waiting:
        bench.step()
    for _ in range(15):
        bench.step()
    for i in range(7):
        turns = sorted(bench.steps_of(f"decode{i}"))[1:]
        assert max(later - earlier for earlier, later in pairwise(turns)) <= 3, "seven decodes in three places"


@pytest.mark.parametrize("budget", [2, 3, 8])
def test_a_waiting_prompt_starts_beside_as_many_decodes_as_a_step_holds(budget: int) -> None:
    bench = Bench(budget=budget, full_blocks=400, sliding_blocks=400)
    for i in range(budget):
        bench.add(f"decode{i}", [i % 5], max_tokens=30, salt="x" * i)
    while len(bench.running) < budget:
        bench.step()
    bench.add("prompt", LONG)
    bench.step()
    assert bench.running[-1] == "prompt"


def tokens_per_step(bench: Bench) -> list[int]:
    return [sum(end - start for _, start, end in step) for step in bench.runner.steps]


def test_a_step_with_a_single_token_in_it_is_smaller_than_one_of_prompts_alone() -> None:
    bench = Bench(budget=16, mixed=4)
    bench.add("decode", [0, 1, 2], max_tokens=6)
    bench.step()
    bench.add("prompt", LONG, salt="x")
    bench.run()
    assert tokens_per_step(bench) == [3] + [4] * 5 + [16, 4]
    assert list(bench.steps_of("prompt").values()) == [3] * 5 + [16, 4]
    bench.check_results()


def test_a_bound_on_mixed_steps_above_the_budget_changes_nothing() -> None:
    bench = Bench(budget=8, mixed=100)
    bench.add("decode", [0, 1, 2], max_tokens=6)
    bench.step()
    bench.add("prompt", LONG, salt="x")
    bench.run()
    assert tokens_per_step(bench) == [3] + [8] * 5
    bench.check_results()


@pytest.mark.parametrize("num_decodes", [5, 8, 20])
def test_prompts_and_decodes_both_go_on_where_a_mixed_step_does_not_hold_all_decodes(num_decodes: int) -> None:
    bench = Bench(budget=64, mixed=8, max_running=40, full_blocks=800, sliding_blocks=800)
    for i in range(num_decodes):
        bench.add(f"decode{i}", [i % 5], max_tokens=39, salt="x" * i)
    bench.step()
    bench.add("prompt", [*LONG, 1], max_tokens=1)
    before = len(bench.runner.steps)
    for _ in range(20):
        bench.step()
    last = max(bench.steps_of("prompt"))
    assert all(bench.steps_of("prompt")[step] >= 2 for step in range(before, last + 1)), "a quarter is the prompt's"
    assert len(bench.tokens("prompt")) == 1
    assert max(tokens_per_step(bench)[1:]) == 8
    for i in range(num_decodes):
        turns = sorted(bench.steps_of(f"decode{i}"))[1:]
        assert max(later - earlier for earlier, later in pairwise(turns)) <= -(-num_decodes // 6), "six places for decodes"
    bench.run()
    bench.check_results()


def test_prompts_share_what_decodes_leave_in_order_of_arrival() -> None:
    bench = Bench(budget=10)
    bench.add("first", LONG[:14], salt="a")
    bench.add("second", LONG[:9], salt="b")
    bench.run()
    assert bench.runner.steps == [[("first", 0, 10)], [("first", 10, 14), ("second", 0, 6)], [("second", 6, 9)]]


def test_a_lower_priority_number_runs_first_and_equals_in_order_of_arrival() -> None:
    bench = Bench(max_running=1)
    for name, priority in (("late", 5), ("first", 0), ("second", 0), ("urgent", -1)):
        bench.add(name, [0, 1], max_tokens=1, priority=priority)
    bench.run()
    assert [step[0][0] for step in bench.runner.steps] == ["urgent", "first", "second", "late"]


def test_no_more_run_at_a_time_than_allowed() -> None:
    bench = Bench(max_running=3)
    for i in range(9):
        bench.add(f"r{i}", [0, i % 5], max_tokens=4, layers=(1,), output=True)
    bench.run()
    assert max(len(step) for step in bench.runner.steps) == 3
    bench.check_results()


def test_rows_captured_in_a_step_are_bounded_and_what_is_left_follows_in_the_next() -> None:
    bench = Bench(max_rows=5)
    bench.add("two layers", LONG[:12], layers=(0, 1))
    bench.add("three layers", LONG[:7], layers=(0, 1, 2), salt="x")
    bench.run()
    assert bench.runner.max_captured == 5 - 5 % 2
    assert max(bench.steps_of("two layers").values()) == 2
    assert max(bench.steps_of("three layers").values()) == 1
    bench.check_results()


def test_rows_that_are_not_kept_do_not_count_against_the_bound() -> None:
    bench = Bench(max_rows=5)
    bench.add("last row", LONG, layers=(0, 1), rows=RowSelection(((-1, None),)))
    bench.run()
    assert bench.runner.steps == [[("last row", 0, 35)]]
    bench.check_results()


def test_the_youngest_is_preempted_when_blocks_run_out_and_ends_with_the_right_rows() -> None:
    bench = Bench(full_blocks=20, pages=60, page_size=4)
    bench.add("old", LONG[:18], max_tokens=8, layers=(1,), output=True)
    bench.add("young", LONG[1:18], max_tokens=8, layers=(2,), output=True)
    while bench.scheduler.num_preemptions == 0:
        bench.step()
    assert bench.running == ["old"]
    assert bench.waiting == ["young"]
    bench.run()
    bench.check_results()


def test_among_unlike_priorities_the_least_urgent_is_preempted() -> None:
    bench = Bench(full_blocks=20)
    bench.add("least", LONG[:18], max_tokens=8, priority=1)
    bench.add("urgent", LONG[1:18], max_tokens=8)
    while bench.scheduler.num_preemptions == 0:
        bench.step()
    assert bench.waiting == ["least"]
    bench.run()
    bench.check_results()


def test_a_preempted_request_hands_its_rows_on_and_keeps_no_page() -> None:
    bench = Bench(full_blocks=20, page_size=4, prefix_cache=False)
    bench.add("old", LONG[:18], max_tokens=8)
    bench.add("young", LONG[1:18], max_tokens=8, layers=(2,), output=True)
    while bench.scheduler.num_preemptions == 0:
        bench.step()
    computed = max(end for step in bench.runner.steps for name, _, end in step if name == "young")
    assert computed % 4, "the last block is a partial one"
    bench.write()
    assert bench.store.pool.stats().referenced == 0
    assert sorted(bench.jobs["young"].rows) == list(range(computed))
    bench.run()
    bench.check_results()


def test_a_preempted_request_starts_again_from_what_is_still_cached() -> None:
    bench = Bench(full_blocks=24, sliding_blocks=60)
    bench.add("old", LONG[:20], max_tokens=12)
    bench.add("young", LONG[1:21], max_tokens=12)
    while bench.scheduler.num_preemptions == 0:
        bench.step()
    computed = bench.core.num_computed_tokens
    bench.run()
    again = bench.core.num_computed_tokens - computed
    assert again < 20 + 12 + 12
    bench.check_results()


def test_requests_without_pages_do_not_hold_up_those_behind_them_that_need_none() -> None:
    bench = Bench(pages=2)
    bench.add("starved", LONG[:12], layers=(1,))
    bench.step()
    bench.step()
    bench.add("no pages", LONG[:3], layers=(0, 1), salt="x")
    bench.add("plain", LONG[:5], max_tokens=3, salt="y")
    for _ in range(3):
        bench.step()
    assert len(bench.tokens("plain")) == 3
    assert bench.waiting == ["no pages"]
    bench.run()
    bench.check_results()


def test_a_step_in_which_everything_waits_for_pages_says_so() -> None:
    bench = Bench(pages=2)
    bench.add("starved", LONG[:12], layers=(1,))
    assert bench.step()
    assert not bench.step()
    bench.write()
    assert bench.step()


def test_text_goes_on_without_pages_once_the_rows_that_are_kept_have_theirs() -> None:
    bench = Bench(pages=6)
    bench.add("prompt rows", LONG[:5], max_tokens=12, layers=(1, 2))
    for _ in range(12):
        bench.step()  # and the disk writes nothing
    assert len(bench.tokens("prompt rows")) == 12
    bench.run()
    bench.check_results()


def test_a_request_starved_of_pages_yields_its_kv_to_a_waiting_plain_one() -> None:
    bench = Bench(full_blocks=20, pages=4)
    bench.add("starved", LONG[:12], layers=(1, 2))
    bench.step()
    bench.step()
    assert bench.running == ["starved"]
    bench.add("plain", [*LONG, 1, 1, 1], max_tokens=2, salt="x")
    for _ in range(4):
        bench.step()
    assert len(bench.tokens("plain")) == 2, "the disk has written nothing yet"
    assert bench.scheduler.num_preemptions == 1
    bench.run()
    bench.check_results()


def test_a_request_starved_of_pages_keeps_its_kv_while_nobody_needs_it() -> None:
    bench = Bench(full_blocks=20, pages=4)
    bench.add("starved", LONG[:12], layers=(1, 2))
    bench.add("plain", LONG[:4], max_tokens=6, salt="x")
    for _ in range(9):
        bench.step()
    assert len(bench.tokens("plain")) == 6
    assert bench.scheduler.num_preemptions == 0
    assert bench.running == ["starved"]


@pytest.mark.parametrize("num_requests", [2, 3, 4])
def test_requests_whose_windows_of_rows_do_not_fit_together_run_one_after_the_other(num_requests: int) -> None:
    bench = Bench(pages=8, prefix_cache=False)
    for i in range(num_requests):
        bench.add(f"r{i}", [i], max_tokens=20, layers=(1,), output=True, rows=RowSelection(((-8, None),)))
    bench.step()
    assert bench.running == ["r0"]
    bench.run()
    bench.check_results()


def test_pages_promised_to_a_window_of_rows_are_not_taken_by_others() -> None:
    bench = Bench(pages=8, prefix_cache=False)
    bench.add("window", [0], max_tokens=20, layers=(1,), output=True, rows=RowSelection(((-8, None),)))
    bench.step()
    bench.add("all rows", LONG, layers=(0,))
    for _ in range(25):
        bench.step()  # and the disk writes nothing
    assert len(bench.tokens("window")) == 20
    assert bench.running == ["all rows"]
    bench.run()
    bench.check_results()


def test_a_prompt_is_admitted_only_where_the_running_prompts_still_get_their_blocks() -> None:
    bench = Bench(full_blocks=24, budget=10)
    bench.add("first", LONG)
    bench.add("second", LONG[1:21], salt="x")
    bench.step()
    assert bench.running == ["first"]
    bench.run()
    assert bench.scheduler.num_preemptions == 0
    bench.check_results()
