"""The second half of a decoder layer: what a row becomes by itself."""

from dataclasses import dataclass
from typing import Protocol

import torch

from engine.models.blocks.linear import Linear
from engine.models.blocks.ops import Ops


class MLP(Protocol):
    """Of one layer."""

    def __call__(self, ops: Ops, normed: torch.Tensor) -> torch.Tensor:
        """`[rows, width]` of normed rows `[rows, width]`, which aren't written."""


@dataclass(frozen=True, slots=True)
class GatedMLP:
    """down(activation(gate(x)) * up(x)), as in Llama."""

    activation: str
    gate_up: Linear  # [2 * intermediate, width]
    down: Linear  # [width, intermediate]

    def __call__(self, ops: Ops, normed: torch.Tensor) -> torch.Tensor:
        return self.down(ops.gate(self.activation, self.gate_up(normed)))


@dataclass(frozen=True, slots=True)
class PlainMLP:
    """down(activation(up(x))), as in StarCoder 2."""

    activation: str
    up: Linear  # [intermediate, width]
    down: Linear  # [width, intermediate]

    def __call__(self, ops: Ops, normed: torch.Tensor) -> torch.Tensor:
        return self.down(ops.activate(self.activation, self.up(normed)))
