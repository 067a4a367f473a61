"""What differs between GGUF architectures: tensor names, stored forms of weights, and the Hugging Face configuration.

Names and forms: https://github.com/ggml-org/llama.cpp/blob/master/convert_hf_to_gguf.py, read backwards.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from engine.errors import ModelError
from engine.models.gguf.file import GGUFMetadata
from engine.models.gguf.rope import rope_scaling
from engine.models.gguf.settings import GGUFSettings

Config = dict[str, Any]
Factors = Sequence[float] | None
"""`rope_freqs.weight`: a divisor per rotary frequency; None where the file has none."""

TOP_NAMES: Mapping[str, str] = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
ROPE_FACTORS = "rope_freqs.weight"

_LAYER_NAMES: Mapping[str, str] = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_QK_NORMS: Mapping[str, str] = {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}
_ROTARY_ORDER: Mapping[str, str] = {"attn_q": "num_attention_heads", "attn_k": "num_key_value_heads"}


@dataclass(frozen=True)
class GGUFFamily:
    """How one GGUF architecture is turned into a Hugging Face folder."""

    config: Callable[[GGUFSettings, Factors], Config]
    layer_names: Mapping[str, str] = field(default_factory=lambda: _LAYER_NAMES)
    """`blk.N.<key>.weight` is `model.layers.N.<value>.weight`."""
    biases: tuple[str, ...] = ()
    """These keys have a `.bias` beside the weight."""
    optional_biases: tuple[str, ...] = ()
    """These have all of them one, or none (the configuration's `attention_bias`)."""
    permuted: Mapping[str, str] = field(default_factory=dict)
    """Projections whose rows stand in interleaved rotary order, with the configuration's name of their head count."""
    norms_plus_one: bool = False
    """Norm weights are stored as 1 + w."""


def _common(settings: GGUFSettings, factors: Factors) -> Config:
    heads = settings.get("attention.head_count", int)
    hidden_size = settings.get("embedding_length", int)
    head_dim = settings.get("attention.key_length", int, hidden_size // heads)
    rotary = settings.get("rope.dimension_count", int, head_dim)
    if rotary != head_dim:
        raise settings.error(f"rotary embedding over {rotary} of {head_dim} dimensions is not supported")
    settings.refuse_unless("attention.value_length", head_dim)
    _refuse_what_is_not_built(settings)
    context = settings.get("context_length", int)
    return {
        "hidden_size": hidden_size,
        "intermediate_size": settings.get("feed_forward_length", int),
        "num_hidden_layers": settings.get("block_count", int),
        "num_attention_heads": heads,
        "num_key_value_heads": settings.get("attention.head_count_kv", int, heads),
        "head_dim": head_dim,
        "max_position_embeddings": context,
        "rms_norm_eps": settings.number("attention.layer_norm_rms_epsilon"),
        "attention_bias": False,
        "attention_dropout": 0.0,
        "rope_scaling": rope_scaling(settings, context, factors),
    }


def _refuse_what_is_not_built(settings: GGUFSettings) -> None:
    for key in ("expert_count", "expert_used_count", "expert_shared_count", "attention.max_alibi_bias", "attention.clamp_kqv"):
        settings.refuse_unless(key, 0)
    for key in ("logit_scale", "embedding_scale", "residual_scale"):
        settings.refuse_unless(key, 0, 1)
    settings.refuse_unless("attention.causal", True)
    settings.refuse_unless("attn_logit_softcapping", 0)
    settings.refuse_unless("leading_dense_block_count", 0)


def _plain_scale(settings: GGUFSettings, head_dim: int) -> None:
    settings.refuse_unless("attention.scale", 0, head_dim**-0.5)
    settings.refuse_unless("final_logit_softcapping", 0)


def _llama_config(settings: GGUFSettings, factors: Factors) -> Config:
    """Mistral's files are of this architecture too; what tells them apart is the window, where they have one."""
    common = _common(settings, factors)
    _plain_scale(settings, common["head_dim"])
    window = settings.get("attention.sliding_window", int, 0)
    settings.refuse_unless("attention.sliding_window_pattern", 0, 1)
    slides = 0 < window < common["max_position_embeddings"]
    family: Config = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "mlp_bias": False}
    if slides:
        family = {"model_type": "mistral", "architectures": ["MistralForCausalLM"], "sliding_window": window}
    return common | family | {"hidden_act": "silu", "rope_theta": settings.number("rope.freq_base", 10_000.0)}


def _qwen_config(model_type: str, architecture: str) -> Callable[[GGUFSettings, Factors], Config]:
    def config(settings: GGUFSettings, factors: Factors) -> Config:
        common = _common(settings, factors)
        _plain_scale(settings, common["head_dim"])
        settings.refuse_unless("attention.sliding_window", 0)
        return common | {
            "model_type": model_type,
            "architectures": [architecture],
            "hidden_act": "silu",
            "use_sliding_window": False,
            "max_window_layers": common["num_hidden_layers"],
            "rope_theta": settings.number("rope.freq_base", 10_000.0),
        }

    return config


GEMMA3_PATTERN = 6
"""Every sixth layer of Gemma 3 sees all positions, the others a window, where the file says nothing else."""
GEMMA3_27B_LAYERS = 62


def _gemma3_config(settings: GGUFSettings, factors: Factors) -> Config:
    common = _common(settings, factors)
    cap = settings.number("final_logit_softcapping", 0.0)
    return common | {
        "model_type": "gemma3_text",
        "architectures": ["Gemma3ForCausalLM"],
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": _query_scalar(settings, common),
        "sliding_window": settings.get("attention.sliding_window", int),
        "layer_types": _layer_types(settings, common["num_hidden_layers"]),
        "rope_theta": settings.number("rope.freq_base", 1e6),
        "rope_local_base_freq": settings.number("rope.freq_base_swa", 10_000.0),
        "attn_logit_softcapping": None,
        "final_logit_softcapping": cap or None,
    }


def _query_scalar(settings: GGUFSettings, common: Config) -> float:
    scale = settings.get("attention.scale", float, 0.0)
    if scale:
        return float(scale**-2)
    # The largest Gemma 3 alone scales queries by width / heads (Gemma 3 report, and llama.cpp's graph for it).
    of_27b = common["num_hidden_layers"] == GEMMA3_27B_LAYERS
    scalar: int = common["hidden_size"] // common["num_attention_heads"] if of_27b else common["head_dim"]
    return scalar


def _layer_types(settings: GGUFSettings, layers: int) -> list[str]:
    """The pattern is a period, whose last layer sees everything, or says of each layer whether it slides."""
    pattern = settings.raw("attention.sliding_window_pattern")
    if isinstance(pattern, list):
        if len(pattern) != layers:
            raise settings.error(f"attention.sliding_window_pattern has {len(pattern)} entries for {layers} layers")
        slides = [bool(value) for value in pattern]
    else:
        period = GEMMA3_PATTERN if pattern is None else settings.get("attention.sliding_window_pattern", int)
        slides = [period > 0 and layer % period != 0 for layer in range(1, layers + 1)]
    return ["sliding_attention" if value else "full_attention" for value in slides]


FAMILIES: Mapping[str, GGUFFamily] = {
    "llama": GGUFFamily(_llama_config, optional_biases=("attn_q", "attn_k", "attn_v", "attn_output"), permuted=_ROTARY_ORDER),
    "qwen2": GGUFFamily(_qwen_config("qwen2", "Qwen2ForCausalLM"), biases=("attn_q", "attn_k", "attn_v")),
    "qwen3": GGUFFamily(_qwen_config("qwen3", "Qwen3ForCausalLM"), layer_names={**_LAYER_NAMES, **_QK_NORMS}),
    "gemma3": GGUFFamily(
        _gemma3_config,
        layer_names={
            **_LAYER_NAMES,
            **_QK_NORMS,
            "post_attention_norm": "post_attention_layernorm",
            "ffn_norm": "pre_feedforward_layernorm",
            "post_ffw_norm": "post_feedforward_layernorm",
        },
        norms_plus_one=True,
    ),
}


def family_of(metadata: GGUFMetadata) -> GGUFFamily:
    """Raises `ModelError` for an architecture that isn't supported."""
    family = FAMILIES.get(metadata.architecture)
    if family is None:
        known = ", ".join(sorted(FAMILIES))
        raise ModelError(f"{metadata.source} is of architecture {metadata.architecture!r}; GGUF files of {known} can be used")
    return family
