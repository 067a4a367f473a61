"""Activations by the names that configurations give them."""

from collections.abc import Callable, Mapping

import torch
from torch.nn.functional import gelu, relu, silu


def _gelu_tanh(states: torch.Tensor) -> torch.Tensor:
    return gelu(states, approximate="tanh")


def _relu_squared(states: torch.Tensor) -> torch.Tensor:
    return relu(states).square_()


ACTIVATIONS: Mapping[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": silu,
    "swish": silu,
    "gelu": gelu,
    "gelu_pytorch_tanh": _gelu_tanh,
    "relu": relu,
    "relu2": _relu_squared,
}
