"""Converted GGUF files against transformers' own reading of the same files: weights and configuration."""

import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from safetensors import safe_open
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

CONFIG_FIELDS = {
    "smollm2": ["hidden_act", "mlp_bias", "vocab_size"],
    "gemma3": ["hidden_activation", "query_pre_attn_scalar", "sliding_window", "layer_types", "attn_logit_softcapping"],
}
COMMON_FIELDS = [
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "max_position_embeddings",
    "rope_parameters",
    "tie_word_embeddings",
    "attention_bias",
]
SPECIAL_IDS = {"smollm2": (1, 2, 2), "gemma3": (2, 1, 0)}


class _ShortReader(gguf.GGUFReader):  # type: ignore[misc]  # gguf has no types
    """transformers makes objects of all tokenizer entries one by one, half a minute for Gemma; weights don't need them."""

    def __init__(self, *arguments: Any) -> None:  # noqa: ANN401  # handed through
        super().__init__(*arguments)
        for key in ("tokens", "scores", "token_type", "merges"):
            self.fields.pop(f"tokenizer.ggml.{key}", None)


@pytest.fixture(scope="module", params=["smollm2", "gemma3"])
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def folder(name: str, request: pytest.FixtureRequest) -> Path:
    path: Path = request.getfixturevalue(f"{name}_folder")
    return path


@pytest.fixture(scope="module")
def reference(name: str, folder: Path, request: pytest.FixtureRequest) -> Iterator[dict[str, Any]]:
    """What transformers reads: `config` and `tensors`. Our configuration only tells it which names the tensors have."""
    file: Path = request.getfixturevalue(f"{name}_gguf")
    with warnings.catch_warnings(), pytest.MonkeyPatch.context() as patch:
        warnings.simplefilter("ignore")
        patch.setattr("gguf.GGUFReader", _ShortReader)
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))
        yield load_gguf_checkpoint(str(file), return_tensors=True, model_to_load=model)


def test_every_weight_is_exactly_the_one_that_transformers_reads(folder: Path, reference: dict[str, Any]) -> None:
    expected: dict[str, torch.Tensor] = reference["tensors"]
    with safe_open(folder / "model.safetensors", framework="pt") as converted:
        names = list(converted.keys())
        assert set(names) == set(expected)
        for key in names:
            tensor = converted.get_tensor(key)
            assert tensor.dtype == torch.float32
            assert torch.equal(tensor, expected[key]), key


def test_the_configuration_is_the_one_that_transformers_reads(name: str, folder: Path, reference: dict[str, Any]) -> None:
    values = {key: value for key, value in reference["config"].items() if key != "_model_name_or_path"}
    expected = AutoConfig.for_model(**values)
    config = AutoConfig.from_pretrained(folder)
    assert config.model_type == expected.model_type
    for field in COMMON_FIELDS + CONFIG_FIELDS[name]:
        assert getattr(config, field) == getattr(expected, field), field
    assert np.float32(config.rms_norm_eps) == np.float32(expected.rms_norm_eps)
    assert (config.bos_token_id, config.eos_token_id, config.pad_token_id) == SPECIAL_IDS[name]
    assert config.dtype == torch.bfloat16
