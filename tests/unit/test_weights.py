"""Loading weights from safetensors: what lands where, and what is refused."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from engine.errors import ModelError
from engine.models.blocks.linear import DenseLinear, DenseLinears, Linear
from engine.models.blocks.mlp import MLP, GatedMLP
from engine.models.checkpoints.checkpoint import Checkpoint
from engine.models.configuration.families import read_decoder_config
from engine.models.loader import load_model
from engine.models.weights import DecoderWeights, WeightLoader

CPU = torch.device("cpu")
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 8,
    "intermediate_size": 12,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 16,
    "vocab_size": 10,
    "tie_word_embeddings": False,
}
Q = "model.layers.1.self_attn.q_proj.weight"


def stored_weights(norms: tuple[str, ...] = ("input_layernorm", "post_attention_layernorm")) -> dict[str, torch.Tensor]:
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens": (10, 8), "lm_head": (10, 8), "model.norm": (8,)}
    for layer in range(2):
        attention, mlp = f"model.layers.{layer}.self_attn", f"model.layers.{layer}.mlp"
        shapes |= {f"{attention}.{part}_proj": (size, 8) for part, size in (("q", 8), ("k", 4), ("v", 4), ("o", 8))}
        shapes |= {f"{mlp}.gate_proj": (12, 8), f"{mlp}.up_proj": (12, 8), f"{mlp}.down_proj": (8, 12)}
        shapes |= {f"model.layers.{layer}.{norm}": (8,) for norm in norms}
    generator = torch.Generator().manual_seed(0)
    return {f"{name}.weight": torch.randn(shape, generator=generator) for name, shape in shapes.items()}


def write(folder: Path, weights: dict[str, torch.Tensor], **settings: object) -> Path:
    (folder / "config.json").write_text(json.dumps({**CONFIG, **settings}))
    save_file(weights, folder / "model.safetensors")
    return folder


def write_shards(folder: Path, weights: dict[str, torch.Tensor]) -> Path:
    (folder / "config.json").write_text(json.dumps(CONFIG))
    names = sorted(weights)
    files = {name: f"model-{i % 3}.safetensors" for i, name in enumerate(names)}
    for file in set(files.values()):
        save_file({name: weights[name] for name in names if files[name] == file}, folder / file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": files}))
    return folder


def load(folder: Path, dtype: torch.dtype = torch.float32, checkpoint: Checkpoint | None = None) -> DecoderWeights:
    linears = DenseLinears(dtype, CPU)
    return WeightLoader(read_decoder_config(folder), checkpoint or Checkpoint(folder), linears, dtype=dtype, device=CPU).load(folder)


def weight(product: Linear) -> torch.Tensor:
    assert isinstance(product, DenseLinear)
    return product.weight


def gated(mlp: MLP) -> GatedMLP:
    assert isinstance(mlp, GatedMLP)
    return mlp


def refusal(folder: Path) -> str:
    with pytest.raises(ModelError) as caught:
        load_model(folder, device=CPU, dtype=torch.float32)
    message = str(caught.value)
    assert "\n" not in message
    return message


def assert_same_weights(weights: DecoderWeights, stored: dict[str, torch.Tensor]) -> None:
    assert torch.equal(weights.embedding, stored["model.embed_tokens.weight"])
    assert torch.equal(weight(weights.head), stored["lm_head.weight"])
    for index, layer in enumerate(weights.layers):
        prefix = f"model.layers.{index}"
        attention = [stored[f"{prefix}.self_attn.{part}_proj.weight"] for part in "qkv"]
        assert torch.equal(weight(layer.mixer.qkv), torch.cat(attention))
        assert torch.equal(
            weight(gated(layer.mlp).gate_up), torch.cat([stored[f"{prefix}.mlp.{part}_proj.weight"] for part in ("gate", "up")])
        )
        assert torch.equal(weight(gated(layer.mlp).down), stored[f"{prefix}.mlp.down_proj.weight"])
        assert torch.equal(layer.before_mlp.weight, stored[f"{prefix}.post_attention_layernorm.weight"])


def test_projections_are_fused_in_order(tmp_path: Path) -> None:
    stored = stored_weights()
    assert_same_weights(load(write(tmp_path, stored)), stored)


def test_shards_are_found_by_their_index(tmp_path: Path) -> None:
    stored = stored_weights()
    assert_same_weights(load(write_shards(tmp_path, stored)), stored)


def test_large_tensors_are_read_in_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.models.checkpoints.checkpoint.CHUNK_BYTES", 70)
    stored = stored_weights()
    done: list[tuple[int, int]] = []
    folder = write(tmp_path, stored)
    checkpoint = Checkpoint(folder, lambda *call: done.append(call))
    weights = load(folder, checkpoint=checkpoint)
    assert_same_weights(weights, stored)
    assert len(done) > 2 * len(stored)
    total = sum(weight.numel() * 4 for weight in stored.values())
    assert done[-1] == (total, total)


def test_weights_are_converted_while_loading(tmp_path: Path) -> None:
    stored = stored_weights()
    weights = load(write(tmp_path, stored), torch.bfloat16)
    assert torch.equal(weight(gated(weights.layers[1].mlp).down), stored["model.layers.1.mlp.down_proj.weight"].bfloat16())
    assert weights.final_norm.weight.dtype == torch.bfloat16


def test_gemma_norm_weights_are_rounded_before_one_is_added_in_float32(tmp_path: Path) -> None:
    stored = stored_weights(("input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm"))
    for layer in range(2):
        stored |= {f"model.layers.{layer}.self_attn.{part}_norm.weight": torch.rand(4) for part in "qk"}
    weights = load(write(tmp_path, stored, architectures=["Gemma3ForCausalLM"], head_dim=4), torch.bfloat16)
    assert torch.equal(weights.final_norm.weight, stored["model.norm.weight"].bfloat16().float() + 1)


def test_rotary_buffers_are_ignored(tmp_path: Path) -> None:
    stored = stored_weights()
    assert_same_weights(load(write(tmp_path, {**stored, "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(2)})), stored)


def test_a_missing_weight_is_named(tmp_path: Path) -> None:
    stored = stored_weights()
    del stored[Q]
    assert refusal(write(tmp_path, stored)) == f"{tmp_path}: weight {Q} is missing"


def test_a_weight_of_another_shape_is_named_with_both_shapes(tmp_path: Path) -> None:
    stored = {**stored_weights(), Q: torch.zeros(6, 8)}
    assert refusal(write(tmp_path, stored)).endswith(f"weight {Q} has shape [6, 8], expected [8, 8]")


def test_a_weight_that_would_be_left_out_is_an_error(tmp_path: Path) -> None:
    bias = "model.layers.0.self_attn.q_proj.bias"
    message = refusal(write(tmp_path, {**stored_weights(), bias: torch.zeros(8)}))
    assert message.endswith(f"weight {bias} (1 such) is not part of LlamaForCausalLM")


def test_layers_beyond_the_configured_number_are_an_error(tmp_path: Path) -> None:
    assert "model.layers.1." in refusal(write(tmp_path, stored_weights(), num_hidden_layers=1))


def test_integer_weights_are_refused_as_quantised(tmp_path: Path) -> None:
    stored = {**stored_weights(), Q: torch.zeros(8, 8, dtype=torch.int8)}
    assert refusal(write(tmp_path, stored)).endswith(f"weight {Q} is stored as I8; quantised checkpoints are not supported")


def test_a_folder_without_weights_says_what_was_looked_for(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    assert "neither model.safetensors nor model.safetensors.index.json" in refusal(tmp_path)


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    write_shards(tmp_path, stored_weights())
    (tmp_path / "model-1.safetensors").unlink()
    assert refusal(tmp_path) == f"{tmp_path / 'model-1.safetensors'} is missing, though model.safetensors.index.json lists it"


@pytest.mark.parametrize("content", ["{}", '{"weight_map": []}', "[]", "not json"])
def test_a_damaged_index_is_refused(tmp_path: Path, content: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    (tmp_path / "model.safetensors.index.json").write_text(content)
    assert "model.safetensors.index.json" in refusal(tmp_path)


@pytest.mark.parametrize("keep", [0, 5, 200, -20])
def test_a_cut_off_file_is_refused(tmp_path: Path, keep: int) -> None:
    file = write(tmp_path, stored_weights()) / "model.safetensors"
    file.write_bytes(file.read_bytes()[:keep])
    assert refusal(tmp_path).startswith(f"{file} can't be read: ")
