"""One request's rows between the model and the writer, step by step and without a scheduler."""

from __future__ import annotations

import pytest
import torch

from engine.cache.chain import HashChain
from engine.cache.states import StateStore
from engine.capture.page_table import pages_reserved
from engine.capture.row_capture import CapturePlan, RowCapture
from engine.capture.sink import Landing
from engine.errors import SaveError
from engine.layers import LayerId
from engine.saves.selection import ALL_ROWS, LAST_ROW, RowSelection
from engine.saves.spec import SaveSpec
from tests.unit.core_fakes import FakeJob, Target

TOKENS = list(range(40))


class Setup:
    """A store with pages of four rows, and captures over it."""

    def __init__(self, pages: int = 20) -> None:
        self.store = StateStore(pages + 1, 4, 1, torch.float32, poison=True)

    def capture(
        self,
        *,
        layers: tuple[LayerId, ...] = (1, 2),
        rows: RowSelection = ALL_ROWS,
        total: int | None = 20,
        max_total: int = 40,
        cached: bool = True,
        tokens: list[int] = TOKENS,
    ) -> RowCapture:
        spec = SaveSpec("s", Target(), layers, "float32", total is None, False, rows)
        chain = HashChain(tokens, 4) if cached else None
        release = self.store.pool.release
        return RowCapture(spec, FakeJob(spec, self.store), self.store, chain, total=total, max_total=total or max_total, release=release)

    @property
    def referenced(self) -> int:
        return self.store.pool.stats().referenced


def launch(capture: RowCapture, start: int, end: int) -> CapturePlan:
    """The device computes the positions, as far as pages reach; the state at position p of the layer with index i is 100 i + p."""
    plan = capture.plan(start, capture.limit(start, end, end, None), end)
    for index, (positions, slots) in enumerate(captured(capture, plan)):
        rows = capture.job.store.rows  # type: ignore[attr-defined]  # a fake job's
        assert rows[torch.tensor(slots)].isnan().all()
        rows[torch.tensor(slots), 0] = torch.tensor(positions).float() + 100 * index
    return plan


def captured(capture: RowCapture, plan: CapturePlan) -> list[tuple[list[int], list[int]]]:
    """Per layer the positions of the plan's rows, and their slots."""
    if not plan.ranges:
        return []
    positions, slots = capture.slots(plan)
    return [(positions.tolist(), of_layer) for of_layer in slots.tolist()]


def compute(capture: RowCapture, start: int, end: int, landing: Landing | None = None) -> int:
    """One step over the positions, whose rows land at once unless `landing` says otherwise; how far pages reached."""
    plan = launch(capture, start, end)
    capture.commit(plan, landing or Landing(landed=True))
    return plan.end


def written(capture: RowCapture) -> dict[int, list[float]]:
    job = capture.job
    assert isinstance(job, FakeJob)
    job.write_all()
    return {position: states[:, 0].tolist() for position, states in job.rows.items()}


def expected(positions: list[int], num_layers: int = 2) -> dict[int, list[float]]:
    return {position: [100.0 * i + position for i in range(num_layers)] for position in positions}


def test_rows_go_to_the_writer_by_whole_blocks_as_they_are_computed() -> None:
    setup = Setup()
    capture = setup.capture()
    capture.start()
    compute(capture, 0, 7)
    assert written(capture) == expected(list(range(4)))
    compute(capture, 7, 12)
    assert written(capture) == expected(list(range(12)))
    compute(capture, 12, 20)
    capture.finish(TOKENS[:20], 20, 20)
    assert written(capture) == expected(list(range(20)))
    assert setup.referenced == 0


def test_single_rows_go_to_the_writer_when_their_block_is_complete() -> None:
    setup = Setup()
    capture = setup.capture(total=10)
    capture.start()
    job = capture.job
    assert isinstance(job, FakeJob)
    handed = []
    for position in range(10):
        plan = capture.plan_row(position, position + 1)
        assert plan is not None
        assert not capture.commit(plan, Landing(landed=True))
        handed.append([list(chunk.ranges) for chunk in job.chunks])
    first, second, last = [(0, 4)], [(4, 8)], [(8, 10)]
    assert handed == [[]] * 3 + [[first]] * 4 + [[first, second]] * 2 + [[first, second, last]]
    assert setup.capture().hit_limit(20, 20) == 8, "complete blocks are offered to others"


