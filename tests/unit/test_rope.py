"""Rotary frequencies against transformers at real models' sizes, and the rotation against complex multiplication."""

import math
from typing import Any

import pytest
import torch
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from engine.errors import ModelError
from engine.models.blocks.rope import DefaultRope, Rope, RotaryTable, YarnRope, rotate
from engine.models.checkpoints.hf_config import JsonObject
from engine.models.configuration.rope_config import read_rope, read_ropes_by_layer_type

VARIANTS: dict[str, dict[str, object]] = {
    "default": {"rope_type": "default"},
    "linear": {"rope_type": "linear", "factor": 4.0},
    "dynamic": {"rope_type": "dynamic", "factor": 4.0},
    "llama 3.1": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 1024,
    },
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024},
    "yarn, original length left out": {"rope_type": "yarn", "factor": 4.0},
    "yarn, not truncated": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024, "truncate": False},
    "yarn, a narrow ramp": {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 1024,
        "beta_fast": 2.0,
        "beta_slow": 2.0,
        "truncate": False,
    },
    "yarn, a ramp without width": {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 1024,
        "beta_fast": 188.0,
        "beta_slow": 188.0,
    },
    "yarn, other bounds": {
        "rope_type": "yarn",
        "factor": 16.0,
        "original_max_position_embeddings": 1024,
        "beta_fast": 20.0,
        "beta_slow": 3.0,
    },
    "yarn, scales": {
        "rope_type": "yarn",
        "factor": 40.0,
        "original_max_position_embeddings": 1024,
        "mscale": 0.707,
        "mscale_all_dim": 1.3,
    },
    "yarn, attention factor": {
        "rope_type": "yarn",
        "factor": 40.0,
        "original_max_position_embeddings": 1024,
        "attention_factor": 0.9,
    },
    "longrope": {
        "rope_type": "longrope",
        "short_factor": [1.0 + 0.01 * i for i in range(32)],
        "long_factor": [1.0 + 2.0 * i for i in range(32)],
        "original_max_position_embeddings": 1024,
    },
    "longrope, factor": {
        "rope_type": "longrope",
        "short_factor": [1.0 + 0.01 * i for i in range(32)],
        "long_factor": [1.0 + 2.0 * i for i in range(32)],
        "original_max_position_embeddings": 1024,
        "factor": 16.0,
    },
}


def transformers_config(parameters: dict[str, object], theta: float) -> LlamaConfig:
    return LlamaConfig(
        hidden_size=128,
        num_attention_heads=2,
        max_position_embeddings=4096,
        rope_parameters={**parameters, "rope_theta": theta},
    )


def ours(parameters: dict[str, object], theta: float, *, hub_form: bool = False) -> Rope:
    values: dict[str, object] = {"max_position_embeddings": 4096}
    if hub_form:
        values |= {"rope_theta": theta, "rope_scaling": parameters}
    else:
        values |= {"rope_parameters": {**parameters, "rope_theta": theta}}
    return read_rope(JsonObject("config.json", values), 64)


@pytest.mark.parametrize("theta", [10_000.0, 500_000.0])
@pytest.mark.parametrize("name", VARIANTS)
@pytest.mark.parametrize("length", [700, 1024, 1025, 4096, 9000])
def test_frequencies_and_attention_factor_equal_those_of_transformers(name: str, theta: float, length: int) -> None:
    parameters = VARIANTS[name]
    config = transformers_config(parameters, theta)
    kind = str(parameters["rope_type"])
    reference: Any = LlamaRotaryEmbedding.compute_default_rope_parameters if kind == "default" else ROPE_INIT_FUNCTIONS[kind]
    expected, factor = reference(config, device=torch.device("cpu"), seq_len=length)
    rope = ours(parameters, theta)
    torch.testing.assert_close(rope.inverse_frequencies(64, length), expected, rtol=1e-6, atol=0)
    assert rope.attention_factor == pytest.approx(factor, rel=1e-12)


@pytest.mark.parametrize("name", VARIANTS)
def test_both_forms_of_a_configuration_mean_the_same(name: str) -> None:
    parameters = VARIANTS[name]
    old_name = {("type" if key == "rope_type" else key): value for key, value in parameters.items()}
    assert ours(parameters, 5e4) == ours(parameters, 5e4, hub_form=True) == ours(old_name, 5e4, hub_form=True)


def test_an_original_length_beside_the_entry_goes_first() -> None:
    entry = VARIANTS["longrope"]
    values = {"max_position_embeddings": 4096, "rope_scaling": entry, "original_max_position_embeddings": 2048}
    rope = read_rope(JsonObject("config.json", values), 64)
    assert rope.attention_factor == pytest.approx(math.sqrt(1 + math.log(2) / math.log(2048)))


def test_theta_is_ten_thousand_where_nothing_says_otherwise() -> None:
    assert read_rope(JsonObject("config.json", {"max_position_embeddings": 64}), 64) == DefaultRope(10_000.0)


