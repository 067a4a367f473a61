"""What the engine hands to the writer of a save."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Self

import numpy as np

from engine.errors import SaveError
from engine.saves.selection import IntArray, Range, RowSelection, positions_of


@dataclass(frozen=True, eq=False)
class RowChunk:
    """Rows of one save that are handed over together, lying in host pages."""

    ranges: Sequence[Range]
    """Their positions in the sequence: ascending, disjoint, none empty."""
    blocks: IntArray
    """`[blocks]` ascending; block n is the positions from `n * page_size` on, and every position's block is among them."""
    pages: IntArray
    """`[blocks, layers]` page ids."""
    release: Callable[[], None]
    """Called exactly once, from a writer thread, when the rows are no longer needed (written, failed or cancelled)."""

    @cached_property
    def bounds(self) -> IntArray:
        """The ranges as `[ranges, 2]`."""
        return np.array(self.ranges, dtype=np.int64).reshape(-1, 2)

    @property
    def count(self) -> int:
        return len(self._positions)

    def positions(self, first: int, count: int) -> IntArray:
        """Of the rows `first … first + count - 1` of the chunk."""
        return self._positions[first : first + count]

    def slots(self, positions: IntArray, page_size: int) -> IntArray:
        """Where rows of these positions lie, `[positions, layers]`, counted in rows from the first page's first.

        Raises `SaveError` for a position whose block isn't there.
        """
        numbers, offsets = np.divmod(positions, page_size)
        index = np.searchsorted(self.blocks, numbers).clip(max=len(self.blocks) - 1)
        if (self.blocks[index] != numbers).any():
            raise SaveError("engine_error", f"rows of positions {positions[0]} to {positions[-1]} came without their pages")
        slots: IntArray = self.pages[index] * page_size + offsets[:, None]
        return slots

    @cached_property
    def _positions(self) -> IntArray:
        return positions_of(self.bounds[:, 0], self.bounds[:, 1])


@dataclass(frozen=True, eq=False)
class SaveEnd:
    """What is known once the last token has been computed."""

    token_ids: IntArray | Sequence[int]
    """Of the kept positions, in order."""
    positions: IntArray | Sequence[int] | None
    """The kept positions where not all were kept, else None."""
    num_tokens: int
    """Rows of the sequence that the selection was taken from."""
    num_prompt_tokens: int

    @classmethod
    def of(cls, selection: RowSelection, token_ids: IntArray | Sequence[int], num_tokens: int, num_prompt_tokens: int) -> Self:
        """What `selection` keeps of the first `num_tokens` rows of a sequence; `token_ids` may be of more."""
        positions = positions_of(*selection.spans(num_tokens))
        if len(positions) == num_tokens:
            return cls(token_ids[:num_tokens], None, num_tokens, num_prompt_tokens)
        low, high = (int(positions[0]), int(positions[-1]) + 1) if len(positions) else (0, 0)
        kept = np.asarray(token_ids[low:high], dtype=np.int64)[positions - low]
        return cls(kept, positions, num_tokens, num_prompt_tokens)
