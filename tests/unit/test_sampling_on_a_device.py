"""A step's choice and its log-probabilities, given to a device that the host doesn't wait for."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from engine.request import SamplingParams, TokenLogprobs
from engine.sampling import logprobs, penalties, sampler, token_mask
from engine.sampling.logprobs import score
from engine.sampling.penalties import Penalties
from engine.sampling.sampler import SampledRow, Sampler
from tests.unit.decode_bench import DecodeBench
from tests.unit.deferred_stream import DeferredStream

META, VOCAB = torch.device("meta"), 50


class OneDevice(TorchDispatchMode):
    """Tensors of the device "meta" have no values, so nobody can look at one. Nor may operators take what is on the host, or what came to
    the device unasked, as an index that is a list does: for either the host would wait."""

    def __init__(self, *given: torch.Tensor) -> None:
        super().__init__()
        self._known = list(given)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # noqa: ANN401 - torch's
        given, result = _tensors((args, kwargs)), func(*args, **(kwargs or {}))
        made = [tensor for tensor in _tensors(result) if tensor.device == META]
        if made or any(tensor.device == META for tensor in given):
            unknown = [tensor for tensor in given if not any(tensor is known for known in self._known)]
            assert not unknown, f"{func} is given what nobody has sent"
        self._known += made
        return result


def _tensors(tree: object) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


@pytest.fixture
def meta(monkeypatch: pytest.MonkeyPatch) -> torch.device:
    """A device to which arrays go only by the ways that wait for nothing."""

    def sent(host: torch.Tensor, device: torch.device) -> torch.Tensor:
        return torch.empty(host.shape, dtype=host.dtype, device=META)

    for module in (sampler, penalties, logprobs, token_mask):
        monkeypatch.setattr(module, "to_device", sent, raising=False)
    monkeypatch.setattr(sampler, "arrays_to_device", lambda arrays, device: [sent(torch.from_numpy(each), device) for each in arrays])
    return META


def rows(*params: SamplingParams) -> list[SampledRow]:
    made = []
    for each in params:
        of_row = Penalties.of(each, [1])
        if of_row is not None:
            of_row.count(7)
        made.append(SampledRow(each, of_row, None if each.seed is None else torch.Generator().manual_seed(each.seed)))
    return made


CHOICES = [
    [SamplingParams(temperature=0.0), SamplingParams(temperature=0.0)],
    [SamplingParams(temperature=0.7, seed=3), SamplingParams(temperature=0.0, logprobs=2), SamplingParams(top_k=5, logprobs=0)],
    [
        SamplingParams(temperature=0.0, repetition_penalty=1.3, frequency_penalty=0.5, logit_bias={3: 1.0}, logprobs=4),
        SamplingParams(top_p=0.5),
    ],
    [
        SamplingParams(temperature=0.0, allowed_token_ids=[3, 4, 7], bad_words=[(7, 4), (3,)], logprobs=1),
        SamplingParams(top_k=3, min_tokens=9, stop_token_ids=frozenset({5})),
    ],
]


@pytest.mark.parametrize("params", CHOICES)
def test_a_choice_waits_for_nothing_whatever_is_reported_of_it(params: list[SamplingParams], meta: torch.device) -> None:
    logits = torch.empty(len(params), VOCAB, device=meta)
    chooser = Sampler(VOCAB, meta)
    wanted = rows(*params)
    with OneDevice(logits):
        choice = chooser.launch(logits, wanted)
    assert choice.ids.device == meta
    assert list(choice.reported) == [i for i, each in enumerate(params) if each.logprobs is not None]
    assert (choice.scores is None) == (not choice.reported)


def test_prompts_are_scored_without_waiting() -> None:
    logits, tokens = torch.empty(5, VOCAB, device=META), torch.empty(5, dtype=torch.int64, device=META)
    with OneDevice(logits, tokens):
        scores = score(logits, tokens, 3)
    assert (scores.logprobs.shape, scores.numbers.shape) == ((5, 4), (5, 4))


def test_no_row_of_logits_is_kept_for_what_is_reported() -> None:
    choice = Sampler(VOCAB, torch.device("cpu")).launch(torch.randn(2, VOCAB), rows(*[SamplingParams(logprobs=3)] * 2))
    assert choice.scores is not None
    assert choice.scores.logprobs.shape == choice.scores.numbers.shape == (2, 1 + 3)


def test_rows_that_are_reported_side_by_side_get_as_many_tokens_as_each_asked_for() -> None:
    logits, counts = torch.randn(4, VOCAB), (3, None, 0, 1)
    wanted = rows(*[SamplingParams(temperature=0.0, logprobs=count) for count in counts])
    together = Sampler(VOCAB, torch.device("cpu")).sample(logits.clone(), wanted)
    for number, count in enumerate(counts):
        [alone] = Sampler(VOCAB, torch.device("cpu")).sample(logits[number : number + 1].clone(), [wanted[number]])
        assert together[number] == alone
        assert count is None or len(together[number].logprobs.top) == count  # type: ignore[union-attr]  # a token with log-probabilities


def texts(*, overlap: bool) -> tuple[DecodeBench, DeferredStream]:
    stream = DeferredStream()
    bench = DecodeBench(overlap=overlap, stream=stream if overlap else None)
    bench.add("reported", [1, 2, 3], SamplingParams(max_tokens=6, temperature=0.9, seed=5, logprobs=3))
    bench.add("plain", [4, 5], SamplingParams(max_tokens=6, temperature=0.9, seed=6))
    bench.add("prompt", [7, 8, 9, 10, 11], SamplingParams(max_tokens=6, temperature=0.0, prompt_logprobs=2))
    return bench, stream


def test_what_is_reported_comes_by_copies_of_its_step_while_the_next_one_runs() -> None:
    ahead, stream = texts(overlap=True)
    ahead.step()
    assert not stream.num_waits
    assert len(stream.pending) == 1 + 2 + 2, "tokens, and log-probabilities and numbers of text and prompt"
    ahead.run()
    assert ahead.num_ahead >= 5
    plain, _ = texts(overlap=False)
    plain.run()
    for name in ("reported", "plain", "prompt"):
        assert ahead.tokens(name) == plain.tokens(name)
        assert reported(ahead, name) == reported(plain, name)
    assert len(reported(plain, "reported")) == 6
    assert len(reported(plain, "prompt")) == 4


def reported(bench: DecodeBench, name: str) -> list[tuple[int, int, list[int]]]:
    """Token, rank and likeliest tokens of everything that was reported."""
    entries: list[TokenLogprobs] = []
    for output in bench.listener.outputs[name]:
        entries += [entry for entry in [*(output.prompt_logprobs or ()), *(output.logprobs or ())] if entry is not None]
    return [(entry.token_id, entry.rank, [token for token, _ in entry.top]) for entry in entries]


def test_a_greedy_request_draws_no_numbers_and_a_seeded_one_draws_them_on_the_host() -> None:
    bench = DecodeBench()
    bench.add("greedy", [1, 2], SamplingParams(max_tokens=2, temperature=0.0, seed=5))
    bench.add("drawn", [1, 2], SamplingParams(max_tokens=2, temperature=0.8, seed=5))
    greedy, drawn = (bench.core._sequences[name].generator for name in ("greedy", "drawn"))
    assert greedy is None
    assert drawn is not None
    assert drawn.device.type == "cpu"
