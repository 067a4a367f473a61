"""Who runs when: budgets, turns, priorities, preemption, and what happens while pages are short."""

from __future__ import annotations

import time
from dataclasses import dataclass
from itertools import pairwise

import pytest

from engine.saves.selection import ALL_ROWS, RowSelection
from engine.scheduling.prefix import PrefixFinder
from engine.scheduling.sequence import TokenSequence
from tests.unit.core_fakes import Bench, FakeRunner
from tests.unit.staged_runner import StagedRunner

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
    before = len(bench.runner.steps)
    for _ in range(28):
        bench.step()
    for i in range(7):
        turns = [step for step in bench.steps_of(f"decode{i}") if step >= before]
        assert len(turns) == 12, "seven decodes in three places"
        assert max(later - earlier for earlier, later in pairwise(turns)) <= 3


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


def paced(prompt_tokens: int, **settings: int) -> Bench:
    """Steps beside text are to take a second, in which so many tokens of prompts were computed; how long they take here plays no part."""
    bench = Bench(inter_token_seconds=1.0, **settings)  # type: ignore[arg-type]  # all numbers
    bench.scheduler.pace.observe(prompt_tokens, 1.0, beside_text=True)
    bench.scheduler.observe = lambda chunks, seconds: None  # type: ignore[method-assign]
    return bench


def test_a_step_with_a_single_token_in_it_is_as_large_as_its_time_allows_and_one_of_prompts_alone_is_whole() -> None:
    bench = paced(4, budget=16)
    bench.add("decode", [0, 1, 2], max_tokens=6)
    bench.step()
    bench.add("prompt", LONG, salt="x")
    bench.run()
    assert tokens_per_step(bench) == [3] + [1 + 4] * 5 + [15]
    assert list(bench.steps_of("prompt").values()) == [4] * 5 + [15]
    bench.check_results()


def test_without_a_limit_of_time_a_step_beside_text_is_whole() -> None:
    bench = Bench(budget=8)
    bench.scheduler.pace.observe(4, 100.0, beside_text=True)
    bench.add("decode", [0, 1, 2], max_tokens=6)
    bench.step()
    bench.add("prompt", LONG, salt="x")
    bench.run()
    assert tokens_per_step(bench) == [3] + [8] * 5
    bench.check_results()


def test_steps_beside_text_follow_what_the_last_ones_took() -> None:
    bench = paced(4, budget=32)
    bench.add("decode", [0, 1, 2], max_tokens=6)
    bench.step()
    bench.add("prompt", LONG, salt="x")
    bench.step()
    bench.scheduler.pace.observe(4, 0.25, beside_text=True)
    bench.step()
    bench.scheduler.pace.observe(10, 2.5, beside_text=True)
    bench.step()
    assert list(bench.steps_of("prompt").values()) == [4, 10, 4]
    bench.run()
    bench.check_results()


@pytest.mark.parametrize("num_decodes", [5, 8, 20])
def test_every_text_goes_on_in_every_step_and_prompts_get_a_block_however_long_that_takes(num_decodes: int) -> None:
    bench = paced(4, budget=64, max_running=40, full_blocks=800, sliding_blocks=800)
    for i in range(num_decodes):
        bench.add(f"decode{i}", [i % 5], max_tokens=39, salt="x" * i)
    bench.step()
    bench.scheduler.pace.observe(2, 1000.0, beside_text=True)
    bench.add("prompt", [*LONG, 1], max_tokens=1)
    before = len(bench.runner.steps)
    for _ in range(18):
        bench.step()
    assert [bench.steps_of("prompt")[step] for step in range(before, before + 18)] == [2] * 18
    assert len(bench.tokens("prompt")) == 1
    for i in range(num_decodes):
        assert sorted(bench.steps_of(f"decode{i}")) == list(range(before + 18))
    bench.run()
    bench.check_results()


def test_prompts_that_begin_beside_text_share_the_time_that_it_leaves() -> None:
    bench = paced(8, budget=32, full_blocks=200, sliding_blocks=200)
    bench.add("decode", [0, 1, 2], max_tokens=20)
    bench.step()
    bench.add("first", LONG, salt="x")
    bench.add("second", LONG, salt="y")
    bench.step()
    bench.step()
    assert list(bench.steps_of("first").values()) == list(bench.steps_of("second").values()) == [4, 4]


