"""The second half of a decoder layer: what a row becomes by itself."""

import sys
from dataclasses import dataclass
from typing import Protocol

import torch

from engine.models.blocks.decoder_config import DecoderConfig
from engine.models.blocks.linear import Linear
from engine.models.blocks.ops import Ops
from engine.models.blocks.reader import WeightReader

_ROWS_ON_CPU = 256
"""What lies between the products, several times as wide as a row, stays in the caches."""


class MLP(Protocol):
    """Of one layer."""

    @property
    def rows_at_once(self) -> int:
        """So many rows are best computed together."""

    @property
    def recordable(self) -> bool:
        """Whether a CUDA graph can hold it."""

    def __call__(self, ops: Ops, normed: torch.Tensor) -> torch.Tensor:
        """`[rows, width]` of normed rows `[rows, width]`, which aren't written."""


@dataclass(frozen=True, slots=True)
class GatedMLP:
    """down(activation(gate(x)) * up(x)), as in Llama."""

    activation: str
    gate_up: Linear  # [2 * intermediate, width]
    down: Linear  # [width, intermediate]
    rows_at_once: int = sys.maxsize
    recordable: bool = True

    def __call__(self, ops: Ops, normed: torch.Tensor) -> torch.Tensor:
        return self.down(ops.gate(self.activation, self.gate_up(normed)))


@dataclass(frozen=True, slots=True)
class PlainMLP:
    """down(activation(up(x))), as in StarCoder 2."""

    activation: str
    up: Linear  # [intermediate, width]
    down: Linear  # [width, intermediate]
    rows_at_once: int = sys.maxsize
    recordable: bool = True

    def __call__(self, ops: Ops, normed: torch.Tensor) -> torch.Tensor:
        return self.down(ops.activate(self.activation, self.up(normed)))


def read_mlp(reader: WeightReader, config: DecoderConfig, prefix: str, intermediate_size: int) -> MLP:
    """The one whose modules begin with `prefix`."""
    names, width, bias = config.mlp, config.model.hidden_size, config.mlp_bias
    rows = _ROWS_ON_CPU if reader.device.type == "cpu" else sys.maxsize
    down = reader.linear([f"{prefix}.{names.down}"], [width], intermediate_size, bias=bias)
    if names.gate is None:
        up = reader.linear([f"{prefix}.{names.up}"], [intermediate_size], width, bias=bias)
        return PlainMLP(config.activation, up, down, rows)
    modules = reader.stored([f"{prefix}.{names.gate}", f"{prefix}.{names.up}"], f"{prefix}.{names.fused}")
    gate_up = reader.linear(modules, [intermediate_size, intermediate_size], width, bias=bias)
    return GatedMLP(config.activation, gate_up, down, rows)
