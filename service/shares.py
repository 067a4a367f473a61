"""Bounds that owners share: where API keys stand for several owners, none of them can take all of one."""

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from service.errors import Busy

Owner = str | None
"""Whom an API key stands for; None where the service runs without keys."""

POLLS = 2048
DOWNLOADS = 1024


class Share:
    """A bounded amount of something. Used on the event loop.

    One owner alone may take all of it. Of several, each may hold as much as is left for the others: the first gets half at most, a second
    one half of the rest. So a later owner always gets a share. (A dynamic threshold with alpha 1: Choudhury and Hahne, 1998.)
    """

    def __init__(self, what: str, most: int, several: Callable[[], bool], code: str = Busy.default_code) -> None:
        """`what` there is too much of, for the error message. `several`: whether there are several owners just now."""
        self.most = most
        self.total = 0
        self._what = what
        self._several = several
        self._code = code
        self._held: Counter[Owner] = Counter()

    def acquire(self, owner: Owner, amount: int = 1) -> None:
        """Raises `Busy`, and acquires nothing, where that is more than is left or than the owner's share."""
        left = self._left(amount)
        if left < 0:
            raise Busy(f"{self._what}: {self.total} of {self.most} are in use", code=self._code)
        if self._several() and self._held[owner] + amount > max(left, 1):
            held = self._held[owner]
            raise Busy(f"{self._what}: {held} of {self.most} are in use with your keys, the rest is reserved for others", code=self._code)
        self._held[owner] += amount
        self.total += amount

    def release(self, owner: Owner, amount: int = 1) -> None:
        self._held[owner] -= amount
        self.total -= amount
        if not self._held[owner]:
            del self._held[owner]

    @contextmanager
    def acquired(self, owner: Owner, amount: int = 1) -> Iterator[None]:
        """Holds it for the length of the block. Raises `Busy`."""
        self.acquire(owner, amount)
        try:
            yield
        finally:
            self.release(owner, amount)

    def _left(self, amount: int) -> int:
        """What others find afterwards; negative where there isn't so much."""
        return self.most - self.total - amount


class EngineShare(Share):
    """Places in the engine, which refuses by itself what is too much for it: here owners are kept from each other's places only."""

    def _left(self, amount: int) -> int:
        return max(super()._left(amount), 0)


class Shares:
    """What owners share in one service, beside its threads."""

    def __init__(self, engine_places: int) -> None:
        self.several: Callable[[], bool] = lambda: False
        """Whether there are several owners; without keys all clients are one."""
        self.choices = EngineShare("choices in the engine", engine_places, self._asked)
        self.polls = self.share("requests that wait for a save", POLLS)
        self.downloads = self.share("downloads", DOWNLOADS)

    def share(self, what: str, most: int, code: str = Busy.default_code) -> Share:
        return Share(what, most, self._asked, code)

    def _asked(self) -> bool:
        return self.several()
