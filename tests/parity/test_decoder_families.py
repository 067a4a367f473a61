"""Every family and rope variant against transformers in float64, row by row and layer by layer."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.attention.facade import StepRows
from engine.cache.groups import RecurrentGroup
from engine.cache.spec import LayerKV, group_layers
from engine.errors import ModelError
from engine.execution.recurrent import RecurrentCache, RecurrentStates
from engine.execution.step_input import SlotInput
from engine.layers import LayerId
from engine.models.base import AttentionOptions, ForwardBatch, Model
from engine.models.blocks.ops import NativeOps, Ops, TorchOps
from engine.models.loader import load_model, read_model_config
from engine.native.compiler import NoKernels
from engine.native.kernels import load_kernels
from tests.parity.conftest import RECURRENT
from tests.parity.exact import Errors
from tests.products import packed_linears

if TYPE_CHECKING:
    from tests.parity.conftest import TinyModel
    from tests.parity.exact import KnownRows

MakeModel = Callable[..., "TinyModel"]

LENGTHS = (23, 1, 40, 7)

YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 32}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 1e4,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "short_factor": [1.0 + 0.1 * i for i in range(8)],
    "long_factor": [1.5 + 0.7 * i for i in range(8)],
    "original_max_position_embeddings": 32,
}
GEMMA_ROPES = {
    "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e3},
}


class DenseAttention:
    """Whole sequences, each attended naively: the plainest reading of the protocol."""

    def __init__(self, lengths: Sequence[int]) -> None:
        self.lengths = lengths
        self.rows: list[int] = []

    def attend(self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, options: AttentionOptions) -> torch.Tensor:
        assert layer >= len(self.rows), "recurrent layers don't attend"
        self.rows.append(query.shape[0])
        lengths = [length for i, length in enumerate(self.lengths) if sum(self.lengths[: i + 1]) <= query.shape[0]]
        parts = [states.split(lengths) for states in (query, key, value)]
        return torch.cat([_attend_one(q, k, v, options) for q, k, v in zip(*parts, strict=True)])


def _attend_one(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, options: AttentionOptions) -> torch.Tensor:
    group = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(group, dim=1), value.repeat_interleave(group, dim=1)
    scores = torch.einsum("qhd,khd->hqk", query, key) * options.scale
    if options.soft_cap is not None:
        scores = torch.tanh(scores / options.soft_cap) * options.soft_cap
    distance = torch.arange(len(query))[:, None] - torch.arange(len(query))
    hidden = distance < 0
    if options.window is not None:
        hidden |= distance >= options.window
    if options.chunk is not None:
        chunks = torch.arange(len(query)) // options.chunk
        hidden |= chunks[:, None] != chunks
    scores = scores.masked_fill(hidden, float("-inf"))
    if options.sinks is not None:
        scores = torch.cat([scores, options.sinks[:, None, None].expand(-1, len(query), 1)], dim=-1)
    weights = scores.softmax(dim=-1)[..., : len(key)]
    return torch.einsum("hqk,khd->qhd", weights, value)


def native_ops(dtype: torch.dtype) -> NativeOps:
    try:
        return NativeOps(load_kernels(dtype, threads=2))
    except NoKernels as error:
        pytest.skip(f"no native kernels here: {error}")


@pytest.fixture(params=["torch", "native"])
def ops(request: pytest.FixtureRequest) -> Ops:
    """What computes between the matrix products, in float32."""
    return native_ops(torch.float32) if request.param == "native" else TorchOps()


def prompts(lengths: Sequence[int], seed: int = 1) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(0, 97, (length,), generator=generator).tolist() for length in lengths]


def run(
    model: Model, sequences: Sequence[list[int]], rows_at_layer: Sequence[int] | None = None, final_rows: list[int] | None = None
) -> list[torch.Tensor]:
    """The captured states: ids 0 … the deepest that ran."""
    lengths = [len(sequence) for sequence in sequences]
    states: list[torch.Tensor] = []
    batch = ForwardBatch(
        token_ids=torch.tensor([token for sequence in sequences for token in sequence]),
        positions=torch.cat([torch.arange(length) for length in lengths]),
        rows_at_layer=rows_at_layer if rows_at_layer is not None else [sum(lengths)] * model.config.num_layers,
        attention=DenseAttention(lengths),
        capture=lambda layer, hidden: states.insert(layer, hidden),
        recurrent=cold_states(model, lengths),
        final_rows=None if final_rows is None else torch.tensor(final_rows, dtype=torch.int64),
    )
    last = model.forward(batch)
    assert last.shape == (batch.rows_at_layer[-1] if final_rows is None else len(final_rows), model.config.hidden_size)
    assert torch.equal(last, states[-1][: len(last)])
    return states


def cold_states(model: Model, lengths: Sequence[int]) -> RecurrentStates:
    """A slot for each sequence, all of which begin with the batch."""
    specs = [spec for spec in group_layers(model.cache_layers(), 8, model.dtype) if spec.is_recurrent]
    groups = [RecurrentGroup(spec, 1 + len(lengths), torch.device("cpu"), poison=True) for spec in specs]
    slots = SlotInput(np.zeros(len(lengths), np.int64), np.arange(len(lengths)) + 1)
    rows = StepRows(np.zeros(len(lengths), np.int64), np.array(lengths))
    return RecurrentStates(rows, [(RecurrentCache(group.spec.layers, group.tensors), slots) for group in groups])


def compare(model: Model, states: Sequence[torch.Tensor], known: Sequence[KnownRows]) -> Errors:
    """Of all layers, the normed rows and the logits; a layer that ran for fewer rows has the first of them."""
    errors = Errors()
    assert len(states) == model.config.num_layers + 1
    for layer, hidden in enumerate(states):
        add(errors, hidden, known, layer)
    if len(states[-1]) == sum(len(one.logits) for one in known):
        normed = model.final_norm(states[-1])
        add(errors, normed, known, "norm")
        if model.config.has_head:
            errors.add(model.logits(normed), torch.cat([one.logits for one in known]), torch.cat([one.logit_errors for one in known]))
    return errors


def add(errors: Errors, hidden: torch.Tensor, known: Sequence[KnownRows], layer: LayerId) -> None:
    exact, off = (torch.cat([getattr(one, name)[layer] for one in known])[: len(hidden)] for name in ("rows", "errors"))
    errors.add(hidden, exact, off)


def load(folder: Path, max_model_len: int | None = None, ops: Ops | None = None, dtype: torch.dtype = torch.float32) -> Model:
    """With packed weights where the kernels are compiled ones."""
    linears = packed_linears(dtype) if isinstance(ops, NativeOps) else None
    return load_model(folder, device=torch.device("cpu"), dtype=dtype, max_model_len=max_model_len, ops=ops, linears=linears)


def check(
    tiny: TinyModel,
    lengths: Sequence[int] = LENGTHS,
    max_model_len: int | None = None,
    ops: Ops | None = None,
    *,
    recurrent: bool = False,
) -> None:
    sequences = prompts(lengths)
    model = load(tiny.folder, max_model_len, ops)
    compare(model, run(model, sequences), [tiny.known(sequence) for sequence in sequences]).check(recurrent=recurrent)


CASES: dict[str, tuple[str, dict[str, object]]] = {
    "llama": ("llama", {}),
    "llama, tied": ("llama", {"tie_word_embeddings": True}),
    "llama, biases, wide heads": ("llama", {"attention_bias": True, "mlp_bias": True, "head_dim": 24}),
    "llama, one head for each query": ("llama", {"num_key_value_heads": 4, "rms_norm_eps": 1e-3}),
    "llama, gelu": ("llama", {"hidden_act": "gelu"}),
    "llama, relu": ("llama", {"hidden_act": "relu"}),
    "mistral, window": ("mistral", {}),
    "mistral, no window": ("mistral", {"sliding_window": None}),
    "qwen2": ("qwen2", {}),
    "qwen2, upper layers slide": ("qwen2", {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1}),
    "qwen2, layer types": (
        "qwen2",
        {
            "use_sliding_window": True,
            "sliding_window": 5,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
    ),
    "qwen3": ("qwen3", {}),
    "qwen3, bias, window": (
        "qwen3",
        {"attention_bias": True, "use_sliding_window": True, "sliding_window": 6, "max_window_layers": 2},
    ),
    "gemma3": ("gemma3", {}),
    "gemma3, untied, biases, soft cap, scaled": (
        "gemma3",
        {"tie_word_embeddings": False, "attention_bias": True, "final_logit_softcapping": 3.0, "rope_parameters": GEMMA_ROPES},
    ),
    "gemma3, pattern": ("gemma3", {"layer_types": None, "sliding_window_pattern": 4}),
    "gemma2": ("gemma2", {}),
    "gemma2, no caps": ("gemma2", {"attn_logit_softcapping": None, "final_logit_softcapping": None}),
    "phi3, half of a head is rotated": ("phi3", {}),
    "phi3, window": ("phi3", {"sliding_window": 9, "num_key_value_heads": 4}),
    "smollm3": ("smollm3", {}),
    "smollm3, layers that don't rotate slide": ("smollm3", {"use_sliding_window": True, "sliding_window": 7, "no_rope_layer_interval": 2}),
    "granite": ("granite", {}),
    "granite, biases, tied": ("granite", {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}),
    "olmo2": ("olmo2", {}),
    "olmo3": ("olmo3", {}),
    "exaone4": ("exaone4", {}),
    "exaone4, no windows": ("exaone4", {"sliding_window": None, "layer_types": ["full_attention"] * 4}),
    "cohere2": ("cohere2", {}),
    "cohere2, biases, untied": ("cohere2", {"attention_bias": True, "tie_word_embeddings": False}),
    "starcoder2": ("starcoder2", {}),
    "starcoder2, no biases, window": ("starcoder2", {"use_bias": False, "sliding_window": 9}),
    "glm": ("glm", {}),
    "glm4": ("glm4", {}),
    "glm4, no biases": ("glm4", {"attention_bias": False}),
    "qwen2_moe": ("qwen2_moe", {}),
    "qwen2_moe, windows, some layers dense": (
        "qwen2_moe",
        {"use_sliding_window": True, "sliding_window": 6, "mlp_only_layers": [1], "qkv_bias": False, "norm_topk_prob": True},
    ),
    "qwen3_moe": ("qwen3_moe", {}),
    "qwen3_moe, window, every second layer sparse": (
        "qwen3_moe",
        {"use_sliding_window": True, "sliding_window": 6, "decoder_sparse_step": 2, "norm_topk_prob": False, "attention_bias": True},
    ),
    "mixtral": ("mixtral", {}),
    "mixtral, window": ("mixtral", {"sliding_window": 9, "num_experts_per_tok": 1}),
    "glm4_moe": ("glm4_moe", {}),
    "glm4_moe, one group, two shared experts": (
        "glm4_moe",
        {"n_group": 1, "topk_group": 1, "n_shared_experts": 2, "norm_topk_prob": False, "use_qk_norm": False, "attention_bias": True},
    ),
    "minimax_m2": ("minimax_m2", {}),
    "deepseek_v2": ("deepseek_v2", {}),
    "deepseek_v2, greedy, plain queries, first layers dense, yarn": (
        "deepseek_v2",
        {
            "topk_method": "greedy",
            "q_lora_rank": None,
            "first_k_dense_replace": 2,
            "attention_bias": True,
            "rope_parameters": {**YARN, "mscale": 0.707, "mscale_all_dim": 0.707},
        },
    ),
    "deepseek_v3": ("deepseek_v3", {}),
    "deepseek_v3, not interleaved, plain queries, yarn": (
        "deepseek_v3",
        {"rope_interleave": False, "q_lora_rank": None, "rope_parameters": {**YARN, "mscale": 0.7, "mscale_all_dim": 1.2}},
    ),
    "deepseek_v3, biases, weights as they are": ("deepseek_v3", {"attention_bias": True, "norm_topk_prob": False}),
    "glm4_moe_lite": ("glm4_moe_lite", {"mlp_layer_types": ["sparse", "dense", "sparse"]}),
    "qwen3_next": ("qwen3_next", {}),
    "qwen3_next, some layers dense": ("qwen3_next", {"mlp_only_layers": [2], "norm_topk_prob": False, "attention_bias": True}),
    "qwen3_5": ("qwen3_5", {}),
    "qwen3_5, every fourth layer attends": ("qwen3_5", {"layer_types": None, "num_hidden_layers": 5}),
    "qwen3_5_moe": ("qwen3_5_moe", {}),
    "granite4": ("granite4", {}),
    "granite4, dense, rotated, biases": (
        "granite4",
        {
            "num_local_experts": 0,
            "position_embedding_type": "rope",
            "mamba_proj_bias": True,
            "mamba_conv_bias": False,
            "attention_bias": True,
        },
    ),
    "granite4, steps limited": ("granite4", {"time_step_limit": [0.4, 0.9]}),
    "nemotron_h": ("nemotron_h", {}),
    "nemotron_h, steps limited, biases, experts on a latent": (
        "nemotron_h",
        {"time_step_min": 0.5, "use_bias": True, "mlp_bias": True, "moe_latent_size": 32, "use_conv_bias": False},
    ),
    "lfm2": ("lfm2", {}),
    "lfm2, biases, untied, width as it is": (
        "lfm2",
        {"conv_bias": True, "tie_word_embeddings": False, "block_auto_adjust_ff_dim": False, "conv_L_cache": 4},
    ),
    "llama4": ("llama4", {}),
    "llama4, no chunks, no norms, all layers sparse": (
        "llama4",
        {
            "attention_chunk_size": None,
            "use_qk_norm": False,
            "attn_temperature_tuning": False,
            "interleave_moe_layer_step": 1,
            "attention_bias": True,
            "num_experts_per_tok": 1,
        },
    ),
    "gpt_oss": ("gpt_oss", {}),
    "gpt_oss, no biases, layer types": (
        "gpt_oss",
        {"attention_bias": False, "layer_types": ["full_attention", "sliding_attention", "full_attention"], "swiglu_alpha": 1.1},
    ),
    "linear": ("llama", {"rope_parameters": {"rope_type": "linear", "rope_theta": 5e3, "factor": 3.0}}),
    "dynamic": ("llama", {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}}),
    "yarn": ("qwen2", {"rope_parameters": YARN}),
    "yarn, all settings": (
        "llama",
        {"rope_parameters": {**YARN, "beta_fast": 16.0, "beta_slow": 2.0, "mscale": 0.7, "mscale_all_dim": 1.2, "truncate": False}},
    ),
    "yarn, attention factor": ("qwen3", {"rope_parameters": {**YARN, "attention_factor": 1.3}}),
    "llama3": ("llama", {"rope_parameters": LLAMA3}),
    "longrope, attention factor": ("llama", {"rope_parameters": {**LONGROPE, "attention_factor": 1.25}}),
}
LONG_ONLY = {"longrope, attention factor": (40, 33, 47)}


@pytest.mark.parametrize("case", CASES)
def test_every_row_of_every_layer_equals_transformers(tiny_model: MakeModel, case: str, ops: Ops) -> None:
    family, settings = CASES[case]
    check(tiny_model(family, **settings), LONG_ONLY.get(case, LENGTHS), ops=ops, recurrent=family in RECURRENT)


def test_longrope_uses_the_short_set_where_the_limit_is_the_original_context(tiny_model: MakeModel) -> None:
    check(tiny_model("llama", rope_parameters=LONGROPE), (32, 5, 17), max_model_len=32)


def test_longrope_uses_the_long_set_where_the_limit_is_above_the_original_context(tiny_model: MakeModel) -> None:
    check(tiny_model("llama", rope_parameters=LONGROPE), (48,), max_model_len=48)


def test_dynamic_is_unscaled_up_to_the_original_context(tiny_model: MakeModel) -> None:
    rope = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
    check(tiny_model("llama", rope_parameters=rope, max_position_embeddings=32), (32, 3), max_model_len=32)


def test_dynamic_is_scaled_for_the_limit_that_the_server_runs_with(tiny_model: MakeModel) -> None:
    rope = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
    check(tiny_model("llama", seed=1, rope_parameters=rope, max_position_embeddings=32), (60,), max_model_len=60)


def test_a_sharded_checkpoint_equals_transformers(tiny_model: MakeModel) -> None:
    tiny = tiny_model("qwen3", max_shard_size="60KB")
    assert not (tiny.folder / "model.safetensors").exists()
    assert len(list(tiny.folder.glob("model-*.safetensors"))) > 2
    check(tiny)


def test_a_checkpoint_of_another_dtype_is_converted(tiny_model: MakeModel, tmp_path: Path) -> None:
    tiny = tiny_model("gemma3")
    folder = shutil.copytree(tiny.folder, tmp_path / "half")
    weights = {name: weight.bfloat16() for name, weight in load_file(folder / "model.safetensors").items()}
    save_file(weights, folder / "model.safetensors")
    save_file({name: weight.float() for name, weight in weights.items()}, (tmp_path / "same.safetensors"))
    wide = shutil.copytree(folder, tmp_path / "wide")
    shutil.copy(tmp_path / "same.safetensors", wide / "model.safetensors")
    sequences = prompts((12,))
    for half, full in zip(run(load(folder), sequences), run(load(wide), sequences), strict=True):
        assert torch.equal(half, full)


@pytest.mark.parametrize("native", [False, True], ids=["torch", "native"])
@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_bfloat16_rows_stay_near_transformers_in_bfloat16(tiny_model: MakeModel, family: str, native: bool) -> None:
    tiny = tiny_model(family, seed=2, hidden_size=96)  # the square root of the width isn't a bfloat16
    reference = type(tiny.reference).from_pretrained(tiny.folder, dtype=torch.bfloat16, attn_implementation="eager")
    ops = native_ops(torch.bfloat16) if native else None
    model = load(tiny.folder, ops=ops, dtype=torch.bfloat16)
    [sequence] = prompts((20,))
    states = run(model, [sequence])
    expected = reference(torch.tensor([sequence]), output_hidden_states=True).hidden_states
    assert torch.equal(states[0], expected[0][0])
    for actual, wanted in zip(states[1:-1], expected[1:-1], strict=True):
        assert actual.dtype == torch.bfloat16
        error = actual.float() - wanted[0].float()
        assert (error.norm(dim=-1) / wanted[0].float().norm(dim=-1)).max().item() <= 0.02


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_narrowed_rows_equal_those_of_the_whole_batch(tiny_model: MakeModel, family: str, ops: Ops) -> None:
    tiny = tiny_model(family)
    sequences = prompts((11, 4, 9))
    model = load(tiny.folder, ops=ops)
    rows = [24, 15, 15, 11, 11, 11][: model.config.num_layers]
    states = run(model, sequences, rows)
    assert [len(hidden) for hidden in states] == [24, *rows]
    compare(model, states, [tiny.known(sequence) for sequence in sequences]).check()


@pytest.mark.parametrize("final_rows", [[], [10], [0, 3, 4, 14]], ids=str)
@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_only_the_rows_that_are_wanted_leave_the_last_layer(tiny_model: MakeModel, family: str, final_rows: list[int], ops: Ops) -> None:
    tiny = tiny_model(family)
    sequences = prompts((11, 4, 9))
    model = load(tiny.folder, ops=ops)
    rows = [24, 24, 15, 15, 15, 15][: model.config.num_layers]
    states = run(model, sequences, rows, final_rows)
    assert [len(hidden) for hidden in states] == [24, *rows[:-1], len(final_rows)]
    if final_rows:
        known, errors = [tiny.known(sequence) for sequence in sequences], Errors()
        exact, off = (torch.cat([getattr(one, name)[model.config.num_layers] for one in known])[final_rows] for name in ("rows", "errors"))
        errors.add(states[-1], exact, off)
        errors.check_rows()


def test_layers_that_nobody_needs_do_not_run(tiny_model: MakeModel) -> None:
    model = load(tiny_model("llama").folder)
    states = run(model, prompts((5, 3)), [5, 0, 0])
    assert [len(hidden) for hidden in states] == [8, 5]


def test_only_embeddings(tiny_model: MakeModel) -> None:
    tiny = tiny_model("gemma3")
    [sequence] = prompts((6,))
    [embeddings] = run(load(tiny.folder), [sequence], [0] * 6)
    assert torch.equal(embeddings.double(), tiny.known(sequence).rows[0])


def test_captured_states_are_not_written_again(tiny_model: MakeModel, ops: Ops) -> None:
    model = load(tiny_model("llama").folder, ops=ops)
    held: list[tuple[torch.Tensor, torch.Tensor]] = []
    batch = ForwardBatch(
        token_ids=torch.arange(9),
        positions=torch.arange(9),
        rows_at_layer=[9, 9, 9],
        attention=DenseAttention([9]),
        capture=lambda _, hidden: held.append((hidden, hidden.clone())),
    )
    model.forward(batch)
    assert all(torch.equal(now, then) for now, then in held)


def test_cache_layers_say_which_layers_slide(tiny_model: MakeModel) -> None:
    sliding, full = LayerKV(2, 24, 7), LayerKV(2, 24)
    assert load(tiny_model("gemma3").folder).cache_layers() == [sliding, sliding, full] * 2


def test_a_tied_head_shares_the_embedding(tiny_model: MakeModel, tmp_path: Path) -> None:
    """Also where the file stores both; and where they differ they stay apart, as in transformers."""
    tiny = tiny_model("llama", tie_word_embeddings=True)
    stored = load_file(tiny.folder / "model.safetensors")
    assert "lm_head.weight" not in stored
    same = _with_head(tiny.folder, tmp_path / "same", stored["model.embed_tokens.weight"].clone())
    other = _with_head(tiny.folder, tmp_path / "other", stored["model.embed_tokens.weight"] * 2)
    normed = torch.randn(3, 64, generator=torch.Generator().manual_seed(3))
    expected = load(tiny.folder).logits(normed)
    assert torch.equal(load(same).logits(normed), expected)
    assert torch.equal(load(other).logits(normed), expected * 2)


def _with_head(source: Path, folder: Path, head: torch.Tensor) -> Path:
    shutil.copytree(source, folder)
    stored = load_file(folder / "model.safetensors")
    save_file({**stored, "lm_head.weight": head}, folder / "model.safetensors")
    return folder


def test_a_tied_checkpoint_that_stores_only_the_head_loads(tiny_model: MakeModel, tmp_path: Path) -> None:
    tiny = tiny_model("llama", tie_word_embeddings=True)
    folder = shutil.copytree(tiny.folder, tmp_path / "head")
    stored = load_file(folder / "model.safetensors")
    stored["lm_head.weight"] = stored.pop("model.embed_tokens.weight")
    save_file(stored, folder / "model.safetensors")
    [sequence] = prompts((8,))
    compare(load(folder), run(load(folder), [sequence]), [tiny.known(sequence)]).check()


def test_the_hub_form_of_a_configuration_gives_the_same_rows(tiny_model: MakeModel, tmp_path: Path) -> None:
    tiny = tiny_model("gemma3", rope_parameters=GEMMA_ROPES)
    folder = shutil.copytree(tiny.folder, tmp_path / "hub")
    config = json.loads((folder / "config.json").read_text())
    for name in ("rope_parameters", "layer_types", "dtype"):
        config.pop(name)
    scaling = {"rope_type": "linear", "factor": 8.0}
    config |= {"rope_theta": 1e6, "rope_local_base_freq": 1e3, "rope_scaling": scaling, "sliding_window_pattern": 3}
    (folder / "config.json").write_text(json.dumps(config))
    assert read_model_config(folder).checkpoint_dtype == torch.float32, "that of the weights"
    [sequence] = prompts((30,))
    compare(load(folder), run(load(folder), [sequence]), [tiny.known(sequence)]).check()


def test_progress_counts_up_to_the_size_of_the_checkpoint(tiny_model: MakeModel) -> None:
    calls: list[tuple[int, int]] = []
    tiny = tiny_model("llama")
    load_model(tiny.folder, device=torch.device("cpu"), dtype=torch.float32, progress=lambda *call: calls.append(call))
    done = [call[0] for call in calls]
    total = sum(weight.numel() * 4 for weight in load_file(tiny.folder / "model.safetensors").values())
    assert done == sorted(done)
    assert calls[-1] == (total, total)


def test_positions_beyond_the_limit_are_not_answered(tiny_model: MakeModel) -> None:
    model = load(tiny_model("llama").folder, max_model_len=8)
    with pytest.raises(IndexError):
        run(model, prompts((9,)))


def test_an_unsupported_architecture_names_the_supported_ones(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["GPT2LMHeadModel"]}))
    with pytest.raises(ModelError, match=r"GPT2LMHeadModel is not supported; supported are LlamaForCausalLM, .*Gemma3ForCausalLM"):
        load(tmp_path)
