"""The way of captured rows from the device to their pages in host memory."""

from typing import Protocol

import torch


class RowSink(Protocol):
    """Takes the rows of one step. They stand in their pages once `flush` has returned."""

    @property
    def capacity(self) -> int | None:
        """Rows (times layers) that one step may put; None: no limit."""

    def put(self, rows: torch.Tensor, slots: torch.Tensor) -> None:
        """`rows` `[n, width]` on the model's device, `slots` `[n]` int64 on the host: row numbers in the store."""

    def flush(self) -> None: ...

    def discard(self) -> None:
        """The step has failed: rows that were put and not flushed are forgotten."""


class DirectSink:
    """For a model in host memory: one indexed copy per layer and step."""

    capacity: int | None = None

    def __init__(self, store_rows: torch.Tensor) -> None:
        self._store_rows = store_rows  # [pages * page_size, width]

    def put(self, rows: torch.Tensor, slots: torch.Tensor) -> None:
        self._store_rows.index_copy_(0, slots, rows)

    def flush(self) -> None:
        """Nothing is under way."""

    def discard(self) -> None:
        """Rows that were copied too early lie in pages that nobody reads before they are written again."""


class StagedSink:
    """For a model on another device: rows are gathered in one bounded staging buffer, copied in one transfer on a stream of their
    own into pinned memory, and scattered to pages on the host.

    The staging buffer isn't written again before its transfer has ended, which `flush` waits for.
    """

    def __init__(self, store_rows: torch.Tensor, capacity: int, device: torch.device) -> None:
        width, dtype = store_rows.shape[1], store_rows.dtype
        self.capacity: int = capacity
        self._store_rows = store_rows
        self._staging = torch.empty(capacity, width, dtype=dtype, device=device)
        self._host = torch.empty(capacity, width, dtype=dtype, pin_memory=device.type == "cuda")
        self._slots: list[torch.Tensor] = []
        self._used = 0
        self._stream = torch.Stream(device) if device.type == "cuda" else None

    def put(self, rows: torch.Tensor, slots: torch.Tensor) -> None:
        end = self._used + rows.shape[0]
        assert end <= self.capacity, "the scheduler counts rows against the staging buffer"
        self._staging[self._used : end].copy_(rows)
        self._slots.append(slots)
        self._used = end

    def flush(self) -> None:
        if not self._used:
            return
        self._transfer()
        self._store_rows.index_copy_(0, torch.cat(self._slots), self._host[: self._used])
        self.discard()

    def discard(self) -> None:
        self._slots.clear()
        self._used = 0

    def _transfer(self) -> None:
        source, target = self._staging[: self._used], self._host[: self._used]
        if self._stream is None:
            target.copy_(source)
            return
        self._stream.wait_stream(torch.accelerator.current_stream(self._staging.device))
        with self._stream:
            target.copy_(source, non_blocking=True)
        self._stream.synchronize()
