"""Tiny random models of every family, saved as checkpoints, with transformers' results as the reference."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import pytest
import torch
from transformers import (
    Cohere2Config,
    Cohere2ForCausalLM,
    DeepseekV2Config,
    DeepseekV2ForCausalLM,
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    Exaone4Config,
    Exaone4ForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    Glm4Config,
    Glm4ForCausalLM,
    Glm4MoeConfig,
    Glm4MoeForCausalLM,
    Glm4MoeLiteConfig,
    Glm4MoeLiteForCausalLM,
    GlmConfig,
    GlmForCausalLM,
    GptOssConfig,
    GptOssForCausalLM,
    GraniteConfig,
    GraniteForCausalLM,
    GraniteMoeHybridConfig,
    GraniteMoeHybridForCausalLM,
    Lfm2Config,
    Lfm2ForCausalLM,
    Llama4ForCausalLM,
    Llama4TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    MiniMaxM2Config,
    MiniMaxM2ForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    NemotronHConfig,
    NemotronHForCausalLM,
    Olmo2Config,
    Olmo2ForCausalLM,
    Olmo3Config,
    Olmo3ForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen2MoeConfig,
    Qwen2MoeForCausalLM,
    Qwen3_5ForCausalLM,
    Qwen3_5MoeForCausalLM,
    Qwen3_5MoeTextConfig,
    Qwen3_5TextConfig,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
    Qwen3NextConfig,
    Qwen3NextForCausalLM,
    SmolLM3Config,
    SmolLM3ForCausalLM,
    Starcoder2Config,
    Starcoder2ForCausalLM,
)

from tests.parity.exact import KnownRows, in_float64, known_rows

CLASSES = {
    "llama": (LlamaConfig, LlamaForCausalLM),
    "mistral": (MistralConfig, MistralForCausalLM),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM),
    "gemma2": (Gemma2Config, Gemma2ForCausalLM),
    "gemma3": (Gemma3TextConfig, Gemma3ForCausalLM),
    "phi3": (Phi3Config, Phi3ForCausalLM),
    "smollm3": (SmolLM3Config, SmolLM3ForCausalLM),
    "granite": (GraniteConfig, GraniteForCausalLM),
    "olmo2": (Olmo2Config, Olmo2ForCausalLM),
    "olmo3": (Olmo3Config, Olmo3ForCausalLM),
    "exaone4": (Exaone4Config, Exaone4ForCausalLM),
    "cohere2": (Cohere2Config, Cohere2ForCausalLM),
    "starcoder2": (Starcoder2Config, Starcoder2ForCausalLM),
    "glm": (GlmConfig, GlmForCausalLM),
    "glm4": (Glm4Config, Glm4ForCausalLM),
    "qwen2_moe": (Qwen2MoeConfig, Qwen2MoeForCausalLM),
    "qwen3_moe": (Qwen3MoeConfig, Qwen3MoeForCausalLM),
    "mixtral": (MixtralConfig, MixtralForCausalLM),
    "glm4_moe": (Glm4MoeConfig, Glm4MoeForCausalLM),
    "minimax_m2": (MiniMaxM2Config, MiniMaxM2ForCausalLM),
    "deepseek_v2": (DeepseekV2Config, DeepseekV2ForCausalLM),
    "deepseek_v3": (DeepseekV3Config, DeepseekV3ForCausalLM),
    "glm4_moe_lite": (Glm4MoeLiteConfig, Glm4MoeLiteForCausalLM),
    "qwen3_next": (Qwen3NextConfig, Qwen3NextForCausalLM),
    "qwen3_5": (Qwen3_5TextConfig, Qwen3_5ForCausalLM),
    "qwen3_5_moe": (Qwen3_5MoeTextConfig, Qwen3_5MoeForCausalLM),
    "granite4": (GraniteMoeHybridConfig, GraniteMoeHybridForCausalLM),
    "nemotron_h": (NemotronHConfig, NemotronHForCausalLM),
    "lfm2": (Lfm2Config, Lfm2ForCausalLM),
    "llama4": (Llama4TextConfig, Llama4ForCausalLM),
    "gpt_oss": (GptOssConfig, GptOssForCausalLM),
}
ADD_ONE = ("Gemma", "Qwen3Next", "Qwen3_5")
"""Norm weights are stored as w - 1."""
RECURRENT = ("qwen3_next", "qwen3_5", "qwen3_5_moe", "granite4", "nemotron_h")
"""Families whose layers have a recurrent state of matrices."""
SHAPE = {
    "vocab_size": 97,
    "hidden_size": 64,
    "intermediate_size": 112,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": None,
    "tie_word_embeddings": False,
}
HALF_ROTARY = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}
EXPERTS: dict[str, object] = {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 40}
DELTA_NET: dict[str, object] = {
    "num_hidden_layers": 4,
    "head_dim": 24,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 12,
    "linear_conv_kernel_dim": 3,
    "layer_types": ["linear_attention", "full_attention", "linear_attention", "linear_attention"],
}
LATENT: dict[str, object] = {
    "num_key_value_heads": 4,
    "q_lora_rank": 48,
    "kv_lora_rank": 40,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 20,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 40,
}
FAMILY_SETTINGS: dict[str, dict[str, object]] = {
    "llama": {},
    "mistral": {"sliding_window": 9},
    "qwen2": {},
    "qwen3": {"head_dim": 24},
    "gemma3": {
        "head_dim": 24,
        "num_hidden_layers": 6,
        "sliding_window": 7,
        "query_pre_attn_scalar": 20,
        "tie_word_embeddings": True,
        "layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 2,
    },
    "gemma2": {
        "head_dim": 24,
        "num_hidden_layers": 4,
        "sliding_window": 7,
        "query_pre_attn_scalar": 20,
        "tie_word_embeddings": True,
        "attn_logit_softcapping": 4.0,
        "final_logit_softcapping": 5.0,
    },
    "phi3": {"rope_parameters": HALF_ROTARY},
    "smollm3": {"num_hidden_layers": 5},
    "granite": {"embedding_multiplier": 3.0, "attention_multiplier": 0.2, "residual_multiplier": 0.4, "logits_scaling": 4.0},
    "olmo2": {},
    "olmo3": {"num_hidden_layers": 4, "sliding_window": 7},
    "exaone4": {"num_hidden_layers": 4, "sliding_window": 7},
    "cohere2": {"num_hidden_layers": 4, "sliding_window": 7, "logit_scale": 0.25},
    "starcoder2": {},
    "glm": {"head_dim": 16, "rope_parameters": HALF_ROTARY},
    "glm4": {"head_dim": 24, "rope_parameters": HALF_ROTARY},
    "qwen2_moe": {**EXPERTS, "shared_expert_intermediate_size": 56},
    "qwen3_moe": {**EXPERTS, "head_dim": 24, "norm_topk_prob": True},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "glm4_moe": {
        "n_routed_experts": 8,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 40,
        "n_group": 4,
        "topk_group": 2,
        "routed_scaling_factor": 1.7,
        "use_qk_norm": True,
        "head_dim": 24,
        "rope_parameters": HALF_ROTARY,
    },
    "deepseek_v2": {**LATENT, "n_group": 4, "topk_group": 2, "topk_method": "group_limited_greedy", "routed_scaling_factor": 1.7},
    "deepseek_v3": {**LATENT, "n_group": 4, "topk_group": 2, "first_k_dense_replace": 1},
    "glm4_moe_lite": LATENT,
    "qwen3_next": {**EXPERTS, **DELTA_NET, "shared_expert_intermediate_size": 56},
    "qwen3_5": DELTA_NET,
    "qwen3_5_moe": {**EXPERTS, **DELTA_NET, "shared_expert_intermediate_size": 56},
    "granite4": {
        "layer_types": ["linear_attention", "full_attention", "linear_attention"],
        "embedding_multiplier": 3.0,
        "attention_multiplier": 0.2,
        "residual_multiplier": 0.4,
        "logits_scaling": 4.0,
        "num_local_experts": 8,
        "num_experts_per_tok": 3,
        "shared_intermediate_size": 56,
        "mamba_n_heads": 8,
        "mamba_n_groups": 2,
        "mamba_d_state": 12,
        "mamba_d_conv": 3,
    },
    "nemotron_h": {
        "layers_block_type": ["linear_attention", "mlp", "full_attention", "moe", "linear_attention"],
        "head_dim": 24,
        "mamba_num_heads": 6,
        "mamba_head_dim": 10,
        "ssm_state_size": 12,
        "n_groups": 2,
        "time_step_min": 1e-9,  # transformers limits no steps of single tokens
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 40,
        "moe_shared_expert_intermediate_size": 56,
    },
    "lfm2": {
        "num_hidden_layers": 4,
        "layer_types": ["conv", "conv", "full_attention", "conv"],
        "block_multiple_of": 16,
        "tie_word_embeddings": True,
    },
    "llama4": {
        "num_hidden_layers": 4,
        "head_dim": 24,
        "intermediate_size_mlp": 88,
        "num_local_experts": 6,
        "num_experts_per_tok": 2,
        "interleave_moe_layer_step": 2,
        "attention_chunk_size": 16,
        "floor_scale": 8,
        "attn_scale": 0.4,
    },
    "gpt_oss": {"num_local_experts": 8, "num_experts_per_tok": 3, "head_dim": 24, "sliding_window": 7, "swiglu_limit": 1.5},
    "minimax_m2": {"num_local_experts": 8, "num_experts_per_tok": 3, "head_dim": 24, "rope_parameters": HALF_ROTARY},
}


@dataclass(frozen=True)
class TinyModel:
    """A saved checkpoint and the float32 transformers model that it was saved from."""

    folder: Path
    reference: PreTrainedModel

    @cached_property
    def exact(self) -> PreTrainedModel:
        return in_float64(self.reference)

    def known(self, token_ids: list[int]) -> KnownRows:
        """One forward over the whole prompt."""
        return known_rows(self.reference, token_ids, self.exact)


def randomise(model: PreTrainedModel, seed: int) -> None:
    """Weights that a missing term can't hide behind: norms away from one, biases away from zero, attention far from uniform."""
    generator = torch.Generator().manual_seed(seed)
    for name, weight in model.named_parameters():
        noise = torch.randn(weight.shape, generator=generator)
        if "norm" in name:
            around_zero = type(model).__name__.startswith(ADD_ONE) and "linear_attn" not in name
            weight.data = noise.mul(0.3).add(0.0 if around_zero else 1.0)
        elif name.endswith("A_log"):
            weight.data = noise.mul(0.5)
        elif "conv" in name and weight.dim() == 3:
            weight.data = noise.mul(0.6)
        elif weight.dim() == 1 or name.endswith("_bias"):
            weight.data = noise.mul(0.3)
        else:
            gain = 1.5 if "q_proj" in name or "k_proj" in name else 1.0
            weight.data = noise.mul(1.0 if "embed" in name else gain / math.sqrt(weight.shape[-1]))
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            buffer.copy_(torch.randn(buffer.shape, generator=generator).mul(0.2))
    model.tie_weights()


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., TinyModel]:
    """`tiny_model(family, max_shard_size=…, **settings)`: made once per set of arguments."""
    made: dict[str, TinyModel] = {}

    def make(family: str, *, max_shard_size: str = "1GB", seed: int = 0, **settings: object) -> TinyModel:
        key = json.dumps([family, max_shard_size, seed, settings], sort_keys=True)
        if key not in made:
            config_class, model_class = CLASSES[family]
            config = config_class(**{**SHAPE, **FAMILY_SETTINGS[family], **settings}, attn_implementation="eager")
            config._experts_implementation = "eager"  # others aren't there in float64
            reference = model_class(config).eval()
            randomise(reference, seed)
            folder = tmp_path_factory.mktemp(family)
            reference.save_pretrained(folder, max_shard_size=max_shard_size)
            made[key] = TinyModel(folder, reference)
        return made[key]

    return make
