"""The memory of groups of layers, with the pool that hands it out in blocks."""

import torch

from engine.cache.pool import BlockPool, IntArray
from engine.cache.spec import KVSpec, LayerKV, LayerRecurrent


class CacheGroup:
    """Tensors `[layers, blocks, …]` of layers of one kind."""

    def __init__(self, spec: KVSpec, num_blocks: int, tensors: list[torch.Tensor], *, poison: bool) -> None:
        self.spec = spec
        self._poisons = poison
        self.pool = BlockPool(num_blocks, self.poison)
        self.tensors = tensors
        if poison:
            for tensor in tensors:
                tensor.fill_(torch.nan)

    def touch(self) -> None:
        """Has the system hand over all the memory now."""
        for tensor in self.tensors:
            tensor.zero_()

    def first_needed_block(self, position: int) -> int:
        """The first block that a query at `position` can see."""
        return self.spec.kind.first_seen(position) // self.spec.block_size

    def poison(self, blocks: IntArray) -> None:
        """What the blocks hold is dead: NaN from now on, in tests, so that a read of it can't go unnoticed."""
        if self._poisons:
            for tensor in self.tensors:
                tensor[:, torch.from_numpy(blocks)] = torch.nan


class KVGroup(CacheGroup):
    """Keys and values: `[layers, blocks, block_size, kv_heads, head_dim]` each; values may be part of keys."""

    def __init__(self, spec: KVSpec, num_blocks: int, device: torch.device, *, poison: bool = False) -> None:
        kind = spec.kind
        assert isinstance(kind, LayerKV)
        shape = (len(spec.layers), num_blocks, spec.block_size, kind.num_kv_heads, kind.head_dim)
        # Left undefined: filling would touch all the memory at start, and nothing is read that wasn't written.
        self.keys = torch.empty(shape, dtype=spec.dtype, device=device)
        self.values = torch.empty_like(self.keys) if kind.value_dim is None else self.keys[..., : kind.value_dim]
        super().__init__(spec, num_blocks, [self.keys] if kind.value_dim is not None else [self.keys, self.values], poison=poison)


class RecurrentGroup(CacheGroup):
    """Recurrent states: per part `[layers, slots, …]`. A block is a slot; none is padded to another group's size."""

    def __init__(self, spec: KVSpec, num_slots: int, device: torch.device, *, poison: bool = False) -> None:
        kind = spec.kind
        assert isinstance(kind, LayerRecurrent)
        parts = [torch.empty(len(spec.layers), num_slots, *part.shape, dtype=part.dtype, device=device) for part in kind.parts]
        super().__init__(spec, num_slots, parts, poison=poison)


def make_group(spec: KVSpec, num_blocks: int, device: torch.device, *, poison: bool = False) -> CacheGroup:
    """The null block is counted."""
    return (RecurrentGroup if spec.is_recurrent else KVGroup)(spec, num_blocks, device, poison=poison)
