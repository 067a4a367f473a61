"""Things that wait until a test lets them go on."""

from __future__ import annotations

import threading
from itertools import count
from typing import TYPE_CHECKING, Any, Self

from engine.engine import Engine
from engine.saves import builder

if TYPE_CHECKING:
    from collections.abc import Callable

    import pytest


class Gate:
    """Whoever passes waits until it is open; the end of the block opens it, so that a test that fails ends.

    The block ends before that of the service, which waits for what is at the gate.
    """

    def __init__(self) -> None:
        self.reached, self.open = threading.Event(), threading.Event()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.open.set()

    def pass_through(self) -> None:
        self.reached.set()
        self.open.wait()


class PublishingGate(Gate):
    """Files wait at it before they get their names, but for the first `free`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, free: int = 0) -> None:
        super().__init__()
        self._numbers, self._free, self._publish = count(), free, builder.publish_file
        monkeypatch.setattr(builder, "publish_file", self._call)

    def _call(self, *arguments: Any, **options: Any) -> None:  # noqa: ANN401 - passed on
        if next(self._numbers) >= self._free:
            self.pass_through()
        self._publish(*arguments, **options)


class LateStart(Gate):
    """`engine` makes engines that load their model once it is open."""

    @property
    def engine(self) -> type[Engine]:
        gate = self

        class LateEngine(Engine):
            def start(self, progress: Callable[[int, int], None] | None = None) -> None:
                gate.pass_through()
                super().start(progress)

        return LateEngine