def test_single_rows_go_to_the_writer_when_it_is_certain_of_a_block_that_it_is_kept() -> None:
    setup = Setup()
    capture = setup.capture(rows=RowSelection(((0, -2),)), total=None)
    capture.start()
    job = capture.job
    assert isinstance(job, FakeJob)
    handed = []
    for position in range(11):
        plan = capture.plan_row(position, position + 1)
        assert plan is not None
        capture.commit(plan, Landing(landed=True))
        handed.append(sum(chunk.count for chunk in job.chunks))
    assert handed == [0] * 5 + [4] * 4 + [8] * 2


def test_a_single_row_that_was_captured_before_a_preemption_is_not_captured_again() -> None:
    setup = Setup()
    capture = setup.capture(cached=False)
    capture.start()
    compute(capture, 0, 6)
    capture.pause()
    capture.start()
    again = capture.plan_row(5, 6)
    assert again is not None
    assert again.num_rows == 0
    capture.commit(again, Landing(landed=True))
    assert (capture.planned_end, capture.captured_end) == (6, 6)
    further = capture.plan_row(6, 7)
    assert further is not None
    assert list(further.ranges) == [(6, 7)]


def test_the_last_rows_go_to_the_writer_when_they_are_computed_though_their_block_stays_a_part() -> None:
    setup = Setup()
    capture = setup.capture(total=6)
    capture.start()
    compute(capture, 0, 5)
    assert written(capture) == expected(list(range(4)))
    compute(capture, 5, 6)
    assert written(capture) == expected(list(range(6)))
    assert setup.referenced == 0


def test_positions_beyond_the_rows_that_are_kept_take_no_page() -> None:
    setup = Setup(pages=4)
    capture = setup.capture(total=6, cached=False)
    capture.start()
    assert compute(capture, 0, 6) == 6
    assert compute(capture, 6, 20) == 20, "the writer still has all pages"
    assert capture.hit_limit(20, 20) == 20
    capture.finish(TOKENS, 6, 6)
    assert written(capture) == expected(list(range(6)))
    assert setup.referenced == 0


def test_a_chunk_is_cut_where_pages_end_and_goes_on_when_there_are_some_again() -> None:
    setup = Setup(pages=4)
    capture = setup.capture(cached=False)
    capture.start()
    assert compute(capture, 0, 20) == 8
    assert capture.limit(8, 20, 20, None) == 8
    written(capture)
    assert compute(capture, 8, 20) == 16
    written(capture)
    assert compute(capture, 16, 20) == 20
    capture.finish(TOKENS[:20], 20, 20)
    assert written(capture) == expected(list(range(20)))


def test_rows_that_are_not_kept_take_no_page() -> None:
    setup = Setup(pages=4)
    capture = setup.capture(rows=RowSelection(((2, 3), (17, 18))))
    capture.start()
    assert compute(capture, 0, 18) == 18
    capture.finish(TOKENS[:20], 20, 20)
    assert written(capture) == expected([2, 17])
    end = capture.job.end
    assert (list(end.positions), list(end.token_ids), end.num_tokens) == ([2, 17], [2, 17], 20)


EVERY_SECOND = RowSelection(tuple((position, position + 1) for position in range(0, 20, 2)))


def test_a_step_hands_its_rows_over_at_once_however_many_pairs_they_are_of() -> None:
    setup = Setup()
    capture = setup.capture(rows=EVERY_SECOND)
    capture.start()
    job = capture.job
    assert isinstance(job, FakeJob)
    compute(capture, 0, 14)
    assert len(job.chunks) == 1
    compute(capture, 14, 20)
    assert len(job.chunks) == 2
    capture.finish(TOKENS[:20], 20, 20)
    assert len(job.chunks) == 2
    assert written(capture) == expected(list(range(0, 20, 2)))
    assert setup.referenced == 0


@pytest.mark.parametrize("total", [20, None])
def test_steps_do_not_go_through_the_pairs_again(monkeypatch: pytest.MonkeyPatch, total: int | None) -> None:
    capture = Setup().capture(rows=EVERY_SECOND, total=total)
    capture.start()
    asked: list[str] = []
    for name in ("ranges", "spans"):
        monkeypatch.setattr(RowSelection, name, lambda _selection, _total, name=name: asked.append(name))
    assert capture.hit_limit(20, 1) == 0
    for start in range(0, 20, 5):
        compute(capture, start, start + 5)
    assert asked == []
    assert list(written(capture)) == list(range(0, 20, 2))


def test_rows_times_layers_of_a_chunk_are_limited() -> None:
    capture = Setup().capture()
    assert capture.limit(0, 20, 20, 40) == 20
    assert capture.limit(0, 20, 20, 13) == 6
    assert capture.limit(0, 20, 20, 1) == 0
    assert [capture.plan(start, end, 20).num_rows for start, end in ((0, 6), (6, 11))] == [6, 5]


