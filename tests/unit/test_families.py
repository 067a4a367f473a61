"""What is read from a checkpoint's configuration, in every form that it comes in."""

import json
from pathlib import Path

import pytest
import torch

from engine.errors import ModelError
from engine.models.base import ModelConfig
from engine.models.blocks.decoder_config import DecoderConfig
from engine.models.blocks.rope import DefaultRope, LinearRope
from engine.models.configuration.families import read_decoder_config
from engine.models.loader import read_model_config

SIZES = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "vocab_size": 100,
}

HALF_OF_FULL_LAYERS = {"full_attention": {"rope_type": "default", "partial_rotary_factor": 0.5}}


def folder_with(folder: Path, architecture: str | None, **settings: object) -> Path:
    names = {} if architecture is None else {"architectures": [architecture]}
    (folder / "config.json").write_text(json.dumps({**SIZES, **names, **settings}))
    return folder


def decoder(folder: Path, architecture: str | None, **settings: object) -> DecoderConfig:
    return read_decoder_config(folder_with(folder, architecture, **settings))


def test_the_model_config_says_what_the_engine_needs(tmp_path: Path) -> None:
    folder = folder_with(tmp_path, "LlamaForCausalLM", torch_dtype="float16", eos_token_id=2)
    assert read_model_config(folder) == ModelConfig("LlamaForCausalLM", 4, 64, 100, 256, (2,), torch.float16)


@pytest.mark.parametrize(
    ("settings", "dtype"),
    [
        ({}, torch.bfloat16),
        ({"torch_dtype": "float32"}, torch.float32),
        ({"dtype": "float16"}, torch.float16),
        ({"dtype": None, "torch_dtype": "torch.float32"}, torch.float32),
        ({"torch_dtype": "auto"}, torch.bfloat16),
    ],
)
def test_checkpoint_dtype(tmp_path: Path, settings: dict[str, object], dtype: torch.dtype) -> None:
    assert decoder(tmp_path, "LlamaForCausalLM", **settings).model.checkpoint_dtype == dtype


@pytest.mark.parametrize(
    ("config", "generation", "expected"),
    [
        (2, None, (2,)),
        ([1, 106], None, (1, 106)),
        (2, {"eos_token_id": [5, 6, 5]}, (5, 6)),
        (2, {"eos_token_id": 0}, (0,)),
        (2, {"eos_token_id": None}, (2,)),
        (2, {"temperature": 0.6}, (2,)),
        (None, None, ()),
    ],
)
def test_end_tokens_come_from_the_generation_config_first(
    tmp_path: Path, config: object, generation: object, expected: tuple[int, ...]
) -> None:
    if generation is not None:
        (tmp_path / "generation_config.json").write_text(json.dumps(generation))
    assert decoder(tmp_path, "LlamaForCausalLM", eos_token_id=config).model.eos_token_ids == expected


def test_the_model_type_decides_where_no_architecture_is_named(tmp_path: Path) -> None:
    assert decoder(tmp_path, None, model_type="qwen3").model.architecture == "Qwen3ForCausalLM"


def test_yarn_extends_the_context(tmp_path: Path) -> None:
    scaling = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 256}
    assert decoder(tmp_path, "Qwen2ForCausalLM", rope_scaling=scaling).model.max_model_len == 1024


@pytest.mark.parametrize(
    ("architecture", "settings", "windows"),
    [
        ("LlamaForCausalLM", {}, (None,) * 4),
        ("MistralForCausalLM", {}, (4096,) * 4),
        ("MistralForCausalLM", {"sliding_window": None}, (None,) * 4),
        ("MistralForCausalLM", {"sliding_window": 32}, (32,) * 4),
        ("Qwen2ForCausalLM", {"sliding_window": 32, "max_window_layers": 2}, (None,) * 4),
        ("Qwen2ForCausalLM", {"use_sliding_window": True, "sliding_window": 32, "max_window_layers": 3}, (None, None, None, 32)),
        ("Qwen3ForCausalLM", {"use_sliding_window": True, "sliding_window": 32, "max_window_layers": 0}, (32,) * 4),
        ("Qwen3ForCausalLM", {"use_sliding_window": True, "sliding_window": 32}, (None,) * 4),
        ("Gemma3ForCausalLM", {"sliding_window": 32}, (32,) * 4),
        ("Gemma3ForCausalLM", {"sliding_window": 32, "sliding_window_pattern": 2}, (32, None, 32, None)),
        ("Gemma3ForCausalLM", {"sliding_window": 32, "layer_types": ["full_attention"] * 3 + ["sliding_attention"]}, (None,) * 3 + (32,)),
    ],
)
def test_sliding_windows(tmp_path: Path, architecture: str, settings: dict[str, object], windows: tuple[int | None, ...]) -> None:
    assert decoder(tmp_path, architecture, **settings).windows == windows


