"""The decoder's weights, streamed from a checkpoint into the fused tensors that the forward pass uses."""

from dataclasses import dataclass
from pathlib import Path

import torch

from engine.errors import ModelError
from engine.models.blocks.attention import read_attention
from engine.models.blocks.decoder_config import DecoderConfig, DeltaNetConfig, MambaConfig, ShortConvConfig
from engine.models.blocks.delta_net import read_delta_net
from engine.models.blocks.experts import read_sparse_mlp
from engine.models.blocks.latent_attention import read_latent_attention
from engine.models.blocks.linear import Linear, Linears
from engine.models.blocks.mamba import read_mamba
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
    mixer: Mixer | None
    """None, or no MLP: the layer is a half only."""
    after_attention: Norm | None
    before_mlp: Norm | None
    mlp: MLP | None
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
            before_attention=self._optional_norm(prefix, None if index in self._config.without_mixer else names.before_attention),
            mixer=self._mixer(index, prefix),
            after_attention=self._optional_norm(prefix, names.after_attention),
            before_mlp=self._optional_norm(prefix, None if index in self._config.without_mlp else names.before_mlp),
            mlp=self._mlp(index, prefix),
            after_mlp=self._optional_norm(prefix, names.after_mlp),
        )

    def _mixer(self, index: int, prefix: str) -> Mixer | None:
        reader, config = self._reader, self._config
        recurrent, attention = config.recurrent, f"{prefix}.{config.attention.prefix}"
        if index in config.without_mixer:
            return None
        if index in config.recurrent_layers:
            assert recurrent is not None
            return self._recurrent(recurrent, f"{prefix}.{recurrent.prefix}")
        if config.latent is not None:
            return read_latent_attention(reader, config, config.latent, index, attention)
        return read_attention(reader, config, index, attention)

    def _recurrent(self, recurrent: DeltaNetConfig | ShortConvConfig | MambaConfig, prefix: str) -> Mixer:
        match recurrent:
            case DeltaNetConfig():
                return read_delta_net(self._reader, self._config, recurrent, prefix)
            case ShortConvConfig():
                return read_short_conv(self._reader, self._config, recurrent, prefix)
            case MambaConfig():
                return read_mamba(self._reader, self._config, recurrent, prefix)

    def _mlp(self, index: int, prefix: str) -> MLP | None:
        if index in self._config.without_mlp:
            return None
        experts = self._config.experts
        if experts is not None and index in experts.layers:
            return read_sparse_mlp(self._reader, self._config, experts, prefix)
        return read_mlp(self._reader, self._config, f"{prefix}.{self._config.mlp.prefix}", self._config.intermediate_size)

    def _optional_norm(self, prefix: str, name: str | None) -> Norm | None:
        return None if name is None else read_norm(self._reader, self._config, f"{prefix}.{name}")
