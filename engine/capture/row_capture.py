"""The rows of one request on their way to its file: planned for a step, computed, landed in pages, submitted to the writer."""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import Protocol

import numpy as np

from engine.cache.chain import HashChain
from engine.cache.pool import IntArray
from engine.cache.states import StateStore
from engine.capture.page_table import PageTable, pages_reserved, positions_in
from engine.capture.sink import Landing
from engine.errors import SaveError
from engine.saves.chunk import RowChunk, SaveEnd
from engine.saves.selection import Range, WantedRows
from engine.saves.spec import SaveSpec


class Job(Protocol):
    """What capture needs of `SaveJob`."""

    @property
    def failed(self) -> bool: ...
    @property
    def error(self) -> SaveError | None: ...
    def start(self) -> None: ...
    def append(self, chunk: RowChunk) -> None: ...
    def finish(self, end: SaveEnd) -> None: ...
    def cancel(self, error: SaveError) -> None: ...


class Phase(Enum):
    """Of a capture, in this order; only a preemption leads back."""

    WAITING = auto()
    """The request isn't running: what it has captured goes to the writer as soon as its place in the file is certain."""
    RUNNING = auto()
    """Rows go to the writer by whole blocks."""
    ENDING = auto()
    """The text is done: once all rows have landed the file is completed."""
    CLOSED = auto()


@dataclass(slots=True)
class CapturePlan:
    """The rows that one chunk captures. Their pages are taken."""

    first: int
    """Rows below it belong to chunks before."""
    end: int
    ranges: Sequence[Range]
    pages: IntArray | None = None  # [layers]
    """Of the row, where it is a single one."""

    @property
    def num_rows(self) -> int:
        """Of one layer."""
        return sum(high - low for low, high in self.ranges)


