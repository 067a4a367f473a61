"""A step's index arrays on their way to the device: one transfer, into memory that stays."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from engine.device.packing import Packing


class Fence:
    """Lets the host wait for what the device was given so far on its current stream; nothing to wait for on a CPU."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._event: torch.Event | None = None

    def record(self) -> None:
        if self._device.type == "cuda":
            self._event = self._event or torch.Event(self._device)
            self._event.record(torch.accelerator.current_stream(self._device))

    def wait(self) -> None:
        if self._event is not None:
            self._event.synchronize()


class StepBuffer:
    """Pinned memory on the host and its copy on the device. Both grow to the most that was asked for, and never shrink.

    Arrays of the same shapes come to the same addresses again, so a captured graph can be given new contents.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._host, self._sent = (torch.empty(0, dtype=torch.uint8) for _ in range(2))
        self._fence = Fence(device)

    def send(self, arrays: Sequence[npt.NDArray[Any]]) -> list[torch.Tensor]:
        """Copies of the arrays (int32 or int64) on the device. What an earlier call returned is overwritten, in stream order."""
        packing = Packing(arrays)
        self._reserve(packing.num_bytes)
        packing.write(self._host)
        self._sent[: packing.num_bytes].copy_(self._host[: packing.num_bytes], non_blocking=True)
        self._fence.record()
        return packing.views(self._sent)

    def _reserve(self, num_bytes: int) -> None:
        self._fence.wait()  # the transfer before may still be reading
        if self._host.numel() < num_bytes:
            size = 1 << (num_bytes - 1).bit_length()
            with torch.inference_mode(False):  # usable in and out of inference mode
                self._host = torch.empty(size, dtype=torch.uint8, pin_memory=self.device.type == "cuda")
                self._sent = torch.empty(size, dtype=torch.uint8, device=self.device)


class StaticArray:
    """A long int32 array at a fixed address on the device; an update transfers only what has changed."""

    def __init__(self, size: int, device: torch.device) -> None:
        with torch.inference_mode(False):  # usable in and out of inference mode
            self._host = torch.zeros(size, dtype=torch.int32, pin_memory=device.type == "cuda")
            self._sent = torch.zeros(size, dtype=torch.int32, device=device)
        self._fence = Fence(device)

    def update(self, array: npt.NDArray[np.int32]) -> torch.Tensor:
        """The leading elements on the device, in the shape of `array`, after a transfer from the first to the last that differs.

        What stands behind them is left as it was. What an earlier call returned is overwritten, in stream order.
        """
        flat = array.reshape(-1)
        differs = flat != self._host.numpy()[: flat.size]
        if differs.any():
            self._send(flat, int(differs.argmax()), flat.size - int(differs[::-1].argmax()))
        return self._sent[: flat.size].view(array.shape)

    def _send(self, flat: npt.NDArray[np.int32], first: int, end: int) -> None:
        self._fence.wait()  # the transfer before may still be reading
        self._host.numpy()[first:end] = flat[first:end]
        self._sent[first:end].copy_(self._host[first:end], non_blocking=True)
        self._fence.record()
