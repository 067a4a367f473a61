"""A copy stream whose copies happen only when they are awaited: who reads a target too early reads NaN, and who writes a source too
early spoils the copy."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field

import torch


@dataclass(eq=False)
class DeferredCopy:
    """A copy, and the moment that it ends."""

    stream: DeferredStream
    target: torch.Tensor
    source: torch.Tensor

    def done(self) -> bool:
        return self not in self.stream.pending

    def wait(self) -> None:
        if not self.target.dtype.is_floating_point:
            self.stream.lose_tokens()
        self.stream.num_waits += not self.done()
        while not self.done():
            self.stream.advance()


@dataclass
class DeferredStream:
    """Implements `CopyStream`."""

    pinned: bool = False
    pending: deque[DeferredCopy] = field(default_factory=deque)
    num_waits: int = 0
    """How often the host had to wait."""
    loses_tokens: bool = False
    """Whoever waits for token ids hears that the device is lost."""
    num_losses: int = 0
    """So do the next ones who wait for token ids, so many times."""

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> DeferredCopy:
        target.fill_(math.nan if target.dtype.is_floating_point else -(1 << 40))
        self.pending.append(DeferredCopy(self, target, source))
        return self.pending[-1]

    def lose_tokens(self) -> None:
        """Raises where that is to be."""
        if self.loses_tokens or self.num_losses:
            self.num_losses = max(0, self.num_losses - 1)
            raise RuntimeError("the device is lost")

    def advance(self, count: int = 1) -> None:
        """The device gets so many copies done."""
        for _ in range(min(count, len(self.pending))):
            copy = self.pending.popleft()
            copy.target.copy_(copy.source)
