"""The first half of a decoder layer: what rows take from those before them."""

from typing import Protocol

import torch

from engine.cache.spec import LayerCache
from engine.models.base import AttentionOptions, ForwardBatch
from engine.models.blocks.linear import Linear
from engine.models.blocks.ops import Ops
from engine.models.blocks.rope import RotaryAngles


class Mixer(Protocol):
    """Of one layer. Its output is a product of its own, since it is computed for those rows only that are wanted of the layer."""

    @property
    def cache(self) -> LayerCache:
        """What the layer keeps."""

    @property
    def options(self) -> AttentionOptions | None:
        """None: it isn't attention."""

    @property
    def recordable(self) -> bool:
        """Whether a CUDA graph can hold it."""

    @property
    def output(self) -> Linear:
        """`[rows, width]` of what `mix` returns."""

    def mix(self, layer: int, ops: Ops, normed: torch.Tensor, angles: RotaryAngles | None, batch: ForwardBatch) -> torch.Tensor:
        """What the layer's heads give, `[rows, …]`, of normed rows `[rows, width]`, which aren't written."""