class RowCapture:
    """Positions only move up, but for a withdrawn plan: `submitted_end <= landed_end <= captured_end <= planned_end`.

    All survive a preemption: rows below `planned_end` are not captured twice. Rows below `captured_end` have been computed, those below
    `landed_end` stand in their pages, those below `submitted_end` belong to the writer, as far as they are kept at all.
    `total` is the number of rows of the sequence where that is known beforehand.
    """

    def __init__(
        self,
        spec: SaveSpec,
        job: Job,
        store: StateStore,
        chain: HashChain | None,
        *,
        total: int | None,
        max_total: int,
        release: Callable[[IntArray], None],
    ) -> None:
        """`chain` names the blocks for the prefix cache (None: it is off); `release` takes pages back, from any thread."""
        self.spec = spec
        self.job = job
        self.total = total
        self.page_size = store.page_size
        self.planned_end = 0
        self.captured_end = 0
        self.submitted_end = 0
        self.pages = PageTable(store, spec.layers, chain, pages_reserved(spec.rows, len(spec.layers), store.page_size, total, max_total))
        self._wanted = WantedRows(spec.rows, total)
        self._open_end = 0
        """The rows from `planned_end` to here are kept, or may turn out to be, and their place is in `_open_pages`."""
        self._open_pages: IntArray | None = None  # [layers]
        self._lags = spec.rows.lookback > 0
        """Rows are kept back until it is certain that they don't belong to the end."""
        self._release = release
        self._in_flight: deque[tuple[Landing, CapturePlan]] = deque()
        self._phase = Phase.WAITING
        self._started = False
        self._end: tuple[WantedRows, SaveEnd] | None = None

    @property
    def landed_end(self) -> int:
        return self._in_flight[0][1].first if self._in_flight else self.captured_end

    @property
    def in_flight(self) -> bool:
        """Whether computed rows are on their way to their pages."""
        return bool(self._in_flight)

    @property
    def kept_end(self) -> int | None:
        """The end of the last kept row, where known beforehand."""
        return self._wanted.kept_end

    def can_start(self) -> bool:
        """Whether there are pages to begin with, if any are needed."""
        done = self.kept_end is not None and self.planned_end >= self.kept_end
        return done or self.pages.can_start(self.planned_end)

    def start(self) -> None:
        """The sequence runs (again)."""
        if not self._started:
            self._started = True
            self.job.start()
        self._phase = Phase.RUNNING
        self.pages.claim()

    # Before a step

    def limit(self, start: int, end: int, at_least: int, max_rows: int | None) -> int:
        """How far a chunk of positions `start … end - 1` may go (`start`: not at all); nothing is taken.

        `at_least`: rows that the sequence is sure to have; `max_rows`: rows times layers that the step may still capture.
        """
        ranges = self._missing(start, end, at_least)
        if max_rows is not None:
            end, ranges = _first_rows(ranges, end, max_rows // len(self.spec.layers))
        return self.pages.end_within_reach(ranges, end) if ranges else end

    def plan(self, start: int, end: int, at_least: int) -> CapturePlan:
        """The rows of a chunk that `limit` has allowed. `commit` or `withdraw` is next, in the order of plans."""
        plan = CapturePlan(self.planned_end, max(self.planned_end, end), self._missing(start, end, at_least))
        if plan.ranges:
            self.pages.allocate(plan.ranges)
        self.planned_end = plan.end
        return plan

    def plan_row(self, position: int, at_least: int) -> CapturePlan | None:
        """`limit` and `plan` for a chunk of a single row; None where there is no page for it."""
        first, end = self.planned_end, position + 1
        if not first <= position < self._open_end:
            if position < first:
                return CapturePlan(first, first, ())
            if not self._wanted.may_keep(position, at_least):
                self.planned_end = end
                return CapturePlan(first, end, ())
            self._open_pages = self.pages.allocate_row(position)
            if self._open_pages is None:
                return None
            self._open_end = min(self._wanted.kept_until(position), position - position % self.page_size + self.page_size)
        self.planned_end = end
        return CapturePlan(first, end, ((position, end),), self._open_pages)

    def shorten(self, plan: CapturePlan, end: int) -> CapturePlan:
        """The latest plan, of a chunk that ends at `end` after all."""
        assert plan.end == self.planned_end
        self._open_end = 0
        self.planned_end = max(plan.first, end)
        return CapturePlan(plan.first, self.planned_end, _clipped(plan.ranges, end))

    def withdraw(self, plan: CapturePlan) -> None:
        """The latest plan won't be computed."""
        assert plan.end == self.planned_end
        self._open_end = 0
        self.planned_end = plan.first

    def slots(self, plan: CapturePlan) -> tuple[IntArray, IntArray]:
        """Positions `[n]` of the plan's rows, and their slots `[layers, n]` in the store."""
        size, blocks = self.page_size, self.pages.blocks_of(plan.ranges)
        slots = self.pages.pages_of(blocks).T[:, :, None] * size + np.arange(size)  # [layers, blocks, page_size]
        slots = slots.reshape(len(self.spec.layers), -1)
        if len(plan.ranges) == 1:
            low, high = plan.ranges[0]
            before = blocks[0] * size
            return np.arange(low, high), slots[:, low - before : high - before]
        positions = positions_in(plan.ranges)
        return positions, slots[:, np.searchsorted(blocks, positions // size) * size + positions % size]

    # After a step

    def commit(self, plan: CapturePlan, landing: Landing) -> bool:
        """The oldest plan has been computed: its rows are on their way, or stand in their pages, and go to the writer. Whether some are on
        their way, so that `process_landed` is to be called."""
        end = self.captured_end = plan.end
        if self._in_flight or not landing.landed:
            self._in_flight.append((landing, plan))
            return True
        # Nothing happens at a single row but at the end of a page.
        if plan.pages is None or self._lags or end % self.page_size == 0 or end == self.total:
            self._land(plan)
            self.submit_rows()
        return False

    def process_landed(self) -> None:
        """Processes rows that have landed since the last call."""
        before = len(self._in_flight)
        while self._in_flight and self._in_flight[0][0].landed:
            self._land(self._in_flight.popleft()[1])
        if len(self._in_flight) < before:
            self._submit_landed()

    def submit_rows(self) -> None:
        """Submits whole blocks of rows that have landed and whose place in the file is certain to the writer."""
        size, landed_end = self.page_size, self.landed_end
        if landed_end != self.total and landed_end // size == self.submitted_end // size:
            return  # no further block is complete
        horizon = min(self._wanted.settled(self.captured_end), landed_end)
        if horizon != self.total:
            horizon -= horizon % size
        self._submit_up_to(self._wanted, horizon)

    def pause(self) -> None:
        """The sequence was preempted: all rows whose place is certain go to the writer, those on their way once they have landed."""
        self._phase = Phase.WAITING
        self._submit_all()

    def finish(self, token_ids: Sequence[int], total: int, num_prompt_tokens: int) -> None:
        """All kept rows of `total` have been captured: once they have landed the rest goes to the writer, which publishes the file."""
        kept = self._wanted if self.total == total else WantedRows(self.spec.rows, total)
        assert self.captured_end >= (kept.kept_end or 0), "a row that was not computed can't be saved"
        self._end = kept, SaveEnd.of(self.spec.rows, token_ids, total, num_prompt_tokens)
        self._phase = Phase.ENDING
        self._submit_landed()

    def cancel(self, error: SaveError) -> None:
        self._close()
        self.job.cancel(error)

    # Prefix hits

    def hit_limit(self, limit: int, at_least: int) -> int:
        """How far a run from cached pages could reach: the first block with a wanted row whose pages aren't all there, or `limit`."""
        ranges = self._missing(0, limit, at_least)
        return self.pages.hit_limit(ranges, limit) if ranges else limit

    def adopt(self, end: int, at_least: int) -> int:
        """Takes the wanted rows below `end` from cached pages (`hit_limit` said they are there); returns rows times layers."""
        ranges = self._missing(0, end, at_least)
        self._open_end = 0
        if ranges:
            self.pages.adopt(ranges)
        self.planned_end = self.captured_end = max(self.captured_end, end)
        return sum(high - low for low, high in ranges) * len(self.spec.layers)

    def _missing(self, start: int, end: int, at_least: int) -> Sequence[Range]:
        """Ranges of `start … end - 1` that aren't planned yet and that are kept or may turn out to be."""
        start = max(start, self.planned_end)
        return self._wanted.within(start, end, at_least) if start < end else ()

    def _land(self, plan: CapturePlan) -> None:
        self.pages.mark_filled(plan.first, plan.ranges, plan.end)

    def _submit_landed(self) -> None:
        if self._phase is Phase.RUNNING:
            self.submit_rows()
        elif self._phase is Phase.WAITING:
            self._submit_all()
        elif self._phase is Phase.ENDING and not self._in_flight:
            assert self._end is not None
            kept, end = self._end
            self._submit_up_to(kept, end.num_tokens)
            self.job.finish(end)
            self._close()

    def _submit_all(self) -> None:
        self._submit_up_to(self._wanted, min(self._wanted.settled(self.captured_end), self.landed_end))

    def _submit_up_to(self, kept: WantedRows, horizon: int) -> None:
        if horizon > self.submitted_end:
            ranges = kept.kept(self.submitted_end, horizon)
            self.submitted_end = horizon
            if ranges:
                self._append(ranges)
        self._open_end = 0
        if self.submitted_end == self.planned_end:
            self.pages.release_all()
        else:
            self.pages.release_before(self.submitted_end)

    def _append(self, ranges: Sequence[Range]) -> None:
        blocks = self.pages.blocks_of(ranges)
        pages = self.pages.transfer(blocks, self.submitted_end)
        flat = pages.reshape(-1)
        self.job.append(RowChunk(ranges, np.array(blocks), pages, lambda: self._release(flat)))

    def _close(self) -> None:
        self._phase = Phase.CLOSED
        self._in_flight.clear()
        self._end = None
        self.pages.close()


def _first_rows(ranges: Sequence[Range], end: int, max_rows: int) -> tuple[int, Sequence[Range]]:
    """The chunk's end, moved down so that it has at most `max_rows` rows, and its ranges up to there."""
    room = max_rows
    for low, high in ranges:
        if high - low > room:
            return low + room, _clipped(ranges, low + room)
        room -= high - low
    return end, ranges


def _clipped(ranges: Sequence[Range], end: int) -> list[Range]:
    return [(low, min(high, end)) for low, high in ranges if low < end]
