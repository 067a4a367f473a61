"""A random model made on the device: its speed is that of trained weights, and nothing has to be fetched or read."""

from dataclasses import dataclass

import torch

from engine.models.base import AttentionOptions, ModelConfig
from engine.models.blocks.attention import Attention
from engine.models.blocks.decoder_config import DecoderConfig
from engine.models.blocks.linear import DenseLinear
from engine.models.blocks.mlp import GatedMLP
from engine.models.blocks.norm import RMSNorm
from engine.models.blocks.rope import DefaultRope
from engine.models.decoder import Decoder
from engine.models.weights import DecoderWeights, LayerWeights

_DEVIATION = 0.02
"""Of the weights: with it states neither vanish nor overflow in bfloat16 over 32 layers."""


@dataclass(frozen=True)
class ModelShape:
    """A Llama."""

    width: int
    inner: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    context: int
    dtype: torch.dtype

    @property
    def layer_parameters(self) -> int:
        """Weights of the matrices of all layers: what every token is multiplied with, embeddings and head left out."""
        attention = (2 * self.heads + 2 * self.kv_heads) * self.head_dim * self.width
        return self.layers * (attention + 3 * self.width * self.inner)

    def prefill_flops(self, length: int) -> float:
        """Operations for one sequence: two per weight and token, and causal attention's, half of what all pairs would take."""
        pairs = length * (length + 1) / 2
        return 2.0 * self.layer_parameters * length + 4.0 * self.heads * self.head_dim * self.layers * pairs


LLAMA_8B = ModelShape(4096, 14336, 32, 32, 8, 128, 128_256, 16_384, torch.bfloat16)
TINY = ModelShape(64, 96, 4, 4, 2, 16, 97, 512, torch.float32)


def random_model(shape: ModelShape, device: torch.device) -> Decoder:
    """Seeded. Weights are drawn on the device, one tensor after the other."""
    generator = torch.Generator(device).manual_seed(0)

    def matrix(*size: int) -> torch.Tensor:
        return torch.empty(size, dtype=shape.dtype, device=device).normal_(0.0, _DEVIATION, generator=generator)

    def norm() -> RMSNorm:
        return RMSNorm(torch.ones(shape.width, dtype=shape.dtype, device=device), 1e-5)

    def layer() -> LayerWeights:
        queries, fused = shape.heads * shape.head_dim, (shape.heads + 2 * shape.kv_heads) * shape.head_dim
        return LayerWeights(
            before_attention=norm(),
            mixer=Attention(
                shape.heads,
                shape.kv_heads,
                shape.head_dim,
                AttentionOptions(shape.head_dim**-0.5),
                qkv=DenseLinear(matrix(fused, shape.width)),
                head_norm=None,
                all_heads_norms=None,
                output=DenseLinear(matrix(shape.width, queries)),
                gated=False,
                normed_after=None,
                temperature=None,
            ),
            after_attention=None,
            before_mlp=norm(),
            mlp=GatedMLP("silu", DenseLinear(matrix(2 * shape.inner, shape.width)), DenseLinear(matrix(shape.width, shape.inner))),
            after_mlp=None,
        )

    with torch.inference_mode():
        layers = tuple(layer() for _ in range(shape.layers))
        weights = DecoderWeights(matrix(shape.vocab, shape.width), layers, norm(), DenseLinear(matrix(shape.vocab, shape.width)))
    return Decoder(_config(shape), weights, shape.context)


def _config(shape: ModelShape) -> DecoderConfig:
    described = ModelConfig("RandomLlama", shape.layers, shape.width, shape.vocab, shape.context, (), shape.dtype)
    return DecoderConfig(
        model=described,
        num_heads=shape.heads,
        num_kv_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        intermediate_size=shape.inner,
        activation="silu",
        norm_eps=1e-5,
        attention_scale=shape.head_dim**-0.5,
        windows=(None,) * shape.layers,
        ropes=(DefaultRope(500_000.0),),
        rope_of_layer=(0,) * shape.layers,
        tie_embeddings=False,
    )
