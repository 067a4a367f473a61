"""What the configurable decoder is told about one model; `families.py` makes it from a checkpoint's configuration."""

from dataclasses import dataclass
from enum import Enum, auto

from engine.models.base import ModelConfig
from engine.models.blocks.rope import Rope, RotaryLayout


@dataclass(frozen=True)
class NormNames:
    """Weight names of a layer's norms. A sublayer is `x + after(sublayer(before(x)))`; None: there is no such norm."""

    before_attention: str | None = "input_layernorm"
    after_attention: str | None = None
    before_mlp: str | None = "post_attention_layernorm"
    after_mlp: str | None = None


@dataclass(frozen=True)
class MLPNames:
    """Weight names of a layer's MLP and within it; `gate` None: down(activation(up(x))), without a gate."""

    up: str = "up_proj"
    down: str = "down_proj"
    gate: str | None = "gate_proj"
    prefix: str = "mlp"
    fused: str = "gate_up_proj"
    """Gate and up side by side, as some exporters write them."""


class QKNorm(Enum):
    """What queries and keys are normed over, and when."""

    NONE = auto()
    HEAD = auto()
    """Each head by itself; all have the same weight."""
    AFTER_ROTATION = auto()
    """Each head by itself, without a weight, after it is rotated, where it is (Llama 4)."""
    ALL_HEADS = auto()
    """All heads of the queries together, and all of the keys."""


class Scoring(Enum):
    """How a router's logits become the weights of experts."""

    SOFTMAX = auto()
    """Of all experts, before some are chosen. Normalised, the weights are the softmax of the chosen ones' logits."""
    SIGMOID = auto()
    """Of each by itself."""


@dataclass(frozen=True)
class AttentionNames:
    """Weight names of a layer's attention and within it."""

    output: str = "o_proj"
    query_norm: str = "q_norm"
    key_norm: str = "k_norm"
    prefix: str = "self_attn"


@dataclass(frozen=True)
class AttentionTemperature:
    """Queries are multiplied by 1 + scale * ln(1 + floor((position + 1) / every)) (Llama 4)."""

    scale: float
    every: int


@dataclass(frozen=True)
class DeltaNetConfig:
    """Gated delta net (Qwen3-Next, Qwen3.5): linear attention whose state is a matrix per value head."""

    num_key_heads: int
    num_value_heads: int
    key_dim: int
    value_dim: int
    num_taps: int
    """Of the convolution before it."""
    prefix: str = "linear_attn"


@dataclass(frozen=True)
class ShortConvConfig:
    """Gated short convolution (LFM2)."""

    num_taps: int
    bias: bool
    prefix: str = "conv"


@dataclass(frozen=True)
class MambaConfig:
    """Mamba 2 (Granite 4, Nemotron-H)."""

    num_heads: int
    head_dim: int
    state_dim: int
    num_groups: int
    num_taps: int
    conv_bias: bool
    bias: bool
    """Of the products before and behind."""
    step_limits: tuple[float, float]
    prefix: str


@dataclass(frozen=True)
class LatentConfig:
    """Multi-head latent attention (DeepSeek V2). A head has dimensions that aren't rotated, then `rotary_dim` that are."""

    query_rank: int | None
    """Of the latent that queries are made of; None: they are made of the rows themselves."""
    rank: int
    """Of the latent that keys and values are made of."""
    plain_dim: int
    rotary_dim: int
    value_dim: int
    norm_eps: float = 1e-6
    """Of the latents' norms: transformers' default, whatever the configuration says of the other norms."""


@dataclass(frozen=True)
class ClampedGate:
    """(up + 1) * gate * sigmoid(alpha * gate) in the place of activation(gate) * up, of values within a limit (GPT-OSS)."""

    alpha: float
    limit: float
    """Of the gate from above, of up on both sides."""


@dataclass(frozen=True)
class SharedExpert:
    """An MLP that every row goes through beside its experts."""

    name: str
    intermediate_size: int
    in_layer: bool = False
    """Its modules are the layer's, not the MLP's (Granite 4)."""
    gated: bool = False
    """Its output is multiplied by sigmoid(w x), with a weight of its own for each model (Qwen2-MoE)."""


