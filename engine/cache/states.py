"""Hidden-state pages: host memory for captured rows, one page for one block of rows of one layer."""

from collections.abc import Sequence
from typing import Protocol

import torch

from engine.cache.pool import BlockPool
from engine.layers import LayerId


class Reserving(Protocol):
    """A holder of pages that was promised some at admission."""

    reservation: int
    """Pages promised."""

    @property
    def num_held(self) -> int:
        """Pages it has."""


class StateStore:
    """The pool of pages and their memory `[pages, page_size, width]`, in the compute dtype.

    Pages found by `(block digest, layer)` serve any later request with the same prefix, whatever layers it asks for beside them.
    """

    def __init__(
        self, num_pages: int, page_size: int, width: int, dtype: torch.dtype, *, pinned: bool = False, poison: bool = False
    ) -> None:
        self.page_size = page_size
        # Left undefined: filling would touch all the memory at start, and nothing is read that wasn't written.
        self.pages = torch.empty(num_pages, page_size, width, dtype=dtype, pin_memory=pinned)
        self.rows = self.pages.view(num_pages * page_size, width)
        self.pool = BlockPool(num_pages, self._fill_with_nan if poison else None)
        self._reserving: list[Reserving] = []
        if poison:
            self.pages.fill_(torch.nan)

    def touch(self) -> None:
        """Has the system hand over all the memory now."""
        self.pages.zero_()

    def reserve(self, holder: Reserving) -> None:
        """Keeps what `holder` was promised out of the others' reach until `unreserve`."""
        if holder not in self._reserving:
            self._reserving.append(holder)

    def unreserve(self, holder: Reserving) -> None:
        if holder in self._reserving:
            self._reserving.remove(holder)

    def headroom(self, holder: Reserving) -> int:
        """Pages that `holder` may still take without touching what was promised to others."""
        return self.pool.num_available - sum(_unfilled(other) for other in self._reserving if other is not holder)

    def allocate(self, holder: Reserving, count: int) -> tuple[int, ...] | None:
        """`count` pages, or None (and nothing taken) where there are too few."""
        if count > self.headroom(holder):
            return None
        pages = [self.pool.allocate() for _ in range(count)]
        return tuple(page for page in pages if page is not None)

    def lookup(self, link: tuple[bytes, bytes], layers: Sequence[LayerId]) -> tuple[int, ...] | None:
        """The cached pages of one block for all the layers, or None where one is missing."""
        digest, tokens = link
        found = [self.pool.lookup((digest, layer), tokens) for layer in layers]
        pages = tuple(page for page in found if page is not None)
        return pages if len(pages) == len(layers) else None

    def register(self, link: tuple[bytes, bytes], layers: Sequence[LayerId], pages: Sequence[int]) -> None:
        digest, tokens = link
        for layer, page in zip(layers, pages, strict=True):
            self.pool.register(page, (digest, layer), tokens)

    def _fill_with_nan(self, page: int) -> None:
        self.pages[page] = torch.nan


def _unfilled(holder: Reserving) -> int:
    return max(0, holder.reservation - holder.num_held)
