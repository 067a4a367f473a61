"""Matrix products with packed weights: values, and when they are chosen."""

import pytest
import torch
from torch.nn.functional import linear

import engine.models.blocks.linear as products
from engine.errors import ConfigError
from engine.models.blocks.linear import DenseLinear, DenseLinears, PackedLinear, PackedLinears, choose_linears
from tests.products import packed_linears

CPU = torch.device("cpu")
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 8e-3}
"""Relative L2 error of a row: a few units in the last place."""


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("rows", [1, 2, 3, 16, 17, 63, 65, 300])
@pytest.mark.parametrize(("outputs", "inputs"), [(96, 64), (1, 5), (33, 127)])
@pytest.mark.parametrize("with_bias", [False, True])
def test_packed_products_equal_those_in_double_precision(dtype: torch.dtype, rows: int, outputs: int, inputs: int, with_bias: bool) -> None:
    linears = packed_linears(dtype)
    weight = linears.empty(outputs, inputs).normal_()
    bias = torch.randn(outputs).to(dtype) if with_bias else None
    states = torch.randn(rows, inputs).to(dtype)
    found = linears.of(weight, bias)(states)
    expected = linear(states.double(), weight.double(), None if bias is None else bias.double())
    assert (found.dtype, found.shape) == (dtype, (rows, outputs))
    error = (found.double() - expected).norm(dim=1) / expected.norm(dim=1)
    assert error.max().item() <= TOLERANCE[dtype] * (1 + 8 * (outputs == 1))  # one output alone may cancel out


def test_few_products_are_compiled_while_text_is_generated(monkeypatch: pytest.MonkeyPatch) -> None:
    product, compiled = packed_linears(torch.float32).of(torch.ones(2, 3)), set()
    monkeypatch.setattr(products, "pad", lambda states, by: compiled.add(len(states) + by[3]) or torch.nn.functional.pad(states, by))
    for rows in range(1, 200):
        assert product(torch.ones(rows, 3)).shape == (rows, 2)
    assert compiled == {4, *range(8, 65, 8)}  # 1, 2 and more than 64 rows are taken as they are


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_a_product_over_no_rows_is_empty(dtype: torch.dtype) -> None:
    product = packed_linears(dtype).of(torch.ones(7, 3, dtype=dtype))
    assert product(torch.empty(0, 3, dtype=dtype)).shape == (0, 7)


def test_rows_that_lie_apart_and_weights_of_any_layout_are_taken() -> None:
    linears = packed_linears(torch.float32)
    turned = DenseLinears(torch.float32, CPU).empty(24, 40).normal_()
    assert not turned.is_contiguous()
    states = torch.randn(9, 80)[:, :40]
    assert torch.allclose(linears.of(turned)(states), linear(states, turned), atol=1e-5)


def test_not_a_number_goes_through() -> None:
    states = torch.zeros(3, 8)
    states[1, 2] = torch.nan
    found = packed_linears(torch.float32).of(torch.ones(4, 8))(states)
    assert found.isnan().all(dim=1).tolist() == [False, True, False]


@pytest.mark.parametrize(("gain", "packs"), [(0.5, False), (1.09, False), (1.1, True), (3.0, True)])
def test_auto_packs_where_it_is_clearly_faster(monkeypatch: pytest.MonkeyPatch, gain: float, packs: bool) -> None:
    packed_linears(torch.float32)
    monkeypatch.setattr(products, "packed_gain", lambda dtype, num_threads: gain)
    linears, reason = choose_linears("auto", torch.float32, CPU)
    assert isinstance(linears, PackedLinears) is packs
    assert reason == f"{'on' if packs else 'off'}: {gain:.2f} times as fast on this processor"


def test_the_gain_is_measured_once() -> None:
    packed_linears(torch.float32)
    threads = torch.get_num_threads()
    gain = products.packed_gain(torch.float32, threads)
    assert gain > 0
    assert products.packed_gain(torch.float32, threads) == gain


def test_packing_can_be_switched_on_and_off() -> None:
    packed_linears(torch.float32)
    assert isinstance(choose_linears("on", torch.float32, CPU)[0], PackedLinears)
    linears, reason = choose_linears("off", torch.float32, CPU)
    assert isinstance(linears.of(torch.ones(2, 2)), DenseLinear)
    assert reason == "off"


def test_what_cannot_be_packed_is_refused_where_it_was_asked_for() -> None:
    with pytest.raises(ConfigError, match="no packed weights in float16"):
        choose_linears("on", torch.float16, CPU)
    with pytest.raises(ConfigError, match="for a CPU"):
        choose_linears("on", torch.float32, torch.device("cuda"))
    assert choose_linears("auto", torch.float16, CPU)[1] == "there are no packed weights in float16"
    assert choose_linears("auto", torch.float32, torch.device("cuda"))[1] == "not needed on cuda"


def test_a_torch_without_the_operators_goes_on_with_its_own_products(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(self: PackedLinear, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        raise AttributeError("no attribute '_reorder_linear_weight'")

    monkeypatch.setattr(PackedLinear, "__init__", missing)
    linears, reason = choose_linears("auto", torch.float32, CPU)
    assert isinstance(linears, DenseLinears)
    assert "can't pack weights here" in reason


def test_wrong_products_are_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    packed_linears(torch.float32)
    product = PackedLinear.__call__
    monkeypatch.setattr(PackedLinear, "__call__", lambda self, states: product(self, states) + 0.01)
    with pytest.raises(ConfigError, match="are wrong here"):
        choose_linears("on", torch.float32, CPU)


@pytest.mark.parametrize("inputs", [4096, 1536, 576, 500, 40])
@pytest.mark.parametrize("with_bias", [False, True])
def test_few_rows_are_as_exact_as_many(inputs: int, with_bias: bool) -> None:
    """A library that adds up one input after the other for them is several times further off where there are many inputs."""
    weight = DenseLinears(torch.float32, CPU).empty(96, inputs).normal_()
    bias = torch.randn(96) if with_bias else None
    product, states = DenseLinear(weight, bias), torch.randn(64, 2 * inputs)[:, :inputs]
    exact = linear(states.double(), weight.double(), None if bias is None else bias.double())

    def error(found: torch.Tensor) -> float:
        return ((found.double() - exact).norm(dim=1) / exact.norm(dim=1)).median().item()

    many = error(product(states))
    for rows in (1, 2, 3, 5, 7, 10, 16):
        few = torch.cat([product(part) for part in states.split(rows)])
        assert few.shape == exact.shape
        assert error(few) <= max(1.5 * many, 4e-7)
    assert product(states[:0]).shape == (0, 96)
