"""transformers in float64, and its float32 as the yardstick for ours.

A row of ours may be as far from the exact one as transformers' float32 is, twice over: some rows are worse conditioned than others, and
only a second computation in the same precision tells which.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from unittest.mock import patch

import torch
from transformers import PreTrainedModel

from engine.layers import LayerId

FACTOR = 2.0
"""Of the median, the 99.9th percentile and the largest relative error of a row, ours to transformers' float32."""
RECURRENT_FACTOR = 10.0
"""Of the 99.9th percentile and the largest error where layers are recurrent: a state carries the rounding of one row to all behind it, so
the largest errors of a prompt are few events. Over 18 random models with delta nets, with torch's products and with packed ones, ours were
0.15 to 2.97 times transformers', evenly on both sides of 1; the medians 0.93 to 1.13 times. For one prompt of 20 tokens it was 6.6."""
RECURRENT_FLOOR = 5e-5
"""In the place of `ROW_FLOOR` there: the rows behind such an event are off by 1.6e-5 where transformers' are by 1.6e-6."""
ROW_FACTOR, ROW_FLOOR = 10.0, 1e-5
"""No row is further off than so many times its own error in transformers' float32, or than this, whichever is larger."""


def in_float64(model: PreTrainedModel) -> PreTrainedModel:
    """A copy that computes everything in float64, where it is called within `float64_only`."""
    exact: PreTrainedModel = copy.deepcopy(model).double().eval()
    return exact


@contextmanager
def float64_only() -> Iterator[None]:
    """transformers computes norms, angles and softmax in float32 whatever the model's dtype is; here they are float64 too."""
    to, cast, softmax = torch.Tensor.to, torch.Tensor.type, torch.nn.functional.softmax

    def to_wide(tensor: torch.Tensor, *args: object, **kwargs: object) -> torch.Tensor:
        wide = [torch.float64 if value is torch.float32 else value for value in args]
        return to(tensor, *wide, **{name: torch.float64 if value is torch.float32 else value for name, value in kwargs.items()})

    def type_wide(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        return cast(tensor, torch.float64 if dtype is torch.float32 else dtype)

    def wide_softmax(tensor: torch.Tensor, dim: int | None = None, _stacklevel: int = 3, dtype: torch.dtype | None = None) -> torch.Tensor:
        return softmax(tensor, dim=dim, dtype=torch.float64 if dtype is torch.float32 else dtype)

    with (
        patch.object(torch.Tensor, "to", to_wide),
        patch.object(torch.Tensor, "type", type_wide),
        patch.object(torch.Tensor, "float", lambda tensor: to(tensor, torch.float64)),
        patch.object(torch.nn.functional, "softmax", wide_softmax),
    ):
        yield


Rows = dict[LayerId, torch.Tensor]


@torch.inference_mode()
def layer_rows(model: PreTrainedModel, token_ids: Sequence[int]) -> tuple[Rows, torch.Tensor]:
    """transformers' states of one prompt by our layer ids, `[tokens, width]` each (the last layer's are before the final norm), and its
    logits, `[tokens, vocab]`.
    """
    caught: list[torch.Tensor] = []
    text = getattr(model.model, "language_model", model.model)
    last = next(getattr(text, name) for name in ("norm", "embedding_norm", "norm_f") if hasattr(text, name))
    handle = last.register_forward_pre_hook(lambda _, inputs: caught.append(inputs[0][0]))
    output = model(input_ids=torch.tensor([token_ids]), output_hidden_states=True, use_cache=False)
    handle.remove()
    rows: Rows = {layer: state[0] for layer, state in enumerate(output.hidden_states[:-1])}
    rows[len(rows)] = caught[0]
    rows["norm"] = output.hidden_states[-1][0]
    return rows, output.logits[0]


@dataclass(frozen=True)
class KnownRows:
    """What transformers computes for a prompt: exactly, and how far its float32 is off."""

    rows: Rows  # float64
    errors: Rows  # [tokens] each: relative errors of transformers' float32
    logits: torch.Tensor  # [tokens, vocab] float64
    logit_errors: torch.Tensor  # [tokens]


def known_rows(reference: PreTrainedModel, token_ids: Sequence[int], exact: PreTrainedModel) -> KnownRows:
    """`exact` is `in_float64(reference)`."""
    narrow, narrow_logits = layer_rows(reference, token_ids)
    with float64_only():
        wide, logits = layer_rows(exact, token_ids)
    return KnownRows(wide, {layer: row_errors(narrow[layer], wide[layer]) for layer in wide}, logits, row_errors(narrow_logits, logits))


def row_errors(actual: torch.Tensor, exact: torch.Tensor) -> torch.Tensor:
    """Relative L2 error of each row: `[rows]` float64."""
    assert exact.dtype == torch.float64
    return (actual.double() - exact).norm(dim=-1) / exact.norm(dim=-1)


@dataclass
class Errors:
    """Of rows of ours and, beside each, of transformers' float32."""

    ours: list[torch.Tensor] = field(default_factory=list)
    theirs: list[torch.Tensor] = field(default_factory=list)
    layer: float = 0.0
    """The largest error over the largest value of a layer."""

    def add(self, actual: torch.Tensor, exact: torch.Tensor, yardstick: torch.Tensor) -> None:
        """Rows of one layer `[rows, width]`, and transformers' float32 errors of the same rows, `[rows]`."""
        assert actual.dtype == torch.float32
        assert actual.shape == exact.shape
        assert actual.isfinite().all()
        self.ours.append(row_errors(actual, exact))
        self.theirs.append(yardstick)
        self.layer = max(self.layer, ((actual.double() - exact).abs().max() / exact.abs().max()).item())

    @property
    def row(self) -> float:
        """The largest relative L2 error of a row."""
        return torch.cat(self.ours).max().item()

    def ratios(self) -> tuple[float, float, float]:
        """Ours to transformers' float32: median, 99.9th percentile, largest. Rows that both have exactly are left out."""
        ours, theirs = torch.cat(self.ours), torch.cat(self.theirs)
        counted = (ours > 0) | (theirs > 0)
        ours, theirs = ours[counted], theirs[counted]
        assert len(ours), "nothing was computed"
        points = torch.tensor([0.5, 0.999, 1.0], dtype=torch.float64)
        median, most, largest = (ours.quantile(points) / theirs.quantile(points)).tolist()
        return median, most, largest

    def check(self, *, recurrent: bool = False) -> None:
        """Fails where rows are further off than the yardstick allows."""
        median, *largest = self.ratios()
        assert median <= FACTOR, self.ratios()
        assert max(largest) <= (RECURRENT_FACTOR if recurrent else FACTOR), self.ratios()
        self.check_rows(RECURRENT_FLOOR if recurrent else ROW_FLOOR)

    def check_rows(self, floor: float = ROW_FLOOR) -> None:
        """Each row by itself: for so few of them that their median and maximum say nothing."""
        ours, theirs = torch.cat(self.ours), torch.cat(self.theirs)
        allowed = (ROW_FACTOR * theirs).clamp(min=floor)
        worst = int((ours / allowed).argmax())
        assert bool((ours <= allowed).all()), f"row {worst}: {ours[worst].item():.2e}, transformers' float32 {theirs[worst].item():.2e}"
