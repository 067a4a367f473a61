"""Products of many experts, and what a checkpoint holds beside its decoder."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.errors import ModelError
from engine.models.blocks.experts import GroupedProduct, SeparateProducts
from engine.models.blocks.linear import DenseLinear
from engine.models.loader import load_model

if TYPE_CHECKING:
    from tests.parity.conftest import TinyModel

CPU = torch.device("cpu")


@pytest.mark.parametrize("counts", [[0, 3, 0, 5], [8, 0, 0, 0], [0, 0, 0, 1], [2, 2, 2, 2]])
def test_the_kernel_for_all_experts_computes_what_their_own_products_do(counts: list[int]) -> None:
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(len(counts), 24, 16, generator=generator)
    states = torch.randn(sum(counts), 16, generator=generator)
    ends = torch.tensor(counts).cumsum(0).int()
    bias = torch.randn(len(counts), 24, generator=generator)
    expected = torch.cat([rows @ own.T + of for rows, own, of in zip(states.split(counts), weight, bias, strict=True)])
    separate = SeparateProducts([DenseLinear(*own) for own in zip(weight, bias, strict=True)], 24)
    for product in (GroupedProduct(weight, bias), separate):
        torch.testing.assert_close(product(states, ends), expected)
        assert not product.recordable, "on a CPU there are no graphs"


def test_layers_that_predict_more_tokens_are_not_loaded(tiny_model: Callable[..., TinyModel], tmp_path: Path) -> None:
    tiny = tiny_model("glm4_moe", num_nextn_predict_layers=1)
    stored = load_file(tiny.folder / "model.safetensors")
    (tmp_path / "config.json").write_text((tiny.folder / "config.json").read_text())
    for layer in (3, 4):
        save_file({**stored, f"model.layers.{layer}.eh_proj.weight": torch.zeros(8, 8)}, tmp_path / "model.safetensors")
        if layer == 3:
            load_model(tmp_path, device=CPU, dtype=torch.float32)
            continue
        with pytest.raises(ModelError, match=r"model.layers.4.eh_proj.weight \(1 such\) is not part of Glm4MoeForCausalLM"):
            load_model(tmp_path, device=CPU, dtype=torch.float32)


def test_an_expert_that_is_missing_is_named(tiny_model: Callable[..., TinyModel], tmp_path: Path) -> None:
    tiny = tiny_model("mixtral")
    stored = load_file(tiny.folder / "model.safetensors")
    (tmp_path / "config.json").write_text((tiny.folder / "config.json").read_text())
    name = next(name for name in stored if "layers.1" in name and "experts.2" in name)
    del stored[name]
    save_file(stored, tmp_path / "model.safetensors")
    with pytest.raises(ModelError, match=f"weight {name} is missing"):
        load_model(tmp_path, device=CPU, dtype=torch.float32)
