"""The way of captured rows from the device to their pages in host memory."""

from collections import deque
from typing import Protocol

import torch

from engine.device.streams import CopyEvent, CopyStream, copy_stream


class Landing:
    """Whether the captured rows of one step stand in their pages. May be read at any time."""

    def __init__(self, *, landed: bool) -> None:
        self.landed = landed


class RowSink(Protocol):
    """Takes the rows of one step at a time. Rows land in the order of their steps."""

    @property
    def capacity(self) -> int | None:
        """Rows (times layers) that one step may put; None: no limit."""

    @property
    def busy(self) -> bool:
        """Whether rows are on their way."""

    def put(self, rows: torch.Tensor, slots: torch.Tensor) -> None:
        """`rows` `[n, width]` on the model's device, `slots` `[n]` int64 on the host: row numbers in the store.

        The slots must not be used for anything else until the rows have landed.
        """

    def flush(self) -> Landing:
        """Sends the step's rows off without waiting for them."""

    def collect(self, *, wait: bool = False) -> None:
        """Lets land what has arrived; with `wait`, at least the oldest step's rows that are on their way."""

    def discard(self) -> None:
        """The step has failed: rows that were put and not flushed are forgotten."""


class DirectSink:
    """For a model in host memory: one indexed copy per layer and step."""

    capacity: int | None = None
    busy = False

    def __init__(self, store_rows: torch.Tensor) -> None:
        self._store_rows = store_rows  # [pages * page_size, width]
        self._landed = Landing(landed=True)

    def put(self, rows: torch.Tensor, slots: torch.Tensor) -> None:
        self._store_rows.index_copy_(0, slots, rows)

    def flush(self) -> Landing:
        return self._landed

    def collect(self, *, wait: bool = False) -> None:
        """Nothing is in flight."""

    def discard(self) -> None:
        """Rows that were copied too early lie in pages that nobody reads before they are written again."""


class _Buffer:
    """One step's rows: gathered on the device, then copied to the host by one transfer."""

    def __init__(self, capacity: int, like: torch.Tensor, device: torch.device, pinned: bool) -> None:
        shape = (capacity, like.shape[1])
        self.staging = torch.empty(shape, dtype=like.dtype, device=device)
        self.host = torch.empty(shape, dtype=like.dtype, pin_memory=pinned)
        self.slots: list[torch.Tensor] = []
        self.used = 0

    def clear(self) -> None:
        self.slots.clear()
        self.used = 0


class StagedSink:
    """For a model on another device: rows are gathered in a bounded staging buffer, copied by one transfer on a stream of its own
    into pinned memory, and scattered to pages on the host once they are there.

    There are several buffers in turn, so that a step can fill one while another's rows are on their way. None is written again
    before its rows have landed: `put` waits for the oldest where all are in flight.
    """

    def __init__(
        self, store_rows: torch.Tensor, capacity: int, device: torch.device, *, stream: CopyStream | None = None, num_buffers: int = 2
    ) -> None:
        self.capacity: int = capacity
        self._store_rows = store_rows
        self._stream = stream or copy_stream(device)
        self._free = deque(_Buffer(capacity, store_rows, device, self._stream.pinned) for _ in range(num_buffers))
        self._filling: _Buffer | None = None
        self._in_flight: deque[tuple[_Buffer, CopyEvent, Landing]] = deque()

    @property
    def busy(self) -> bool:
        return bool(self._in_flight)

    def put(self, rows: torch.Tensor, slots: torch.Tensor) -> None:
        buffer = self._filling = self._filling or self._acquire_buffer()
        end = buffer.used + rows.shape[0]
        assert end <= self.capacity, "the scheduler counts rows against the staging buffer"
        buffer.staging[buffer.used : end].copy_(rows)
        buffer.slots.append(slots)
        buffer.used = end

    def flush(self) -> Landing:
        buffer = self._filling
        if buffer is None:
            return Landing(landed=True)
        event, landing = self._stream.copy(buffer.host[: buffer.used], buffer.staging[: buffer.used]), Landing(landed=False)
        self._in_flight.append((buffer, event, landing))
        self._filling = None
        return landing

    def collect(self, *, wait: bool = False) -> None:
        while self._in_flight and (wait or self._in_flight[0][1].done()):
            self._land()
            wait = False

    def discard(self) -> None:
        if self._filling is not None:
            self._filling.clear()
            self._free.append(self._filling)
            self._filling = None

    def _acquire_buffer(self) -> _Buffer:
        if not self._free:
            self._land()
        return self._free.popleft()

    def _land(self) -> None:
        buffer, event, landing = self._in_flight[0]
        event.wait()
        self._in_flight.popleft()
        self._store_rows.index_copy_(0, torch.cat(buffer.slots), buffer.host[: buffer.used])
        buffer.clear()
        self._free.append(buffer)
        landing.landed = True
