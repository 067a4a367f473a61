"""Places among the running while the disk is slow: who can't go on for want of pages doesn't keep others from theirs."""

from __future__ import annotations

from tests.unit.core_fakes import Bench

LONG = [0, 1, 2, 3, 4, 0, 2] * 2


def starved() -> Bench:
    """The only place is taken by a request that holds all pages and gets no more."""
    bench = Bench(pages=4, max_running=1)
    bench.add("starved", LONG, layers=(1,))
    for _ in range(4):
        bench.step()
    assert bench.running == ["starved"]
    return bench


def test_a_starved_request_makes_room_for_one_that_needs_no_pages() -> None:
    bench = starved()
    bench.add("plain", LONG[:3], max_tokens=3, salt="x")
    for _ in range(5):
        bench.step()
    assert len(bench.tokens("plain")) == 3, "the disk has written nothing yet"
    assert bench.waiting == ["starved"]
    bench.run()
    bench.check_results()


def test_a_starved_request_keeps_its_place_where_those_that_wait_are_starved_too() -> None:
    bench = starved()
    bench.add("late", LONG, layers=(1,), salt="late")
    for _ in range(5):
        bench.step()
    assert (bench.running, bench.waiting) == (["starved"], ["late"])
    assert bench.scheduler.num_preemptions == 0
    bench.run()
    bench.check_results()


def test_a_request_that_goes_on_keeps_its_place() -> None:
    bench = Bench(pages=40, max_running=2, full_blocks=100, sliding_blocks=100)
    for name in ("one", "two"):
        bench.add(name, LONG[:3], max_tokens=8, salt=name)
    bench.step()
    bench.add("late", LONG[:3], max_tokens=1)
    bench.step()
    assert (bench.running, bench.waiting) == (["one", "two"], ["late"])
    bench.run()
    bench.check_results()
