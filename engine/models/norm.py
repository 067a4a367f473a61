"""RMSNorm as transformers computes it: statistics and product in float32 whatever the model's dtype."""

import torch


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
