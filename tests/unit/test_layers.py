"""Layer ids, as the contract's table has them."""

from __future__ import annotations

import pytest

from engine.errors import InvalidRequest
from engine.layers import LayerId, default_layers, depth_of, resolve_layers


@pytest.mark.parametrize(
    ("ids", "resolved"),
    [
        ([0], (0,)),
        ([4, 0, 2], (0, 2, 4)),
        ([-1], (4,)),
        ([-4], (1,)),
        (["norm", 4, -1, 4, 1, "norm"], (1, 4, "norm")),
        (["norm"], ("norm",)),
        ([-2, 3], (3,)),
    ],
)
def test_ids_are_sorted_and_unique_with_negatives_from_the_end_and_norm_last(ids: list[object], resolved: tuple[LayerId, ...]) -> None:
    assert resolve_layers(ids, 4) == resolved


@pytest.mark.parametrize("ids", [[], [5], [-5], [1.0], ["2"], [True], [None], [[1]], ["Norm"]])
def test_anything_else_is_refused_with_the_valid_range(ids: list[object]) -> None:
    with pytest.raises(InvalidRequest, match="0 to 4, -4 to -1, or 'norm'") as refused:
        resolve_layers(ids, 4, "kv_transfer_params.layers")
    assert refused.value.param == "kv_transfer_params.layers"


@pytest.mark.parametrize(
    ("num_layers", "layers"), [(30, (2, 15, 27, 30)), (18, (2, 9, 15, 18)), (6, (2, 3, 6)), (4, (1, 2, 4)), (2, (1, 2)), (1, (1,))]
)
def test_default_layers_are_those_that_the_model_has(num_layers: int, layers: tuple[int, ...]) -> None:
    assert default_layers(num_layers) == layers


@pytest.mark.parametrize(("layers", "depth"), [((0,), 0), ((0, 3), 3), ((1, "norm"), 30), ((30,), 30), ((), 0)])
def test_depth_is_the_number_of_decoder_layers_that_must_run(layers: tuple[LayerId, ...], depth: int) -> None:
    assert depth_of(layers, 30) == depth
