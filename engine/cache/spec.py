"""What a kind of layer needs of the cache. Nothing looks a group up by a layer's name or assumes a block size of its own."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, TypeVar

import numpy as np
import numpy.typing as npt
import torch

Positions = TypeVar("Positions", int, npt.NDArray[np.int64])

NUM_SPARES = 2
"""Slots of recurrent layers that a sequence has beside those in its table: a step reads one and writes another, so that it can be
repeated, and so does the step that is launched before it has ended."""


@dataclass(frozen=True)
class LayerKV:
    """What one decoder layer keeps per token."""

    num_kv_heads: int
    head_dim: int
    window: int | None = None
    """Sliding window: a query at position p sees keys at p - window + 1 … p. None: all of them."""
    chunked: bool = False
    """Chunked local attention: a query sees the keys of its own chunk of `window` positions, up to itself, and none before."""
    value_dim: int | None = None
    """The values are the first so many numbers of the keys (latent attention). None: values of their own, as wide as keys."""

    def first_seen(self, position: Positions) -> Positions:
        """The earliest position that a query at `position` sees; of an array, those of all."""
        if self.window is None:
            return position * 0
        first = position - position % self.window if self.chunked else position - self.window + 1
        return first * (first > 0)


@dataclass(frozen=True)
class StatePart:
    """One tensor of a recurrent state."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        return torch.Size(self.shape).numel() * self.dtype.itemsize


@dataclass(frozen=True)
class LayerRecurrent:
    """What one layer keeps per sequence, however long that is: its recurrent state behind one position."""

    parts: tuple[StatePart, ...]
    window: ClassVar[int] = 2
    """As if it were attention to two positions: the next one starts from the state behind the one before."""

    def first_seen(self, position: Positions) -> Positions:
        """See `LayerKV.first_seen`."""
        first = position - self.window + 1
        return first * (first > 0)


LayerCache = LayerKV | LayerRecurrent

_MOST_SNAPSHOTS = 3
"""Slots of a sequence in its table: the one that is being written to and, until that has been computed, the snapshots before."""


@dataclass(frozen=True)
class KVSpec:
    """A group of layers that keep the same thing and so share block tables."""

    kind: LayerCache
    layers: tuple[int, ...]
    """Decoder-layer indices, ascending."""
    block_size: int
    """Tokens per block. Of recurrent layers a block is one slot, with the state behind the block's last position: a snapshot."""
    dtype: torch.dtype

    @property
    def is_recurrent(self) -> bool:
        return isinstance(self.kind, LayerRecurrent)

    @property
    def border(self) -> int | None:
        """Steps of a sequence end at multiples of it: at snapshots, and where chunks of local attention end."""
        if isinstance(self.kind, LayerRecurrent):
            return self.block_size
        return self.kind.window if self.kind.chunked else None

    @property
    def kv(self) -> LayerKV:
        """The kind, of layers with attention."""
        assert isinstance(self.kind, LayerKV)
        return self.kind

    @property
    def bytes_per_block(self) -> int:
        if isinstance(self.kind, LayerRecurrent):
            return len(self.layers) * sum(part.num_bytes for part in self.kind.parts)
        tensors = 2 if self.kind.value_dim is None else 1
        return tensors * len(self.layers) * self.kind.num_kv_heads * self.kind.head_dim * self.dtype.itemsize * self.block_size

    @property
    def kind_name(self) -> str:
        """For people."""
        if isinstance(self.kind, LayerRecurrent):
            return "recurrent states"
        if self.kind.chunked:
            return f"keys and values, chunks of {self.kind.window}"
        latent = "latents" if self.kind.value_dim is not None else "keys and values"
        return latent if self.kind.window is None else f"{latent}, window of {self.kind.window}"

    def blocks_for(self, num_tokens: int) -> int:
        """How many blocks a request holds at most at a time, while `num_tokens` are computed one by one."""
        if isinstance(self.kind, LayerRecurrent):
            return min(-(-num_tokens // self.block_size), _MOST_SNAPSHOTS) + NUM_SPARES
        window = self.kind.window
        if window is None:
            return -(-num_tokens // self.block_size)
        return -(-min(num_tokens, window + self.block_size) // self.block_size) + 1


def group_layers(
    layers: Sequence[LayerCache | None], block_size: int, dtype: torch.dtype, snapshot_distance: int = 1024
) -> tuple[KVSpec, ...]:
    """One group per distinct kind, in order of first appearance; a layer that keeps nothing is None.

    `snapshot_distance`: the block size of recurrent layers.
    """
    members: dict[LayerCache, list[int]] = {}
    for index, kind in enumerate(layers):
        if kind is not None:
            members.setdefault(kind, []).append(index)
    return tuple(
        KVSpec(kind, tuple(of_kind), snapshot_distance if isinstance(kind, LayerRecurrent) else block_size, dtype)
        for kind, of_kind in members.items()
    )