def test_each_layer_type_has_its_own_rope() -> None:
    nested = {
        "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 2e6},
        "sliding_attention": {"rope_type": "default", "rope_theta": 2e4},
    }
    hub = {"rope_scaling": {"rope_type": "linear", "factor": 8.0}, "rope_theta": 2e6, "rope_local_base_freq": 2e4}
    both = [{"rope_parameters": nested}, hub]
    ropes = [
        read_ropes_by_layer_type(
            JsonObject("config.json", {"max_position_embeddings": 64, **values}), 64, global_theta=1e6, local_theta=1e4
        )
        for values in both
    ]
    assert ropes[0] == ropes[1]
    assert ropes[0]["sliding_attention"] == DefaultRope(2e4)
    bare = JsonObject("config.json", {"max_position_embeddings": 64})
    assert read_ropes_by_layer_type(bare, 64, global_theta=1e6, local_theta=1e4) == {
        "full_attention": DefaultRope(1e6),
        "sliding_attention": DefaultRope(1e4),
    }


def test_a_flat_entry_where_layer_types_are_expected_is_refused() -> None:
    config = JsonObject("config.json", {"max_position_embeddings": 64, "rope_parameters": {"rope_type": "default"}})
    with pytest.raises(ModelError, match="rope_type is not a layer type"):
        read_ropes_by_layer_type(config, 64, global_theta=1e6, local_theta=1e4)


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ({"rope_type": "axial"}, "rope type axial is not supported; supported are default, mrope, linear"),
        ({"rope_type": "default", "axial_dims": [8, 12, 12]}, "rope setting axial_dims is not supported"),
        ({"full_attention": {"rope_type": "default"}}, "rope setting full_attention is not supported"),
        ({"rope_type": "linear"}, "factor is missing"),
        ({"rope_type": "linear", "factor": -1.0}, "factor must be a positive number, not -1.0"),
        ({"rope_type": "linear", "factor": "8"}, "factor must be a positive number, not '8'"),
        ({"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 4.0, "high_freq_factor": 4.0}, "must be above low_freq_factor"),
        ({"rope_type": "longrope", "short_factor": [1.0], "long_factor": [1.0] * 32}, "short_factor must have 32 numbers, not 1"),
        ({"rope_type": "longrope", "long_factor": [1.0] * 32}, "short_factor must be a list of numbers"),
        ("yarn", "rope_scaling must be an object, not 'yarn'"),
    ],
)
def test_a_setting_that_can_not_be_computed_is_refused(entry: object, message: str) -> None:
    config = JsonObject("config.json", {"max_position_embeddings": 4096, "rope_scaling": entry})
    with pytest.raises(ModelError, match=message):
        read_rope(config, 64)


def test_the_length_changes_only_dynamic_and_longrope() -> None:
    changed = {
        name
        for name, parameters in VARIANTS.items()
        if not torch.equal(ours(parameters, 1e4).inverse_frequencies(64, 512), ours(parameters, 1e4).inverse_frequencies(64, 8192))
    }
    assert changed == {"dynamic", "longrope", "longrope, factor"}


def table(rope: Rope, length: int = 300, dtype: torch.dtype = torch.float32) -> RotaryTable:
    return RotaryTable(rope, 64, length, dtype=dtype, device=torch.device("cpu"))


def test_rotation_equals_complex_multiplication_in_double_precision() -> None:
    rope = YarnRope(1e4, 4.0, 64, attention_factor=1.25)
    states = torch.randn(5, 3, 64, generator=torch.Generator().manual_seed(0))
    positions = torch.tensor([0, 1, 7, 130, 299])
    rotated = rotate(states, table(rope).lookup(positions))
    angles = positions.double()[:, None, None] * rope.inverse_frequencies(64, 300).double()
    pairs = torch.complex(states[..., :32].double(), states[..., 32:].double()) * torch.polar(1.25 * torch.ones_like(angles), angles)
    torch.testing.assert_close(rotated.double(), torch.cat((pairs.real, pairs.imag), dim=-1), rtol=0, atol=5e-5)
    assert rotated.is_contiguous()


def test_rotation_leaves_its_input_alone() -> None:
    states = torch.randn(4, 2, 64)
    before = states.clone()
    rotate(states, table(DefaultRope(1e4)).lookup(torch.arange(4)))
    assert torch.equal(states, before)


def test_angles_of_a_position_do_not_depend_on_its_batch() -> None:
    rotary = table(DefaultRope(1e4))
    together = rotary.lookup(torch.arange(299))
    for position in (0, 3, 150, 298):
        alone = rotary.lookup(torch.tensor([position]))
        assert all(torch.equal(one[0], many[position]) for one, many in zip(alone, together, strict=True))


def test_the_table_is_rounded_to_the_dtype_after_the_trigonometry() -> None:
    fine = table(DefaultRope(1e4)).lookup(torch.arange(300))
    coarse = table(DefaultRope(1e4), dtype=torch.bfloat16).lookup(torch.arange(300))
    assert all(torch.equal(low, high.bfloat16()) for low, high in zip(coarse, fine, strict=True))
