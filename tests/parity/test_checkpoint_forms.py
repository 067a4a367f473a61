"""Checkpoints as they lie on people's disks: other prefixes, fused weights, multimodal wrappers, absent and null settings, no head."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    Gemma3Config,
    Gemma3ForConditionalGeneration,
    Llama4Config,
    Llama4ForConditionalGeneration,
    Mistral3Config,
    Mistral3ForConditionalGeneration,
    PreTrainedModel,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2VLConfig,
    Qwen2VLForConditionalGeneration,
    Qwen3_5Config,
    Qwen3_5ForConditionalGeneration,
    Qwen3_5MoeConfig,
    Qwen3_5MoeForConditionalGeneration,
    Qwen3VLConfig,
    Qwen3VLForConditionalGeneration,
)

from engine.errors import ModelError
from engine.models.loader import load_model, read_model_config
from tests.parity.conftest import FAMILY_SETTINGS, SHAPE, TinyModel, randomise
from tests.parity.exact import in_float64, known_rows
from tests.parity.test_decoder_families import compare, load, prompts, run

MakeModel = Callable[..., TinyModel]
Weights = dict[str, torch.Tensor]
CPU = torch.device("cpu")


def rewritten(tiny: TinyModel, folder: Path, weights: Callable[[Weights], Weights], **settings: object) -> Path:
    """A copy of a checkpoint with other weights or names, and settings set; a setting that is `...` is removed."""
    shutil.copytree(tiny.folder, folder)
    config = json.loads((folder / "config.json").read_text()) | settings
    (folder / "config.json").write_text(json.dumps({name: value for name, value in config.items() if value is not ...}))
    save_file(weights(load_file(folder / "model.safetensors")), folder / "model.safetensors")
    return folder


def same(weights: Weights) -> Weights:
    return weights


def renamed(rename: Callable[[str], str]) -> Callable[[Weights], Weights]:
    return lambda weights: {rename(name): weight for name, weight in weights.items()}


def assert_rows_are_right(folder: Path, tiny: TinyModel) -> None:
    sequences = prompts((23, 9))
    model = load(folder)
    compare(model, run(model, sequences), [tiny.known(sequence) for sequence in sequences]).check()


def refusal(folder: Path) -> str:
    with pytest.raises(ModelError) as caught:
        load_model(folder, device=CPU, dtype=torch.float32)
    assert "\n" not in str(caught.value)
    return str(caught.value)


PREFIXES: Mapping[str, Callable[[str], str]] = {
    "a base model's": lambda name: name.removeprefix("model."),
    "torch.compile's": lambda name: f"_orig_mod.{name}",
    "torch.compile's, inside": lambda name: name.replace("model.", "model._orig_mod.", 1),
    "FSDP's": lambda name: name.replace(".mlp.", "._fsdp_wrapped_module.mlp."),
    "language_model.": lambda name: f"language_model.{name}",
    "model.language_model.": lambda name: name.replace("model.", "model.language_model.", 1),
    "language_model. of a base model": lambda name: "language_model." + name.removeprefix("model."),
}


@pytest.mark.parametrize("prefix", PREFIXES)
def test_weights_are_found_behind_prefixes(prefix: str, tiny_model: MakeModel, tmp_path: Path) -> None:
    tiny = tiny_model("qwen3")
    assert_rows_are_right(rewritten(tiny, tmp_path / "x", renamed(PREFIXES[prefix])), tiny)


def test_two_weights_that_would_be_one_are_refused(tiny_model: MakeModel, tmp_path: Path) -> None:
    def doubled(weights: Weights) -> Weights:
        return weights | {"norm.weight": weights["model.norm.weight"].clone()}

    message = refusal(rewritten(tiny_model("llama"), tmp_path / "x", doubled))
    assert "model.norm.weight and norm.weight both stand for model.norm.weight" in message or "norm.weight and model.norm.weight" in message


def fused(weights: Weights) -> Weights:
    """`qkv_proj` and `gate_up_proj`, as Phi-3 and vLLM write them."""
    joined: Weights = {}
    for name, weight in weights.items():
        if ".q_proj." in name:
            parts = [weights[name.replace(".q_proj.", f".{part}_proj.")] for part in "qkv"]
            joined[name.replace(".q_proj.", ".qkv_proj.")] = torch.cat(parts)
        elif ".gate_proj." in name:
            joined[name.replace(".gate_proj.", ".gate_up_proj.")] = torch.cat([weight, weights[name.replace(".gate_proj.", ".up_proj.")]])
        elif not any(part in name for part in (".k_proj.", ".v_proj.", ".up_proj.")):
            joined[name] = weight
    return joined


@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_fused_projections_load(family: str, tiny_model: MakeModel, tmp_path: Path) -> None:
    """Biases (Qwen2) are fused with them."""
    tiny = tiny_model(family)
    assert_rows_are_right(rewritten(tiny, tmp_path / "x", fused), tiny)


def test_an_untied_checkpoint_without_a_head_has_states_but_no_text(tiny_model: MakeModel, tmp_path: Path) -> None:
    tiny = tiny_model("llama")

    def headless(weights: Weights) -> Weights:
        return {name: weight for name, weight in weights.items() if name != "lm_head.weight"}

    model = load(rewritten(tiny, tmp_path / "x", headless))
    assert not model.config.has_head
    assert load(tiny.folder).config.has_head
    [sequence] = prompts((20,))
    compare(model, run(model, [sequence]), [tiny.known(sequence)]).check()


def test_each_weight_is_read_from_the_file_that_the_index_maps_it_to(tiny_model: MakeModel, tmp_path: Path) -> None:
    """Also where an older copy of it lies in a file that comes later."""
    tiny = tiny_model("llama", max_shard_size="60KB")
    folder = shutil.copytree(tiny.folder, tmp_path / "x")
    weight_map = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
    name = "model.layers.0.mlp.down_proj.weight"
    for shard in set(weight_map.values()) - {weight_map[name]}:
        stored = load_file(folder / shard)
        save_file({**stored, name: torch.zeros(64, 112)}, folder / shard)
    assert_rows_are_right(folder, tiny)


def test_an_index_that_maps_a_weight_to_the_wrong_file_is_refused(tiny_model: MakeModel, tmp_path: Path) -> None:
    folder = shutil.copytree(tiny_model("llama", max_shard_size="60KB").folder, tmp_path / "x")
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    first, second = sorted(set(index["weight_map"].values()))[:2]
    name = next(name for name, file in index["weight_map"].items() if file == first)
    index["weight_map"][name] = second
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    assert f"maps weight {name} to {second}, which doesn't hold it" in refusal(folder)


DISAGREEING = [
    ("llama", "LlamaForCausalLM", "mistral"),
    ("mistral", "MistralForCausalLM", "llama"),
    ("qwen2", "Qwen2ForCausalLM", "qwen3"),
    ("llama", "LlamaForCausalLM", "phi"),
]


@pytest.mark.parametrize(("family", "architecture", "model_type"), DISAGREEING)
def test_a_class_and_a_model_type_of_different_families_are_refused(
    family: str, architecture: str, model_type: str, tiny_model: MakeModel, tmp_path: Path
) -> None:
    message = refusal(rewritten(tiny_model(family), tmp_path / "x", same, architectures=[architecture], model_type=model_type))
    assert model_type in message or "not supported" in message


@pytest.mark.parametrize(
    ("family", "settings"),
    [
        ("gemma3", {"hidden_activation": None}),
        ("gemma3", {"hidden_activation": ...}),
        ("llama", {"hidden_act": None, "rms_norm_eps": None}),
        ("llama", {"num_key_value_heads": 2, "head_dim": None}),
        ("llama", {"quantization_config": {}}),
        ("llama", {"architectures": ["LLaMAForCausalLM"]}),
        ("llama", {"architectures": ["LlamaModel"]}),
        ("llama", {"architectures": ...}),
        ("llama", {"model_type": ...}),
        ("llama", {"eos_token_id": -1, "pad_token_id": -1}),
        ("llama", {"vocab_size": 97, "rope_scaling": {}, "attention_bias": None}),
    ],
    ids=str,
)
def test_absent_null_and_empty_settings_mean_the_familys_defaults(
    family: str, settings: dict[str, object], tiny_model: MakeModel, tmp_path: Path
) -> None:
    tiny = tiny_model(family)
    assert_rows_are_right(rewritten(tiny, tmp_path / "x", same, **settings), tiny)


def test_sizes_that_are_absent_are_those_of_transformers(tiny_model: MakeModel, tmp_path: Path) -> None:
    """Gemma 3's multimodal checkpoints leave out whatever equals the default."""
    tiny = tiny_model("gemma3", num_attention_heads=8, num_key_value_heads=4)
    folder = rewritten(tiny, tmp_path / "x", same, num_attention_heads=..., num_key_value_heads=..., max_position_embeddings=...)
    assert_rows_are_right(folder, tiny)
    assert read_model_config(folder).max_model_len == 131_072


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
def test_the_dtype_that_no_setting_names_is_that_of_the_weights(dtype: torch.dtype, tiny_model: MakeModel, tmp_path: Path) -> None:
    """A few norms in float32 don't make a float32 checkpoint."""

    def stored(weights: Weights) -> Weights:
        return {name: weight if "norm" in name else weight.to(dtype) for name, weight in weights.items()}

    folder = rewritten(tiny_model("llama"), tmp_path / "x", stored, dtype=..., torch_dtype=...)
    assert read_model_config(folder).checkpoint_dtype == dtype


