"""The page table of one request: its hidden-state pages, by block of positions."""

from bisect import bisect_right
from collections.abc import Sequence

import numpy as np

from engine.cache.chain import HashChain
from engine.cache.pool import IntArray
from engine.cache.states import StateStore
from engine.layers import LayerId
from engine.saves.selection import Range, RowSelection, positions_of


class PageTable:
    """A page per layer for every block of positions that has rows to be kept; and pages that were promised at admission.

    A block is complete once rows were captured for all of its positions; it is then offered to the prefix cache.
    """

    def __init__(self, store: StateStore, layers: tuple[LayerId, ...], chain: HashChain | None, reservation: int) -> None:
        """`chain` names the blocks for the prefix cache (None: it is off); `reservation`: pages promised."""
        self.reservation = reservation
        self._store = store
        self._layers = layers
        self._chain = chain
        self._size = store.page_size
        self._pages: dict[int, IntArray] = {}
        """`[layers]` by block, blocks ascending."""
        self._contiguous_from = 0
        """Every row from here on, up to the latest one that was captured, stands in its page."""
        self._claimed = False

    @property
    def num_held(self) -> int:
        return len(self._pages) * len(self._layers)

    @property
    def in_use(self) -> bool:
        """Whether there are pages that others lack: held, or promised and claimed."""
        return self._claimed or bool(self._pages)

    def can_start(self, position: int) -> bool:
        """Whether there are pages for the row at `position`, and for what is promised, beside those that are held already."""
        for_row = 0 if position // self._size in self._pages else len(self._layers)
        need = max(for_row, self.reservation - self.num_held)
        return need <= 0 or self._store.headroom(self) >= need

    def claim(self) -> None:
        """Reserves the promised pages: no other request can allocate them."""
        if self.reservation:
            self._claimed = True
            self._store.reserve(self)

    def blocks_of(self, ranges: Sequence[Range]) -> list[int]:
        """The blocks that hold positions of ascending ranges, each once."""
        size = self._size
        if len(ranges) == 1:
            return list(range(ranges[0][0] // size, -(-ranges[0][1] // size)))
        blocks: list[int] = np.unique(positions_in(ranges) // size).tolist()
        return blocks

    def end_within_reach(self, ranges: Sequence[Range], end: int) -> int:
        """How far a chunk of `ranges` that ends at `end` could go with the pages available; allocates nothing."""
        missing = [block for block in self.blocks_of(ranges) if block not in self._pages]
        if not missing:
            return end
        room = self._store.headroom(self) // len(self._layers)
        if room >= len(missing):
            return end
        return max(missing[max(0, room)] * self._size, ranges[0][0])

    def allocate(self, ranges: Sequence[Range]) -> None:
        """Allocates pages for all positions of `ranges`; `end_within_reach` has said that there are enough."""
        missing = [block for block in self.blocks_of(ranges) if block not in self._pages]
        if not missing:
            return
        taken = self._store.allocate(self, len(missing) * len(self._layers))
        assert taken is not None, "the pages that a chunk was planned with are missing"
        self._pages.update(zip(missing, taken.reshape(len(missing), -1), strict=True))

    def allocate_row(self, position: int) -> IntArray | None:
        """`[layers]`: the pages of the block that holds `position`; None where they can't be had."""
        block = position // self._size
        pages = self._pages.get(block)
        if pages is None:
            pages = self._store.allocate(self, len(self._layers))
            if pages is not None:
                self._pages[block] = pages
        return pages

    def pages_of(self, blocks: Sequence[int]) -> IntArray:
        """`[blocks, layers]`."""
        if len(blocks) == 1:
            return self._pages[blocks[0]][None]
        return np.concatenate([self._pages[block] for block in blocks]).reshape(len(blocks), -1)

    def mark_filled(self, first: int, ranges: Sequence[Range], end: int) -> None:
        """Of positions `first … end - 1`, which follow those before, the rows in `ranges` stand in their pages; the others aren't kept.

        Blocks that have been given up since are passed over.
        """
        size, at = self._size, first
        complete: list[int] = []
        for low, high in ranges:
            if low > at:
                self._contiguous_from = low
            if low // size < high // size:
                complete += range(max(low // size, -(-self._contiguous_from // size)), high // size)
            at = high
        if at < end:
            self._contiguous_from = end
        complete = [block for block in complete if block in self._pages]
        if complete and self._chain is not None:
            self._store.register(self._chain, complete, self._layers, self.pages_of(complete))

    def transfer(self, blocks: Sequence[int], end: int) -> IntArray:
        """`[blocks, layers]`, ascending, for a new owner, which releases them to the pool. Blocks that end at `end` or before it are held
        no longer, the others by both."""
        pages = self.pages_of(blocks)
        num_given = bisect_right(blocks, end // self._size - 1)
        for block in blocks[:num_given]:
            del self._pages[block]
        if num_given < len(blocks):
            self._store.pool.retain(pages[num_given:].reshape(-1))
        return pages

    def release_before(self, position: int) -> None:
        """Releases blocks that end at `position` or before it."""
        if self._pages:
            self._release([block for block in self._pages if (block + 1) * self._size <= position])

    def release_all(self) -> None:
        if self._pages:
            self._release(list(self._pages))

    def close(self) -> None:
        self.release_all()
        self._claimed = False
        self._store.cancel_reservation(self)

    # Prefix hits

    def hit_limit(self, ranges: Sequence[Range], limit: int) -> int:
        """How far cached pages of all positions of `ranges` go without touching what others were promised; `limit`: all the way."""
        headroom, pool = self._store.headroom(self), self._store.pool
        for first, end in _runs(self.blocks_of(ranges)):
            pages = self._cached(first, end)
            taken = np.cumsum((~pool.is_referenced(pages.reshape(-1))).reshape(pages.shape).sum(axis=1))
            fitting = int(np.searchsorted(taken, headroom, side="right"))
            if fitting < end - first:
                return (first + fitting) * self._size
            headroom -= int(taken[-1])
        return limit

    def adopt(self, ranges: Sequence[Range]) -> None:
        """Takes the cached pages of `ranges`, which `hit_limit` said are there, in place of what is held of those blocks."""
        for first, end in _runs(self.blocks_of(ranges)):
            pages = self._cached(first, end)
            assert len(pages) == end - first, "a cached page that was found is gone"
            self._store.pool.retain(pages.reshape(-1))
            self._release([block for block in range(first, end) if block in self._pages])
            self._pages.update(zip(range(first, end), pages, strict=True))
        self._pages = dict(sorted(self._pages.items()))

    def _cached(self, first: int, end: int) -> IntArray:
        """`[blocks, layers]` from block `first` on, as far as they are cached."""
        if self._chain is None:
            return np.zeros((0, len(self._layers)), np.int64)
        return self._store.lookup(self._chain, first, min(end, self._chain.num_full_blocks), self._layers)

    def _release(self, blocks: Sequence[int]) -> None:
        if not blocks:
            return
        self._contiguous_from = max(self._contiguous_from, (max(blocks) + 1) * self._size)
        self._store.pool.release(np.concatenate([self._pages.pop(block) for block in blocks]))


def positions_in(ranges: Sequence[Range]) -> IntArray:
    """The positions of ascending ranges, `[rows]`."""
    return positions_of(*np.array(ranges, dtype=np.int64).reshape(-1, 2).T)


def _runs(blocks: Sequence[int]) -> list[tuple[int, int]]:
    """Ascending numbers as ranges of neighbours."""
    runs: list[tuple[int, int]] = []
    for block in blocks:
        if runs and runs[-1][1] == block:
            runs[-1] = (runs[-1][0], block + 1)
        else:
            runs.append((block, block + 1))
    return runs


def pages_reserved(selection: RowSelection, num_layers: int, page_size: int, total: int | None, max_total: int) -> int:
    """Pages that must be promised at admission: the ring of rows that can't be settled before the end.

    Rows go to the writer by whole blocks, so the ring spans the window, the block that its beginning lies in and the growing one.
    """
    if total is not None or selection.lookback == 0:
        return 0
    blocks = min(-(-selection.lookback // page_size) + 2, -(-max_total // page_size))
    return blocks * num_layers