def test_a_limit_counts_only_rows_that_are_kept() -> None:
    capture = Setup().capture(rows=RowSelection(((2, 4), (10, 14))))
    assert capture.limit(0, 20, 20, 8) == 12
    assert captured(capture, capture.plan(0, 12, 20))[0][0] == [2, 3, 10, 11]


def test_pages_are_taken_for_the_rows_of_a_chunk_and_for_no_others() -> None:
    setup = Setup()
    capture = setup.capture()
    end = capture.limit(0, 20, 20, 4)
    assert setup.referenced == 0, "a limit takes nothing"
    capture.plan(0, end, 20)
    assert (end, setup.referenced) == (2, 2)


def test_rows_that_were_captured_before_a_preemption_are_not_captured_again() -> None:
    setup = Setup()
    capture = setup.capture(cached=False)
    capture.start()
    compute(capture, 0, 6)
    capture.pause()
    assert written(capture) == expected(list(range(6)))
    assert setup.referenced == 0
    capture.start()
    assert capture.limit(0, 6, 6, None) == 6
    again = capture.plan(0, 6, 6)
    assert again.num_rows == 0
    assert setup.referenced == 0
    capture.commit(again, Landing(landed=True))
    assert capture.limit(4, 9, 9, None) == 9
    further = capture.plan(4, 9, 9)
    assert captured(capture, further)[0][0] == [6, 7, 8]
    capture.withdraw(further)
    compute(capture, 6, 20)
    capture.finish(TOKENS[:20], 20, 20)
    assert written(capture) == expected(list(range(20)))


def test_a_block_that_was_captured_in_two_parts_with_a_preemption_between_is_not_shared() -> None:
    setup = Setup()
    capture = setup.capture()
    capture.start()
    compute(capture, 0, 6)
    capture.pause()
    capture.start()
    compute(capture, 6, 12)
    chain = HashChain(TOKENS, 4)
    assert [len(setup.store.lookup(chain, block, block + 1, (1, 2))) for block in range(3)] == [1, 0, 1]


def test_a_plan_that_is_withdrawn_captures_nothing() -> None:
    setup = Setup()
    capture = setup.capture()
    capture.start()
    capture.withdraw(capture.plan(0, 8, 8))
    assert capture.planned_end == 0
    capture.pause()
    assert setup.referenced == 0
    assert written(capture) == {}


def test_plans_of_steps_in_flight_are_withdrawn_the_latest_first_and_their_rows_captured_later() -> None:
    setup = Setup()
    capture = setup.capture()
    capture.start()
    first, second, third = (capture.plan(start, start + 3, 20) for start in (0, 3, 6))
    capture.withdraw(third)
    capture.withdraw(second)
    capture.commit(first, Landing(landed=True))
    assert (capture.captured_end, capture.planned_end) == (3, 3)
    assert captured(capture, capture.plan(3, 9, 20))[0][0] == list(range(3, 9))


def test_a_plan_that_is_shortened_captures_the_rows_up_to_its_end_and_the_rest_is_planned_anew() -> None:
    setup = Setup()
    capture = setup.capture(rows=RowSelection(((1, 3), (4, 12))))
    capture.start()
    shorter = capture.shorten(capture.plan(0, 12, 20), 5)
    assert [positions for positions, _ in captured(capture, shorter)] == [[1, 2, 4]] * 2
    capture.commit(shorter, Landing(landed=True))
    assert captured(capture, capture.plan(5, 20, 20))[0][0] == list(range(5, 12))


def test_complete_pages_are_taken_from_the_cache_and_their_rows_written_to_the_file() -> None:
    setup = Setup()
    first = setup.capture()
    first.start()
    compute(first, 0, 20)
    first.finish(TOKENS[:20], 20, 20)
    written(first)
    second = setup.capture(layers=(2,), total=18, tokens=TOKENS[:18])
    assert second.hit_limit(18, 18) == 16, "the last block isn't full"
    second.start()
    assert second.adopt(16, 18) == 16
    second.submit_rows()
    assert written(second) == {position: [100.0 + position] for position in range(16)}
    assert second.captured_end == 16