@dataclass
class Clock:
    """Stands still but while the device computes: three seconds per step."""

    now: float = 100.0


def watch_the_clock(monkeypatch: pytest.MonkeyPatch, bench: Bench) -> tuple[Clock, list[tuple[list[tuple[int, int]], float]]]:
    """What the scheduler is told of every step: first positions and ends of its chunks, and seconds."""
    clock, told = Clock(), list[tuple[list[tuple[int, int]], float]]()
    run = bench.runner.run

    def three_seconds(*arguments: object) -> object:
        clock.now += 3
        return run(*arguments)  # type: ignore[arg-type]  # handed on

    monkeypatch.setattr(bench.runner, "run", three_seconds)
    monkeypatch.setattr(time, "perf_counter", lambda: clock.now)
    bench.scheduler.observe = lambda chunks, seconds: told.append(  # type: ignore[method-assign]
        ([(chunk.start, chunk.end) for chunk in chunks], seconds)
    )
    return clock, told


def test_the_pace_is_told_how_much_of_prompts_a_step_took_and_whether_text_was_beside_it() -> None:
    bench = Bench(inter_token_seconds=1.0, budget=20)
    told = []
    bench.scheduler.pace.observe = lambda tokens, seconds, *, beside_text: told.append(  # type: ignore[method-assign]
        (tokens, beside_text)
    )
    bench.add("a", LONG[:4], max_tokens=3)
    bench.step()
    bench.add("b", LONG[:6], salt="x")
    bench.add("c", LONG[:5], salt="y")
    bench.step()
    bench.step()
    assert told == [(4, False), (5, True), (5, True)]


