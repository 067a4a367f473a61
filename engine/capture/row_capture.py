"""The rows of one request on their way to its file: which are wanted, in which pages they lie, when the writer gets them."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from engine.cache.chain import HashChain
from engine.cache.states import StateStore
from engine.capture.sink import Landing
from engine.errors import SaveError
from engine.saves.spec import Range, SaveSpec
from engine.saves.writer import RowChunk, SaveEnd

Positions = np.ndarray[tuple[int], np.dtype[np.int64]]
Slots = np.ndarray[tuple[int, int], np.dtype[np.int64]]


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


@dataclass
class BlockPages:
    """The pages of one block of positions, one per layer."""

    pages: tuple[int, ...]
    num_filled: int = 0
    shared: bool = False
    """Found in, or offered to, the prefix cache: complete, and not written again."""


@dataclass(eq=False)
class Flight:
    """Rows of one step that may not stand in their pages yet. Their pages are held until they do, whatever becomes of the request."""

    first: int
    end: int
    blocks: list[tuple[int, BlockPages, int]]
    """Block number, its pages, and how many of its rows are under way."""
    landed: bool
    confirmed: bool = False
    """The step has gone well, and the sequence has these positions."""


class RowCapture:
    """Positions only move up: `handed_end <= landed_end <= captured_end`, and all survive a preemption.

    Rows below `captured_end` are in pages or on their way there, handed on or not kept: a request that starts again doesn't capture
    them twice. Nobody reads them before they are below `landed_end`. Rows below `handed_end` belong to the writer. `total` is the
    number of rows of the sequence where that is known beforehand.
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
        release: Callable[[Sequence[int]], None],
    ) -> None:
        """`chain` names the blocks for the prefix cache (None: it is off); `release` takes pages back, from any thread."""
        self.spec = spec
        self.job = job
        self.total = total
        self.captured_end = 0
        self.handed_end = 0
        self.reservation = pages_reserved(spec, store.page_size, total, max_total)
        self._store = store
        self._chain = chain
        self._release = release
        self._blocks: dict[int, BlockPages] = {}
        self._ranges: list[Range] = []
        self._flights: list[Flight] = []
        self._gives_all = False
        """The sequence has been preempted: what lands is handed on at once."""
        self._ending: tuple[Sequence[Range], int, SaveEnd] | None = None
        self._started = False

    @property
    def page_size(self) -> int:
        return self._store.page_size

    @property
    def num_held(self) -> int:
        return len(self._blocks) * len(self.spec.layers)

    @property
    def landed_end(self) -> int:
        """Rows below it stand in their pages, or aren't kept."""
        return self._flights[0].first if self._flights else self.captured_end

    @property
    def kept_end(self) -> int | None:
        """The end of the last kept row, where known beforehand."""
        if self.total is None:
            return None
        ranges = self.spec.rows.ranges(self.total)
        return ranges[-1][1] if ranges else 0

    def can_start(self) -> bool:
        """Whether there are pages for one block of every layer, and for what must be promised."""
        need = max(len(self.spec.layers), self.reservation - self.num_held)
        return self._store.headroom(self) >= need

    def start(self) -> None:
        """The sequence runs (again): what was promised is taken out of the others' reach."""
        if not self._started:
            self._started = True
            self.job.start()
        self._gives_all = False
        if self.reservation:
            self._store.reserve(self)

    # Before a step

    def reserve(self, start: int, end: int, at_least: int) -> int:
        """Gets pages for what is wanted of positions `start … end - 1`; returns how far they reach (`start`: not at all).

        `at_least`: rows that the sequence is sure to have.
        """
        wanted = self._wanted(start, end, at_least)
        size = self._store.page_size
        for low, high in wanted:
            for block in range(low // size, -(-high // size)):
                if block not in self._blocks and not self._add_block(block):
                    end = max(low, block * size)
                    self._ranges = _intersect(wanted, start, end)
                    return end
        self._ranges = wanted
        return end

    def limit_rows(self, end: int, max_rows: int) -> int:
        """The chunk's end, moved down so that the rows to be captured, times layers, are at most `max_rows`."""
        room = max_rows // len(self.spec.layers)
        for low, high in self._ranges:
            if high - low > room:
                end = low + room
                break
            room -= high - low
        self.clip(end)
        return end

    def clip(self, end: int) -> None:
        """The chunk ends at `end` after all; 0 gives the whole plan up."""
        if self._ranges and self._ranges[-1][1] > end:
            self._ranges = _intersect(self._ranges, 0, end)

    @property
    def num_rows_planned(self) -> int:
        """Rows times layers that the planned chunk captures."""
        return sum(high - low for low, high in self._ranges) * len(self.spec.layers)

    def planned_row(self) -> tuple[int, tuple[int, ...]] | None:
        """Where the plan is a single row: its position, and its page per layer. What most sequences of most steps have, without arrays."""
        if len(self._ranges) != 1:
            return None
        low, high = self._ranges[0]
        return (low, self._blocks[low // self._store.page_size].pages) if high - low == 1 else None

    def planned(self) -> tuple[Positions, Slots] | None:
        """Positions `[n]` of the rows to capture in this step and their slots `[layers, n]` in the store; None: no rows."""
        if not self._ranges:
            return None
        positions = np.concatenate([np.arange(low, high) for low, high in self._ranges])
        size = self._store.page_size
        blocks, inverse = np.unique(positions // size, return_inverse=True)
        pages = np.array([self._blocks[block].pages for block in blocks.tolist()], dtype=np.int64).T  # [layers, blocks]
        return positions, pages[:, inverse] * size + positions % size

    # After a step

    def commit(self, end: int, landing: Landing | None = None) -> None:
        """The rows planned up to `end` have been computed. Once they stand in their pages, complete blocks are offered to the prefix
        cache: now, or when they land."""
        if landing is not None or self._flights:
            self.confirm(self.launch(end, landing))
            return
        self._fill(self._planned_blocks())
        self._ranges = []
        self.captured_end = max(self.captured_end, end)

    def launch(self, end: int, landing: Landing | None) -> Flight:
        """The rows planned up to `end` are being computed; `confirm` or `withdraw` is next, before `finish`."""
        blocks = self._planned_blocks()
        flight = Flight(self.captured_end, end, blocks, landed=landing is None or not blocks)
        self._ranges = []
        self.captured_end = max(self.captured_end, end)
        self._flights.append(flight)
        if landing is not None and blocks:
            for _, held, _ in blocks:
                for page in held.pages:
                    self._store.pool.retain(page)
            landing.then(lambda: self._land(flight))
        return flight

    def confirm(self, flight: Flight) -> None:
        flight.confirmed = True
        self._settle()

    def withdraw(self, flight: Flight) -> None:
        """The sequence ended before these positions. It must be the latest that was launched."""
        assert self._flights[-1] is flight
        self._flights.pop()
        self.captured_end = flight.first

    def hand_over(self, at_least: int, *, everything: bool = False) -> None:
        """Gives the writer the rows whose place in the file is certain: whole blocks, or `everything` that is certain.

        With `everything`, rows that are on their way follow as soon as they have landed.
        """
        self._gives_all = everything and bool(self._flights)
        size, landed_end = self._store.page_size, self.landed_end
        if not everything and landed_end != self.total and landed_end // size == self.handed_end // size:
            return  # no further block is complete
        if self.total is None:
            horizon, kept = self.spec.rows.settled(at_least)
        else:
            horizon, kept = landed_end, self.spec.rows.ranges(self.total)
        horizon = min(horizon, landed_end)
        if not everything and horizon != self.total:
            horizon -= horizon % size
        self._hand(kept, horizon)

    def finish(self, token_ids: Sequence[int], total: int, num_prompt_tokens: int) -> None:
        """All kept rows of `total` have been captured: once they have landed the rest goes to the writer, which publishes the file."""
        kept = self.spec.rows.ranges(total)
        assert not kept or self.captured_end >= kept[-1][1], "a row that was not computed can't be saved"
        self._ending = kept, total, SaveEnd.of(self.spec.rows, token_ids, total, num_prompt_tokens)
        self._end_if_landed()

    def cancel(self, error: SaveError) -> None:
        self._close()
        self.job.cancel(error)

    def _close(self) -> None:
        self._flights, self._ending = [], None
        self._drop()
        self._store.unreserve(self)

    def _planned_blocks(self) -> list[tuple[int, BlockPages, int]]:
        size = self._store.page_size
        return [
            (block, self._blocks[block], min(high, (block + 1) * size) - max(low, block * size))
            for low, high in self._ranges
            for block in range(low // size, -(-high // size))
        ]

    def _land(self, flight: Flight) -> None:
        flight.landed = True
        for settled in self._settle():
            self.hand_over(settled.end, everything=self._gives_all)
        for _, held, _ in flight.blocks:
            for page in held.pages:
                self._store.pool.release(page)
        self._end_if_landed()

    def _settle(self) -> list[Flight]:
        settled = []
        while self._flights and self._flights[0].landed and self._flights[0].confirmed:
            settled.append(self._flights.pop(0))
            self._fill(settled[-1].blocks)
        return settled

    def _fill(self, blocks: Sequence[tuple[int, BlockPages, int]]) -> None:
        size = self._store.page_size
        for block, held, count in blocks:
            held.num_filled += count
            if held.num_filled == size and self._blocks.get(block) is held:  # it may have been given up since
                self._share(block)

    def _end_if_landed(self) -> None:
        if self._ending is not None and not self._flights:
            kept, total, end = self._ending
            self._hand(kept, total)
            self.job.finish(end)
            self._close()

    # Prefix hits

    def hit_limit(self, limit: int, at_least: int) -> int:
        """How far a run from cached pages could reach: the first block with a wanted row whose pages aren't all there, or `limit`."""
        size, headroom = self._store.page_size, self._store.headroom(self)
        for low, high in self._wanted(0, limit, at_least):
            for block in range(low // size, -(-high // size)):
                pages = self._cached(block)
                if pages is None:
                    return block * size
                headroom -= sum(not self._store.pool.is_referenced(page) for page in pages)
                if headroom < 0:
                    return block * size
        return limit

    def adopt(self, end: int, at_least: int) -> int:
        """Takes the wanted rows below `end` from cached pages (`hit_limit` said they are there); returns rows times layers."""
        size, taken = self._store.page_size, 0
        for low, high in self._wanted(0, end, at_least):
            for block in range(low // size, -(-high // size)):
                pages = self._cached(block)
                assert pages is not None
                for page in pages:
                    self._store.pool.retain(page)
                self._remove_block(block)
                self._blocks[block] = BlockPages(pages, size, shared=True)
            taken += (high - low) * len(self.spec.layers)
        self._blocks = dict(sorted(self._blocks.items()))
        self.captured_end = max(self.captured_end, end)
        return taken

    def _wanted(self, start: int, end: int, at_least: int) -> list[Range]:
        """Ranges of `start … end - 1` that haven't been captured and that may turn out to be kept."""
        if self.spec.rows.everything:
            low, high = max(start, self.captured_end), end if self.total is None else min(end, self.total)
            return [(low, high)] if low < high else []
        if self.total is None:
            horizon, ranges = self.spec.rows.settled(at_least)
            if horizon < end:
                ranges = [*ranges, (horizon, end)]
        else:
            ranges = self.spec.rows.ranges(self.total)
        return _intersect(ranges, max(start, self.captured_end), end)

    def _cached(self, block: int) -> tuple[int, ...] | None:
        if self._chain is None or block >= self._chain.num_full_blocks:
            return None
        return self._store.lookup(self._chain.link(block), self.spec.layers)

    def _share(self, block: int) -> None:
        """Offers a complete block to the prefix cache."""
        held = self._blocks[block]
        if not held.shared and self._chain is not None:
            self._store.register(self._chain.link(block), self.spec.layers, held.pages)
            held.shared = True

    def _add_block(self, block: int) -> bool:
        pages = self._store.allocate(self, len(self.spec.layers))
        if pages is None:
            return False
        self._blocks[block] = BlockPages(pages)
        return True

    def _hand(self, kept: Sequence[Range], horizon: int) -> None:
        for low, high in _intersect(kept, self.handed_end, horizon):
            self._append(low, high)
        self.handed_end = max(self.handed_end, horizon)
        size = self._store.page_size
        for block in [block for block in self._blocks if (block + 1) * size <= self.handed_end]:
            self._remove_block(block)
        if self.handed_end == self.captured_end and not self._ranges:  # rows may land in the middle of the step that has the plan
            self._drop()

    def _append(self, low: int, high: int) -> None:
        size = self._store.page_size
        held = [self._blocks[block].pages for block in range(low // size, -(-high // size))]
        pages = [page for pages in held for page in pages]
        for page in pages:
            self._store.pool.retain(page)
        self.job.append(RowChunk(low, high - low, tuple(zip(*held, strict=True)), lambda: self._release(pages)))

    def _remove_block(self, block: int) -> None:
        held = self._blocks.pop(block, None)
        for page in held.pages if held else ():
            self._store.pool.release(page)

    def _drop(self) -> None:
        for block in list(self._blocks):
            self._remove_block(block)


def pages_reserved(spec: SaveSpec, page_size: int, total: int | None, max_total: int) -> int:
    """Pages that must be promised at admission: the ring of rows that can't be settled before the end.

    Rows go to the writer by whole blocks, so the ring spans the window, the block that its beginning lies in and the growing one.
    """
    if total is not None or spec.rows.lookback == 0:
        return 0
    blocks = min(-(-spec.rows.lookback // page_size) + 2, -(-max_total // page_size))
    return blocks * len(spec.layers)


def _intersect(ranges: Sequence[Range], start: int, end: int) -> list[Range]:
    clipped = [(max(low, start), min(high, end)) for low, high in ranges]
    return [(low, high) for low, high in clipped if low < high]
