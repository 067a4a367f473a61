"""What backends with kernels that read pages have in common: writing keys and values, narrowing, and buffers for captured graphs."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from engine.attention.facade import AttentionNeeds, FixedShape, GroupPlan, SequencePlan
from engine.attention.pages import GroupPages, StepRows, find_pages
from engine.models.base import AttentionOptions


def device_refusal(needs: AttentionNeeds) -> str | None:
    """Why such a backend can't run on the device and in the dtype, None where it can."""
    if needs.capability is None:
        return "it needs a CUDA device"
    if needs.capability < (8, 0):
        return f"it needs compute capability 8.0, this device has {needs.capability[0]}.{needs.capability[1]}"
    if needs.dtype not in (torch.bfloat16, torch.float16):
        return f"it computes in bfloat16 and float16, not in {str(needs.dtype).removeprefix('torch.')}"
    return None


@dataclass(frozen=True)
class Step:
    """One step's rows and, per group, its pages: padded where the shape is fixed."""

    rows: StepRows
    pages: list[GroupPages]

    @classmethod
    def of(cls, sequences: Sequence[SequencePlan], groups: Sequence[GroupPlan], fixed: FixedShape | None) -> "Step":
        assert all(len(group.block_tables) == len(sequences) for group in groups), "one block table per sequence and group"
        if fixed is None:
            rows = StepRows.of(sequences)
            return cls(rows, [find_pages(rows, group) for group in groups])
        assert all(sequence.count == 1 for sequence in sequences), "a fixed shape is for single rows"
        assert all(sequence.start < fixed.max_len for sequence in sequences), "a sequence is longer than the fixed shape"
        num_padding = fixed.num_sequences - len(sequences)
        assert num_padding >= 0, "more sequences than the fixed shape has"
        rows = StepRows.of(sequences, num_padding)
        found = [find_pages(rows, group) for group in groups]
        assert all(pages.num_sequences == len(sequences) for pages in found), "a sequence of a fixed shape lacks blocks"
        return cls(rows, [pages.padded(num_padding) for pages in found])


class KernelGroup(ABC):
    """One KV group's part of a step."""

    def __init__(self, plan: GroupPlan) -> None:
        layers, _, block_size, kv_heads, head_dim = plan.keys.shape
        assert (layers, block_size) == (len(plan.layers), plan.block_size), "a group's tensors must match its plan"
        self.plan = plan
        self.keys, self.values = plan.keys.unbind(0), plan.values.unbind(0)  # per layer [pages, block_size, kv_heads, head_dim]
        self._slots_of_keys, self._slots_of_values = (
            [layer.view(-1, kv_heads, head_dim) for layer in layers] for layers in (self.keys, self.values)
        )
        self._checked: set[tuple[int, int | None]] = set()

    def fill(self, rows: StepRows, pages: GroupPages, slots: torch.Tensor) -> None:
        """The step that the group's layers work on next; `slots` is `[rows]`, int64, on the device."""
        self.rows, self.pages, self.slots = rows, pages, slots
        self._checked.clear()

    def check(self, num_sequences: int, window: int | None) -> None:
        """That the leading sequences have blocks for everything their rows see and write."""
        if (num_sequences, window) not in self._checked:
            assert num_sequences <= self.pages.num_sequences, "a sequence lacks blocks, or a position in use lies in the null block"
            starts = self.rows.starts[:num_sequences]
            first_seen = starts * 0 if window is None else np.maximum(0, starts + 1 - window)
            assert (self.pages.skipped[:num_sequences] <= first_seen).all(), "a position in use lies in the null block"
            self._checked.add((num_sequences, window))

    def write(self, index: int, key: torch.Tensor, value: torch.Tensor) -> None:
        slots = self.slots[: key.shape[0]]
        self._slots_of_keys[index].index_copy_(0, slots, key)
        self._slots_of_values[index].index_copy_(0, slots, value)

    @abstractmethod
    def attend(self, index: int, query: torch.Tensor, options: AttentionOptions, num_sequences: int) -> torch.Tensor:
        """Attention of the leading sequences' rows over the pages of the group's layer number `index`."""


class PagedContext(ABC):
    """One step. With a fixed shape it can be given further ones: `refill` writes to the addresses that a captured graph reads."""

    def __init__(self, sequences: Sequence[SequencePlan], groups: Sequence[KernelGroup], fixed: FixedShape | None) -> None:
        self._groups = groups
        self._fixed = fixed
        self._layers = {layer: (group, index) for group in groups for index, layer in enumerate(group.plan.layers)}
        self._fill(sequences, [group.plan for group in groups])

    def refill(self, sequences: Sequence[SequencePlan], groups: Sequence[GroupPlan]) -> None:
        """Another step of single rows over the same caches, at most as many sequences as the shape has, none longer than its limit."""
        assert self._fixed is not None, "only a context of fixed shape can be filled again"
        for group, plan in zip(self._groups, groups, strict=True):
            assert group.plan.keys.data_ptr() == plan.keys.data_ptr(), "a captured graph can't move to another cache"
        self._fill(sequences, groups)

    def attend(self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, options: AttentionOptions) -> torch.Tensor:
        """See `AttentionContext.attend`."""
        num_rows = query.shape[0]
        assert num_rows in self._num_sequences, f"{num_rows} rows are not whole sequences"
        if num_rows == 0:
            return torch.empty_like(query)
        group, index = self._layers[layer]
        group.check(self._num_sequences[num_rows], options.window)
        group.write(index, key, value)
        return group.attend(index, query, options, self._num_sequences[num_rows])

    def _fill(self, sequences: Sequence[SequencePlan], groups: Sequence[GroupPlan]) -> None:
        step = Step.of(sequences, groups, self._fixed)
        self._num_sequences = {rows: count for count, rows in enumerate(step.rows.first_rows.tolist())}
        self._send(step)

    @abstractmethod
    def _send(self, step: Step) -> None:
        """Moves the step's arrays to the device and hands each group its own."""