def test_the_scheduler_is_told_how_long_every_step_took(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(budget=20)
    _, told = watch_the_clock(monkeypatch, bench)
    bench.add("a", LONG, max_tokens=2)
    bench.run()
    assert told == [([(0, 20)], 3.0), ([(20, 35)], 3.0), ([(35, 36)], 3.0)]


def test_no_time_is_counted_twice_where_steps_overlap(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(budget=20, overlap=True, runner=StagedRunner)
    clock, told = watch_the_clock(monkeypatch, bench)
    started = clock.now
    bench.add("a", LONG, max_tokens=6)
    bench.run()
    assert len(told) == len(bench.runner.steps) == 7
    assert sum(seconds for _, seconds in told) == clock.now - started
    assert all(seconds == 3.0 for _, seconds in told[1:-1])


def test_prompts_of_one_priority_share_what_decodes_leave_evenly_or_get_all_that_they_need() -> None:
    bench = Bench(budget=10)
    bench.add("first", LONG[:14], salt="a")
    bench.add("second", LONG[:9], salt="b")
    bench.run()
    assert bench.runner.steps == [
        [("first", 0, 5), ("second", 0, 5)],
        [("first", 5, 11), ("second", 5, 9)],
        [("first", 11, 14)],
    ]


def wide(budget: int = 8, **settings: int) -> Bench:
    """With room for everybody."""
    return Bench(budget=budget, full_blocks=400, sliding_blocks=400, **settings)  # type: ignore[arg-type]  # all numbers


def test_a_request_of_better_priority_starts_at_once_beside_a_long_prompt() -> None:
    bench = wide()
    bench.add("long", LONG)
    bench.step()
    bench.add("urgent", LONG[1:4], max_tokens=1, priority=-100, salt="x")
    bench.step()
    assert len(bench.tokens("urgent")) == 1
    assert bench.runner.steps[-1] == [("urgent", 0, 3), ("long", 8, 13)]
    bench.run()
    bench.check_results()


def test_a_long_prompt_of_better_priority_has_the_steps_to_itself() -> None:
    bench = wide()
    bench.add("long", LONG)
    bench.step()
    bench.add("urgent", LONG[1:20], priority=-100, salt="x")
    bench.run()
    assert bench.runner.steps[1:4] == [[("urgent", 0, 8)], [("urgent", 8, 16)], [("urgent", 16, 19), ("long", 8, 13)]]
    bench.check_results()


def test_a_short_prompt_beside_a_long_one_starts_within_two_steps() -> None:
    bench = wide()
    bench.add("long", LONG)
    bench.step()
    bench.add("short", LONG[1:4], max_tokens=1, salt="x")
    for _ in range(2):
        bench.step()
    assert len(bench.tokens("short")) == 1
    assert bench.steps_of("long")[2] > 0
    bench.run()
    bench.check_results()


def test_two_long_prompts_share_steps_evenly_though_one_came_later() -> None:
    bench = wide()
    bench.add("first", LONG, salt="x")
    bench.step()
    bench.add("second", LONG, salt="y")
    for _ in range(6):
        bench.step()
    assert list(bench.steps_of("first").values()) == [8] + [4] * 6
    assert list(bench.steps_of("second").values()) == [4] * 6
    bench.run()
    bench.check_results()


def test_a_prompt_goes_on_under_a_stream_of_short_ones_that_would_fill_every_step() -> None:
    bench = wide()
    bench.add("long", LONG)
    for i in range(6):
        bench.step()
        for j in range(4):
            bench.add(f"short{i}{j}", [0, 1], salt=f"{i}{j}")
    bench.step()
    turns = sorted(bench.steps_of("long"))
    assert max(later - earlier for earlier, later in pairwise([*turns, 7])) <= 2
    bench.run()
    bench.check_results()


@pytest.mark.parametrize("num_prompts", [5, 6, 9])
def test_five_and_more_prompts_take_turns_in_fours(num_prompts: int) -> None:
    bench = wide()
    names = [f"r{i}" for i in range(num_prompts)]
    for name in names:
        bench.add(name, LONG[:34], salt=name)
    for _ in range(num_prompts * 3):
        bench.step()
    most = -(-num_prompts // 4)
    for name in names:
        turns = sorted(bench.steps_of(name))
        assert turns[0] < most, "each starts within so many steps"
        assert max(later - earlier for earlier, later in pairwise(turns)) <= most
        assert set(bench.steps_of(name).values()) == {2}
    done = [sum(bench.steps_of(name).values()) for name in names]
    assert max(done) - min(done) <= 2
    bench.run()
    bench.check_results()


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


def test_a_chunk_of_two_rows_takes_only_the_pages_that_it_needs() -> None:
    bench = Bench(max_rows=8, page_size=4)
    bench.add("four layers", LONG, layers=(0, 1, 2, 3))
    bench.step()
    assert bench.steps_of("four layers") == {0: 2}
    assert bench.store.pool.stats().referenced == 4
    bench.run()
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


@pytest.mark.parametrize("max_rows", [None, 2])
def test_a_request_starved_of_pages_yields_its_kv_to_a_waiting_plain_one(max_rows: int | None) -> None:
    bench = Bench(full_blocks=20, pages=4, max_rows=max_rows)
    bench.add("starved", LONG[:12], layers=(1, 2))
    while bench.step():
        pass
    assert bench.running == ["starved"]
    bench.add("plain", [*LONG, 1, 1, 1], max_tokens=2, salt="x")
    for _ in range(4):
        bench.step()
    assert len(bench.tokens("plain")) == 2, "the disk has written nothing yet"
    assert bench.scheduler.num_preemptions == 1
    bench.run()
    bench.check_results()


def test_a_step_that_only_preempted_says_that_it_did_something() -> None:
    """Else the engine would wait for pages before it looks again."""
    bench = Bench(full_blocks=20, pages=4)
    bench.add("starved", LONG[:12], layers=(1, 2))
    assert bench.step()
    assert not bench.step()
    bench.add("plain", [*LONG, 1, 1, 1], max_tokens=2, salt="x")
    before = len(bench.runner.steps)
    assert bench.step()
    assert (bench.scheduler.num_preemptions, len(bench.runner.steps)) == (1, before)
    assert bench.step()
    assert bench.tokens("plain")
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


def test_a_long_prompt_goes_on_where_a_window_holds_less_than_a_step() -> None:
    bench = Bench(budget=32, sliding_blocks=5)  # a window of 5 in blocks of 2 takes so many at a time
    bench.add("long", LONG, max_tokens=3)
    bench.run()
    bench.check_results()
    assert bench.scheduler.num_preemptions == 0
    assert max(bench.steps_of("long").values()) == 10, "what the blocks hold"


def test_long_requests_run_side_by_side_in_windows_and_the_room_of_one_chunk() -> None:
    window, chunk = 5, 16 // 2
    bench = Bench(budget=16, full_blocks=3 * 20, sliding_blocks=3 * window + chunk, prefix_cache=False)
    for name in "abc":
        bench.add(name, LONG, max_tokens=4, salt=name)
    bench.run()
    bench.check_results()
    assert bench.scheduler.num_preemptions == 0
    assert tokens_per_step(bench)[:6] == [16] * 6


def test_blocks_that_a_prompts_last_chunk_no_longer_needs_come_back_before_anybody_is_preempted() -> None:
    bench = Bench(budget=16, sliding_size=1, sliding_blocks=20, prefix_cache=False)
    for name in "abc":
        bench.add(name, [0, 1], max_tokens=6, salt=name)
    bench.step()
    bench.add("long", LONG, salt="d")
    bench.run()
    bench.check_results()
    assert bench.steps_of("long")[1] == 11, "all that the others had left, which they need in the next step"
    assert bench.scheduler.num_preemptions == 0


LAST_EIGHT = RowSelection(((-8, None),))
"""Of a text that grows: six pages of two rows are promised for it."""


def add_ring(bench: Bench, name: str, priority: int = 0) -> None:
    bench.add(name, [0], max_tokens=20, layers=(1,), output=True, rows=LAST_EIGHT, priority=priority, salt=name)


def add_save(bench: Bench, number: int, priority: int = 0) -> None:
    """A prompt that takes three pages until they are written."""
    bench.add(f"save{number}", LONG[:6], layers=(1,), priority=priority, salt=f"{number}")


def write_late(bench: Bench, number: int) -> None:
    """The disk writes the save before this one, so that there are always some pages that it holds."""
    bench.jobs[f"save{number - 1}"].write_all()
    bench.take_pages_back()


def test_a_stream_of_later_saves_does_not_starve_a_request_that_lacks_pages_for_its_ring() -> None:
    bench = Bench(pages=8, prefix_cache=False)
    add_save(bench, 0)
    bench.step()
    add_ring(bench, "ring")
    number = 0
    while "ring" not in bench.running:
        number += 1
        assert number <= 3, "the ring is starved"
        add_save(bench, number)
        bench.step()
        write_late(bench, number)
    bench.run()
    bench.check_results()


def test_a_save_of_better_priority_goes_before_a_request_that_lacks_pages() -> None:
    bench = Bench(pages=8, prefix_cache=False)
    add_save(bench, 0)
    bench.step()
    add_ring(bench, "ring")
    add_save(bench, 1)
    add_save(bench, 2, priority=-1)
    bench.step()
    assert bench.steps_of("save2")
    assert not bench.steps_of("save1")
    assert bench.waiting == ["ring", "save1"]
    bench.run()
    bench.check_results()


def test_who_needs_no_pages_does_not_wait_for_those_who_lack_them() -> None:
    bench = Bench(pages=8, prefix_cache=False)
    add_save(bench, 0)
    bench.step()
    add_ring(bench, "ring")
    bench.add("plain", LONG[:5], max_tokens=1)
    bench.step()
    assert (bench.tokens("plain"), bench.waiting) != ([], [])
    assert bench.waiting == ["ring"]
    bench.run()
    bench.check_results()


def preempted_ring(pages: int) -> Bench:
    """A ring of five pages, all of which it holds, has just been preempted."""
    bench = Bench(full_blocks=20, pages=pages, prefix_cache=False)
    bench.add("old", LONG[:22], max_tokens=15)
    bench.add("ring", [0], max_tokens=10, layers=(1,), output=True, rows=RowSelection(((-10, None),)), priority=1)
    while not bench.scheduler.num_preemptions:
        assert bench.step()
    assert bench.waiting == ["ring"]
    assert bench.store.pool.stats().referenced == 5
    return bench


def test_a_preempted_request_that_holds_its_whole_ring_starts_again_although_no_page_is_free() -> None:
    bench = preempted_ring(pages=5)
    assert bench.store.pool.num_available == 0
    bench.run()
    bench.check_results()


def test_a_preempted_request_that_holds_promised_pages_goes_on_while_one_of_better_priority_lacks_them() -> None:
    bench = preempted_ring(pages=8)
    add_ring(bench, "urgent")
    while "old" in bench.running:
        bench.step()
        assert bench.waiting == ["urgent", "ring"] or "old" not in bench.running
    while "ring" in bench.waiting:
        assert bench.step()
    assert bench.waiting == ["urgent"]
    bench.run()
    bench.check_results()


def test_a_blocked_request_does_not_search_for_its_prefix_again_while_nothing_comes_free() -> None:
    bench = Bench(full_blocks=24)
    searches = []
    find = bench.prefixes.find

    def counting(sequence: TokenSequence) -> int:
        searches.append(sequence.request.request_id)
        return find(sequence)

    bench.prefixes.find = counting  # type: ignore[method-assign]
    bench.add("first", LONG[:20], max_tokens=15)
    bench.step()
    bench.add("second", LONG[1:], max_tokens=1, salt="x")
    for _ in range(10):
        bench.step()
    assert bench.waiting == ["second"]
    assert searches == ["first", "second"]
    bench.run()
    assert searches == ["first", "second", "second"]
    bench.check_results()


def test_a_blocked_request_searches_again_when_something_has_come_free() -> None:
    bench = Bench(full_blocks=30, prefix_cache=False)
    bench.add("first", LONG[:20], max_tokens=15, salt="a")
    bench.add("short", LONG[:12], max_tokens=4, salt="b")
    bench.step()
    bench.add("second", LONG[1:29], max_tokens=3, salt="c")
    bench.step()
    assert bench.waiting == ["second"]
    while "short" in bench.running:
        bench.step()
    bench.step()
    assert bench.running == ["first", "second"]
    bench.run()
    bench.check_results()


@pytest.mark.parametrize(("overlap", "runner"), [(False, FakeRunner), (True, StagedRunner)])
def test_a_prompt_waits_for_the_beginning_that_another_one_computes(overlap: bool, runner: type[FakeRunner]) -> None:
    bench = Bench(budget=32, full_blocks=400, sliding_blocks=400, overlap=overlap, runner=runner)
    for i in range(4):
        bench.add(f"r{i}", [*LONG[:16], i, i], layers=(1, 2))
    bench.run()
    assert bench.core.num_computed_tokens == 16 + 4 * 2
    bench.check_results()


def test_who_waits_for_a_beginning_is_compared_only_once_with_the_prompt_that_computes_it(monkeypatch: pytest.MonkeyPatch) -> None:
    compared: list[TokenSequence] = []
    awaited_end = PrefixFinder.awaited_end

    def counted(finder: PrefixFinder, running: TokenSequence, waiting: TokenSequence) -> int:
        compared.append(waiting)
        return awaited_end(finder, running, waiting)

    monkeypatch.setattr(PrefixFinder, "awaited_end", counted)
    bench = Bench(budget=8, full_blocks=400, sliding_blocks=400)
    for i in range(6):
        bench.add(f"r{i}", [*LONG[:28], i % 5, i % 2])
    for _ in range(3):
        bench.step()
    assert (bench.running, len(bench.waiting)) == (["r0"], 5)
    assert len(compared) == 5
    bench.run()
    bench.check_results()


def test_a_prompt_does_not_wait_for_a_beginning_that_it_could_not_use() -> None:
    bench = wide(budget=32)
    saves = {
        "last row": ((1, 2), RowSelection(((-1, None),)), ""),
        "one layer": ((2,), ALL_ROWS, ""),
        "both": ((1, 2), ALL_ROWS, ""),
        "deeper": ((1, 2, 3), ALL_ROWS, ""),
        "another salt": ((2,), ALL_ROWS, "x"),
    }
    for number, (name, (layers, rows, salt)) in enumerate(saves.items()):
        bench.add(name, [*LONG[:14], number], layers=layers, rows=rows, salt=salt)
    bench.step()
    bench.step()
    assert all(bench.steps_of(name) for name in saves)
    bench.run()
    bench.check_results()


def test_a_prompt_waits_for_what_is_left_of_a_beginning_that_another_one_is_in_the_middle_of() -> None:
    bench = wide()
    bench.add("first", LONG)
    bench.step()
    bench.add("second", [*LONG[:24], 4], max_tokens=1)
    for _ in range(2):
        bench.step()
        assert not bench.steps_of("second")
    bench.run()
    assert bench.num_cached("second") == 24
    bench.check_results()


def test_a_prompt_does_not_wait_for_one_that_has_left_the_beginning_that_they_share() -> None:
    bench = wide()
    bench.add("first", LONG)
    for _ in range(2):
        bench.step()
    bench.add("second", [*LONG[:8], 4, 4, 4, 4], max_tokens=1)
    bench.step()
    assert bench.steps_of("second")
    bench.run()
    assert bench.num_cached("second") == 8
    bench.check_results()


def test_a_prompt_waits_for_nobody_where_the_prefix_cache_is_off() -> None:
    bench = Bench(prefix_cache=False)
    bench.add("first", [*LONG[:14], 1])
    bench.add("second", [*LONG[:14], 2])
    bench.step()
    assert bench.steps_of("second") == {0: 15}
    bench.run()
    bench.check_results()


def test_a_prompt_waits_for_nobody_of_a_worse_priority() -> None:
    bench = Bench(budget=8, full_blocks=400, sliding_blocks=400)
    bench.add("worse", LONG, priority=1)
    bench.step()
    bench.add("better", LONG)
    bench.step()
    assert bench.steps_of("better")[1] > 0
    bench.run()
    bench.check_results()


def test_a_prompt_waits_for_no_text_that_is_generated() -> None:
    bench = wide()
    bench.add("text", [0, 1, 2], max_tokens=8)
    for _ in range(3):
        bench.step()
    tokens = [0, 1, 2, *bench.tokens("text")]
    assert len(tokens) == 6, "the next row completes a block"
    bench.add("prompt", [*tokens, 1, 1], max_tokens=1)
    bench.step()
    assert bench.tokens("prompt")
    bench.run()
    bench.check_results()


def test_a_prompt_waits_for_nobody_who_lacks_pages() -> None:
    bench = Bench(pages=2, budget=16)
    bench.add("starved", LONG[:12], layers=("norm",))
    for _ in range(3):
        bench.step()
    bench.add("plain", LONG[:13], max_tokens=2)
    for _ in range(3):
        bench.step()
    assert len(bench.tokens("plain")) == 2, "the disk has written nothing yet"
    bench.run()
    bench.check_results()


def test_a_quarter_of_a_step_is_left_to_prompts_and_no_more() -> None:
    bench = Bench(budget=12, max_running=40, full_blocks=800, sliding_blocks=800)
    for i in range(12):
        bench.add(f"decode{i}", [i % 5], max_tokens=30, salt="x" * i)
    while len(bench.running) < 12 or bench.waiting:
        bench.step()
    bench.add("prompt", LONG)
    bench.step()
    assert bench.steps_of("prompt")[len(bench.runner.steps) - 1] == 3
    assert len(bench.runner.steps[-1]) == 9 + 1


def test_steps_grow_by_a_hundred_and_twenty_eighth_and_one_token_after_memory_ran_out() -> None:
    bench = Bench(budget=384)
    bench.scheduler.shrink_token_budget(300)
    sizes = []
    for _ in range(3):
        sizes.append(bench.scheduler._token_budget)
        bench.scheduler.grow_token_budget()
    assert sizes == [150, 154, 158]


def test_who_gets_no_room_in_the_staging_buffer_of_a_step_is_not_starved_of_pages() -> None:
    bench = Bench(max_rows=2, max_running=2)
    bench.add("first", LONG[:12], layers=(0, 1))
    bench.add("second", LONG[1:13], layers=(0, 1), salt="x")
    bench.step()
    assert bench.running == ["first", "second"]
    bench.add("plain", LONG[:3], max_tokens=2, salt="y")
    for _ in range(4):
        bench.step()
    assert bench.scheduler.num_preemptions == 0
    bench.run()
    bench.check_results()