def test_a_hit_ends_where_the_page_of_one_layer_is_missing() -> None:
    setup = Setup()
    for layers, total in (((1, 2), 8), ((1,), 16)):
        capture = setup.capture(layers=layers, total=total)
        capture.start()
        compute(capture, 0, total)
        capture.finish(TOKENS[:total], total, total)
        written(capture)
    assert setup.capture(layers=(1,)).hit_limit(20, 20) == 16
    assert setup.capture(layers=(1, 2)).hit_limit(20, 20) == 8
    assert setup.capture(layers=(2, "norm")).hit_limit(20, 20) == 0
    assert setup.capture(layers=(1, 2), rows=RowSelection(((0, 3), (19, 20)))).hit_limit(19, 20) == 19
    assert setup.capture(layers=(1,), cached=False).hit_limit(20, 20) == 0
    assert setup.capture(layers=(1,), tokens=[99, *TOKENS]).hit_limit(20, 20) == 0


def test_a_hit_does_not_take_cached_pages_that_are_promised_to_others() -> None:
    setup = Setup(pages=10)
    first = setup.capture(layers=(1,), total=16)
    first.start()
    compute(first, 0, 16)
    first.finish(TOKENS[:16], 16, 16)
    written(first)
    window = setup.capture(rows=RowSelection(((-8, None),)), total=None)
    assert window.pages.reservation == 8
    window.start()
    assert setup.capture(layers=(1,), total=16).hit_limit(16, 16) == 8


def test_rows_counted_from_an_unknown_end_wait_until_they_are_certain() -> None:
    setup = Setup()
    capture = setup.capture(rows=RowSelection(((0, 2), (-3, None))), total=None)
    capture.start()
    compute(capture, 0, 9)
    assert written(capture) == expected([0, 1])
    for position in range(9, 14):
        compute(capture, position, position + 1)
        assert setup.referenced <= capture.pages.reservation
    capture.finish(TOKENS[:14], 14, 9)
    assert written(capture) == expected([0, 1, 11, 12, 13])
    assert setup.referenced == 0


def test_rows_that_may_still_be_kept_survive_a_preemption_in_their_pages() -> None:
    setup = Setup()
    capture = setup.capture(rows=RowSelection(((-3, None),)), total=None)
    capture.start()
    compute(capture, 0, 10)
    capture.pause()
    assert setup.referenced > 0
    capture.start()
    compute(capture, 0, 10)
    compute(capture, 10, 11)
    capture.finish(TOKENS[:11], 11, 9)
    assert written(capture) == expected([8, 9, 10])
    assert setup.referenced == 0


@pytest.mark.parametrize(
    ("rows", "total", "max_total", "pages"),
    [
        (ALL_ROWS, None, 100, 0),
        (LAST_ROW, 50, 50, 0),
        (LAST_ROW, None, 100, 3 * 2),
        (RowSelection(((-9, -5),)), None, 100, 5 * 2),
        (RowSelection(((0, -4),)), None, 100, 3 * 2),
        (RowSelection(((-80, None),)), None, 30, 8 * 2),
    ],
)
def test_pages_are_promised_for_the_window_of_rows_that_cannot_be_settled(
    rows: RowSelection, total: int | None, max_total: int, pages: int
) -> None:
    assert pages_reserved(rows, 2, 4, total, max_total) == pages


def test_a_request_starts_only_where_one_block_of_every_layer_and_its_promise_can_be_had() -> None:
    setup = Setup(pages=5)
    assert setup.capture(layers=(0, 1, 2, 3, "norm")).can_start()
    assert not setup.capture(layers=(0, 1, 2, 3, 4, "norm")).can_start()
    assert setup.capture(layers=(1,), rows=RowSelection(((-12, None),)), total=None).can_start()
    assert not setup.capture(layers=(1,), rows=RowSelection(((-16, None),)), total=None).can_start()


def test_a_request_that_holds_its_whole_ring_can_start_again_although_no_page_is_free() -> None:
    setup = Setup(pages=6)
    capture = setup.capture(rows=RowSelection(((-9, None),)), total=None, max_total=12)
    capture.start()
    compute(capture, 0, 9)
    assert (capture.pages.reservation, setup.store.pool.num_available) == (6, 0)
    capture.pause()
    assert setup.referenced == 6, "it isn't certain of any row that it is left out"
    assert capture.can_start()
    capture.start()
    compute(capture, 0, 9)
    compute(capture, 9, 10)
    capture.finish(TOKENS[:10], 10, 3)
    assert written(capture) == expected(list(range(1, 10)))
    assert setup.referenced == 0


def test_a_cancelled_capture_gives_its_pages_and_its_promise_back() -> None:
    setup = Setup()
    capture = setup.capture(rows=LAST_ROW, total=None)
    capture.start()
    compute(capture, 0, 6)
    other = setup.capture(layers=(1,))
    assert setup.store.headroom(other) < 20
    capture.cancel(SaveError("cancelled", "the request was aborted"))
    assert capture.job.failed
    assert setup.store.headroom(other) == 20


