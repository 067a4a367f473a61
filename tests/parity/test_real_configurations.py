"""Configurations of released models against transformers: every setting that changes results as it was published, sizes cut down."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from engine.errors import ModelError
from engine.models.loader import read_model_config
from tests.parity.conftest import randomise
from tests.parity.exact import in_float64, known_rows
from tests.parity.models_table import DOCUMENT, table
from tests.parity.test_checkpoint_forms import QWEN_VISION, VISION
from tests.parity.test_decoder_families import compare, load, prompts, run

Settings = dict[str, Any]
CONFIGURATIONS: Mapping[str, Settings] = json.loads((Path(__file__).parent / "configurations.json").read_text())
AMBIGUOUS = "deepseek-ai/DeepSeek-R1-0528-Qwen3-8B"
"""Its `attn_factor` is ignored by transformers and applied by vLLM."""
MAX_MODEL_LEN = 64
LENGTHS = (61, 20)
NUM_LAYERS = {"gemma3_text": 7, "smollm3": 5, "olmo3": 5, "exaone4": 5, "cohere2": 5, "qwen3_next": 4, "lfm2": 4, "granitemoehybrid": 6}
"""Past the first layer that is unlike the ones before; of the others two are enough."""
FEWER_EXPERTS = {
    "num_experts": 16,
    "num_local_experts": 16,
    "n_routed_experts": 16,
    "moe_intermediate_size": 40,
    "shared_expert_intermediate_size": 56,
    "first_k_dense_replace": 1,
}
VISION_TOWERS: Mapping[str, Settings] = {
    "gemma3": {"vision_config": VISION, "mm_tokens_per_image": 4},
    "mistral3": {"vision_config": {**VISION, "model_type": "pixtral"}},
    "qwen2_vl": {"vision_config": {"depth": 1, "embed_dim": 32, "num_heads": 2, "hidden_size": 64}},
    "qwen2_5_vl": {"vision_config": QWEN_VISION},
    "qwen3_vl": {"vision_config": {**QWEN_VISION, "deepstack_visual_indexes": [0]}},
}


def cut_down(published: Mapping[str, Any]) -> Settings:
    """The same configuration with fewer layers, heads and tokens; queries per key, the width of a head and all of rope stay."""
    config = {**published, **VISION_TOWERS.get(str(published["model_type"]), {})}
    text = published.get("text_config")
    if isinstance(text, dict):
        return config | {"text_config": _cut_text(text)}
    return _cut_text(config)


def _cut_text(text: Mapping[str, Any]) -> Settings:
    cut: Settings = {"vocab_size": 97, "intermediate_size": 96, "num_hidden_layers": NUM_LAYERS.get(str(text["model_type"]), 2)}
    width, heads = text["hidden_size"], text.get("num_attention_heads")
    if isinstance(heads, int):
        kv_heads = text.get("num_key_value_heads", heads)
        kept = 1 if heads > 2 * kv_heads else 2
        cut["num_attention_heads"] = kept * heads // kv_heads
        if "num_key_value_heads" in text:
            cut["num_key_value_heads"] = kept
        cut["hidden_size"] = (32 if "head_dim" in text else width // heads) * kept * heads // kv_heads
    else:
        cut["hidden_size"] = 64
    if "full_attn_idxs" in text:
        cut["full_attn_idxs"] = [layer for layer in text["full_attn_idxs"] if layer < cut["num_hidden_layers"]]
        cut["block_ff_dim"] = 512
    if "mamba_n_heads" in text:  # the width that the heads make up follows the model's
        cut["mamba_n_heads"] = text["mamba_n_heads"] * cut["hidden_size"] // width
        cut["shared_intermediate_size"] = 56
    if isinstance(text.get("sliding_window"), int):
        cut["sliding_window"] = 9
    cut |= {name: size for name, size in FEWER_EXPERTS.items() if text.get(name)}
    for name in ("layer_types", "no_rope_layers", "attn_type_list"):
        if isinstance(of_layers := text.get(name), list):
            cut[name] = of_layers[: cut["num_hidden_layers"]]
    if isinstance(padding := text.get("pad_token_id"), int):
        cut["pad_token_id"] = padding % cut["vocab_size"]
    return {**text, **cut}


def reference_model(folder: Path, architecture: str) -> PreTrainedModel:
    """transformers' own reading of a `config.json`, with random weights."""
    config = AutoConfig.from_pretrained(folder, attn_implementation="eager", experts_implementation="eager")
    if architecture.endswith("ForConditionalGeneration"):
        reference = getattr(transformers, architecture)(config)
    else:
        reference = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    reference = reference.float().eval()
    randomise(reference, 0)
    return reference


def check_rows(folder: Path, config: Mapping[str, Any]) -> None:
    (folder / "config.json").write_text(json.dumps(config))
    [architecture] = config["architectures"]
    reference = reference_model(folder, architecture)
    saved = reference.model if architecture.endswith("Model") else reference
    tied = reference.get_input_embeddings().weight is reference.get_output_embeddings().weight
    weights = {name: weight.clone() for name, weight in saved.state_dict().items() if not (tied and name == "lm_head.weight")}
    save_file(weights, folder / "model.safetensors")
    sequences, exact = prompts(LENGTHS), in_float64(reference)
    model = load(folder, MAX_MODEL_LEN)
    compare(model, run(model, sequences), [known_rows(reference, sequence, exact) for sequence in sequences]).check()
    assert model.config.has_head is (saved is reference)


@pytest.mark.parametrize("name", [name for name in CONFIGURATIONS if name != AMBIGUOUS])
def test_rows_of_a_released_models_configuration_equal_transformers(name: str, tmp_path: Path) -> None:
    published = CONFIGURATIONS[name]
    check_rows(tmp_path, cut_down(published))
    config = read_model_config(tmp_path)
    text = published.get("text_config")
    named = {**published, **(text if isinstance(text, dict) else {})}
    stop = named.get("eos_token_id")
    assert list(config.eos_token_ids) == (stop if isinstance(stop, list) else [] if stop is None else [stop])
    assert str(config.checkpoint_dtype).removeprefix("torch.") == named.get("torch_dtype", named.get("dtype"))


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("CohereLabs/c4ai-command-r7b-12-2024", {"sliding_window_pattern": 2}),
        ("allenai/Olmo-3-7B-Instruct", {"rope_theta": 10_000}),
        ("HuggingFaceTB/SmolLM3-3B", {"no_rope_layers": None, "no_rope_layer_interval": 2}),
    ],
)
def test_settings_that_the_released_configurations_leave_as_they_are(name: str, settings: Settings, tmp_path: Path) -> None:
    check_rows(tmp_path, cut_down(CONFIGURATIONS[name]) | settings)


def test_a_setting_that_transformers_ignores_and_vllm_applies_is_refused_with_both_readings(tmp_path: Path) -> None:
    config = cut_down(CONFIGURATIONS[AMBIGUOUS])
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match=r"attn_factor .*transformers ignores .*vLLM .*attention_factor: 1\.0\b"):
        read_model_config(tmp_path)
    rope = dict(config["rope_scaling"])
    del rope["attn_factor"]
    check_rows(tmp_path, config | {"rope_scaling": rope})
    check_rows(tmp_path, config | {"rope_scaling": {**rope, "attention_factor": 1.0}})


def test_the_table_of_models_is_what_the_code_says() -> None:
    assert DOCUMENT.read_text() == table(), "write it anew with: python -m tests.parity.models_table"
