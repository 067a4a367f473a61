"""Norms as transformers computes them: statistics in float32 whatever the model's dtype."""

import torch
from torch.nn.functional import layer_norm


class RMSNorm:
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension.

    `weight` is `[width]`, or `[heads, width]` where each head has its own. A weight in the model's dtype is applied after the
    rounding to that dtype (Llama); a float32 weight before it (Gemma). In a float32 model both are the same.
    """

    __slots__ = ("eps", "inverse_width", "weight")

    def __init__(self, weight: torch.Tensor, eps: float) -> None:
        self.weight = weight
        self.eps = eps
        self.inverse_width = 1.0 / weight.shape[-1]

    def __call__(self, states: torch.Tensor) -> torch.Tensor:
        # In place wherever possible: fresh memory costs more than the arithmetic on a CPU.
        wide = states.float()
        scale: torch.Tensor = torch.linalg.vector_norm(wide, dim=-1, keepdim=True)
        scale.square_().mul_(self.inverse_width).add_(self.eps).rsqrt_()
        normed = wide * scale
        if self.weight.dtype == torch.float32:
            return normed.mul_(self.weight).to(states.dtype)
        return normed.to(states.dtype).mul_(self.weight)


class LayerNorm:
    """(x - mean(x)) / sqrt(var(x) + eps) * weight + bias over the last dimension, all in float32; the bias may be absent."""

    __slots__ = ("bias", "eps", "weight")

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None, eps: float) -> None:
        self.weight = weight.float()  # [width]
        self.bias = None if bias is None else bias.float()
        self.eps = eps

    def __call__(self, states: torch.Tensor) -> torch.Tensor:
        return layer_norm(states.float(), self.weight.shape, self.weight, self.bias, self.eps).to(states.dtype)


Norm = RMSNorm | LayerNorm
