"""What a decoder layer does between its matrix products: with torch's operators on any device, or with compiled kernels on a CPU."""

from typing import Protocol

import torch

from engine.models.blocks.activations import ACTIVATIONS
from engine.models.blocks.norm import Norm, RMSNorm
from engine.models.blocks.rope import RotaryAngles, rotate
from engine.native.kernels import GATES, MAX_HEAD_DIM, Kernels


class Ops(Protocol):
    """Inputs are never written; results may share memory with nothing."""

    def norm(self, norm: Norm, states: torch.Tensor) -> torch.Tensor:
        """The norm of `[rows, width]`."""

    def add_and_norm(self, hidden: torch.Tensor, delta: torch.Tensor, norm: Norm) -> tuple[torch.Tensor, torch.Tensor]:
        """`hidden + delta`, `[rows, width]`, and its norm."""

    def gate(self, activation: str, gate_up: torch.Tensor) -> torch.Tensor:
        """activation(gate) * up, `[rows, inner]`, of `[rows, 2 * inner]`: gate, then up."""

    def activate(self, activation: str, states: torch.Tensor) -> torch.Tensor:
        """activation(states)."""

    def rotate(self, states: torch.Tensor, angles: RotaryAngles | None, norm: RMSNorm | None) -> torch.Tensor:
        """Queries and keys `[rows, heads, head_dim]`, normed per head where there is a norm, then rotated where there are angles;
        contiguous.
        """


class TorchOps:
    """The reference."""

    def norm(self, norm: Norm, states: torch.Tensor) -> torch.Tensor:
        return norm(states)

    def add_and_norm(self, hidden: torch.Tensor, delta: torch.Tensor, norm: Norm) -> tuple[torch.Tensor, torch.Tensor]:
        total = hidden + delta
        return total, norm(total)

    def gate(self, activation: str, gate_up: torch.Tensor) -> torch.Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return ACTIVATIONS[activation](gate).mul_(up)

    def activate(self, activation: str, states: torch.Tensor) -> torch.Tensor:
        return ACTIVATIONS[activation](states)

    def rotate(self, states: torch.Tensor, angles: RotaryAngles | None, norm: RMSNorm | None) -> torch.Tensor:
        normed = states if norm is None else norm(states)
        return normed.contiguous() if angles is None else rotate(normed, angles)


class NativeOps(TorchOps):
    """One pass over memory each; what the kernels don't cover is left to torch."""

    def __init__(self, kernels: Kernels) -> None:
        self._kernels = kernels

    def norm(self, norm: Norm, states: torch.Tensor) -> torch.Tensor:
        return self._kernels.rms_norm(states, norm.weight, norm.eps) if isinstance(norm, RMSNorm) else super().norm(norm, states)

    def add_and_norm(self, hidden: torch.Tensor, delta: torch.Tensor, norm: Norm) -> tuple[torch.Tensor, torch.Tensor]:
        if not isinstance(norm, RMSNorm):
            return super().add_and_norm(hidden, delta, norm)
        return self._kernels.add_and_rms_norm(hidden, delta, norm.weight, norm.eps)

    def gate(self, activation: str, gate_up: torch.Tensor) -> torch.Tensor:
        return self._kernels.gate(activation, gate_up) if activation in GATES else super().gate(activation, gate_up)

    def rotate(self, states: torch.Tensor, angles: RotaryAngles | None, norm: RMSNorm | None) -> torch.Tensor:
        if angles is None or states.shape[-1] > MAX_HEAD_DIM:
            return super().rotate(states, angles, norm)
        weight, eps = (None, 0.0) if norm is None else (norm.weight, norm.eps)
        return self._kernels.rotate(states, *angles, weight, eps)