def test_a_row_that_was_not_computed_cannot_be_saved() -> None:
    capture = Setup().capture()
    capture.start()
    compute(capture, 0, 19)
    with pytest.raises(AssertionError, match="was not computed"):
        capture.finish(TOKENS[:20], 20, 20)


def test_the_end_of_what_is_kept_is_known_where_the_length_is() -> None:
    setup = Setup()
    assert setup.capture(rows=RowSelection(((0, 2), (5, -7)))).kept_end == 13
    assert setup.capture(total=None).kept_end is None
    assert setup.capture(rows=RowSelection(((30, 32),))).kept_end == 0


# Rows on their way


def test_rows_of_a_landing_that_is_asked_late_go_to_the_writer_all_the_same() -> None:
    setup, landing = Setup(), Landing(landed=False)
    capture = setup.capture()
    capture.start()
    compute(capture, 0, 8, landing)
    assert capture.in_flight
    assert (capture.captured_end, capture.landed_end) == (8, 0)
    capture.process_landed()
    assert written(capture) == {}
    landing.landed = True
    assert written(capture) == {}, "nobody has asked"
    capture.process_landed()
    assert not capture.in_flight
    assert written(capture) == expected(list(range(8)))


def test_a_landing_that_landed_before_its_step_was_committed_is_not_lost() -> None:
    setup, landing = Setup(), Landing(landed=False)
    capture = setup.capture()
    capture.start()
    plan = launch(capture, 0, 8)
    landing.landed = True
    capture.commit(plan, landing)
    capture.submit_rows()
    assert not capture.in_flight
    assert written(capture) == expected(list(range(8)))


def test_rows_that_landed_wait_for_those_before_them() -> None:
    setup, first, second = Setup(), Landing(landed=False), Landing(landed=True)
    capture = setup.capture()
    capture.start()
    compute(capture, 0, 5, first)
    compute(capture, 5, 12, second)
    capture.process_landed()
    assert written(capture) == {}
    first.landed = True
    capture.process_landed()
    assert written(capture) == expected(list(range(12)))


def test_blocks_are_offered_to_others_once_their_rows_have_landed() -> None:
    setup, landing = Setup(), Landing(landed=False)
    capture = setup.capture()
    capture.start()
    compute(capture, 0, 8, landing)
    assert setup.capture().hit_limit(20, 20) == 0
    landing.landed = True
    capture.process_landed()
    assert setup.capture().hit_limit(20, 20) == 8


def test_a_file_is_completed_when_its_last_rows_have_landed() -> None:
    setup, landing = Setup(), Landing(landed=False)
    capture = setup.capture(total=6)
    capture.start()
    compute(capture, 0, 6, landing)
    capture.finish(TOKENS[:6], 6, 6)
    assert capture.job.end is None
    landing.landed = True
    capture.process_landed()
    assert capture.job.end is not None
    assert written(capture) == expected(list(range(6)))
    assert setup.referenced == 0


def test_rows_of_a_preempted_request_go_to_the_writer_when_they_land_though_their_block_stays_a_part() -> None:
    setup, landing = Setup(), Landing(landed=False)
    capture = setup.capture(cached=False)
    capture.start()
    compute(capture, 0, 6, landing)
    capture.pause()
    assert setup.referenced == 4
    landing.landed = True
    capture.process_landed()
    assert written(capture) == expected(list(range(6)))
    assert setup.referenced == 0


def test_a_preempted_request_that_runs_again_before_its_rows_have_landed_goes_on_behind_them() -> None:
    setup, landing = Setup(), Landing(landed=False)
    capture = setup.capture(total=8)
    capture.start()
    compute(capture, 0, 6, landing)
    capture.pause()
    capture.start()
    compute(capture, 0, 8)
    assert written(capture) == {}
    landing.landed = True
    capture.process_landed()
    capture.finish(TOKENS[:8], 8, 8)
    assert written(capture) == expected(list(range(8)))
    assert setup.referenced == 0


def test_rows_of_a_cancelled_capture_that_land_afterwards_are_nobody_s() -> None:
    setup, landing = Setup(), Landing(landed=False)
    capture = setup.capture()
    capture.start()
    compute(capture, 0, 8, landing)
    capture.finish(TOKENS[:8], 8, 8)
    capture.cancel(SaveError("cancelled", "the request was aborted"))
    landing.landed = True
    capture.process_landed()
    assert capture.job.end is None
    assert written(capture) == {}
    assert setup.referenced == 0
