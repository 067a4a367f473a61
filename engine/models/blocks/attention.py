"""Grouped-query attention, with the variants of all families."""

from dataclasses import dataclass

import torch

from engine.cache.spec import LayerKV
from engine.models.base import AttentionOptions, ForwardBatch
from engine.models.blocks.decoder_config import AttentionTemperature, DecoderConfig, QKNorm
from engine.models.blocks.linear import Linear
from engine.models.blocks.norm import RMSNorm
from engine.models.blocks.ops import Ops
from engine.models.blocks.reader import HeadOrder, WeightReader, read_norm_weight
from engine.models.blocks.rope import RotaryAngles


@dataclass(frozen=True, slots=True)
class Attention:
    """Grouped-query attention of one layer, without the product of its output."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    options: AttentionOptions
    qkv: Linear  # [(heads + 2 * kv_heads) * head_dim, width]: queries, keys, values
    head_norm: RMSNorm | None  # of queries and keys, weight [heads + kv_heads, head_dim]
    all_heads_norms: tuple[RMSNorm, RMSNorm] | None  # weights [heads * head_dim], [kv_heads * head_dim]
    output: Linear  # [width, heads * head_dim]
    gated: bool
    """Behind the values come gates, [heads * head_dim]: what the heads give is multiplied by their sigmoid."""
    normed_after: RMSNorm | None  # of queries and keys once they are rotated, weight [head_dim]
    temperature: AttentionTemperature | None
    recordable: bool = True

    @property
    def cache(self) -> LayerKV:
        """What the layer keeps."""
        chunk = self.options.chunk
        return LayerKV(self.num_kv_heads, self.head_dim, chunk or self.options.window, chunked=chunk is not None)

    def mix(self, layer: int, ops: Ops, normed: torch.Tensor, angles: RotaryAngles | None, batch: ForwardBatch) -> torch.Tensor:
        """What the heads give, `[rows, heads * head_dim]`, of normed rows `[rows, width]`, which aren't written."""
        rotated_heads = self.num_heads + self.num_kv_heads
        qkv = self.qkv(normed).view(normed.shape[0], -1, self.head_dim)  # [rows, heads + 2 * kv_heads (+ heads), head_dim]
        queries_and_keys = qkv[:, :rotated_heads]
        if self.all_heads_norms is not None:
            queries_and_keys = self._normed_together(ops, queries_and_keys, self.all_heads_norms)
        rotated = ops.rotate(queries_and_keys, angles, self.head_norm)  # [rows, heads + kv_heads, head_dim]
        if self.normed_after is not None and angles is not None:
            rotated = self.normed_after(rotated)
        queries, keys = rotated[:, : self.num_heads], rotated[:, self.num_heads :]
        if self.temperature is not None and angles is None:
            positions = batch.positions[: len(normed), None, None].float()
            scales = (positions + 1).div_(self.temperature.every).floor_().log1p_().mul_(self.temperature.scale).add_(1)
            queries = (queries * scales).to(normed.dtype)
        end = rotated_heads + self.num_kv_heads
        mixed = batch.attention.attend(layer, queries, keys, qkv[:, rotated_heads:end], self.options)
        return (mixed.mul_(qkv[:, end:].sigmoid()) if self.gated else mixed).flatten(1)

    def _normed_together(self, ops: Ops, states: torch.Tensor, norms: tuple[RMSNorm, RMSNorm]) -> torch.Tensor:
        """Queries normed over all of their heads, and keys over theirs: `[rows, heads + kv_heads, head_dim]`."""
        parts = zip(norms, (states[:, : self.num_heads], states[:, self.num_heads :]), strict=True)
        return torch.cat([ops.norm(norm, part.flatten(1).contiguous()).view(part.shape) for norm, part in parts], dim=1)


def read_attention(reader: WeightReader, config: DecoderConfig, index: int, prefix: str) -> Attention:
    """Of decoder layer `index`. The heads of queries and keys, and what norms them, are put in the order of their rotation."""
    heads, kv_heads, size, width = config.num_heads, config.num_kv_heads, config.head_dim, config.model.hidden_size
    names, modules = config.attention, reader.stored([f"{prefix}.{part}_proj" for part in "qkv"], f"{prefix}.qkv_proj")
    sinks = reader.tensor((heads,), [f"{prefix}.sinks"], dtype=torch.float32) if config.attention_sinks else None
    heights = [heads * size * (2 if config.attention_gate else 1), kv_heads * size, kv_heads * size]
    window = config.windows[index]
    chunk, window = (window, None) if config.chunked else (None, window)
    options = AttentionOptions(config.attention_scale, window, config.attention_soft_cap, chunk, sinks)
    normed_after = None
    if config.qk_norm is QKNorm.AFTER_ROTATION:
        normed_after = RMSNorm(torch.ones(size, dtype=reader.dtype, device=reader.device), config.norm_eps)
    order = _gated_order(config) if config.attention_gate else _order(config, heads + kv_heads)
    return Attention(
        heads,
        kv_heads,
        size,
        options,
        qkv=reader.linear(modules, heights, width, bias=config.qkv_bias, order=order),
        head_norm=_head_norm(reader, config, prefix) if config.qk_norm is QKNorm.HEAD else None,
        all_heads_norms=_all_heads_norms(reader, config, prefix) if config.qk_norm is QKNorm.ALL_HEADS else None,
        output=reader.linear([f"{prefix}.{names.output}"], [width], heads * size, bias=config.output_bias),
        gated=config.attention_gate,
        normed_after=normed_after,
        temperature=config.temperature,
    )


def _order(config: DecoderConfig, num_heads: int) -> HeadOrder | None:
    order = None if config.rotary is None else config.rotary.order(config.head_dim)
    return None if order is None else HeadOrder(order, num_heads)


def _gated_order(config: DecoderConfig) -> HeadOrder:
    """Of products whose queries are stored head by head, each with its gate: the gates come last."""
    size, heads = config.head_dim, config.num_heads
    rotary = (None if config.rotary is None else config.rotary.order(size)) or list(range(size))
    keys, values = 2 * heads * size, (2 * heads + config.num_kv_heads) * size
    order = [head * 2 * size + place for head in range(heads) for place in rotary]
    order += [keys + head * size + place for head in range(config.num_kv_heads) for place in rotary]
    order += range(values, values + config.num_kv_heads * size)
    order += [head * 2 * size + size + place for head in range(heads) for place in range(size)]
    return HeadOrder(order, 1)


def _head_norm(reader: WeightReader, config: DecoderConfig, prefix: str) -> RMSNorm:
    """The query and key norms side by side, so that both are one operation."""
    names = config.attention
    query, key = (_norm_weight(reader, config, f"{prefix}.{name}", 1) for name in (names.query_norm, names.key_norm))
    return RMSNorm(torch.stack([query] * config.num_heads + [key] * config.num_kv_heads), config.norm_eps)


def _all_heads_norms(reader: WeightReader, config: DecoderConfig, prefix: str) -> tuple[RMSNorm, RMSNorm]:
    query = _norm_weight(reader, config, f"{prefix}.q_norm", config.num_heads)
    key = _norm_weight(reader, config, f"{prefix}.k_norm", config.num_kv_heads)
    return RMSNorm(query, config.norm_eps), RMSNorm(key, config.norm_eps)


def _norm_weight(reader: WeightReader, config: DecoderConfig, module: str, num_heads: int) -> torch.Tensor:
    weight, order = read_norm_weight(reader, config, module, num_heads * config.head_dim), _order(config, num_heads)
    if order is not None:
        order.apply(weight)
    return weight
