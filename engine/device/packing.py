"""Several arrays in one piece of memory, so that one transfer takes them all."""

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

Array = npt.NDArray[Any]

_ALIGNMENT = 64
_DTYPES = {
    np.dtype(np.int32): torch.int32,
    np.dtype(np.int64): torch.int64,
    np.dtype(np.float32): torch.float32,
    np.dtype(np.float64): torch.float64,
}


class Packing:
    """Where each of some arrays (of the dtypes above) lies."""

    def __init__(self, arrays: Sequence[Array]) -> None:
        self._arrays = arrays
        *self._offsets, self.num_bytes = accumulate((-(-array.nbytes // _ALIGNMENT) * _ALIGNMENT for array in arrays), initial=0)

    def write(self, host: torch.Tensor) -> None:
        """Puts the arrays into memory of the host, `[bytes]` uint8."""
        memory = host.numpy()
        for array, offset in zip(self._arrays, self._offsets, strict=True):
            memory[offset : offset + array.nbytes] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)

    def views(self, sent: torch.Tensor) -> list[torch.Tensor]:
        """The arrays in a copy of that memory."""
        return [
            sent[offset : offset + array.nbytes].view(_DTYPES[array.dtype]).view(array.shape)
            for array, offset in zip(self._arrays, self._offsets, strict=True)
        ]


def arrays_to_device(arrays: Sequence[Array], device: torch.device) -> list[torch.Tensor]:
    """Copies on the device, by one transfer that the host doesn't wait for; views on a CPU."""
    if device.type == "cpu":
        return [torch.from_numpy(array) for array in arrays]
    packing = Packing(arrays)
    host = torch.empty(packing.num_bytes, dtype=torch.uint8, pin_memory=True)
    packing.write(host)
    return packing.views(host.to(device, non_blocking=True))
