"""Reads a checkpoint's tensors into what the blocks of a decoder compute with."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from engine.models.blocks.decoder_config import DecoderConfig
from engine.models.blocks.linear import Linear, Linears
from engine.models.blocks.norm import LayerNorm, Norm, RMSNorm
from engine.models.checkpoints.checkpoint import Checkpoint


@dataclass(frozen=True)
class HeadOrder:
    """The order in which the dimensions of heads are computed with, where it isn't the one in which they are stored."""

    order: Sequence[int]
    """Of one head: the stored dimension for each place."""
    num_heads: int
    """So many side by side; what comes after them stays as it is."""

    def apply(self, heads: torch.Tensor) -> None:
        """In place: `[heads * head_dim + …, …]`, one head after the other."""
        size = len(self.order)
        for first in range(0, self.num_heads * size, size):
            heads[first : first + size] = heads[first : first + size][list(self.order)]


class WeightReader:
    """Fills tensors of one dtype on one device. Names are canonical ones; errors are `ModelError`s of the checkpoint.

    Every fused tensor is made empty and filled part by part, so at no time is there a second copy of more than a chunk, or of one
    matrix where it is packed.
    """

    def __init__(self, checkpoint: Checkpoint, linears: Linears, *, dtype: torch.dtype, device: torch.device) -> None:
        self.dtype = dtype
        self._checkpoint = checkpoint
        self._linears = linears
        self.device = device

    def __contains__(self, name: str) -> bool:
        return name in self._checkpoint

    def tensor(
        self, shape: tuple[int, ...], names: Sequence[str], heights: Sequence[int] | None = None, dtype: torch.dtype | None = None
    ) -> torch.Tensor:
        """Stored tensors stacked along the first dimension; `heights` of each, where there are several. `dtype`: the model's where None."""
        return self.fill(torch.empty(shape, dtype=dtype or self.dtype, device=self.device), names, heights)

    def linear(
        self, modules: Sequence[str], heights: Sequence[int], width: int, *, bias: bool = False, order: HeadOrder | None = None
    ) -> Linear:
        """Modules side by side, as one product of rows `[rows, width]`. Its first outputs are heads that `order` puts in order."""
        heights = heights if len(modules) > 1 else [sum(heights)]
        weight = self.fill(self._linears.empty(sum(heights), width), [f"{module}.weight" for module in modules], heights)
        biases = self.tensor((sum(heights),), [f"{module}.bias" for module in modules], heights) if bias else None
        if order is not None:
            for part in [weight] if biases is None else [weight, biases]:
                order.apply(part)
        return self._linears.of(weight, biases)

    def stored(self, modules: list[str], fused: str) -> list[str]:
        """The modules as they are stored: one by one, or side by side under one name, as some exporters write them."""
        return [fused] if f"{fused}.weight" in self._checkpoint and f"{modules[0]}.weight" not in self._checkpoint else modules

    def fill(self, target: torch.Tensor, names: Sequence[str], heights: Sequence[int] | None) -> torch.Tensor:
        """As `tensor`, into one that is there."""
        parts = target.split_with_sizes(list(heights)) if heights is not None else [target]
        for name, part in zip(names, parts, strict=True):
            self._checkpoint.copy(name, part)
        return target

    def fill_each(self, targets: Sequence[torch.Tensor], name: str) -> None:
        """A stored tensor's parts along the first dimension, one into each of the targets."""
        self._checkpoint.copy_parts(name, targets)


def read_norm(reader: WeightReader, config: DecoderConfig, module: str) -> Norm:
    """Of the residual stream."""
    width = config.model.hidden_size
    weight = read_norm_weight(reader, config, module, width)
    if not config.layer_norm:
        return RMSNorm(weight, config.norm_eps)
    return LayerNorm(weight, reader.tensor((width,), [f"{module}.bias"]) if config.norm_bias else None, config.norm_eps)


def read_norm_weight(reader: WeightReader, config: DecoderConfig, module: str, width: int) -> torch.Tensor:
    """`[width]`; in float32 where it is applied in float32, and where one is added: 1 + w would lose its last bits otherwise."""
    weight = reader.tensor((width,), [f"{module}.weight"])
    if config.norm_adds_one:
        return weight.float().add_(1.0)
    return weight.float() if config.norm_in_float32 else weight