def test_absent_settings_take_the_defaults_of_the_family(tmp_path: Path) -> None:
    sizes = {name: value for name, value in SIZES.items() if name != "num_key_value_heads"}
    (tmp_path / "config.json").write_text(json.dumps({**sizes, "architectures": ["Gemma3ForCausalLM"]}))
    gemma = read_decoder_config(tmp_path)
    assert (gemma.num_kv_heads, gemma.head_dim, gemma.tie_embeddings) == (4, 256, True)
    assert (gemma.activation, gemma.attention_scale) == ("gelu_pytorch_tanh", 1 / 16)
    assert gemma.ropes == (DefaultRope(1e6), DefaultRope(1e4))
    (tmp_path / "config.json").write_text(json.dumps({**sizes, "architectures": ["LlamaForCausalLM"]}))
    llama = read_decoder_config(tmp_path)
    assert (llama.num_kv_heads, llama.head_dim, llama.tie_embeddings) == (4, 16, False)
    assert (llama.activation, llama.norm_eps, llama.attention_scale) == ("silu", 1e-6, 0.25)


def test_a_null_is_not_the_default_of_the_family(tmp_path: Path) -> None:
    assert decoder(tmp_path, "MistralForCausalLM", num_key_value_heads=None, head_dim=None).num_kv_heads == 4
    assert decoder(tmp_path, "Qwen3ForCausalLM").head_dim == 128
    assert decoder(tmp_path, "Qwen3ForCausalLM", head_dim=None).head_dim == 16


def test_kimi_k2_is_read_as_what_it_is(tmp_path: Path) -> None:
    settings = {"n_routed_experts": 8, "n_group": 1, "topk_group": 1, "num_experts_per_tok": 2}
    kimi, deepseek = (decoder(tmp_path, "DeepseekV3ForCausalLM", model_type=name, **settings) for name in ("kimi_k2", "deepseek_v3"))
    assert kimi == deepseek
    assert kimi.latent is not None
    assert kimi.attention_scale == (kimi.latent.plain_dim + kimi.latent.rotary_dim) ** -0.5


def test_the_hub_form_of_a_gemma_configuration(tmp_path: Path) -> None:
    gemma = decoder(
        tmp_path,
        "Gemma3ForCausalLM",
        rope_theta=1_000_000,
        rope_local_base_freq=10_000,
        rope_scaling={"rope_type": "linear", "factor": 8.0},
        sliding_window_pattern=2,
        query_pre_attn_scalar=64,
        torch_dtype="bfloat16",
    )
    assert gemma.ropes == (LinearRope(1e6, 8.0), DefaultRope(1e4))
    assert gemma.rope_of_layer == (1, 0, 1, 0)
    assert gemma.attention_scale == 0.125


