"""From pages of the compute dtype to rows as they lie in the file."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from engine.errors import SaveError
from engine.layers import LayerId
from engine.saves.chunk import RowChunk
from engine.saves.selection import IntArray
from engine.saves.spec import SaveDtype

STORED_TYPES: dict[SaveDtype, torch.dtype] = {
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "float8_e4m3fn": torch.float8_e4m3fn,
}
FLOAT8_MAX = 448.0
SMALLEST_SCALE = 1e-12


@dataclass
class Scratch:
    """Buffers that one writer thread uses again and again; they grow to the largest request and are bounded by it."""

    _buffers: dict[str, torch.Tensor] = field(default_factory=dict)

    def tensor(self, use: str, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """An uninitialised tensor that is valid until the next call with the same `use`."""
        size = int(np.prod(shape)) * dtype.itemsize
        buffer = self._buffers.get(use)
        if buffer is None or buffer.numel() < size:
            buffer = self._buffers[use] = torch.empty(size, dtype=torch.uint8)
        return buffer[:size].view(dtype).view(*shape)


def gather(pages: torch.Tensor, chunk: RowChunk, positions: IntArray, scratch: Scratch) -> torch.Tensor:
    """The chunk's rows of these positions, layers interleaved: `[positions, layers, width]` in the compute dtype.

    `pages` is `[num_pages, page_size, width]`. One indexed copy that reads nothing but the rows asked for.
    """
    page_size, width = pages.shape[1:]
    slots = chunk.slots(positions, page_size)  # [positions, layers]
    gathered = scratch.tensor("gathered", (slots.size, width), pages.dtype)
    torch.index_select(pages.view(-1, width), 0, torch.from_numpy(slots.reshape(-1)), out=gathered)
    return gathered.view(*slots.shape, width)


def to_stored(
    rows: torch.Tensor, dtype: SaveDtype, locate: Callable[[int, int], str], scratch: Scratch
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """`[rows, layers, width]` in the dtype on disk, and the scales `[rows]` (float32) of float8, else None.

    `locate(row, layer)` names a place for messages. Raises `SaveError`: "non_finite", or "out_of_range" for what `dtype` can't hold.
    """
    if dtype == "float8_e4m3fn":
        return to_float8(rows, locate, scratch)
    stored_type = STORED_TYPES[dtype]
    stored = rows
    if rows.dtype != stored_type:
        stored = scratch.tensor("stored", rows.shape, stored_type).copy_(rows)
    # Whatever is not finite stays so in every dtype, so one look at the result covers both kinds of failure.
    if not is_finite(stored):
        raise _value_error(rows, stored, dtype, locate)
    return stored, None


def to_float8(rows: torch.Tensor, locate: Callable[[int, int], str], scratch: Scratch) -> tuple[torch.Tensor, torch.Tensor]:
    """One scale per token over all its layers: the largest magnitude / 448, at least 1e-12, as hs-connectors' float8 files have it."""
    largest = rows.abs().amax(dim=(1, 2)).to(torch.float32)  # [rows]
    if not is_finite(largest):
        raise _value_error(rows, rows, "float8_e4m3fn", locate)
    scales = (largest / FLOAT8_MAX).clamp_(min=SMALLEST_SCALE)
    scaled = torch.div(rows, scales.view(-1, 1, 1), out=scratch.tensor("scaled", rows.shape, torch.float32))
    return scratch.tensor("stored", rows.shape, torch.float8_e4m3fn).copy_(scaled), scales


def is_finite(values: torch.Tensor) -> bool:
    """A reduction that makes no second tensor. NaN survives it: `aminmax` hands one on."""
    if values.numel() == 0:
        return True
    low, high = torch.aminmax(values)
    return bool(torch.isfinite(low)) and bool(torch.isfinite(high))


def _value_error(rows: torch.Tensor, stored: torch.Tensor, dtype: SaveDtype, locate: Callable[[int, int], str]) -> SaveError:
    """The slow search for the first bad value, once it is known that there is one."""
    bad = ~torch.isfinite(rows)
    if bad.any():
        row, layer, column = bad.nonzero()[0].tolist()
        return SaveError("non_finite", f"the hidden state of {locate(row, layer)} holds {rows[row, layer, column].item()}")
    row, layer, column = (~torch.isfinite(stored)).nonzero()[0].tolist()
    value, limit = rows[row, layer, column].item(), torch.finfo(STORED_TYPES[dtype]).max
    advice = "float32" if dtype == "bfloat16" else "bfloat16 or float32"
    message = f"the hidden state of {locate(row, layer)} holds {value:g}, beyond {limit:g}, the largest {dtype}; ask for {advice}"
    return SaveError("out_of_range", message)


@dataclass
class RunningMean:
    """Mean over all rows, accumulated in float32."""

    total: torch.Tensor  # [layers, width] float32
    count: int = 0

    @classmethod
    def zeros(cls, num_layers: int, width: int) -> "RunningMean":
        return cls(torch.zeros(num_layers, width))

    def add(self, rows: torch.Tensor, locate: Callable[[int, int], str]) -> None:
        """`rows` is `[rows, layers, width]`. Raises `SaveError` for values or sums that are not finite."""
        self.total += rows.sum(dim=0, dtype=torch.float32)
        self.count += len(rows)
        # A sum is finite only where everything in it is.
        if is_finite(self.total):
            return
        if not is_finite(rows):
            raise _value_error(rows, rows, "float32", locate)
        raise SaveError("out_of_range", "the sum over the hidden states is beyond the largest float32, so there is no mean")

    def row(self) -> torch.Tensor:
        """`[1, layers, width]` float32."""
        if self.count == 0:
            raise SaveError("out_of_range", "no position was kept, so there is no mean")
        return (self.total / self.count).unsqueeze(0)


def layer_and_position(layers: Sequence[LayerId], positions: IntArray) -> Callable[[int, int], str]:
    """Names places in the rows of these positions."""
    return lambda row, layer: f"layer {layers[layer]}, position {positions[row]}"


def layer_of_mean(layers: Sequence[LayerId]) -> Callable[[int, int], str]:
    return lambda _row, layer: f"layer {layers[layer]}, mean over the positions"
