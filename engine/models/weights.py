"""The decoder's weights, streamed from a checkpoint into the fused tensors that the forward pass uses."""

from dataclasses import dataclass
from pathlib import Path

import torch

from engine.errors import ModelError
from engine.models.blocks.attention import read_attention
from engine.models.blocks.decoder_config import DecoderConfig, DeltaNetConfig
from engine.models.blocks.delta_net import read_delta_net
from engine.models.blocks.experts import read_sparse_mlp
from engine.models.blocks.latent_attention import read_latent_attention
from engine.models.blocks.linear import Linear, Linears
from engine.models.blocks.mixer import Mixer
from engine.models.blocks.mlp import MLP, read_mlp
from engine.models.blocks.norm import Norm
from engine.models.blocks.reader import WeightReader, read_norm
from engine.models.blocks.short_conv import read_short_conv
from engine.models.checkpoints.checkpoint import Checkpoint

EMBEDDING = "model.embed_tokens.weight"
HEAD = "lm_head.weight"
HARMLESS_SUFFIXES = (".rotary_emb.inv_freq", ".self_attn.masked_bias", ".self_attn.bias")
"""Buffers that old exporters stored beside the weights; they are derived from the configuration."""


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """One decoder layer."""

    before_attention: Norm | None
    mixer: Mixer
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
    """Reads one checkpoint."""

    def __init__(
        self, config: DecoderConfig, checkpoint: Checkpoint, linears: Linears, *, dtype: torch.dtype, device: torch.device
    ) -> None:
        self._config = config
        self._checkpoint = checkpoint
        self._linears = linears
        self._reader = WeightReader(checkpoint, linears, dtype=dtype, device=device)

    def load(self, folder: Path) -> DecoderWeights:
        """Raises `ModelError` naming a weight that is missing, of a wrong shape, or that the architecture doesn't have."""
        embedding, head = self._embedding_and_head()
        layers = tuple(self._layer(index) for index in range(self._config.model.num_layers))
        final_norm = read_norm(self._reader, self._config, self._config.final_norm)
        unknown = sorted(name for name in self._checkpoint.unread if not name.endswith(HARMLESS_SUFFIXES))
        if unknown:
            raise ModelError(f"{folder}: weight {unknown[0]} ({len(unknown)} such) is not part of {self._config.model.architecture}")
        return DecoderWeights(embedding, layers, final_norm, None if head is None else self._linears.of(head))

    def _embedding_and_head(self) -> tuple[torch.Tensor, torch.Tensor | None]:
        """As transformers does, a tied pair is shared also where only the head is stored, and kept apart where the two differ."""
        shape = (self._config.model.vocab_size, self._config.model.hidden_size)
        checkpoint, tensor = self._checkpoint, self._reader.tensor
        if not self._config.tie_embeddings:
            return tensor(shape, [EMBEDDING]), tensor(shape, [HEAD]) if HEAD in checkpoint else None
        embedding = tensor(shape, [EMBEDDING if EMBEDDING in checkpoint or HEAD not in checkpoint else HEAD])
        if HEAD in checkpoint.unread and not checkpoint.same(EMBEDDING, HEAD):
            return embedding, tensor(shape, [HEAD])
        return embedding, embedding

    def _layer(self, index: int) -> LayerWeights:
        names, prefix = self._config.norms, f"model.layers.{index}"
        return LayerWeights(
            before_attention=self._optional_norm(prefix, names.before_attention),
            mixer=self._mixer(index, prefix),
            after_attention=self._optional_norm(prefix, names.after_attention),
            before_mlp=self._optional_norm(prefix, names.before_mlp),
            mlp=self._mlp(index, prefix),
            after_mlp=self._optional_norm(prefix, names.after_mlp),
        )

    def _mixer(self, index: int, prefix: str) -> Mixer:
        reader, config = self._reader, self._config
        if index in config.recurrent_layers:
            if isinstance(config.recurrent, DeltaNetConfig):
                return read_delta_net(reader, config, config.recurrent, f"{prefix}.linear_attn")
            assert config.recurrent is not None
            return read_short_conv(reader, config, config.recurrent, f"{prefix}.conv")
        if config.latent is not None:
            return read_latent_attention(reader, config, config.latent, index, f"{prefix}.self_attn")
        return read_attention(reader, config, index, f"{prefix}.self_attn")

    def _mlp(self, index: int, prefix: str) -> MLP:
        experts = self._config.experts
        if experts is not None and index in experts.layers:
            return read_sparse_mlp(self._reader, self._config, experts, prefix)
        return read_mlp(self._reader, self._config, f"{prefix}.{self._config.mlp.prefix}", self._config.intermediate_size)

    def _optional_norm(self, prefix: str, name: str | None) -> Norm | None:
        return None if name is None else read_norm(self._reader, self._config, f"{prefix}.{name}")
