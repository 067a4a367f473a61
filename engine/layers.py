"""Layer ids: one convention for requests, files and `GET /v1/models` (contract section 1)."""

from collections.abc import Sequence
from typing import Literal, cast

from engine.errors import InvalidRequest

LayerId = int | Literal["norm"]

LAYER_CONVENTION = (
    "0 is the embedding output, k is the residual stream after k decoder layers (residual added), "
    "the last number is taken before the final norm, 'norm' is the output of the final norm"
)


def resolve_layers(ids: Sequence[object], num_layers: int, param: str = "layers") -> tuple[LayerId, ...]:
    """Sorted unique ids, negatives counted from the end (-1 is `num_layers`), "norm" last.

    Raises `InvalidRequest` naming the valid range for an empty list, a non-integer or an id out of range.
    """
    valid = f"0 to {num_layers}, -{num_layers} to -1, or 'norm'"
    if not ids:
        raise InvalidRequest(f"{param} must not be empty; valid layer ids are {valid}", param)
    numbers: set[int] = set()
    for layer in ids:
        if layer == "norm":
            continue
        if isinstance(layer, bool) or not isinstance(layer, int):
            raise InvalidRequest(f"{param} holds {layer!r}; valid layer ids are {valid}", param)
        if not -num_layers <= layer <= num_layers:
            raise InvalidRequest(f"{param} holds {layer}, out of range; valid layer ids are {valid}", param)
        numbers.add(layer if layer >= 0 else num_layers + 1 + layer)
    norm = ("norm",) if "norm" in ids else ()
    return cast(tuple[LayerId, ...], (*sorted(numbers), *norm))


def default_layers(num_layers: int) -> tuple[LayerId, ...]:
    """2, N//2, N-3 and N, those within 1…N: the EAGLE-3 choice plus the last layer."""
    wanted = (2, num_layers // 2, num_layers - 3, num_layers)
    return tuple(sorted({layer for layer in wanted if 1 <= layer <= num_layers}))


def depth_of(layers: Sequence[LayerId], num_layers: int) -> int:
    """How many decoder layers must run to know these states."""
    return max((num_layers if layer == "norm" else layer for layer in layers), default=0)
