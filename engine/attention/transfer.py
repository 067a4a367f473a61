"""A step's index arrays on their way to the device: one transfer, into memory that stays."""

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

_ALIGNMENT = 64
_DTYPES = {np.dtype(np.int32): torch.int32, np.dtype(np.int64): torch.int64}


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
        self._device = device
        self._host, self._sent = (torch.empty(0, dtype=torch.uint8) for _ in range(2))
        self._fence = Fence(device)

    def send(self, arrays: Sequence[npt.NDArray[Any]]) -> list[torch.Tensor]:
        """Copies of the arrays (int32 or int64) on the device. What an earlier call returned is overwritten, in stream order."""
        offsets = list(accumulate((-(-array.nbytes // _ALIGNMENT) * _ALIGNMENT for array in arrays), initial=0))
        self._reserve(offsets[-1])
        host = self._host.numpy()
        for array, offset in zip(arrays, offsets, strict=False):
            host[offset : offset + array.nbytes] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        self._sent[: offsets[-1]].copy_(self._host[: offsets[-1]], non_blocking=True)
        self._fence.record()
        return [self._view(array, offset) for array, offset in zip(arrays, offsets, strict=False)]

    def _reserve(self, num_bytes: int) -> None:
        self._fence.wait()  # the transfer before may still be reading
        if self._host.numel() < num_bytes:
            size = 1 << (num_bytes - 1).bit_length()
            with torch.inference_mode(False):  # usable in and out of inference mode
                self._host = torch.empty(size, dtype=torch.uint8, pin_memory=self._device.type == "cuda")
                self._sent = torch.empty(size, dtype=torch.uint8, device=self._device)

    def _view(self, array: npt.NDArray[Any], offset: int) -> torch.Tensor:
        return self._sent[offset : offset + array.nbytes].view(_DTYPES[array.dtype]).view(array.shape)