VISION = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 28, "patch_size": 14}
QWEN_VISION = {"depth": 1, "hidden_size": 32, "num_heads": 2, "out_hidden_size": 64, "intermediate_size": 16}


def _text(family: str, **settings: object) -> dict[str, object]:
    return {**SHAPE, **FAMILY_SETTINGS[family], **settings}


MROPE = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]}
QUARTER_MROPE = {**MROPE, "mrope_section": [1, 1, 1], "mrope_interleaved": True, "partial_rotary_factor": 0.25}
MULTIMODAL: Mapping[str, Callable[[], PreTrainedModel]] = {
    "Gemma3ForConditionalGeneration": lambda: Gemma3ForConditionalGeneration(
        Gemma3Config(text_config=_text("gemma3"), vision_config=VISION, mm_tokens_per_image=4)
    ),
    "Mistral3ForConditionalGeneration": lambda: Mistral3ForConditionalGeneration(
        Mistral3Config(text_config=_text("mistral", model_type="mistral"), vision_config={**VISION, "model_type": "pixtral"})
    ),
    "Qwen2VLForConditionalGeneration": lambda: Qwen2VLForConditionalGeneration(
        Qwen2VLConfig(
            text_config=_text("qwen2", rope_parameters=MROPE),
            vision_config={"depth": 1, "embed_dim": 32, "num_heads": 2, "hidden_size": 64},
        )
    ),
    "Qwen2_5_VLForConditionalGeneration": lambda: Qwen2_5_VLForConditionalGeneration(
        Qwen2_5_VLConfig(text_config=_text("qwen2", rope_parameters=MROPE), vision_config=QWEN_VISION)
    ),
    "Qwen3VLForConditionalGeneration": lambda: Qwen3VLForConditionalGeneration(
        Qwen3VLConfig(
            text_config=_text("qwen3", rope_parameters={**MROPE, "mrope_section": [4, 4, 4]}),
            vision_config={**QWEN_VISION, "deepstack_visual_indexes": [0]},
        )
    ),
    "Llama4ForConditionalGeneration": lambda: Llama4ForConditionalGeneration(
        Llama4Config(
            text_config=_text("llama4", no_rope_layers=[]),
            vision_config={"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 128, "image_size": 28},
        )
    ),
    "Qwen3_5ForConditionalGeneration": lambda: Qwen3_5ForConditionalGeneration(
        Qwen3_5Config(text_config=_text("qwen3_5", rope_parameters=QUARTER_MROPE), vision_config=QWEN_VISION)
    ),
    "Qwen3_5MoeForConditionalGeneration": lambda: Qwen3_5MoeForConditionalGeneration(
        Qwen3_5MoeConfig(
            text_config=_text("qwen3_5_moe", rope_parameters=QUARTER_MROPE),
            vision_config=QWEN_VISION,
            experts_implementation="eager",
        )
    ),
}


@pytest.mark.parametrize("name", MULTIMODAL)
def test_the_text_part_of_a_multimodal_checkpoint_gives_its_rows(name: str, tmp_path: Path) -> None:
    reference = MULTIMODAL[name]().eval()
    randomise(reference, 0)
    reference.save_pretrained(tmp_path)
    [sequence] = prompts((20,))
    model = load(tmp_path)
    text = reference.language_model if name.startswith("Llama4") else reference
    compare(model, run(model, [sequence]), [known_rows(text, sequence, in_float64(text))]).check(recurrent="Qwen3_5" in name)
    assert model.config.architecture == name


def test_a_multimodal_checkpoint_in_the_hubs_form_loads(tiny_model: MakeModel, tmp_path: Path) -> None:
    """As Gemma 3 and Qwen2-VL checkpoints were uploaded: `language_model.model.`, a vision tower beside it; settings at the top."""
    tiny = tiny_model("qwen2")

    def hub_form(weights: Weights) -> Weights:
        named = {f"language_model.{name}": weight for name, weight in weights.items()}
        return named | {"visual.blocks.0.norm1.weight": torch.ones(4), "vision_tower.x.weight": torch.ones(4)}

    folder = rewritten(
        tiny,
        tmp_path / "x",
        hub_form,
        architectures=["Qwen2VLForConditionalGeneration"],
        model_type="qwen2_vl",
        vision_config={"depth": 1},
        rope_scaling={"type": "mrope", "mrope_section": [2, 3, 3]},
    )
    assert_rows_are_right(folder, tiny)


def test_weights_of_a_vision_tower_are_refused_where_the_configuration_knows_of_none(tiny_model: MakeModel, tmp_path: Path) -> None:
    def with_tower(weights: Weights) -> Weights:
        return weights | {"vision_tower.x.weight": torch.ones(4)}

    assert "vision_tower.x.weight" in refusal(rewritten(tiny_model("llama"), tmp_path / "x", with_tower))


def test_dynamic_ntk_scaling_runs_beyond_the_original_context(tiny_model: MakeModel) -> None:
    """At the limit's own length, as transformers computes it: 4 times the length that the model was made for."""
    rope = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
    # A model of its own: transformers' keeps the frequencies of the longest prompt for others of exactly the original length.
    tiny = tiny_model("llama", seed=2, max_position_embeddings=32, rope_parameters=rope)
    assert read_model_config(tiny.folder).extendable
    [sequence] = prompts((128,))
    model = load(tiny.folder, max_model_len=128)
    compare(model, run(model, [sequence]), [tiny.known(sequence)]).check()


@pytest.mark.parametrize(("original", "context"), [(None, 128), (64, 256), (128, 512)])
def test_yarn_extends_the_context_only_from_an_original_length_that_is_named(
    original: int | None, context: int, tiny_model: MakeModel, tmp_path: Path
) -> None:
    rope = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": original}
    tiny = tiny_model("llama", rope_parameters={**rope, "original_max_position_embeddings": original or 128})
    folder = rewritten(tiny, tmp_path / "x", same, rope_parameters={name: value for name, value in rope.items() if value is not None})
    assert read_model_config(folder).max_model_len == context
    assert_rows_are_right(folder, tiny)


def test_the_tokenizers_own_end_of_text_is_one_of_the_models(tiny_model: MakeModel, tmp_path: Path) -> None:
    """Instruct models whose configuration still names the base model's token."""
    folder = rewritten(tiny_model("llama"), tmp_path / "x", same, eos_token_id=0)
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"eos_token": "<|im_end|>", "added_tokens_decoder": {"7": {"content": "<|im_end|>"}}})
    )
    (folder / "generation_config.json").unlink(missing_ok=True)
    assert read_model_config(folder).eos_token_ids == (0, 7)
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": {"content": "</s>"}}))
    (folder / "tokenizer.json").write_text(json.dumps({"added_tokens": [], "model": {"vocab": {"</s>": 5}}}))
    assert read_model_config(folder).eos_token_ids == (0, 5)
