"""Pages that rows are on their way to."""

from collections import deque
from collections.abc import Sequence

import numpy as np

from engine.cache.pool import BlockPool, IntArray
from engine.capture.sink import Landing


class PagesInFlight:
    """Holds the pages of launched steps until their rows have landed, whatever becomes of the requests meanwhile: a page that was given
    to somebody else would be written over. Belongs to the engine thread."""

    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool
        self._held: deque[tuple[Landing, IntArray]] = deque()

    def hold(self, landing: Landing, pages: Sequence[IntArray]) -> None:
        """`pages`: of one step, none of them twice."""
        if landing.landed or not pages:
            return
        all_pages = np.concatenate(pages)
        self._pool.retain(all_pages)
        self._held.append((landing, all_pages))

    def release_landed(self) -> None:
        while self._held and self._held[0][0].landed:
            self._pool.release(self._held.popleft()[1])
