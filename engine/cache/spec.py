"""What a kind of layer needs of the KV cache. Nothing looks a group up by a layer's name or assumes a block size of its own."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class LayerKV:
    """What one decoder layer keeps per token."""

    num_kv_heads: int
    head_dim: int
    window: int | None = None
    """Sliding window: a query at position p sees keys at p - window + 1 … p. None: all of them."""
    value_dim: int | None = None
    """The values are the first so many numbers of the keys (latent attention). None: values of their own, as wide as keys."""


@dataclass(frozen=True)
class KVSpec:
    """A group of layers that keep the same thing and so share block tables."""

    kind: LayerKV
    layers: tuple[int, ...]
    """Decoder-layer indices, ascending."""
    block_size: int
    """Tokens per block."""
    dtype: torch.dtype

    @property
    def bytes_per_token(self) -> int:
        tensors = 2 if self.kind.value_dim is None else 1
        return tensors * len(self.layers) * self.kind.num_kv_heads * self.kind.head_dim * self.dtype.itemsize

    @property
    def bytes_per_block(self) -> int:
        return self.bytes_per_token * self.block_size

    def blocks_for(self, num_tokens: int) -> int:
        """How many blocks a request holds at most at a time, while `num_tokens` are computed one by one."""
        window = self.kind.window
        if window is None:
            return -(-num_tokens // self.block_size)
        return -(-min(num_tokens, window + self.block_size) // self.block_size) + 1


def group_layers(layers: list[LayerKV], block_size: int, dtype: torch.dtype) -> tuple[KVSpec, ...]:
    """One group per distinct kind, in order of first appearance."""
    kinds = dict.fromkeys(layers)
    return tuple(KVSpec(kind, tuple(i for i, layer in enumerate(layers) if layer == kind), block_size, dtype) for kind in kinds)