@dataclass(frozen=True)
class ExpertsConfig:
    """The MLPs of sparse layers."""

    num_experts: int
    num_per_token: int
    intermediate_size: int
    layers: frozenset[int]
    """The sparse ones."""
    scoring: Scoring = Scoring.SOFTMAX
    normalise: bool = False
    """The chosen experts' weights are divided by their sum."""
    scale: float = 1.0
    """Of the weights, in the end."""
    num_groups: int = 1
    """Experts are in groups, of which only the best `num_chosen_groups` are chosen from: by the sum of the best scores in each."""
    num_chosen_groups: int = 1
    num_best: int = 2
    """So many scores of a group are added up."""
    wide_router: bool = False
    """The router's product is in float32 whatever the model's dtype is, as DeepSeek's reference has it."""
    correction: str | None = None
    """Weight name of what is added to scores when experts are chosen, but not to their weights (DeepSeek V3)."""
    shared: SharedExpert | None = None
    router: str = "gate"
    """The weight name of the router."""
    bias: bool = False
    """Of the router and of the experts."""
    clamp: ClampedGate | None = None
    gated: bool = True
    """False: an expert is down(activation(up(x))) (Nemotron-H)."""
    latent_size: int | None = None
    """Experts compute with a projection of the rows of this width (Nemotron 3)."""
    weighs_inputs: bool = False
    """Weights multiply what experts are given instead of what they give (Llama 4)."""
    inputs_first: bool = False
    """Experts are stored in one tensor each, `[experts, inputs, outputs]` (GPT-OSS, Llama 4)."""
    outputs_in_turns: bool = False
    """In which the outputs of gate and up take turns (GPT-OSS)."""


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
    rope_of_layer: tuple[int | None, ...]
    """Per layer: an index into `ropes`; None: the layer doesn't rotate (NoPE)."""
    tie_embeddings: bool
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: QKNorm = QKNorm.NONE
    rotary: RotaryLayout | None = None
    """Which dimensions of a head are rotated; None: all, the first half with the second."""
    norms: NormNames = NormNames()
    layer_norm: bool = False
    """LayerNorm instead of RMSNorm."""
    norm_bias: bool = False
    """Of a LayerNorm."""
    norm_in_float32: bool = False
    """RMSNorm weights are applied before the result is rounded to the model's dtype (OLMo, GPT-OSS)."""
    norm_adds_one: bool = False
    """Stored norm weights are w - 1, applied in float32 (Gemma)."""
    embedding_scale: float = 1.0
    parallel: bool = False
    """Attention and MLP both read the rows normed before attention, and both are added to the residual stream (Cohere)."""
    attention: AttentionNames = AttentionNames()
    attention_gate: bool = False
    """What the heads give is multiplied by a sigmoid of the rows, whose weights are stored with those of the queries (Qwen3-Next)."""
    recurrent: DeltaNetConfig | ShortConvConfig | MambaConfig | None = None
    recurrent_layers: frozenset[int] = frozenset()
    """Those with it in the place of attention."""
    without_mixer: frozenset[int] = frozenset()
    without_mlp: frozenset[int] = frozenset()
    """Layers that are a half only (Nemotron-H)."""
    mlp: MLPNames = MLPNames()
    experts: ExpertsConfig | None = None
    latent: LatentConfig | None = None
    """In the place of grouped-query attention."""
    residual_scale: float = 1.0
    """Of what a sublayer adds to the residual stream (Granite)."""
    attention_soft_cap: float | None = None
    """scores = cap * tanh(scores / cap) (Gemma 2)."""
    chunked: bool = False
    """Windows are chunks: a position sees those of its own chunk only (Llama 4)."""
    temperature: AttentionTemperature | None = None
    """Of layers that don't rotate."""
    attention_sinks: bool = False
    """A logit per head takes its share of the softmax and has no value (GPT-OSS)."""
    logit_divisor: float = 1.0
    """logits = head(states) / divisor (Granite)."""
    logit_soft_cap: float | None = None
    """logits = cap * tanh(logits / cap)."""
    final_norm: str = "model.norm"
    """Its weight name."""
    mtp_prefixes: tuple[str, ...] = ()
    """Of weights that the checkpoint may hold beside the decoder's, to predict more tokens at a time (MTP); none is loaded."""
    multimodal: bool = False
    """The checkpoint holds a model of images or sound as well, of which nothing is loaded."""
