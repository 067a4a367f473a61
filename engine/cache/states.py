"""Hidden-state pages: host memory for captured rows, one page for one block of rows of one layer."""

from collections.abc import Sequence
from typing import Protocol

import torch

from engine.cache.chain import HashChain
from engine.cache.pool import BlockPool, IntArray
from engine.layers import LayerId


class ReservationHolder(Protocol):
    """A holder of pages that was promised some at admission."""

    reservation: int
    """Pages promised."""

    @property
    def num_held(self) -> int:
        """Pages it has."""


class StateStore:
    """The pool of pages and their memory `[pages, page_size, width]`, in the compute dtype.

    Pages are found by the name of their block and their layer, so they serve any later request with the same prefix, whatever layers
    it asks for beside them.
    """

    def __init__(self, num_pages: int, page_size: int, width: int, dtype: torch.dtype, *, poison: bool = False) -> None:
        self.page_size = page_size
        # Left undefined: filling would touch all the memory at start, and nothing is read that wasn't written.
        # Not pinned either: no copy of a device goes there, and torch rounds pinned memory up to a power of two.
        self.pages = torch.empty(num_pages, page_size, width, dtype=dtype)
        self.rows = self.pages.view(num_pages * page_size, width)
        self.pool = BlockPool(num_pages, self._fill_with_nan if poison else None)
        self._reservation_holders: list[ReservationHolder] = []
        if poison:
            self.pages.fill_(torch.nan)

    def touch(self) -> None:
        """Writes to all of the memory, so that the system maps it now."""
        self.pages.zero_()

    def reserve(self, holder: ReservationHolder) -> None:
        """Keeps what `holder` was promised out of the others' reach until `cancel_reservation`."""
        if holder not in self._reservation_holders:
            self._reservation_holders.append(holder)

    def cancel_reservation(self, holder: ReservationHolder) -> None:
        if holder in self._reservation_holders:
            self._reservation_holders.remove(holder)

    def headroom(self, holder: ReservationHolder) -> int:
        """Pages that `holder` may still allocate without touching the reservations of others."""
        return self.pool.num_available - sum(_unfilled(other) for other in self._reservation_holders if other is not holder)

    def allocate(self, holder: ReservationHolder, count: int) -> IntArray | None:
        """Allocates `count` pages; None, and nothing is allocated, where there are too few."""
        return None if count > self.headroom(holder) else self.pool.allocate(count)

    def lookup(self, chain: HashChain, first: int, end: int, layers: tuple[LayerId, ...]) -> IntArray:
        """Cached pages `[n, layers]` of blocks `first … first + n - 1`: as far as all the layers are there, and not beyond `end - 1`."""
        return self.pool.find_run(chain, first, end, layers)

    def register(self, chain: HashChain, blocks: Sequence[int], layers: tuple[LayerId, ...], pages: IntArray) -> None:
        """Offers complete pages `[n, layers]` of blocks `[n]` of the chain to the prefix cache."""
        self.pool.register([chain.link(block) for block in blocks], pages, layers)

    def _fill_with_nan(self, pages: IntArray) -> None:
        self.pages[torch.from_numpy(pages)] = torch.nan


def _unfilled(holder: ReservationHolder) -> int:
    return max(0, holder.reservation - holder.num_held)
