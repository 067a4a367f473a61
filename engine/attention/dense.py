"""Attention over dense tensors: the arithmetic of the reference backend, and the buffers it reuses."""

from collections.abc import Sequence

import torch
from torch.nn.functional import scaled_dot_product_attention

from engine.models.base import AttentionOptions


class CausalMasks:
    """Additive causal masks (0 or -inf) whose last row and last column belong to the same position.

    With that alignment one buffer serves every chunk: the mask of `rows` queries over `length` keys is its lower right corner.
    (`is_causal=True` of torch is aligned to the upper left and so right only where a sequence starts.)
    """

    def __init__(self, max_rows: int) -> None:
        self._max_rows = max_rows
        self._buffers: dict[tuple[int | None, torch.dtype, torch.device], torch.Tensor] = {}

    def get(self, rows: int, length: int, window: int | None, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """`[rows, length]` for the last `rows` of `length` positions; `rows` is at most `max_rows`."""
        assert rows <= self._max_rows
        key = (window, dtype, device)
        buffer = self._buffers.get(key)
        if buffer is None or buffer.shape[1] < length:
            buffer = None
            self._buffers.pop(key, None)  # its memory goes back before more is taken
            buffer = self._buffers[key] = self._build(self._width(length), window, dtype, device)
        corner = buffer[self._max_rows - rows :, buffer.shape[1] - length :]
        return corner if device.type == "cpu" else corner.contiguous()  # fused GPU kernels want an aligned address

    def bytes_for(self, length: int, dtype: torch.dtype) -> int:
        """What masks of one window over up to `length` keys take."""
        return self._max_rows * self._width(length) * dtype.itemsize

    def _width(self, length: int) -> int:
        return _power_of_two(max(length, self._max_rows))

    def _build(self, width: int, window: int | None, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        with torch.inference_mode(False):  # usable in and out of inference mode
            query = torch.arange(width - self._max_rows, width, device=device)[:, None]
            key = torch.arange(width, device=device)
            hidden = key > query if window is None else (key > query) | (key <= query - window)
            return torch.zeros(self._max_rows, width, dtype=dtype, device=device).masked_fill_(hidden, -torch.inf)


class Scratch:
    """Two buffers for gathered keys and values, reused by every layer and step; they grow to the largest size asked for.

    Fresh memory would cost more than the attention itself: each page of it faults when first touched.
    """

    def __init__(self) -> None:
        self._buffers: dict[tuple[torch.dtype, torch.device], tuple[torch.Tensor, torch.Tensor]] = {}

    def gather(self, keys: torch.Tensor, values: torch.Tensor, index: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """`keys[index]` and `values[index]`, valid until the next call."""
        shapes = [(index.shape[0], *tensor.shape[1:]) for tensor in (keys, values)]
        pair = self._take(shapes, keys.dtype, keys.device)
        torch.index_select(keys, 0, index, out=pair[0])
        torch.index_select(values, 0, index, out=pair[1])
        return pair

    @staticmethod
    def bytes_for(numel: int, dtype: torch.dtype) -> int:
        """What both buffers take for up to `numel` numbers each."""
        return 2 * _power_of_two(numel) * dtype.itemsize

    def _take(self, shapes: Sequence[tuple[int, ...]], dtype: torch.dtype, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        numel = max(torch.Size(shape).numel() for shape in shapes)
        pair = self._buffers.get((dtype, device))
        if pair is None or pair[0].numel() < numel:
            pair = None
            self._buffers.pop((dtype, device), None)  # its memory goes back before more is taken
            size = _power_of_two(numel)
            with torch.inference_mode(False):
                pair = torch.empty(size, dtype=dtype, device=device), torch.empty(size, dtype=dtype, device=device)
            self._buffers[(dtype, device)] = pair
        first, second = (buffer[: torch.Size(shape).numel()].view(shape) for buffer, shape in zip(pair, shapes, strict=True))
        return first, second


def attend_packed(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor, options: AttentionOptions
) -> torch.Tensor:
    """One query position per sequence: the query heads of a key head are the rows of one matrix.

    Shapes, with `b` = sequences x kv_heads: query `[b, heads / kv_heads, head_dim]`, key and value `[b, length, head_dim]`,
    mask `[b, 1, length]`; returns the query's shape.
    """
    if is_unfused(options):
        sinks = None if options.sinks is None else options.sinks.view(-1, query.shape[1], 1)  # [kv_heads, heads / kv_heads, 1]
        return _attend_unfused(query, key, value, mask, options, None if sinks is None else sinks.repeat(len(query) // len(sinks), 1, 1))
    if query.dtype != torch.float32:  # fused kernels keep the scores in float32
        return scaled_dot_product_attention(query[None], key[None], value[None], attn_mask=mask[None], scale=options.scale)[0]
    scores = torch.baddbmm(mask, query, key.transpose(1, 2), alpha=options.scale)  # [b, heads / kv_heads, length]
    return torch.bmm(scores.softmax(-1), value)


def attend_chunk(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None, options: AttentionOptions
) -> torch.Tensor:
    """Several positions of one sequence: query `[rows, heads, head_dim]`, key and value `[length, kv_heads, head_dim]`, or values that
    are narrower.

    `mask` is `[rows, length]`; None: the keys are the query's own positions, and each sees those up to itself.
    """
    rows, heads, _ = query.shape
    kv_heads = key.shape[1]
    query, key, value = query.transpose(0, 1), key.transpose(0, 1), value.transpose(0, 1)
    if not is_unfused(options):
        out = scaled_dot_product_attention(
            query[None], key[None], value[None], mask, is_causal=mask is None, scale=options.scale, enable_gqa=heads != kv_heads
        )
        return out[0].transpose(0, 1)
    assert mask is not None
    grouped = query.reshape(kv_heads, heads // kv_heads, rows, -1)
    sinks = None if options.sinks is None else options.sinks.view(kv_heads, -1, 1, 1)
    out = _attend_unfused(grouped, key[:, None], value[:, None], mask, options, sinks)
    return out.reshape(heads, rows, -1).transpose(0, 1)


def is_unfused(options: AttentionOptions) -> bool:
    """Whether torch's fused attention can't do it."""
    return options.soft_cap is not None or options.sinks is not None


def _attend_unfused(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor,
    options: AttentionOptions,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """softmax(cap * tanh(query @ key.T * scale / cap) + mask) @ value, in float32 (Gemma 2, arXiv 2408.00118, section 2).

    `sinks`: one more score in each softmax, without a value (GPT-OSS, arXiv 2508.10925, section 2.2); one per row of scores.
    """
    scores = torch.matmul(query.float(), key.float().transpose(-1, -2)).mul_(options.scale)
    if options.soft_cap is not None:
        scores.div_(options.soft_cap).tanh_().mul_(options.soft_cap)
    scores.add_(mask)
    if sinks is None:
        weights = scores.softmax(-1)
    else:
        weights = torch.cat([scores, sinks.expand(*scores.shape[:-1], 1)], dim=-1).softmax(-1)[..., :-1]
    return torch.matmul(weights, value.float()).to(query.dtype)


def _power_of_two(number: int) -> int:
    return 1 << (number - 1).bit_length()
