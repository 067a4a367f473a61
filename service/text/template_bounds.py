"""What one rendering of a chat template may take: computing time, and the size of every value that is made on the way.

A value's size is about the number of characters of its text. No value larger than the bound goes on to anything else, so what makes
a text of it (a list written out, a join) can't make much more. Operations that multiply are judged before they run
(`template_growth`).
"""

import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from jinja2.exceptions import SecurityError

CHECK_EVERY = 256
"""Steps between two looks at the clock."""
MOST_KNOWN = 2**20
"""Items of containers whose sizes are remembered; it bounds what remembering keeps alive."""
LARGEST_NUMBER_BITS = 2**14
"""More than the largest number of a JSON body (4,300 digits)."""
BETWEEN_ITEMS = 2
"""Characters between two items of a container."""
OTHER_SIZE = 16
"""Of what is neither text nor a container: numbers, true and false, functions."""
CONTAINERS: tuple[type, ...] = (list, tuple, dict, set, frozenset, type({}.keys()), type({}.values()), type({}.items()))


@dataclass(frozen=True)
class Bounds:
    """What one rendering may take. Loops over numbers are bounded by jinja2 itself (100,000 steps)."""

    cpu_seconds: float = 10.0
    """Of the rendering thread, so that a busy machine fails no request."""
    characters: int = 2**24
    """Of the result, and of any value that the template makes on the way."""


class Meter:
    """Counts what one rendering takes. Everything here raises `SecurityError` where that is out of bounds."""

    def __init__(self, bounds: Bounds) -> None:
        self._bounds = bounds
        self._end = time.thread_time() + bounds.cpu_seconds
        self._steps = 0
        self._known: dict[int, tuple[object, int]] = {}
        self._known_items = 0

    def step(self, cost: int = 1) -> None:
        self._steps += cost
        if self._steps < CHECK_EVERY:
            return
        self._steps = 0
        if time.thread_time() > self._end:
            raise SecurityError(f"rendering takes more than {self._bounds.cpu_seconds:g} seconds")

    def check(self, characters: int) -> None:
        if characters > self._bounds.characters:
            raise SecurityError(f"the text is longer than {self._bounds.characters} characters")

    def checked(self, value: Any) -> Any:  # noqa: ANN401 - any value
        """The value, which is small enough; an iterator that ends where its items together are not."""
        if isinstance(value, Iterator):
            return self.counted(value)
        self.check(self.size(value))
        return value

    def counted(self, values: Iterable[Any]) -> Iterator[Any]:
        """Values as they are made, for whoever makes a container or a text of them."""
        total = 0
        for value in values:
            self.step()
            total += self.size(value) + BETWEEN_ITEMS
            self.check(total)
            yield value

    def size(self, value: object) -> int:
        if isinstance(value, str | bytes):
            return len(value)
        if isinstance(value, int):
            return _digits(value)
        return self._container_size(value) if isinstance(value, CONTAINERS) else OTHER_SIZE

    def _container_size(self, container: Any) -> int:  # noqa: ANN401 - one of CONTAINERS
        """Items count as often as they stand in it: a few lists in one another can be written out as millions of items.

        The sandbox lets no container be changed, so a size stays what it was.
        """
        known = self._known.get(id(container))
        if known is not None:
            return known[1]
        self.step(len(container))
        total = BETWEEN_ITEMS
        for item in container:
            total += self.size(item) + BETWEEN_ITEMS
            if isinstance(container, dict):
                total += self.size(container[item]) + BETWEEN_ITEMS
            self.check(total)
        self._remember(container, total)
        return total

    def _remember(self, container: Any, size: int) -> None:  # noqa: ANN401 - one of CONTAINERS
        self._known_items += len(container) + 1
        if self._known_items > MOST_KNOWN:
            self._known.clear()
            self._known_items = len(container) + 1
        # With the container itself: its id names no other one as long as it is kept.
        self._known[id(container)] = (container, size)


class Buffer(list[str]):
    """Pieces of a text that a template puts together."""

    def __init__(self, meter: Meter) -> None:
        super().__init__()
        self._meter = meter
        self._characters = 0

    def append(self, piece: str) -> None:
        self._meter.step()
        self._characters += len(piece)
        self._meter.check(self._characters)
        super().append(piece)

    def extend(self, pieces: Iterable[str]) -> None:
        for piece in pieces:
            self.append(piece)

    def write(self, piece: str) -> None:
        """As a file has it."""
        self.append(piece)


def _digits(number: int) -> int:
    if number.bit_length() > LARGEST_NUMBER_BITS:
        raise SecurityError(f"a number has more than {LARGEST_NUMBER_BITS} bits")
    return number.bit_length() // 3 + 1
