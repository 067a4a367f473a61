"""Slow doubles of attention kernels that read pages: they check what they are given, and are as careless as the real ones may be.

What a kernel masks it may still have read and multiplied by zero, so positions of known pages that no row sees must be finite; what
lies behind a sequence's end is never read. Results go into memory that held NaN.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

Pages = tuple[torch.Tensor, torch.Tensor]


def attend_pages(
    query: torch.Tensor,
    cache: Pages,
    pages: torch.Tensor,
    length: int,
    *,
    scale: float,
    window_left: int,
    soft_cap: float | None = None,
) -> torch.Tensor:
    """The last positions of one sequence: query `[rows, heads, head_dim]`, cache `[pages, page_size, kv_heads, head_dim]` each."""
    rows, heads, _ = query.shape
    key, value = (x[pages].flatten(0, 1)[:length].double() for x in cache)
    assert key.shape[0] == length, "pages for fewer positions than the sequence has"
    key, value = (x.repeat_interleave(heads // x.shape[1], 1) for x in (key, value))
    scores = torch.einsum("qhd,khd->hqk", query.double(), key) * scale
    if soft_cap:
        scores = soft_cap * torch.tanh(scores / soft_cap)
    query_at, key_at = torch.arange(length - rows, length)[:, None], torch.arange(length)[None]
    hidden = key_at > query_at
    if window_left >= 0:
        hidden |= key_at < query_at - window_left
    weights = scores.masked_fill(hidden, -math.inf).softmax(-1)
    return torch.einsum("hqk,khd->qhd", weights, value).to(query.dtype)


@dataclass
class FakeVarlen:
    """`varlen_attn` of torch.nn.attention.varlen, for what it is used for."""

    calls: list[dict[str, Any]] = field(default_factory=list)

    def __call__(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        cu_seq_q: torch.Tensor,
        cu_seq_k: torch.Tensor | None,
        max_q: int,
        max_k: int,
        *,
        return_aux: object | None = None,
        scale: float | None = None,
        window_size: tuple[int, int] = (-1, -1),
        enable_gqa: bool = False,
        seqused_k: torch.Tensor | None = None,
        block_table: torch.Tensor | None = None,
        num_splits: int | None = None,
    ) -> torch.Tensor:
        self.calls.append({name: value for name, value in locals().items() if name != "self"})
        assert scale is not None
        assert cu_seq_k is not None
        assert seqused_k is not None
        assert block_table is not None
        assert return_aux is None
        assert num_splits == 1
        assert key.shape[1] % 256 == 0
        assert all(x.dtype == torch.int32 and x.is_contiguous() for x in (cu_seq_q, cu_seq_k, seqused_k))
        assert block_table.dtype == torch.int32
        assert block_table.stride(-1) == 1
        num_sequences = len(cu_seq_q) - 1
        assert (num_sequences, num_sequences, num_sequences) == (len(cu_seq_k) - 1, len(seqused_k), len(block_table))
        assert cu_seq_k.diff().tolist() == seqused_k.tolist()
        assert cu_seq_q[-1] == query.shape[0]
        assert max(cu_seq_q.diff().tolist()) == max_q
        assert max(seqused_k.tolist()) <= max_k <= block_table.shape[1] * key.shape[1]
        assert enable_gqa == (query.shape[1] != key.shape[2])
        assert window_size[1] == 0 or (window_size == (-1, -1) and max_q == 1), "rows would see what follows them"
        out = torch.full(query.shape, math.nan, dtype=query.dtype)
        for i, (first, end) in enumerate(zip(cu_seq_q.tolist(), cu_seq_q.tolist()[1:], strict=False)):
            length = int(seqused_k[i])
            pages = block_table[i, : -(-length // key.shape[1])].long()
            out[first:end] = attend_pages(query[first:end], (key, value), pages, length, scale=scale, window_left=window_size[0])
        return out


class FakePrefillWrapper:
    """`BatchPrefillWithPagedKVCacheWrapper`."""

    def __init__(self, float_workspace_buffer: torch.Tensor, kv_layout: str = "NHD", *, backend: str = "auto") -> None:
        assert float_workspace_buffer.dtype == torch.uint8
        assert (kv_layout, backend) == ("NHD", "fa2")
        self.num_plans = self.num_runs = 0

    def plan(
        self,
        qo_indptr: torch.Tensor,
        paged_kv_indptr: torch.Tensor,
        paged_kv_indices: torch.Tensor,
        paged_kv_last_page_len: torch.Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim_qk: int,
        page_size: int,
        *,
        causal: bool = False,
        sm_scale: float | None = None,
        window_left: int = -1,
        logits_soft_cap: float | None = None,
        q_data_type: torch.dtype = torch.float16,
        kv_data_type: torch.dtype | None = None,
    ) -> None:
        assert causal, "rows would see what follows them"
        self._plan(paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len, page_size)
        self._first_rows = qo_indptr.tolist()
        self._expect = (num_qo_heads, num_kv_heads, head_dim_qk, page_size, q_data_type, kv_data_type)
        self._options = {"scale": sm_scale, "window_left": window_left, "soft_cap": logits_soft_cap}

    def _plan(self, indptr: torch.Tensor, indices: torch.Tensor, last_page_len: torch.Tensor, page_size: int) -> None:
        assert all(x.dtype == torch.int32 for x in (indptr, indices, last_page_len))
        assert len(indptr) == len(last_page_len) + 1
        assert all(0 < n <= page_size for n in last_page_len.tolist())
        assert indptr[-1] == len(indices)
        self._first_page, self._pages, self._last_page = indptr, indices, last_page_len
        self.num_plans += 1

    def run(self, q: torch.Tensor, paged_kv_cache: Pages) -> torch.Tensor:
        self.num_runs += 1
        keys, values = paged_kv_cache
        assert q.is_contiguous()
        assert (q.shape[1], keys.shape[2], q.shape[2], keys.shape[1], q.dtype, keys.dtype) == self._expect
        assert q.shape[0] == self._first_rows[-1]
        out = torch.full(q.shape, math.nan, dtype=q.dtype)
        firsts = self._first_page.tolist()
        for i, (low, high) in enumerate(zip(self._first_rows, self._first_rows[1:], strict=False)):
            pages = self._pages[firsts[i] : firsts[i + 1]].long()
            length = (len(pages) - 1) * keys.shape[1] + int(self._last_page[i])
            out[low:high] = attend_pages(q[low:high], (keys, values), pages, length, **self._options)
        return out


class FakeDecodeWrapper(FakePrefillWrapper):
    """`BatchDecodeWithPagedKVCacheWrapper`: one row per sequence; for a captured graph, reading from buffers that stay."""

    def __init__(
        self,
        float_workspace_buffer: torch.Tensor,
        kv_layout: str = "NHD",
        use_cuda_graph: bool = False,
        use_tensor_cores: bool = False,
        paged_kv_indptr_buffer: torch.Tensor | None = None,
        paged_kv_indices_buffer: torch.Tensor | None = None,
        paged_kv_last_page_len_buffer: torch.Tensor | None = None,
        *,
        backend: str = "auto",
    ) -> None:
        super().__init__(float_workspace_buffer, kv_layout, backend=backend)
        self._buffers = (paged_kv_indptr_buffer, paged_kv_indices_buffer, paged_kv_last_page_len_buffer)
        assert all((buffer is not None) == use_cuda_graph for buffer in self._buffers)
        self.use_tensor_cores = use_tensor_cores

    def plan(
        self,
        indptr: torch.Tensor,
        indices: torch.Tensor,
        last_page_len: torch.Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        page_size: int,
        *,
        window_left: int = -1,
        logits_soft_cap: float | None = None,
        q_data_type: torch.dtype = torch.float16,
        kv_data_type: torch.dtype | None = None,
        sm_scale: float | None = None,
    ) -> None:
        indptr, indices, last_page_len = self._kept(indptr, indices, last_page_len)
        self._plan(indptr, indices, last_page_len, page_size)
        self._first_rows = list(range(len(indptr)))
        self._expect = (num_qo_heads, num_kv_heads, head_dim, page_size, q_data_type, kv_data_type)
        self._options = {"scale": sm_scale, "window_left": window_left, "soft_cap": logits_soft_cap}

    def _kept(self, *arrays: torch.Tensor) -> Sequence[torch.Tensor]:
        kept = []
        for array, buffer in zip(arrays, self._buffers, strict=True):
            if buffer is not None:
                assert buffer.dtype == torch.int32
                buffer.numpy()[: len(array)] = array.numpy()  # on the device: no transfer of ours
            kept.append(array if buffer is None else buffer[: len(array)])
        assert self._buffers[2] is None or len(self._buffers[2]) == len(arrays[2]), "the number of sequences is fixed"
        return kept


@dataclass
class FakeFlashInfer:
    """The module `flashinfer`."""

    made: list[FakePrefillWrapper] = field(default_factory=list)

    def BatchPrefillWithPagedKVCacheWrapper(self, *args: Any, **options: Any) -> FakePrefillWrapper:  # noqa: ANN401, N802 - theirs
        self.made.append(FakePrefillWrapper(*args, **options))
        return self.made[-1]

    def BatchDecodeWithPagedKVCacheWrapper(self, *args: Any, **options: Any) -> FakeDecodeWrapper:  # noqa: ANN401, N802 - theirs
        wrapper = FakeDecodeWrapper(*args, **options)
        self.made.append(wrapper)
        return wrapper


class Operations(TorchDispatchMode):
    """What torch was asked for: the operator, the addresses of its tensors, and how much it copied."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[str, tuple[int, ...]]] = []
        self.bytes_copied = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # noqa: ANN401 - torch's own
        addresses = tuple(arg.data_ptr() for arg in args if isinstance(arg, torch.Tensor))
        self.seen.append((str(func.overloadpacket).removeprefix("aten."), addresses))
        if func.overloadpacket is torch.ops.aten.copy_:
            self.bytes_copied += args[0].nbytes
        return func(*args, **(kwargs or {}))

    def named(self, *names: str) -> list[tuple[str, tuple[int, ...]]]:
        return [operation for operation in self.seen if operation[0] in names]
