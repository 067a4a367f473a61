"""The decoder's weights, streamed from a checkpoint into the fused tensors that the forward pass uses."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from engine.errors import ModelError
from engine.models.blocks.linear import Linear, Linears
from engine.models.blocks.mlp import MLP, GatedMLP, PlainMLP
from engine.models.blocks.norm import LayerNorm, Norm, RMSNorm
from engine.models.checkpoints.checkpoint import Checkpoint
from engine.models.configuration.decoder_config import DecoderConfig, QKNorm

EMBEDDING = "model.embed_tokens.weight"
HEAD = "lm_head.weight"
HARMLESS_SUFFIXES = (".rotary_emb.inv_freq", ".self_attn.masked_bias", ".self_attn.bias")
"""Buffers that old exporters stored beside the weights; they are derived from the configuration."""


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """One decoder layer. Products are given as `[outputs, inputs]`."""

    before_attention: Norm | None
    qkv: Linear  # [(heads + 2 * kv_heads) * head_dim, width]: queries, keys, values
    head_norm: RMSNorm | None  # of queries and keys, weight [heads + kv_heads, head_dim]
    all_heads_norms: tuple[RMSNorm, RMSNorm] | None  # weights [heads * head_dim], [kv_heads * head_dim]
    output: Linear  # [width, heads * head_dim]
    after_attention: Norm | None
    before_mlp: Norm | None
    mlp: MLP
    after_mlp: Norm | None


@dataclass(frozen=True, slots=True)
class DecoderWeights:
    """A whole model."""

    embedding: torch.Tensor  # [vocab, width]
    layers: tuple[LayerWeights, ...]
    final_norm: Norm
    head: Linear | None  # [vocab, width]; None: the checkpoint has none


class WeightLoader:
    """Reads one checkpoint into fused tensors of one dtype on one device.

    Every fused tensor is made empty and filled part by part, so at no time is there a second copy of more than a chunk, or of one
    matrix where it is packed.
    """

    def __init__(
        self, config: DecoderConfig, checkpoint: Checkpoint, linears: Linears, *, dtype: torch.dtype, device: torch.device
    ) -> None:
        self._config = config
        self._checkpoint = checkpoint
        self._linears = linears
        self._dtype = dtype
        self._device = device
        self._head_order = None if config.rotary is None else config.rotary.order(config.head_dim)

    def load(self, folder: Path) -> DecoderWeights:
        """Raises `ModelError` naming a weight that is missing, of a wrong shape, or that the architecture doesn't have."""
        embedding, head = self._embedding_and_head()
        layers = tuple(self._layer(index) for index in range(self._config.model.num_layers))
        final_norm = self._norm("model.norm")
        unknown = sorted(name for name in self._checkpoint.unread if not name.endswith(HARMLESS_SUFFIXES))
        if unknown:
            raise ModelError(f"{folder}: weight {unknown[0]} ({len(unknown)} such) is not part of {self._config.model.architecture}")
        return DecoderWeights(embedding, layers, final_norm, None if head is None else self._linears.of(head))

    def _embedding_and_head(self) -> tuple[torch.Tensor, torch.Tensor | None]:
        """As transformers does, a tied pair is shared also where only the head is stored, and kept apart where the two differ."""
        shape = (self._config.model.vocab_size, self._config.model.hidden_size)
        checkpoint = self._checkpoint
        if not self._config.tie_embeddings:
            return self._tensor(shape, [EMBEDDING]), self._tensor(shape, [HEAD]) if HEAD in checkpoint else None
        embedding = self._tensor(shape, [EMBEDDING if EMBEDDING in checkpoint or HEAD not in checkpoint else HEAD])
        if HEAD in checkpoint.unread and not checkpoint.same(EMBEDDING, HEAD):
            return embedding, self._tensor(shape, [HEAD])
        return embedding, embedding

    def _layer(self, index: int) -> LayerWeights:
        config = self._config
        width = config.model.hidden_size
        queries, keys = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        prefix = f"model.layers.{index}"
        attention = f"{prefix}.self_attn"
        qkv = self._stored([f"{attention}.{part}_proj" for part in "qkv"], f"{attention}.qkv_proj")
        return LayerWeights(
            before_attention=self._optional_norm(prefix, config.norms.before_attention),
            qkv=self._linear(qkv, [queries, keys, keys], width, bias=config.qkv_bias, ordered=queries + keys),
            head_norm=self._head_norm(attention) if config.qk_norm is QKNorm.HEAD else None,
            all_heads_norms=self._all_heads_norms(attention) if config.qk_norm is QKNorm.ALL_HEADS else None,
            output=self._linear([f"{attention}.o_proj"], [width], queries, bias=config.output_bias),
            after_attention=self._optional_norm(prefix, config.norms.after_attention),
            before_mlp=self._optional_norm(prefix, config.norms.before_mlp),
            mlp=self._mlp(f"{prefix}.mlp"),
            after_mlp=self._optional_norm(prefix, config.norms.after_mlp),
        )

    def _mlp(self, prefix: str) -> MLP:
        config, names = self._config, self._config.mlp
        width, inner, bias = config.model.hidden_size, config.intermediate_size, config.mlp_bias
        down = self._linear([f"{prefix}.{names.down}"], [width], inner, bias=bias)
        if names.gate is None:
            return PlainMLP(config.activation, self._linear([f"{prefix}.{names.up}"], [inner], width, bias=bias), down)
        gate_up = self._stored([f"{prefix}.{names.gate}", f"{prefix}.{names.up}"], f"{prefix}.gate_up_proj")
        return GatedMLP(config.activation, self._linear(gate_up, [inner, inner], width, bias=bias), down)

    def _stored(self, modules: list[str], fused: str) -> list[str]:
        """The modules as they are stored: one by one, or side by side under one name, as some exporters write them."""
        return [fused] if f"{fused}.weight" in self._checkpoint and f"{modules[0]}.weight" not in self._checkpoint else modules

    def _linear(self, modules: Sequence[str], heights: Sequence[int], width: int, *, bias: bool, ordered: int = 0) -> Linear:
        """Modules side by side, as one product. The heads of its first `ordered` outputs are put in the order of their rotation."""
        heights = heights if len(modules) > 1 else [sum(heights)]
        weight = self._fill(self._linears.empty(sum(heights), width), [f"{module}.weight" for module in modules], heights)
        biases = self._tensor((sum(heights),), [f"{module}.bias" for module in modules], heights) if bias else None
        for part in [weight] if biases is None else [weight, biases]:
            self._put_in_order(part[:ordered])
        return self._linears.of(weight, biases)

    def _put_in_order(self, heads: torch.Tensor) -> None:
        """In place; `[heads * head_dim, …]`."""
        if self._head_order is not None and len(heads):
            size = self._config.head_dim
            for first in range(0, len(heads), size):
                heads[first : first + size] = heads[first : first + size][self._head_order]

    def _norm(self, module: str) -> Norm:
        width = self._config.model.hidden_size
        weight = self._norm_weight(module, width)
        if not self._config.layer_norm:
            return self._rms_norm(weight)
        return LayerNorm(weight, self._tensor((width,), [f"{module}.bias"]) if self._config.norm_bias else None, self._config.norm_eps)

    def _optional_norm(self, prefix: str, name: str | None) -> Norm | None:
        return None if name is None else self._norm(f"{prefix}.{name}")

    def _head_norm(self, attention: str) -> RMSNorm:
        """The query and key norms side by side, so that both are one operation."""
        config = self._config
        query, key = (self._norm_weight(f"{attention}.{part}_norm", config.head_dim) for part in "qk")
        for weight in (query, key):
            self._put_in_order(weight)
        return self._rms_norm(torch.stack([query] * config.num_heads + [key] * config.num_kv_heads))

    def _all_heads_norms(self, attention: str) -> tuple[RMSNorm, RMSNorm]:
        config = self._config
        weights = [
            self._norm_weight(f"{attention}.{part}_norm", heads * config.head_dim)
            for part, heads in zip("qk", (config.num_heads, config.num_kv_heads), strict=True)
        ]
        for weight in weights:
            self._put_in_order(weight)
        return self._rms_norm(weights[0]), self._rms_norm(weights[1])

    def _norm_weight(self, module: str, width: int) -> torch.Tensor:
        """`[width]`; in float32 where one is added, since 1 + w would lose its last bits in a shorter dtype."""
        if not self._config.norm_adds_one:
            return self._tensor((width,), [f"{module}.weight"])
        stored = torch.empty(width, dtype=torch.float32, device=self._device)
        self._checkpoint.copy(f"{module}.weight", stored)
        return stored.to(self._dtype).float().add_(1.0)

    def _rms_norm(self, weight: torch.Tensor) -> RMSNorm:
        return RMSNorm(weight, self._config.norm_eps)

    def _tensor(self, shape: tuple[int, ...], names: Sequence[str], heights: Sequence[int] | None = None) -> torch.Tensor:
        """Stored tensors stacked along the first dimension."""
        return self._fill(torch.empty(shape, dtype=self._dtype, device=self._device), names, heights)

    def _fill(self, target: torch.Tensor, names: Sequence[str], heights: Sequence[int] | None) -> torch.Tensor:
        parts = target.split_with_sizes(list(heights)) if heights is not None else [target]
        for name, part in zip(names, parts, strict=True):
            self._checkpoint.copy(name, part)
        return target
