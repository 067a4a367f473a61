"""GGUF files made for the occasion: what is converted faithfully, and what is refused rather than guessed."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from numpy.typing import NDArray
from safetensors.numpy import load_file

from engine.errors import ModelError
from engine.models.checkpoints.prepared import Progress
from engine.models.checkpoints.source import resolve_model
from engine.models.gguf import convert as converter
from engine.models.gguf.file import GGUFFile

WIDTH, HEADS, KV_HEADS, HEAD_DIM, INNER, VOCAB = 16, 4, 2, 4, 24, 10
Tensors = dict[str, NDArray[np.float32]]

_SHAPES = {
    "attn_norm": (WIDTH,),
    "attn_q": (HEADS * HEAD_DIM, WIDTH),
    "attn_k": (KV_HEADS * HEAD_DIM, WIDTH),
    "attn_v": (KV_HEADS * HEAD_DIM, WIDTH),
    "attn_output": (WIDTH, HEADS * HEAD_DIM),
    "ffn_norm": (WIDTH,),
    "ffn_gate": (INNER, WIDTH),
    "ffn_up": (INNER, WIDTH),
    "ffn_down": (WIDTH, INNER),
}
_GEMMA_SHAPES = {
    "attn_q_norm": (HEAD_DIM,),
    "attn_k_norm": (HEAD_DIM,),
    "post_attention_norm": (WIDTH,),
    "post_ffw_norm": (WIDTH,),
}


def _tensors(layers: int, gemma: bool = False) -> Tensors:
    random = np.random.default_rng(0)
    shapes: dict[str, tuple[int, ...]] = {"token_embd": (VOCAB, WIDTH), "output_norm": (WIDTH,)}
    for layer in range(layers):
        shapes |= {f"blk.{layer}.{name}": shape for name, shape in (_SHAPES | (_GEMMA_SHAPES if gemma else {})).items()}
    return {f"{name}.weight": random.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}


def _metadata(arch: str, layers: int) -> dict[str, Any]:
    return {
        f"{arch}.block_count": layers,
        f"{arch}.context_length": 128,
        f"{arch}.embedding_length": WIDTH,
        f"{arch}.feed_forward_length": INNER,
        f"{arch}.attention.head_count": HEADS,
        f"{arch}.attention.head_count_kv": KV_HEADS,
        f"{arch}.attention.layer_norm_rms_epsilon": 1e-5,
        f"{arch}.rope.freq_base": 12345.0,
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": ["<end>", *"abcdefgh", "ab"],
        "tokenizer.ggml.token_type": [3] + [1] * 9,
        "tokenizer.ggml.merges": ["a b"],
        "tokenizer.ggml.eos_token_id": 0,
    }


def _write(
    path: Path, arch: str, metadata: Mapping[str, Any], tensors: Tensors, quantised: gguf.GGMLQuantizationType | None = None
) -> Path:
    writer = gguf.GGUFWriter(path, arch)
    for key, value in metadata.items():
        _add(writer, key, value)
    for name, tensor in tensors.items():
        if quantised is not None and tensor.ndim > 1:
            writer.add_tensor(name, gguf.quants.quantize(tensor, quantised), raw_dtype=quantised)
        else:
            writer.add_tensor(name, tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _add(writer: gguf.GGUFWriter, key: str, value: object) -> None:
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    else:
        assert isinstance(value, list)
        writer.add_array(key, value)


def _convert(
    tmp_path: Path, arch: str = "llama", layers: int = 2, metadata: Mapping[str, Any] | None = None, tensors: Tensors | None = None
) -> Path:
    values = {key: value for key, value in (_metadata(arch, layers) | dict(metadata or {})).items() if value is not None}
    tensors = tensors if tensors is not None else _tensors(layers, arch == "gemma3")
    path = _write(tmp_path / "tiny.gguf", arch, values, tensors)
    return resolve_model(str(path), cache=tmp_path / "cache").folder


def _config(folder: Path) -> dict[str, Any]:
    config: dict[str, Any] = json.loads((folder / "config.json").read_text())
    return config


def _permuted(weights: NDArray[np.float32], heads: int) -> NDArray[np.float32]:
    """Row by row: in each head, row i of the first half is followed by row i of the second."""
    rows = weights.reshape(heads, -1, weights.shape[1])
    half = rows.shape[1] // 2
    order = [row for i in range(half) for row in (i, i + half)]
    return rows[:, order].reshape(weights.shape)


def test_rotary_rows_of_llama_files_are_put_back_and_nothing_else_changes(tmp_path: Path) -> None:
    original = _tensors(2)
    stored = dict(original)
    for layer in range(2):
        stored[f"blk.{layer}.attn_q.weight"] = _permuted(original[f"blk.{layer}.attn_q.weight"], HEADS)
        stored[f"blk.{layer}.attn_k.weight"] = _permuted(original[f"blk.{layer}.attn_k.weight"], KV_HEADS)
    loaded = load_file(_convert(tmp_path, tensors=stored) / "model.safetensors")
    assert len(loaded) == len(original)
    assert all(tensor.dtype == np.float32 for tensor in loaded.values())
    np.testing.assert_array_equal(loaded["model.layers.1.self_attn.q_proj.weight"], original["blk.1.attn_q.weight"])
    np.testing.assert_array_equal(loaded["model.layers.1.self_attn.k_proj.weight"], original["blk.1.attn_k.weight"])
    np.testing.assert_array_equal(loaded["model.layers.0.post_attention_layernorm.weight"], original["blk.0.ffn_norm.weight"])
    np.testing.assert_array_equal(loaded["model.norm.weight"], original["output_norm.weight"])


def test_gemma_norms_are_stored_without_the_one_and_projections_as_they_are(tmp_path: Path) -> None:
    stored = _tensors(6, gemma=True)
    extra = {"gemma3.attention.key_length": HEAD_DIM, "gemma3.attention.sliding_window": 32}
    folder = _convert(tmp_path, "gemma3", 6, extra, stored)
    loaded = load_file(folder / "model.safetensors")
    norms = {name: tensor for name, tensor in loaded.items() if "norm" in name}
    assert len(norms) == 6 * 6 + 1
    np.testing.assert_array_equal(norms["model.layers.2.pre_feedforward_layernorm.weight"], stored["blk.2.ffn_norm.weight"] - 1)
    np.testing.assert_array_equal(norms["model.layers.2.self_attn.q_norm.weight"], stored["blk.2.attn_q_norm.weight"] - 1)
    np.testing.assert_array_equal(norms["model.norm.weight"], stored["output_norm.weight"] - 1)
    np.testing.assert_array_equal(loaded["model.layers.2.self_attn.q_proj.weight"], stored["blk.2.attn_q.weight"])
    assert _config(folder)["layer_types"] == ["sliding_attention"] * 5 + ["full_attention"]


def test_the_head_is_tied_only_where_the_file_has_none_of_its_own(tmp_path: Path) -> None:
    (tmp_path / "tied").mkdir()
    (tmp_path / "untied").mkdir()
    assert _config(_convert(tmp_path / "tied"))["tie_word_embeddings"] is True
    head = np.ones((VOCAB, WIDTH), dtype=np.float32)
    folder = _convert(tmp_path / "untied", tensors=_tensors(2) | {"output.weight": head})
    assert _config(folder)["tie_word_embeddings"] is False
    np.testing.assert_array_equal(load_file(folder / "model.safetensors")["lm_head.weight"], head)


def test_the_configuration_has_the_shortest_decimals(tmp_path: Path) -> None:
    config = _config(_convert(tmp_path))
    assert "quantization_config" not in config
    assert (config["rms_norm_eps"], config["rope_theta"]) == (1e-5, 12345.0)
    assert (config["num_key_value_heads"], config["head_dim"], config["vocab_size"]) == (KV_HEADS, HEAD_DIM, VOCAB)


def test_an_end_of_turn_token_ends_a_text_too(tmp_path: Path) -> None:
    folder = _convert(tmp_path, metadata={"tokenizer.ggml.eot_token_id": 3})
    assert _config(folder)["eos_token_id"] == [0, 3]
    assert json.loads((folder / "generation_config.json").read_text())["eos_token_id"] == [0, 3]


@pytest.mark.parametrize(
    ("extra", "scaling"),
    [
        ({}, None),
        ({"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 2.5}, {"rope_type": "linear", "factor": 2.5}),
        (
            {"llama.rope.scaling.type": "yarn", "llama.rope.scaling.factor": 4.0, "llama.rope.scaling.original_context_length": 64},
            {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
        ),
    ],
)
def test_rope_scaling_is_carried_over(extra: dict[str, Any], scaling: dict[str, Any] | None, tmp_path: Path) -> None:
    assert _config(_convert(tmp_path, metadata=extra))["rope_scaling"] == scaling


def test_large_models_are_written_in_shards_with_an_index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(converter, "SHARD_BYTES", 4000)
    folder = _convert(tmp_path)
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    shards = sorted(set(index["weight_map"].values()))
    assert len(shards) > 2
    assert sorted(path.name for path in folder.glob("*.safetensors")) == shards
    names = {name: shard for shard in shards for name in load_file(folder / shard)}
    assert names == index["weight_map"]
    total = sum(tensor.nbytes for shard in shards for tensor in load_file(folder / shard).values())
    assert total == index["metadata"]["total_size"]


def test_a_file_is_converted_once_and_found_again_by_its_contents(tmp_path: Path) -> None:
    folder = _convert(tmp_path)
    lines: list[str] = []
    again = resolve_model(str(tmp_path / "tiny.gguf"), cache=tmp_path / "cache", progress=Progress(lines.append))
    assert again.folder == folder
    assert lines == ["reading tiny.gguf"]
    assert again.revision in folder.name
    assert _convert(tmp_path, layers=1) != folder


def test_progress_ends_with_all_tensors(tmp_path: Path) -> None:
    lines: list[str] = []
    _convert(tmp_path)
    resolve_model(str(tmp_path / "tiny.gguf"), cache=tmp_path / "elsewhere", progress=Progress(lines.append))
    assert lines[0] == "reading tiny.gguf"
    assert lines[-1] == "converting tiny: 20/20 tensors"


def test_a_conversion_can_be_ended_at_every_step_and_leaves_nothing(tmp_path: Path) -> None:
    _convert(tmp_path)
    steps, cache = 0, tmp_path / "elsewhere"

    def convert(end_at: int | None) -> None:
        nonlocal steps
        steps = 0

        def check() -> None:
            nonlocal steps
            steps += 1
            if steps == end_at:
                raise KeyboardInterrupt

        resolve_model(str(tmp_path / "tiny.gguf"), cache=cache, progress=Progress(check=check))

    for end_at in range(1, 22):
        with pytest.raises(KeyboardInterrupt):
            convert(end_at)
        assert [path.name for path in cache.glob("*") if path.suffix != ".lock"] == []
    convert(None)
    assert steps > 20, "at least once for each tensor"


def test_a_missing_tensor_is_named(tmp_path: Path) -> None:
    tensors = _tensors(2)
    del tensors["blk.1.ffn_up.weight"]
    with pytest.raises(ModelError, match=r"lacks the tensor blk\.1\.ffn_up\.weight"):
        _convert(tmp_path, tensors=tensors)


def test_a_tensor_that_would_be_lost_is_named(tmp_path: Path) -> None:
    tensors = _tensors(2) | {"rope_short.weight": np.ones(2, dtype=np.float32)}
    with pytest.raises(ModelError, match=r"holds the tensor rope_short\.weight, whose meaning is not known"):
        _convert(tmp_path, tensors=tensors)


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ({"llama.block_count": None}, r"lacks the metadata key llama\.block_count"),
        ({"llama.block_count": "2"}, r"llama\.block_count should be of type int, not str"),
        ({"llama.attention.head_count_kv": [2, 1]}, r"llama\.attention\.head_count_kv should be of type int, not list"),
        ({"llama.rope.dimension_count": 2}, "rotary embedding over 2 of 4 dimensions is not supported"),
        ({"llama.rope.scaling.type": "longrope"}, "rope scaling 'longrope' is not supported"),
        ({"tokenizer.ggml.model": "bert"}, "tokenizers of kind 'bert' are not supported"),
        ({"tokenizer.ggml.pre": "kimi-k2"}, "the pre-tokenizer 'kimi-k2' is not supported"),
        ({"tokenizer.ggml.token_type": [1, 1]}, "has 2 entries for 10 tokens"),
        ({"tokenizer.ggml.add_bos_token": True}, r"lacks the metadata key tokenizer\.ggml\.bos_token_id"),
        ({"tokenizer.ggml.bos_token_id": 99}, r"tokenizer\.ggml\.bos_token_id is 99, but there are 10 tokens"),
        (
            {"tokenizer.ggml.tokens": ["<end>", *"abcdefgh", "ab", "x"], "tokenizer.ggml.token_type": [1] * 11},
            "lists 11 tokens, but embeds only 10",
        ),
        ({"tokenizer.ggml.merges": ["a z"]}, "the tokenizer in it is damaged"),
    ],
)
def test_what_cannot_be_converted_faithfully_is_refused(metadata: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=message):
        _convert(tmp_path, metadata=metadata)
    assert not [path for path in (tmp_path / "cache").iterdir() if path.is_dir()]


def test_another_architecture_is_refused(tmp_path: Path) -> None:
    path = _write(tmp_path / "m.gguf", "bert", {}, {"token_embd.weight": np.ones((2, 2), dtype=np.float32)})
    with pytest.raises(ModelError, match="is of architecture 'bert'; GGUF files of gemma3, llama, qwen2, qwen3 can be used"):
        resolve_model(str(path), cache=tmp_path / "cache")


@pytest.mark.parametrize("keep", [0, 3, 100, 1500, -1])
def test_a_damaged_file_is_refused(keep: int, tmp_path: Path) -> None:
    _convert(tmp_path)
    broken = tmp_path / "broken.gguf"
    broken.write_bytes((tmp_path / "tiny.gguf").read_bytes()[:keep])
    with pytest.raises(ModelError, match=r"broken\.gguf is not a GGUF file, or it is damaged or cut short"):
        resolve_model(str(broken), cache=tmp_path / "cache")


KINDS = gguf.GGMLQuantizationType


@pytest.mark.parametrize(
    ("kind", "dtype"), [(KINDS.F32, "float32"), (KINDS.F16, "float16"), (KINDS.BF16, "bfloat16"), (KINDS.Q8_0, "bfloat16")], ids=str
)
def test_the_dtype_is_that_of_the_matrices_and_bfloat16_where_they_are_quantised(
    kind: gguf.GGMLQuantizationType, dtype: str, tmp_path: Path
) -> None:
    tensors = {name: np.zeros((*tensor.shape[:-1], 32), np.float32) if tensor.ndim > 1 else tensor for name, tensor in _tensors(1).items()}
    path = _write(tmp_path / "x.gguf", "llama", _metadata("llama", 1), tensors, kind)
    assert GGUFFile(path).dtype == dtype


CHANGES_RESULTS: list[dict[str, Any]] = [
    {"llama.expert_count": 8},
    {"llama.attention.causal": False},
    {"llama.attention.scale": 0.3},
    {"llama.logit_scale": 0.5},
    {"llama.embedding_scale": 12.0},
    {"llama.residual_scale": 0.2},
    {"llama.attn_logit_softcapping": 50.0},
    {"llama.final_logit_softcapping": 30.0},
    {"llama.attention.clamp_kqv": 8.0},
    {"llama.attention.value_length": 8},
    {"llama.rope.scaling.type": "yarn", "llama.rope.scaling.factor": 4.0, "llama.rope.scaling.yarn_log_multiplier": 0.1},
    {"llama.rope.scaling.attn_factor": 1.2, "llama.rope.scaling.factor": 2.0},
    {"llama.something.new": 1},
]


@pytest.mark.parametrize("metadata", CHANGES_RESULTS, ids=str)
def test_a_key_that_changes_results_or_is_not_known_is_refused_by_name(metadata: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(ModelError) as caught:
        _convert(tmp_path, metadata=metadata)
    assert any(key in str(caught.value) for key in metadata)


@pytest.mark.parametrize(
    "metadata",
    [
        {"llama.expert_count": 0, "llama.attention.causal": True, "llama.attention.scale": HEAD_DIM**-0.5, "llama.logit_scale": 1.0},
        {"llama.vocab_size": VOCAB, "llama.tensor_data_layout": "Meta AI original pth", "llama.rope.scaling.attn_factor": 1.0},
    ],
)
def test_keys_that_change_nothing_are_taken(metadata: dict[str, Any], tmp_path: Path) -> None:
    assert _config(_convert(tmp_path, metadata=metadata))["rope_scaling"] is None


@pytest.mark.parametrize("metadata", [{"llama.rope.scaling.factor": 2.0}, {"llama.rope.scale_linear": 2.0}], ids=str)
def test_a_factor_without_a_type_scales_linearly_as_in_llama_cpp(metadata: dict[str, Any], tmp_path: Path) -> None:
    assert _config(_convert(tmp_path, metadata=metadata))["rope_scaling"] == {"rope_type": "linear", "factor": 2.0}


def test_yarns_attention_factor_is_the_product_that_llama_cpp_computes(tmp_path: Path) -> None:
    metadata = {
        "llama.rope.scaling.type": "yarn",
        "llama.rope.scaling.factor": 4.0,
        "llama.rope.scaling.attn_factor": 0.5,
        "llama.rope.scaling.yarn_beta_fast": 16.0,
    }
    scaling = _config(_convert(tmp_path, metadata=metadata))["rope_scaling"]
    assert scaling["attention_factor"] == pytest.approx(0.5 * (0.1 * np.log(4) + 1))
    assert scaling["beta_fast"] == 16.0


def test_rope_frequencies_divide_every_frequency(tmp_path: Path) -> None:
    """As Llama 3.1 files have them."""
    folder = _convert(tmp_path, tensors=_tensors(2) | {"rope_freqs.weight": np.array([1.0, 8.0], np.float32)})
    scaling = _config(folder)["rope_scaling"]
    assert (scaling["rope_type"], scaling["short_factor"], scaling["long_factor"]) == ("longrope", [1.0, 8.0], [1.0, 8.0])
    assert scaling["attention_factor"] == 1.0
    assert "rope_freqs" not in " ".join(load_file(folder / "model.safetensors"))


def test_a_llama_file_with_a_window_is_a_mistral_model(tmp_path: Path) -> None:
    config = _config(_convert(tmp_path, metadata={"llama.attention.sliding_window": 32}))
    assert (config["architectures"], config["sliding_window"]) == (["MistralForCausalLM"], 32)


@pytest.mark.parametrize(
    ("pattern", "sliding"),
    [(None, [1, 1, 1, 1, 1, 0]), (3, [1, 1, 0, 1, 1, 0]), ([True, False] * 3, [1, 0, 1, 0, 1, 0])],
    ids=str,
)
def test_gemma_layers_slide_as_the_file_says(pattern: object, sliding: list[int], tmp_path: Path) -> None:
    metadata = {
        "gemma3.attention.sliding_window": 8,
        "gemma3.attention.sliding_window_pattern": pattern,
        "gemma3.rope.freq_base_swa": 500.0,
    }
    config = _config(_convert(tmp_path, "gemma3", 6, metadata))
    assert [kind == "sliding_attention" for kind in config["layer_types"]] == [bool(value) for value in sliding]
    assert config["rope_local_base_freq"] == 500.0


def test_qwen2_files_have_biases_and_rows_in_their_order(tmp_path: Path) -> None:
    sizes = {"attn_q": 16, "attn_k": 8, "attn_v": 8}
    biases = {f"blk.{layer}.{name}.bias": np.ones(size, np.float32) for layer in range(2) for name, size in sizes.items()}
    stored = _tensors(2) | biases
    loaded = load_file(_convert(tmp_path, "qwen2", tensors=stored) / "model.safetensors")
    np.testing.assert_array_equal(loaded["model.layers.1.self_attn.q_proj.weight"], stored["blk.1.attn_q.weight"])
    np.testing.assert_array_equal(loaded["model.layers.1.self_attn.k_proj.bias"], stored["blk.1.attn_k.bias"])


def test_the_biases_of_a_llama_file_are_put_back_with_their_rows(tmp_path: Path) -> None:
    sizes = {"attn_q": 16, "attn_k": 8, "attn_v": 8, "attn_output": 16}
    biases = {f"blk.{layer}.{name}.bias": np.arange(size, dtype=np.float32) for layer in range(2) for name, size in sizes.items()}
    folder = _convert(tmp_path, tensors=_tensors(2) | biases)
    assert _config(folder)["attention_bias"] is True
    bias = load_file(folder / "model.safetensors")["model.layers.0.self_attn.q_proj.bias"]
    np.testing.assert_array_equal(bias[:4], [0, 2, 1, 3])


def test_all_parts_of_a_split_file_are_read_and_a_missing_one_is_named(tmp_path: Path) -> None:
    tensors = _tensors(2)
    names = list(tensors)
    split = {"split.count": 2, "split.tensors.count": len(names)}
    parts = [tmp_path / f"x-0000{number}-of-00002.gguf" for number in (1, 2)]
    _write(parts[0], "llama", _metadata("llama", 2) | split, {name: tensors[name] for name in names[:5]})
    _write(parts[1], "llama", split, {name: tensors[name] for name in names[5:]})
    for part in parts:
        folder = resolve_model(str(part), cache=tmp_path / "cache").folder
        assert len(load_file(folder / "model.safetensors")) == len(names)
    parts[1].unlink()
    with pytest.raises(ModelError, match=r"the part x-00002-of-00002\.gguf is missing \(1 of 2 are\)"):
        resolve_model(str(parts[0]), cache=tmp_path / "elsewhere")


def test_a_tensor_of_a_type_that_is_not_read_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise NotImplementedError

    monkeypatch.setattr("engine.models.gguf.file.dequantize", refuse)
    with pytest.raises(ModelError, match=r"tensor token_embd\.weight is of type F32, which is not read"):
        _convert(tmp_path)