@pytest.mark.parametrize(
    ("architecture", "settings", "message"),
    [
        ("LlamaForCausalLM", {"quantization_config": {"quant_method": "gptq"}}, "quantised checkpoints are not supported"),
        ("LlamaForCausalLM", {"hidden_act": "quick_gelu"}, "hidden_act quick_gelu is not supported; supported are silu"),
        ("LlamaForCausalLM", {"sliding_window": 32}, "sliding_window is not a setting of LlamaForCausalLM"),
        ("LlamaForCausalLM", {"partial_rotary_factor": 0.5}, "partial_rotary_factor = 0.5 is not supported"),
        ("LlamaForCausalLM", {"rope_scaling": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor = 0.5 is not supported"),
        ("LlamaForCausalLM", {"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor = 0.5 is not supported"),
        ("Gemma3ForCausalLM", {"rope_parameters": HALF_OF_FULL_LAYERS}, "partial_rotary_factor other than 1 is not supported"),
        ("Phi3ForCausalLM", {"partial_rotary_factor": 1.5}, r"partial_rotary_factor \(1.5\) must be at most 1"),
        ("Phi3ForCausalLM", {"partial_rotary_factor": 0.99}, "partial_rotary_factor: 15 of 16 dimensions would be rotated, which is odd"),
        ("Exaone4ForCausalLM", {"sliding_window_pattern": "LLLG"}, "sliding_window_pattern as a text is read only beside layer_types"),
        ("Phi3ForCausalLM", {"rope_parameters": {"rope_type": "yarn", "factor": 4.0}}, "short_factor must be a list of numbers"),
        ("SmolLM3ForCausalLM", {"no_rope_layers": [[1]] * 4}, "no_rope_layers must be 0 or 1 for every layer"),
        ("SmolLM3ForCausalLM", {"no_rope_layers": [1, 0]}, "no_rope_layers must be 0 or 1 for every layer"),
        ("Gemma2ForCausalLM", {"layer_types": ["full_attention"]}, "layer_types must name full_attention or sliding_attention"),
        ("LlamaForCausalLM", {"rope_scaling": {"type": "axial"}}, "rope type axial is not supported"),
        ("LlamaForCausalLM", {"layer_types": ["sliding_attention"] * 4}, "layer_types disagrees"),
        ("LlamaForCausalLM", {"head_dim": 15}, "head_dim \\(15\\) must be even"),
        ("LlamaForCausalLM", {"num_key_value_heads": 3}, "must be a multiple of num_key_value_heads \\(3\\)"),
        ("LlamaForCausalLM", {"hidden_size": "64"}, "hidden_size must be a positive integer, not '64'"),
        ("LlamaForCausalLM", {"num_hidden_layers": True}, "num_hidden_layers must be a positive integer, not True"),
        ("LlamaForCausalLM", {"attention_bias": "yes"}, "attention_bias must be true or false, not 'yes'"),
        ("LlamaForCausalLM", {"rms_norm_eps": 0}, "rms_norm_eps must be a positive number, not 0"),
        ("LlamaForCausalLM", {"hidden_act": 3}, "hidden_act must be a string, not 3"),
        ("LlamaForCausalLM", {"torch_dtype": "float8_e4m3fn"}, "dtype float8_e4m3fn is not supported"),
        ("LlamaForCausalLM", {"eos_token_id": "</s>"}, "eos_token_id must be a token id or a list of them"),
        ("MistralForCausalLM", {"layer_types": ["full_attention"] * 4}, "layer_types disagrees"),
        ("Qwen2ForCausalLM", {"is_causal": False}, "is_causal = False is not supported"),
        ("Qwen2ForCausalLM", {"use_mrope": True}, "use_mrope = True is not supported"),
        ("Qwen2ForCausalLM", {"layer_types": ["sliding_attention"] * 4}, "no sliding_window is in use"),
        ("Qwen2ForCausalLM", {"layer_types": ["full_attention"] * 3}, "for every layer"),
        ("Qwen2ForCausalLM", {"layer_types": ["chunked_attention"] * 4}, "for every layer"),
        ("Qwen2ForCausalLM", {"use_sliding_window": True, "max_window_layers": -1}, "max_window_layers must be a number of layers"),
        ("Gemma3ForCausalLM", {"use_bidirectional_attention": True}, "use_bidirectional_attention = True is not supported"),
        ("Gemma3ForCausalLM", {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping = 50.0 is not supported"),
        ("Gemma3ForCausalLM", {"sliding_window": None}, "no sliding_window is in use"),
        ("Qwen3MoeForCausalLM", {}, "num_experts is missing"),
        ("Qwen3MoeForCausalLM", {"num_experts": 4}, r"num_experts_per_tok \(8\) must be between 1 and the number of experts \(4\)"),
        ("Qwen2MoeForCausalLM", {"num_experts": 8, "mlp_only_layers": 3}, "mlp_only_layers must be a list of layers"),
        (
            "Glm4MoeForCausalLM",
            {"n_routed_experts": 8, "n_group": 3},
            r"n_group \(3\) must divide the 8 experts into groups of two or more",
        ),
        ("Glm4MoeForCausalLM", {"n_routed_experts": 8, "n_group": 2}, "topk_group: 1 of 2 groups hold too few experts"),
        ("Glm4MoeForCausalLM", {"n_routed_experts": 8, "first_k_dense_replace": -1}, "first_k_dense_replace must be an integer that isn't"),
        ("MiniMaxM2ForCausalLM", {"num_local_experts": 8, "scoring_func": "softmax"}, "scoring_func = 'softmax' is not supported"),
        ("DeepseekV2ForCausalLM", {"num_experts_per_tok": 2, "topk_method": "noaux_tc"}, "topk_method = 'noaux_tc' is not supported"),
        ("DeepseekV3ForCausalLM", {"moe_layer_freq": 2}, "moe_layer_freq = 2 is not supported"),
        ("Glm4MoeLiteForCausalLM", {"mlp_layer_types": ["dense"]}, "mlp_layer_types must name dense or sparse for every layer"),
        ("Gemma4ForConditionalGeneration", {}, "architecture Gemma4ForConditionalGeneration is not supported; supported are Llama"),
        (None, {}, "architecture unnamed is not supported"),
    ],
)
def test_what_is_not_built_is_refused_in_one_line(
    tmp_path: Path, architecture: str | None, settings: dict[str, object], message: str
) -> None:
    with pytest.raises(ModelError, match=message) as caught:
        decoder(tmp_path, architecture, **settings)
    assert str(caught.value).startswith(str(tmp_path / "config.json"))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(("content", "message"), [("[1]", "is not a JSON object"), ("{", "can't be read"), (None, "is missing")])
def test_a_damaged_configuration_is_refused(tmp_path: Path, content: str | None, message: str) -> None:
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    with pytest.raises(ModelError, match=message):
        read_model_config(tmp_path)


def test_a_missing_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="is not a folder"):
        read_model_config(tmp_path / "nothing")
