"""What differs between GGUF architectures: tensor names, stored forms of weights, and the Hugging Face configuration.

Names and forms: https://github.com/ggml-org/llama.cpp/blob/master/convert_hf_to_gguf.py, read backwards.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from engine.errors import ModelError
from engine.models.gguf_file import GGUFMetadata

Config = dict[str, Any]

TOP_NAMES: Mapping[str, str] = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}

_COMMON_LAYER_NAMES: Mapping[str, str] = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


@dataclass(frozen=True)
class GGUFFamily:
    """How one GGUF architecture is turned into a Hugging Face folder."""

    layer_names: Mapping[str, str]
    """`blk.N.<key>.weight` is `model.layers.N.<value>.weight`."""
    config: Callable[[GGUFMetadata], Config]
    permuted: Mapping[str, str] = field(default_factory=dict)
    """Projections whose rows stand in interleaved rotary order, with the configuration's name of their head count."""
    norms_plus_one: bool = False
    """Norm weights are stored as 1 + w."""


def shortest(value: float) -> float:
    """The shortest decimal that is the same float32: 1e-05 rather than 9.999999747378752e-06."""
    return float(str(np.float32(value)))


def _common(metadata: GGUFMetadata, prefix: str) -> Config:
    heads = metadata.get(f"{prefix}.attention.head_count", int)
    hidden_size = metadata.get(f"{prefix}.embedding_length", int)
    return {
        "hidden_size": hidden_size,
        "intermediate_size": metadata.get(f"{prefix}.feed_forward_length", int),
        "num_hidden_layers": metadata.get(f"{prefix}.block_count", int),
        "num_attention_heads": heads,
        "num_key_value_heads": metadata.get(f"{prefix}.attention.head_count_kv", int, heads),
        "head_dim": metadata.get(f"{prefix}.attention.key_length", int, hidden_size // heads),
        "max_position_embeddings": metadata.get(f"{prefix}.context_length", int),
        "rms_norm_eps": shortest(metadata.get(f"{prefix}.attention.layer_norm_rms_epsilon", float)),
        "attention_bias": False,
        "attention_dropout": 0.0,
    }


def _rope_scaling(metadata: GGUFMetadata, prefix: str) -> Config | None:
    kind = metadata.get(f"{prefix}.rope.scaling.type", str, "none")
    if kind == "none":
        return None
    if kind not in ("linear", "yarn"):
        raise ModelError(f"{metadata.source}: rope scaling {kind!r} is not supported; linear and yarn are")
    scaling: Config = {"rope_type": kind, "factor": shortest(metadata.get(f"{prefix}.rope.scaling.factor", float))}
    original = metadata.optional_int(f"{prefix}.rope.scaling.original_context_length")
    if original is not None and kind == "yarn":
        scaling["original_max_position_embeddings"] = original
    return scaling


def _llama_config(metadata: GGUFMetadata) -> Config:
    common = _common(metadata, "llama")
    rotary = metadata.get("llama.rope.dimension_count", int, common["head_dim"])
    if rotary != common["head_dim"]:
        raise ModelError(f"{metadata.source}: rotary embedding over {rotary} of {common['head_dim']} dimensions is not supported")
    return common | {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "hidden_act": "silu",
        "mlp_bias": False,
        "rope_theta": shortest(metadata.get("llama.rope.freq_base", float, 10000.0)),
        "rope_scaling": _rope_scaling(metadata, "llama"),
    }


GEMMA3_PATTERN = 6
"""Every sixth layer of Gemma 3 sees all positions, the others a window; the GGUF leaves it unsaid."""
GEMMA3_27B_LAYERS = 62


def _gemma3_config(metadata: GGUFMetadata) -> Config:
    common = _common(metadata, "gemma3")
    layers, head_dim = common["num_hidden_layers"], common["head_dim"]
    # The largest Gemma 3 alone scales queries by width / heads (Gemma 3 report, and llama.cpp's graph for it).
    query_scalar = common["hidden_size"] // common["num_attention_heads"] if layers == GEMMA3_27B_LAYERS else head_dim
    kinds = ["full_attention" if layer % GEMMA3_PATTERN == 0 else "sliding_attention" for layer in range(1, layers + 1)]
    return common | {
        "model_type": "gemma3_text",
        "architectures": ["Gemma3ForCausalLM"],
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": query_scalar,
        "sliding_window": metadata.get("gemma3.attention.sliding_window", int),
        "layer_types": kinds,
        "rope_theta": shortest(metadata.get("gemma3.rope.freq_base", float, 1e6)),
        "rope_local_base_freq": 10000.0,
        "rope_scaling": _rope_scaling(metadata, "gemma3"),
        "attn_logit_softcapping": None,
        "final_logit_softcapping": None,
    }


FAMILIES: Mapping[str, GGUFFamily] = {
    "llama": GGUFFamily(
        layer_names={**_COMMON_LAYER_NAMES, "ffn_norm": "post_attention_layernorm"},
        config=_llama_config,
        permuted={"attn_q": "num_attention_heads", "attn_k": "num_key_value_heads"},
    ),
    "gemma3": GGUFFamily(
        layer_names={
            **_COMMON_LAYER_NAMES,
            "attn_q_norm": "self_attn.q_norm",
            "attn_k_norm": "self_attn.k_norm",
            "post_attention_norm": "post_attention_layernorm",
            "ffn_norm": "pre_feedforward_layernorm",
            "post_ffw_norm": "post_feedforward_layernorm",
        },
        config=_gemma3_config,
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
