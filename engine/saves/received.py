"""The positions for which a save has received rows."""

from array import array

import numpy as np

from engine.errors import SaveError
from engine.saves.selection import IntArray, positions_of


class ReceivedPositions:
    """Grows by the ranges of each chunk; those that touch are one."""

    def __init__(self) -> None:
        self._bounds = array("q")
        """The start and the end of every range, one after the other."""

    def add(self, bounds: IntArray) -> None:
        """`bounds` is `[ranges, 2]`. Raises `SaveError` for ranges that are not ascending, disjoint, and behind those before."""
        flat = bounds.reshape(-1)
        end = self._bounds[-1] if self._bounds else 0
        if not len(flat) or flat[0] < end or (np.diff(flat) < 0).any() or (bounds[:, 0] == bounds[:, 1]).any():
            raise SaveError("engine_error", f"rows behind position {end} were submitted out of order")
        if self._bounds and flat[0] == end:
            self._bounds.pop()
            flat = flat[1:]
        self._bounds.frombytes(flat.tobytes())

    def positions(self) -> IntArray:
        bounds = np.array(self._bounds, dtype=np.int64).reshape(-1, 2)
        return positions_of(bounds[:, 0], bounds[:, 1])
