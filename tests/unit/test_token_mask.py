"""Tokens that may not be chosen: outside `allowed_token_ids`, at the end of a bad word, and ends before `min_tokens`."""

from __future__ import annotations

import math
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.errors import EngineError
from engine.offline import OfflineEngine
from engine.request import EngineRequest, SamplingParams
from engine.sampling.penalties import Penalties
from engine.sampling.sampler import SampledRow, SampledToken, Sampler
from tests.unit.decode_bench import DecodeBench
from tests.unit.small_engine import save_tiny_llama, small_config

VOCAB = 12
EOS = frozenset({11})
CPU = torch.device("cpu")
TOKENS = st.integers(0, VOCAB - 1)
WORDS = st.lists(st.lists(TOKENS, min_size=1, max_size=4).map(tuple), max_size=5)


def forbidden(params: SamplingParams, output: list[int]) -> set[int]:
    """What may not come next, read off the whole output each time."""
    found = set(range(VOCAB)) - set(params.allowed_token_ids) if params.allowed_token_ids else set()
    if len(output) < params.min_tokens:
        found |= params.stop_token_ids | EOS
    for *before, last in params.bad_words:
        if not before or output[-len(before) :] == before:
            found.add(last)
    return found


@settings(deadline=None)
@given(
    output=st.lists(TOKENS, max_size=20),
    min_tokens=st.integers(0, 6),
    stops=st.frozensets(TOKENS, max_size=3),
    allowed=st.lists(TOKENS, max_size=8),
    words=WORDS,
)
def test_what_may_not_come_next_is_minus_infinity_and_the_rest_is_as_it_was(
    output: list[int], min_tokens: int, stops: frozenset[int], allowed: list[int], words: list[tuple[int, ...]]
) -> None:
    params = SamplingParams(min_tokens=min_tokens, stop_token_ids=stops, allowed_token_ids=allowed, bad_words=words)
    penalties = Penalties.of(params, [1], EOS)
    assert (penalties is None) == (not (min_tokens or allowed or words))
    logits = torch.randn(VOCAB)
    for num_output in range(len(output) + 1):
        changed = logits.clone()
        if penalties is not None:
            penalties.apply(changed)
            if num_output < len(output):
                penalties.count(output[num_output])
        expected = logits.clone()
        expected[sorted(forbidden(params, output[:num_output]))] = -math.inf
        assert torch.equal(changed, expected)


def sampled(params: SamplingParams, logits: torch.Tensor) -> SampledToken | EngineError:
    [found] = Sampler(VOCAB, CPU).sample(logits[None].clone(), [SampledRow(params, Penalties.of(params, [1], EOS), None)])
    return found


def test_no_bias_brings_a_forbidden_token_back() -> None:
    params = SamplingParams(temperature=0.0, allowed_token_ids=[3, 4], bad_words=[(4,)], logit_bias={4: 100.0, 5: 100.0})
    found = sampled(params, torch.zeros(VOCAB))
    assert isinstance(found, SampledToken)
    assert found.token_id == 3


@pytest.mark.parametrize("params", [SamplingParams(top_k=5), SamplingParams(top_p=0.99999), SamplingParams(min_p=0.0), SamplingParams()])
def test_no_way_of_drawing_takes_a_forbidden_token(params: SamplingParams) -> None:
    allowed = SamplingParams(top_k=params.top_k, top_p=params.top_p, allowed_token_ids=[2, 9])
    for _ in range(50):
        found = sampled(allowed, torch.randn(VOCAB))
        assert isinstance(found, SampledToken)
        assert found.token_id in (2, 9)


@pytest.mark.parametrize("unsound", [math.nan, math.inf])
def test_logits_that_are_not_sound_are_seen_behind_a_mask(unsound: float) -> None:
    logits = torch.zeros(VOCAB)
    logits[7] = unsound
    for params in (SamplingParams(temperature=0.0, allowed_token_ids=[1, 2]), SamplingParams(temperature=0.0, bad_words=[(7,)])):
        assert isinstance(sampled(params, logits), EngineError)


def test_log_probabilities_are_those_of_the_model() -> None:
    found = sampled(SamplingParams(temperature=0.0, allowed_token_ids=[1], logprobs=1), torch.tensor([5.0] + [0.0] * (VOCAB - 1)))
    assert isinstance(found, SampledToken)
    assert found.logprobs is not None
    assert found.token_id == 1
    assert found.logprobs.top[0][0] == 0


def test_a_text_goes_on_past_its_end_until_it_is_long_enough(tmp_path: Path) -> None:
    save_tiny_llama(tmp_path)
    with OfflineEngine(small_config(tmp_path)) as engine:

        def text(**params: object) -> list[int]:
            sampling = SamplingParams(temperature=0.0, **params)  # type: ignore[arg-type]  # fields of the dataclass
            [completion] = engine.generate([EngineRequest("r", [5, 9, 30], sampling)])
            return list(completion.token_ids)

        plain = text(max_tokens=12, ignore_eos=True)
        stop = frozenset({plain[0], plain[3]})
        assert len(text(max_tokens=12, stop_token_ids=stop)) == 1
        longer = text(max_tokens=12, min_tokens=5, stop_token_ids=stop)
        assert len(longer) > 5
        assert not stop & set(longer[:5])
        assert plain[1] not in text(max_tokens=12, ignore_eos=True, bad_words=[(plain[1],)])
        pair = (plain[0], plain[1])
        spared = text(max_tokens=12, ignore_eos=True, bad_words=[pair])
        assert spared[0] == plain[0]
        assert pair not in set(pairwise(spared))


def test_a_masked_text_is_the_same_where_steps_overlap() -> None:
    texts = []
    for overlap in (False, True):
        bench = DecodeBench(overlap=overlap)
        bench.add("masked", [1, 2, 3], SamplingParams(max_tokens=8, temperature=0.9, seed=5, bad_words=[(2, 3), (4,)], min_tokens=3))
        bench.add("plain", [4, 5], SamplingParams(max_tokens=8, temperature=0.9, seed=6))
        bench.run()
        texts.append([bench.tokens(name) for name in ("masked", "plain")])
    assert texts[0] == texts[1]
    assert 4 not in texts[0][0]
