"""Products of rows with a weight: torch's, or oneDNN's with weights that were packed for its kernels when the model was loaded."""

import time
from functools import lru_cache
from typing import Protocol

import torch
from torch.nn.functional import linear, pad

from engine.config import Switch
from engine.errors import ConfigError

_PACKED_DTYPES = (torch.float32, torch.bfloat16)
_TRIED_SHAPE = (1536, 768)
_TRIED_ROWS = (16, 256)
_TRIES = 5
_MOST_PADDED_ROWS = 64
_FEW_ROWS = 16
"""MKL adds up one input after the other for 1 to 3 rows, also where a thread gets so few of them: 7 rows are 4 and 3."""
_MOST_BLOCK_BYTES = 64 << 20
"""Of the sums by block; only products too large for a CPU are computed without blocks for it."""
_BLOCK_INPUTS = 192
"""About as many as MKL adds up in one go where there are more rows."""
_WORTH_IT = 1.1
"""Both ways are as good where they differ by less: then torch's, which needs no second copy of a tied head."""


class Linear(Protocol):
    """A weight `[outputs, inputs]`, and a bias or none."""

    def __call__(self, states: torch.Tensor) -> torch.Tensor:
        """`[rows, outputs]` of `[rows, inputs]`: states W^T + bias."""


