"""Attention through flashinfer's kernels for paged caches (CUDA, extra `[flashinfer]`).

flashinfer plans on the host, once per step and kind of layer, and the layers of that kind run by the plan. A kind is a scale, a
window, a soft cap and, once a batch has been narrowed, a number of sequences. Every plan in use needs a wrapper of its own, since
a wrapper holds one plan.
"""

from collections.abc import Sequence
from importlib import import_module
from importlib.util import find_spec
from typing import Any, Literal, NamedTuple, Protocol, cast

import numpy as np
import torch

from engine.attention.facade import AttentionNeeds, FixedShape, GroupCache, GroupStep, IntArray, StepRows
from engine.attention.paged import KernelGroup, PagedContext, Step, device_refusal, unfilled
from engine.attention.transfer import Fence, StepBuffer
from engine.cache.spec import KVSpec
from engine.errors import ConfigError
from engine.models.base import AttentionOptions

_HEAD_DIMS = (64, 128, 256)
_WORKSPACE_BYTES = 256 << 20
"""For partial results of long sequences: twice what flashinfer recommends, since that grows with the heads."""
_KERNELS = "fa2"
"""The kernels that run on every card; they read values beyond a sequence's end as zero, so what a page holds there doesn't matter."""


class Wrapper(Protocol):
    """`BatchPrefillWithPagedKVCacheWrapper` or `BatchDecodeWithPagedKVCacheWrapper`."""

    def plan(self, *args: Any, **options: Any) -> None: ...  # noqa: ANN401 - theirs

    def run(self, q: torch.Tensor, paged_kv_cache: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor: ...


class Library(Protocol):
    """What is used of the module `flashinfer`."""

    BatchPrefillWithPagedKVCacheWrapper: Any
    BatchDecodeWithPagedKVCacheWrapper: Any


def is_installed() -> bool:
    return find_spec("flashinfer") is not None


_WrapperKind = Literal["prefill", "decode", "tensor_core_decode"]


class _Kind(NamedTuple):
    """Layers that run by one plan."""

    num_sequences: int
    heads: int
    options: AttentionOptions


class WrapperPool:
    """Wrappers for the plans of one step; they are used again from the next one on."""

    def __init__(self, library: Library, device: torch.device, workspace_bytes: int) -> None:
        self._library = library
        self._device = device
        self._workspace = torch.zeros(workspace_bytes, dtype=torch.uint8, device=device)
        self._fence = Fence(device)
        self._free: dict[_WrapperKind, list[Wrapper]] = {}
        self._taken: list[tuple[_WrapperKind, Wrapper]] = []

    def reset(self) -> None:
        """For a new step."""
        self.wait()
        for kind, wrapper in self._taken:
            self._free.setdefault(kind, []).append(wrapper)
        self._taken.clear()

    def wait(self) -> None:
        """Before wrappers plan again: they do so in pinned memory that the transfer of their plan before may still be reading."""
        self._fence.wait()

    def planned(self) -> None:
        self._fence.record()

    def prefill(self) -> Wrapper:
        return self._take("prefill")

    def decode(self, tensor_cores: bool) -> Wrapper:
        return self._take("tensor_core_decode" if tensor_cores else "decode")

    def fixed_decode(self, tensor_cores: bool, num_sequences: int, num_pages: int) -> Wrapper:
        """One for a captured graph, with buffers for its plan that stay."""
        first_page, pages, last_page = (
            torch.zeros(size, dtype=torch.int32, device=self._device) for size in (num_sequences + 1, num_pages, num_sequences)
        )
        wrapper: Wrapper = self._library.BatchDecodeWithPagedKVCacheWrapper(
            self._workspace,
            "NHD",
            use_cuda_graph=True,
            use_tensor_cores=tensor_cores,
            paged_kv_indptr_buffer=first_page,
            paged_kv_indices_buffer=pages,
            paged_kv_last_page_len_buffer=last_page,
            backend=_KERNELS,
        )
        return wrapper

    def _take(self, kind: _WrapperKind) -> Wrapper:
        free = self._free.get(kind)
        wrapper = free.pop() if free else self._make(kind)
        self._taken.append((kind, wrapper))
        return wrapper

    def _make(self, kind: _WrapperKind) -> Wrapper:
        wrapper: Wrapper
        if kind == "prefill":
            wrapper = self._library.BatchPrefillWithPagedKVCacheWrapper(self._workspace, "NHD", backend=_KERNELS)
        else:
            decode = self._library.BatchDecodeWithPagedKVCacheWrapper
            wrapper = decode(self._workspace, "NHD", use_tensor_cores=kind == "tensor_core_decode", backend=_KERNELS)
        return wrapper


class FlashInferBackend:
    """See `AttentionBackend`. A context is valid until the next one is planned."""

    name = "flashinfer"
    default_block_size = 32

    def __init__(self, device: torch.device, library: Library | None = None, workspace_bytes: int = _WORKSPACE_BYTES) -> None:
        """Raises `ConfigError` where flashinfer is installed but can't be imported."""
        self.device = device
        self.wrappers = WrapperPool(library or _import_library(), device, workspace_bytes)
        self._buffer = StepBuffer(device)

    @staticmethod
    def refusal(needs: AttentionNeeds) -> str | None:
        """See `select.Candidate`."""
        general = device_refusal(needs)
        if general is not None:
            return general
        unfit = sorted(needs.head_dims - {*_HEAD_DIMS})
        if unfit:
            return f"it takes heads {', '.join(map(str, _HEAD_DIMS))} wide, not {unfit[0]}"
        if needs.sinks:
            return "its attention sinks aren't built in here"
        return None if is_installed() else "flashinfer is not installed (extra [flashinfer])"

    @staticmethod
    def check_block_size(block_size: int) -> None:
        """Any size from 1 on will do."""
        if block_size < 1:
            raise ConfigError(f"block_size is {block_size}, but must be at least 1")

    @staticmethod
    def workspace_bytes(specs: Sequence[KVSpec], max_len: int, max_step_tokens: int) -> int:
        """The workspace is there from the start."""
        return 0

    def plan(self, rows: StepRows, groups: Sequence[GroupStep]) -> "FlashInferContext":
        self.wrappers.reset()
        return FlashInferContext(self.wrappers, self._buffer, rows, groups)

    def plan_decodes(self, shape: FixedShape, caches: Sequence[GroupCache]) -> "FlashInferContext":
        """See `GraphBackend.plan_decodes`."""
        return FlashInferContext(self.wrappers, StepBuffer(self.device), *unfilled(caches), shape)


def _import_library() -> Library:
    try:
        library: Library = cast(Any, import_module("flashinfer"))
    except (ImportError, OSError, RuntimeError) as error:
        raise ConfigError(f"attention flashinfer can't run: importing it failed: {error}") from error
    return library


class _Group(KernelGroup):
    """One KV group: a plan per kind of layer, made when the first such layer runs."""

    def __init__(self, wrappers: WrapperPool, cache: GroupCache, fixed: FixedShape | None) -> None:
        super().__init__(cache)
        self._wrappers = wrappers
        self._fixed = fixed
        self._planned: dict[_Kind, Wrapper] = {}

    def take(self, pages: torch.Tensor) -> None:
        """`pages` are those of all sequences, packed, on the device. Where the shape is fixed, kinds that are known are planned anew."""
        self._pages_on_device = pages
        for kind, wrapper in self._planned.items():
            self._plan(wrapper, kind)

    def attend(self, layer: int, query: torch.Tensor, options: AttentionOptions, num_sequences: int) -> torch.Tensor:
        kind = _Kind(num_sequences, query.shape[1], options)
        if kind not in self._planned:
            wrapper = self._wrapper_for(kind)
            self._plan(wrapper, kind)
            self._planned[kind] = wrapper
        return self._planned[kind].run(query.contiguous(), self.cache.paged_layers[layer])

    def _wrapper_for(self, kind: _Kind) -> Wrapper:
        tensor_cores = kind.heads > self.cache.kv_heads  # they pay there, and take any group of heads
        if self._fixed is not None:
            pages = kind.num_sequences * self._fixed.max_pages(self.cache.block_size)
            return self._wrappers.fixed_decode(tensor_cores, kind.num_sequences, pages)
        return self._wrappers.decode(tensor_cores) if self._only_decodes(kind) else self._wrappers.prefill()

    def _only_decodes(self, kind: _Kind) -> bool:
        return bool((self.index.rows.counts[: kind.num_sequences] == 1).all())

    def _plan(self, wrapper: Wrapper, kind: _Kind) -> None:
        count, options = kind.num_sequences, kind.options
        cache, first_page = self.cache, self.index.first_page[: count + 1]
        last_page = (self.index.lengths[:count] - 1) % cache.block_size + 1
        pages = (_on_host(first_page), self._pages_on_device[: first_page[-1]], _on_host(last_page))
        shape = (kind.heads, cache.kv_heads, cache.head_dim, cache.block_size)
        common = {
            "window_left": -1 if options.window is None else options.window - 1,
            "logits_soft_cap": options.soft_cap,
            "sm_scale": options.scale,
            "q_data_type": cache.keys.dtype,
            "kv_data_type": cache.keys.dtype,
        }
        if self._only_decodes(kind):
            wrapper.plan(*pages, *shape, **common)
        else:
            wrapper.plan(_on_host(self.index.rows.first_rows[: count + 1]), *pages, *shape, causal=True, **common)
        self._wrappers.planned()


def _on_host(array: IntArray) -> torch.Tensor:
    return torch.from_numpy(array.astype(np.int32))


class FlashInferContext(PagedContext):
    """One batch."""

    _groups: Sequence[_Group]

    def __init__(
        self, wrappers: WrapperPool, buffer: StepBuffer, rows: StepRows, groups: Sequence[GroupStep], fixed: FixedShape | None = None
    ) -> None:
        self._wrappers = wrappers
        super().__init__(buffer, rows, [_Group(wrappers, cache, fixed) for cache, _ in groups], [given for _, given in groups], fixed)

    def _send(self, step: Step) -> None:
        if self._fixed is not None:
            self._wrappers.wait()
        slots, pages = self._transfer([index.slots for index in step.indexes], [index.pages for index in step.indexes])
        for number, (group, index) in enumerate(zip(self._groups, step.indexes, strict=True)):
            group.fill(index, slots[number])
            group.take(pages[number])
