"""Sampling where the host must not wait for the device: the operations that look at a tensor's values are none."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from engine.request import SamplingParams
from engine.sampling.logprobs import largest, largest_without_waiting
from engine.sampling.penalties import Penalties
from engine.sampling.sampler import SampledRow, Sampler
from engine.sampling.top_k_top_p import SamplingBatch, sample_tokens

CPU, VOCAB = torch.device("cpu"), 50
WAITING = ("_local_scalar_dense", "nonzero", "equal", "is_nonzero", "masked_select")


class Watch(TorchDispatchMode):
    """Notes operations that need a tensor's values on the host."""

    def __init__(self) -> None:
        super().__init__()
        self.waited: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # noqa: ANN401 - torch's
        name = func._schema.name.partition("::")[2]
        if name in WAITING:
            self.waited.append(name)
        if name.startswith("index") and any(
            getattr(index, "dtype", None) == torch.bool for part in args if isinstance(part, list) for index in part
        ):
            self.waited.append("nonzero")
        return func(*args, **(kwargs or {}))


def rows(*params: SamplingParams) -> list[SampledRow]:
    return [SampledRow(each, Penalties.of(each, [1]), None) for each in params]


@pytest.mark.parametrize("top_k", [0, 5])
@pytest.mark.parametrize("nucleus", [False, True])
def test_a_draw_on_a_device_looks_at_no_value(top_k: int, nucleus: bool) -> None:
    """Tensors of the device "meta" have none, and asking for one raises."""
    batch = SamplingBatch(*(torch.empty(3, width, dtype=dtype, device="meta") for width, dtype in SHAPES))
    assert sample_tokens(batch, top_k, nucleus=nucleus).shape == (3,)


SHAPES = ((VOCAB, torch.float32), (1, torch.float32), (1, torch.float32), (1, torch.float64))


def test_greedy_and_plain_random_choices_look_at_no_value() -> None:
    sampler, watch = Sampler(VOCAB, CPU), Watch()
    wanted = rows(SamplingParams(temperature=0.0), SamplingParams(temperature=0.7), SamplingParams(temperature=1.3, min_p=0.1))
    with watch:
        choice = sampler.launch(torch.randn(3, VOCAB), wanted)
    assert watch.waited == []
    assert choice.ids.shape == (3,)


def test_penalties_look_at_no_value() -> None:
    wanted = rows(
        SamplingParams(temperature=0.0, repetition_penalty=1.3, presence_penalty=0.5, logit_bias={3: 1.0}),
        SamplingParams(temperature=0.7, frequency_penalty=0.5),
    )
    for row in wanted:
        assert row.penalties is not None
        row.penalties.count(7)
    watch = Watch()
    with watch:
        Sampler(VOCAB, CPU).launch(torch.randn(2, VOCAB), wanted)
    assert watch.waited == []


def test_a_watch_notices_who_waits() -> None:
    watch = Watch()
    with watch:
        assert (torch.ones(3) > 0).any()
        assert torch.ones(3)[torch.tensor([True, False, True])].numel() == 2
    assert set(watch.waited) == {"_local_scalar_dense", "nonzero"}


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.lists(st.sampled_from([-torch.inf, -1.0, 0.0, 0.5, 0.5, 2.0]), min_size=8, max_size=8), min_size=1, max_size=4),
    st.integers(1, 7),
)
def test_the_largest_entries_are_the_same_ones_when_nobody_looks_whether_places_are_shared(scores: list[list[float]], count: int) -> None:
    tensor = torch.tensor(scores)
    values, index = largest_without_waiting(tensor, count)
    expected_values, expected_index = largest(tensor, count)
    assert values.tolist() == expected_values.tolist()
    finite = expected_values.isfinite()  # what can't be drawn may stand in any order
    assert index[finite].tolist() == expected_index[finite].tolist()
    assert all(len(set(row)) == count for row in index.tolist())


def test_two_halves_give_what_the_whole_gives() -> None:
    logits = torch.randn(4, VOCAB)
    logits[2, 7] = torch.nan
    wanted = rows(*[SamplingParams(temperature=0.0, logprobs=count) for count in (None, 2, 1, 0)])
    sampler = Sampler(VOCAB, CPU)
    choice = sampler.launch(logits.clone(), wanted)
    halves = sampler.finish(choice, wanted)
    whole = sampler.sample(logits.clone(), wanted)
    assert choice.ids[2] == -1
    assert [str(answer) for answer in halves] == [str(answer) for answer in whole]