class Linears(Protocol):
    """Makes the products of one model."""

    def empty(self, outputs: int, inputs: int) -> torch.Tensor:
        """A weight to be filled, `[outputs, inputs]`."""

    def of(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> Linear:
        """The product with a weight from `empty`, or with any other one."""


class DenseLinear:
    """The weight is used as it lies."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        self.weight = weight
        self.bias = bias
        self._blocks = _blocks_of_inputs(weight)
        num_blocks = 1 if self._blocks is None else len(self._blocks)
        self._most_rows = min(_FEW_ROWS, _MOST_BLOCK_BYTES // (4 * num_blocks * weight.shape[0]))

    def __call__(self, states: torch.Tensor) -> torch.Tensor:
        if self._blocks is not None and 0 < states.shape[0] <= self._most_rows:
            return self._summed_by_blocks(states, self._blocks)
        return linear(states, self.weight, self.bias)

    def _summed_by_blocks(self, states: torch.Tensor, blocks: torch.Tensor) -> torch.Tensor:
        """The rounding is that of products of many rows, and it is no slower than they are: up to twice as fast with 4,096 inputs."""
        product = torch.bmm(states.view(len(states), *blocks.shape[:2]).transpose(0, 1), blocks).sum(0)
        return product if self.bias is None else product.add_(self.bias)


def _blocks_of_inputs(weight: torch.Tensor) -> torch.Tensor | None:
    """`[blocks, inputs per block, outputs]`, a view of a weight whose inputs are first in memory. None for others, for inputs that have
    no divisor of a useful size, and where there is but one block."""
    outputs, inputs = weight.shape
    if weight.dtype != torch.float32 or weight.device.type != "cpu" or not weight.t().is_contiguous():
        return None
    size = next((size for size in range(_BLOCK_INPUTS, _BLOCK_INPUTS // 4, -1) if inputs % size == 0), inputs)
    return weight.t().view(inputs // size, size, outputs) if size < inputs else None


class DenseLinears:
    """torch's products, on any device."""

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        self._dtype = dtype
        self._device = device

    def empty(self, outputs: int, inputs: int) -> torch.Tensor:
        if self._dtype == torch.float32 and self._device.type == "cpu":
            # Inputs first in memory: for steps of up to about 128 rows the product is a tenth faster, for others the same.
            return torch.empty(inputs, outputs, dtype=self._dtype).t()
        return torch.empty(outputs, inputs, dtype=self._dtype, device=self._device)

    def of(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> DenseLinear:
        return DenseLinear(weight, bias)


class PackedLinear:
    """The weight lies in blocks, as oneDNN's kernels read it; nothing else can read it."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        self._outputs = weight.shape[0]
        self._weight = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous())
        self._bias = bias

    def __call__(self, states: torch.Tensor) -> torch.Tensor:
        rows = states.shape[0]
        if not rows:  # oneDNN has no product over nothing
            return states.new_empty(0, self._outputs)
        if _compiled_rows(rows) > rows:
            states = pad(states, (0, 0, 0, _compiled_rows(rows) - rows))
        product: torch.Tensor = torch.ops.mkldnn._linear_pointwise(states, self._weight, self._bias, "none", [], "")
        return product[:rows]


def _compiled_rows(rows: int) -> int:
    """A product is compiled for each number of rows, which takes milliseconds and memory, so while text is generated there are few of
    them: 1, 2, 4 and multiples of 8. Up to there the weights' way from memory is what costs. Prompts are computed as they are."""
    if rows > _MOST_PADDED_ROWS:
        return rows
    return -(-rows // 8) * 8 if rows > 4 else 1 << (rows - 1).bit_length()


class PackedLinears:
    """oneDNN's products on a CPU. Raises `ConfigError` where this build of torch has none for the dtype, or wrong ones."""

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype
        if dtype not in _PACKED_DTYPES:
            raise ConfigError(f"there are no packed weights in {str(dtype).removeprefix('torch.')}")
        _check(dtype)

    def empty(self, outputs: int, inputs: int) -> torch.Tensor:
        return torch.empty(outputs, inputs, dtype=self._dtype)

    def of(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> PackedLinear:
        return PackedLinear(weight, bias)


@torch.inference_mode()
def choose_linears(switch: Switch, dtype: torch.dtype, device: torch.device) -> tuple[Linears, str]:
    """The products to use, and why. "auto" times both ways, since each library has processors that it knows badly.

    MKL, which torch calls for float32, takes 256-bit vectors on processors of other makers than Intel, whatever they have.
    """
    dense = DenseLinears(dtype, device)
    if device.type != "cpu":
        if switch == "on":
            raise ConfigError("packed weights are for a CPU")
        return dense, f"not needed on {device.type}"
    if switch == "off":
        return dense, "off"
    try:
        packed = PackedLinears(dtype)
    except ConfigError as error:
        if switch == "on":
            raise
        return dense, str(error)
    if switch == "on":
        return packed, "on"
    gain = packed_gain(dtype, torch.get_num_threads())
    says = f"{gain:.2f} times as fast on this processor"
    return (packed, f"on: {says}") if gain >= _WORTH_IT else (dense, f"off: {says}")


def _check(dtype: torch.dtype) -> None:
    """The operators are not part of torch's documented interface, so they show here that they are there and right."""
    weight, states = torch.linspace(-1, 1, 48 * 80).view(48, 80).to(dtype), torch.linspace(1, -2, 7 * 80).view(7, 80).to(dtype)
    bias = torch.linspace(-3, 3, 48).to(dtype)
    try:
        found = PackedLinear(weight, bias)(states)
    except (AttributeError, RuntimeError) as error:
        reason, _, _ = str(error).partition("\n")
        raise ConfigError(f"torch can't pack weights here: {reason}") from error
    expected = linear(states.double(), weight.double(), bias.double())
    if not torch.allclose(found.double(), expected, rtol=4 * torch.finfo(dtype).eps, atol=1e-3):
        raise ConfigError("torch's products with packed weights are wrong here")


@lru_cache
def packed_gain(dtype: torch.dtype, num_threads: int) -> float:
    """How many times as long products take with torch's weights as they do with packed ones, few rows and many together.

    Measured once per process; `num_threads` is what torch is set to.
    """
    weight = DenseLinears(dtype, torch.device("cpu")).empty(*_TRIED_SHAPE).normal_()
    ways: tuple[Linear, ...] = (DenseLinear(weight), PackedLinear(weight))
    dense, packed = (sum(_best_seconds(way, torch.ones(rows, _TRIED_SHAPE[1], dtype=dtype)) for rows in _TRIED_ROWS) for way in ways)
    return dense / packed


def _best_seconds(product: Linear, states: torch.Tensor) -> float:
    product(states)  # compiles, for this number of rows
    seconds = []
    for _ in range(_TRIES):
        started = time.perf_counter()
        product(states)
        seconds.append(time.perf_counter() - started)
    return min(seconds)
