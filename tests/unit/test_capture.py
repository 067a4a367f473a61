"""One request's rows between the model and the writer, step by step and without a scheduler."""

from __future__ import annotations

import pytest
import torch

from engine.cache.chain import HashChain
from engine.cache.states import StateStore
from engine.capture.row_capture import RowCapture, pages_reserved
from engine.errors import SaveError
from engine.layers import LayerId
from engine.saves.spec import ALL_ROWS, LAST_ROW, RowSelection, SaveSpec
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
        cached: bool = True,
        tokens: list[int] = TOKENS,
    ) -> RowCapture:
        spec = SaveSpec("s", Target(), layers, "float32", total is None, False, rows)
        chain = HashChain(tokens, 4) if cached else None
        return RowCapture(spec, FakeJob(spec, self.store), self.store, chain, total=total, max_total=total or 40, release=self.release)

    def release(self, pages: list[int]) -> None:
        for page in pages:
            self.store.pool.release(page)

    @property
    def referenced(self) -> int:
        return self.store.pool.stats().referenced


def compute(capture: RowCapture, start: int, end: int) -> int:
    """One step over the positions, as far as pages reach; the state at position p of the layer with index i is 100 i + p."""
    end = capture.reserve(start, end, end)
    planned = capture.planned()
    if planned is not None:
        positions, slots = planned
        for index, layer_slots in enumerate(slots):
            assert capture._store.rows[layer_slots].isnan().all()
            capture._store.rows[torch.from_numpy(layer_slots), 0] = torch.from_numpy(positions + 100 * index).float()
    capture.commit(end)
    capture.hand_over(end)
    return end


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
    assert capture.reserve(8, 20, 20) == 8
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


def test_rows_times_layers_of_a_chunk_are_limited() -> None:
    capture = Setup().capture()
    capture.reserve(0, 20, 20)
    assert capture.num_rows_planned == 40
    assert capture.limit_rows(20, 13) == 6
    assert capture.num_rows_planned == 12
    assert capture.limit_rows(6, 1) == 0
    assert capture.planned() is None


def test_a_limit_counts_only_rows_that_are_kept() -> None:
    capture = Setup().capture(rows=RowSelection(((2, 4), (10, 14))))
    capture.reserve(0, 20, 20)
    assert capture.limit_rows(20, 8) == 12
    assert capture.planned()[0].tolist() == [2, 3, 10, 11]


def test_rows_that_were_captured_before_a_preemption_are_not_captured_again() -> None:
    setup = Setup()
    capture = setup.capture(cached=False)
    capture.start()
    compute(capture, 0, 6)
    capture.clip(0)
    capture.hand_over(6, everything=True)
    assert written(capture) == expected(list(range(6)))
    assert setup.referenced == 0
    assert capture.reserve(0, 6, 6) == 6
    assert capture.planned() is None
    assert setup.referenced == 0
    capture.commit(6)
    assert capture.reserve(4, 9, 9) == 9
    assert capture.planned()[0].tolist() == [6, 7, 8]
    capture.clip(0)
    compute(capture, 6, 20)
    capture.finish(TOKENS[:20], 20, 20)
    assert written(capture) == expected(list(range(20)))


def test_a_block_that_was_captured_in_two_parts_with_a_preemption_between_is_not_shared() -> None:
    setup = Setup()
    capture = setup.capture()
    capture.start()
    compute(capture, 0, 6)
    capture.hand_over(6, everything=True)
    compute(capture, 6, 12)
    chain = HashChain(TOKENS, 4)
    assert [setup.store.lookup(chain.link(block), (1, 2)) is not None for block in range(3)] == [True, False, True]


def test_a_plan_that_is_given_up_captures_nothing() -> None:
    setup = Setup()
    capture = setup.capture()
    capture.reserve(0, 8, 8)
    capture.clip(0)
    assert capture.planned() is None
    capture.commit(0)
    capture.hand_over(0, everything=True)
    assert setup.referenced == 0


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
    second.hand_over(16)
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
    assert window.reservation == 8
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
        assert setup.referenced <= capture.reservation
    capture.finish(TOKENS[:14], 14, 9)
    assert written(capture) == expected([0, 1, 11, 12, 13])
    assert setup.referenced == 0


def test_rows_that_may_still_be_kept_survive_a_preemption_in_their_pages() -> None:
    setup = Setup()
    capture = setup.capture(rows=RowSelection(((-3, None),)), total=None)
    capture.start()
    compute(capture, 0, 10)
    capture.clip(0)
    capture.hand_over(10, everything=True)
    assert setup.referenced > 0
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
    spec = SaveSpec("s", Target(), (1, 2), "float32", True, False, rows)
    assert pages_reserved(spec, 4, total, max_total) == pages


def test_a_request_starts_only_where_one_block_of_every_layer_and_its_promise_can_be_had() -> None:
    setup = Setup(pages=5)
    assert setup.capture(layers=(0, 1, 2, 3, "norm")).can_start()
    assert not setup.capture(layers=(0, 1, 2, 3, 4, "norm")).can_start()
    assert setup.capture(layers=(1,), rows=RowSelection(((-12, None),)), total=None).can_start()
    assert not setup.capture(layers=(1,), rows=RowSelection(((-16, None),)), total=None).can_start()


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
