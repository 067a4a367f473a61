"""What the configurable decoder is told about one model; `families.py` makes it from a checkpoint's configuration."""

from dataclasses import dataclass

from engine.models.base import ModelConfig
from engine.models.rope import Rope


@dataclass(frozen=True)
class NormNames:
    """Weight names of a layer's norms. A sublayer is `x + after(sublayer(before(x)))`; None: there is no such norm."""

    before_attention: str = "input_layernorm"
    after_attention: str | None = None
    before_mlp: str = "post_attention_layernorm"
    after_mlp: str | None = None


@dataclass(frozen=True)
class DecoderConfig:
    """A Llama-like decoder."""

    model: ModelConfig
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    activation: str
    norm_eps: float
    attention_scale: float
    windows: tuple[int | None, ...]
    """Per layer: the sliding window, or None for full attention."""
    ropes: tuple[Rope, ...]
    rope_of_layer: tuple[int, ...]
    """Per layer: an index into `ropes`."""
    tie_embeddings: bool
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    norms: NormNames = NormNames()
    norm_adds_one: bool = False
    """Stored norm weights are w - 1, applied in float32 (Gemma)."""
    embedding_scale: float = 1.0
    logit_soft_cap: float | None = None
    """logits = cap * tanh(logits / cap)."""
    multimodal: bool = False
    """The checkpoint holds a model of images or sound as well, of which nothing is loaded."""
