"""The sampler against transformers' processors and warpers, exact distributions, and plain Python."""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.generation.logits_process import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from engine.errors import EngineError
from engine.request import SamplingParams, TokenLogprobs
from engine.sampling.logprobs import largest
from engine.sampling.penalties import Penalties
from engine.sampling.sampler import SampledRow, SampledToken, Sampler, token_logprobs
from engine.sampling.top_k_top_p import Candidates, SamplingBatch, all_candidates, nucleus_candidates, sample_tokens, top_k_candidates

CPU = torch.device("cpu")
GREEDY = SamplingParams(temperature=0.0)


@pytest.fixture(autouse=True)
def _same_numbers_every_time() -> None:
    torch.manual_seed(0)


def row(params: SamplingParams, prompt: Sequence[int] = (1,), output: Sequence[int] = ()) -> SampledRow:
    generator = None if params.seed is None else torch.Generator().manual_seed(params.seed)
    penalties = Penalties.of(params, prompt)
    for token in output:
        if penalties is not None:
            penalties.count(token)
    return SampledRow(params, penalties, generator)


def choose(logits: torch.Tensor, rows: Sequence[SampledRow]) -> list[SampledToken]:
    """All rows are expected to have a token."""
    tokens = Sampler(logits.shape[-1], CPU).sample(logits.clone(), rows)
    assert all(isinstance(token, SampledToken) for token in tokens)
    return [token for token in tokens if isinstance(token, SampledToken)]


def choose_ids(logits: torch.Tensor, rows: Sequence[SampledRow]) -> list[int]:
    return [token.token_id for token in choose(logits, rows)]


def warped(logits: torch.Tensor, params: SamplingParams) -> torch.Tensor:
    """The distribution that transformers would draw from: `[rows, vocab]` float64."""
    warpers = LogitsProcessorList([TemperatureLogitsWarper(params.temperature)])
    if params.top_k > 0:
        warpers.append(TopKLogitsWarper(params.top_k))
    if params.top_p < 1:
        warpers.append(TopPLogitsWarper(params.top_p))
    if params.min_p > 0:
        warpers.append(MinPLogitsWarper(params.min_p))
    return warpers(torch.zeros(len(logits), 1, dtype=torch.int64), logits).double().softmax(-1)


def lots_of(logits: torch.Tensor, params: SamplingParams) -> SamplingBatch:
    def column(value: float, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.full((len(logits), 1), value, dtype=dtype)

    return SamplingBatch(logits / params.temperature, column(params.top_p), column(params.min_p), column(0.5, torch.float64))


def spread(candidates: Candidates, vocab: int) -> torch.Tensor:
    """Candidates as a distribution over the vocabulary: `[rows, vocab]` float64."""
    weights = candidates.weights.double()
    weights = weights / weights.sum(-1, keepdim=True)
    if candidates.ids is None:
        return weights
    return torch.zeros(len(weights), vocab, dtype=torch.float64).scatter_(-1, candidates.ids, weights)


WARPED = [
    SamplingParams(temperature=0.7),
    SamplingParams(temperature=1.3, min_p=0.05),
    SamplingParams(top_k=1),
    SamplingParams(top_k=17),
    SamplingParams(temperature=0.5, top_k=40, top_p=0.8),
    SamplingParams(top_k=30, top_p=0.95, min_p=0.02),
    SamplingParams(top_p=0.5),
    SamplingParams(temperature=2.0, top_p=0.9),
    SamplingParams(top_p=0.99, min_p=0.1),
    SamplingParams(top_p=0.0),
]


@pytest.mark.parametrize("params", WARPED)
def test_what_is_drawn_from_equals_transformers(params: SamplingParams) -> None:
    logits = torch.randn(12, 1000) * 3
    batch = lots_of(logits, params)
    if params.top_k:
        candidates = top_k_candidates(batch, params.top_k)
    elif params.top_p < 1:
        candidates = nucleus_candidates(batch, 1000)[0]
    else:
        candidates = all_candidates(batch)
    torch.testing.assert_close(spread(candidates, 1000), warped(logits, params), rtol=1e-5, atol=1e-9)


def test_a_narrow_nucleus_search_says_whether_it_found_everything() -> None:
    params = SamplingParams(top_p=0.9)
    logits = torch.randn(64, 1000) * torch.linspace(0.1, 6, 64)[:, None]
    batch = lots_of(logits, params)
    narrow, complete = nucleus_candidates(batch, 100)
    assert 0 < complete.sum() < 64
    expected = warped(logits, params)
    torch.testing.assert_close(spread(narrow, 1000)[complete], expected[complete], rtol=1e-5, atol=1e-9)
    assert ((expected > 0).sum(-1)[complete] <= 100).all()
    assert ((expected > 0).sum(-1)[~complete] > 100).all()


@pytest.mark.parametrize("params", [*WARPED, SamplingParams(), SamplingParams(temperature=1.5, top_k=5, min_p=0.3)])
def test_draws_follow_the_distribution(params: SamplingParams) -> None:
    """Pearson's chi-square over tokens expected often enough; a bound that a right sampler passes with six sigmas to spare."""
    draws, vocab = 20_000, 50
    logits = torch.randn(1, vocab) * 2
    expected = warped(logits, params)[0] * draws
    sampler = Sampler(vocab, CPU)
    sampler._generator.manual_seed(1)  # fixed numbers: the test can't fail by chance
    tokens = sampler.sample(logits.repeat(draws, 1), [row(params)] * draws)
    counts = Counter(token.token_id for token in tokens if isinstance(token, SampledToken))
    observed = torch.tensor([counts[token] for token in range(vocab)], dtype=torch.float64)
    assert observed.sum() == draws
    assert not observed[expected == 0].any()
    often = expected >= 5
    statistic = ((observed - expected)[often] ** 2 / expected[often]).sum().item()
    freedom = max(1, int(often.sum()) - 1)
    assert statistic <= freedom + 6 * math.sqrt(2 * freedom)


def test_seeded_draws_follow_the_distribution() -> None:
    logits = torch.randn(1, 20)
    params = SamplingParams(seed=3)
    seeded = row(params)
    sampler = Sampler(20, CPU)
    tokens = [token for _ in range(3000) for token in sampler.sample(logits.clone(), [seeded])]
    counts = Counter(token.token_id for token in tokens if isinstance(token, SampledToken))
    expected = warped(logits, params)[0] * 3000
    statistic = sum((counts[token] - expected[token].item()) ** 2 / expected[token].item() for token in range(20))
    assert statistic <= 19 + 6 * math.sqrt(38)


def test_unlike_rows_share_a_batch() -> None:
    """A wide nucleus, which needs the whole vocabulary sorted, beside narrow ones and other filters: each keeps to its own."""
    vocab = 20_000
    logits = torch.cat([torch.randn(1, vocab) * 0.1, torch.randn(15, vocab) * 4])
    params = [SamplingParams(top_p=0.9), *(WARPED[i % len(WARPED)] for i in range(15))]
    allowed = torch.cat([warped(logits[i : i + 1], p) > 0 for i, p in enumerate(params)])
    sampler = Sampler(vocab, CPU)
    seen = set()
    for _ in range(50):
        tokens = sampler.sample(logits.clone(), [row(p) for p in params])
        assert all(isinstance(token, SampledToken) and allowed[i, token.token_id] for i, token in enumerate(tokens))
        seen.add(tokens[0].token_id if isinstance(tokens[0], SampledToken) else -1)
    assert len(seen) > 40
    assert not seen <= set(logits[0].topk(8192).indices.tolist())


@pytest.mark.parametrize("params", [replace(p, seed=11) for p in WARPED])
def test_a_seed_gives_the_same_tokens_whatever_else_is_in_the_batch(params: SamplingParams) -> None:
    vocab, steps = 2000, 12
    logits = torch.randn(steps, vocab) * 3
    alone = row(params)
    expected = [choose_ids(logits[step : step + 1], [alone])[0] for step in range(steps)]
    again, others = row(params), [row(replace(WARPED[i % len(WARPED)], seed=i if i % 2 else None)) for i in range(20)]
    for step in range(steps):
        batch = torch.randn(21, vocab) * 3
        batch[step] = logits[step]
        rows = [*others[:step], again, *others[step:]]
        assert choose_ids(batch, rows)[step] == expected[step]


def test_unlike_seeds_and_no_seed_give_unlike_tokens() -> None:
    rows = [row(SamplingParams(seed=seed)) for seed in (1, 2, 3, None, None)]
    steps = [choose_ids(torch.zeros(5, 50_000), rows) for _ in range(4)]
    assert len(set(zip(*steps, strict=True))) == 5


def test_rounding_of_the_logits_does_not_move_seeded_draws() -> None:
    """All tokens are nearly equal, so rounding decides their order; the draw must not depend on it."""
    logits = torch.full((300, 100), -10.0)
    logits[:, 20:50] = 1.0
    rows = [SamplingParams(top_k=30, top_p=0.9999, seed=seed) for seed in range(300)]
    first, second = (choose_ids(logits + 1e-6 * torch.randn(300, 100), [row(params) for params in rows]) for _ in range(2))
    assert first == second


def test_greedy_takes_the_largest_logit_and_of_equal_ones_the_lowest_id() -> None:
    logits = torch.randn(40, 500).clamp(max=1.5).round(decimals=1)  # many ties
    expected = [max(range(500), key=lambda token: (values[token], -token)) for values in logits.tolist()]
    assert choose_ids(logits, [row(GREEDY)] * 40) == expected


def test_greedy_rows_are_not_touched_by_sampled_ones() -> None:
    logits = torch.randn(30, 500)
    rows = [row(GREEDY if i % 3 else WARPED[i % len(WARPED)]) for i in range(30)]
    ids = choose_ids(logits, rows)
    assert all(ids[i] == logits[i].argmax() for i in range(30) if i % 3)


@pytest.mark.parametrize("size", [100.0, 1e12])
@pytest.mark.parametrize("temperature", [1e-320, 1e-30, 1e-8, 1e-3])
def test_a_tiny_temperature_takes_the_largest_logit(temperature: float, size: float) -> None:
    logits = torch.randn(20, 500) * size
    assert choose_ids(logits, [row(SamplingParams(temperature=temperature))] * 20) == logits.argmax(-1).tolist()


@pytest.mark.parametrize("penalty", [0.5, 1.3, 5.0])
def test_repetition_penalty_equals_transformers(penalty: float) -> None:
    logits = torch.randn(20, 60) * 2
    prompts, outputs = torch.randint(60, (20, 15)).tolist(), torch.randint(60, (20, 10)).tolist()
    tokens = torch.tensor([p + o for p, o in zip(prompts, outputs, strict=True)])
    expected = RepetitionPenaltyLogitsProcessor(penalty)(tokens, logits.clone()).argmax(-1).tolist()
    params = replace(GREEDY, repetition_penalty=penalty)
    rows = [row(params, p, o) for p, o in zip(prompts, outputs, strict=True)]
    assert choose_ids(logits, rows) == expected
    assert expected != logits.argmax(-1).tolist()


def test_presence_and_frequency_penalties_count_the_output_only() -> None:
    logits = torch.tensor([[3.0, 2.9, 2.8, 2.0]])
    frequency = replace(GREEDY, frequency_penalty=0.15)
    assert choose_ids(logits, [row(frequency, [0, 0, 0, 0], [])]) == [0]
    assert choose_ids(logits, [row(frequency, [1], [0])]) == [1]
    assert choose_ids(logits, [row(frequency, [1], [0, 1, 0])]) == [2]
    presence = replace(GREEDY, presence_penalty=0.15)
    assert choose_ids(logits, [row(presence, [1], [0, 0, 0])]) == [1]
    assert choose_ids(logits, [row(presence, [1], [0, 1])]) == [0]
    assert choose_ids(logits, [row(replace(GREEDY, frequency_penalty=-0.5), [1], [3, 3, 3])]) == [3]


def test_penalties_apply_in_the_documented_order() -> None:
    params = SamplingParams(
        temperature=0.0, repetition_penalty=2.0, presence_penalty=0.5, frequency_penalty=0.25, logit_bias={0: 1.0, 4: -0.5}, logprobs=0
    )
    logits = torch.tensor([[4.0, -1.0, 3.0, 1.0, 2.9]])
    # token 0: 4 / 2 - 0.5 - 2 * 0.25 + 1 = 2; token 2: 3 / 2 = 1.5; token 4: 2.9 - 0.5 = 2.4
    sampler = Sampler(5, CPU)
    changed = logits.clone()
    [token] = sampler.sample(changed, [row(params, [2], [0, 0, 1])])
    torch.testing.assert_close(changed, torch.tensor([[2.0, -2.75, 1.5, 1.0, 2.4]]))
    assert isinstance(token, SampledToken)
    assert token.token_id == 4


def test_logit_bias_forces_and_forbids_tokens() -> None:
    logits = torch.randn(2, 100)
    best = int(logits[1].argmax())
    ids = choose_ids(logits, [row(SamplingParams(logit_bias={7: 100.0})), row(replace(GREEDY, logit_bias={best: -100.0}))])
    assert ids[0] == 7
    assert ids[1] != best


def test_penalties_of_one_row_leave_the_others_alone() -> None:
    logits = torch.randn(3, 50)
    changed = logits.clone()
    penalised = row(SamplingParams(repetition_penalty=1.5, presence_penalty=1.0, logit_bias={3: 2.0}), [1, 2], [4])
    Sampler(50, CPU).sample(changed, [row(GREEDY), penalised, row(SamplingParams())])
    torch.testing.assert_close(changed[[0, 2]], logits[[0, 2]], rtol=0, atol=0)
    assert set((changed[1] != logits[1]).nonzero()[:, 0].tolist()) == {1, 2, 3, 4}


def test_logprobs_come_from_the_raw_logits() -> None:
    logits = torch.randn(2, 100)
    params = SamplingParams(temperature=0.3, top_k=5, repetition_penalty=1.7, logit_bias={3: 5.0}, logprobs=4)
    tokens = choose(logits, [row(params, [3, 4]), row(replace(GREEDY, logprobs=2))])
    reference = logits.double().log_softmax(-1)
    for i, (token, count) in enumerate(zip(tokens, (4, 2), strict=True)):
        assert token.logprobs is not None
        assert token.logprobs.token_id == token.token_id
        assert token.logprobs.logprob == pytest.approx(reference[i, token.token_id].item(), abs=1e-5)
        values, ids = reference[i].topk(count)
        assert [top[0] for top in token.logprobs.top] == ids.tolist()
        assert [top[1] for top in token.logprobs.top] == pytest.approx(values.tolist(), abs=1e-5)


def test_only_rows_that_ask_get_logprobs() -> None:
    tokens = choose(torch.randn(3, 20), [row(GREEDY), row(replace(GREEDY, logprobs=0)), row(SamplingParams())])
    assert tokens[0].logprobs is None
    assert tokens[1].logprobs is not None
    assert tokens[1].logprobs.top == []
    assert tokens[1].logprobs.rank == 1
    assert tokens[2].logprobs is None


def ranked(values: Sequence[float]) -> list[int]:
    return sorted(range(len(values)), key=lambda token: (-values[token], token))


@settings(deadline=None)
@given(values=st.lists(st.integers(-3, 3), min_size=1, max_size=30), top=st.integers(0, 35), data=st.data())
def test_ranks_and_top_tokens_break_ties_by_the_lowest_id(values: list[int], top: int, data: st.DataObject) -> None:
    token = data.draw(st.integers(0, len(values) - 1))
    logits = torch.tensor([values], dtype=torch.float32)
    [found] = token_logprobs(logits, [token], top)
    order = ranked(values)
    reference = logits[0].double().log_softmax(-1).tolist()
    assert found.token_id == token
    assert found.rank == 1 + order.index(token)
    assert found.logprob == pytest.approx(reference[token], abs=1e-5)
    assert [entry[0] for entry in found.top] == order[:top]
    assert [entry[1] for entry in found.top] == pytest.approx([reference[i] for i in order[:top]], abs=1e-5)


@settings(deadline=None)
@given(rows=st.lists(st.lists(st.integers(-2, 2), min_size=12, max_size=12), min_size=1, max_size=4), count=st.integers(1, 14))
def test_the_largest_entries_come_in_order_of_value_and_then_index(rows: list[list[int]], count: int) -> None:
    values, index = largest(torch.tensor(rows, dtype=torch.float32), count)
    assert index.tolist() == [ranked(entries)[:count] for entries in rows]
    assert values.tolist() == [[entries[i] for i in ranked(entries)[:count]] for entries in rows]


def test_top_k_keeps_exactly_k_of_equal_tokens() -> None:
    logits = torch.zeros(500, 100)
    ids = choose_ids(logits, [row(SamplingParams(top_k=4))] * 500)
    assert set(ids) == {0, 1, 2, 3}


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("params", [GREEDY, *WARPED, SamplingParams(logit_bias={5: -100.0}, repetition_penalty=2.0)])
def test_a_row_that_is_not_finite_fails_alone(bad: float, params: SamplingParams) -> None:
    logits = torch.randn(4, 2000)
    logits[2, 5] = bad
    params = replace(params, logprobs=3)
    tokens = Sampler(2000, CPU).sample(logits, [row(params)] * 4)
    assert [isinstance(token, EngineError) for token in tokens] == [False, False, True, False]
    assert "not finite" in str(tokens[2])


def test_a_row_of_minus_infinity_fails_and_single_ones_are_never_drawn() -> None:
    logits = torch.zeros(3, 10)
    logits[0] = -math.inf
    logits[1:, :9] = -math.inf
    tokens = Sampler(10, CPU).sample(logits, [row(SamplingParams(top_p=0.9)), row(SamplingParams()), row(SamplingParams(top_p=0.9))])
    assert isinstance(tokens[0], EngineError)
    assert tokens[1:] == [SampledToken(9, None), SampledToken(9, None)]


def test_scores_of_a_row_that_is_not_finite_are_nan() -> None:
    logits = torch.randn(3, 50)
    logits[1, 7] = math.nan
    found = token_logprobs(logits, [1, 2, 3], 2)
    assert math.isnan(found[1].logprob)
    assert all(math.isnan(value) for _, value in found[1].top)
    for i, token in ((0, 1), (2, 3)):
        assert found[i].logprob == pytest.approx(logits[i].log_softmax(-1)[token].item(), abs=1e-5)


def test_no_rows_give_no_tokens() -> None:
    assert Sampler(10, CPU).sample(torch.zeros(0, 10), []) == []
    assert token_logprobs(torch.zeros(0, 10), [], 3) == []


def test_more_rows_than_are_drawn_for_at_once() -> None:
    vocab = 1 << 20
    logits = torch.zeros(9, vocab)
    logits[torch.arange(9), torch.arange(9) * 1000] = 60.0
    assert choose_ids(logits, [row(SamplingParams())] * 9) == [i * 1000 for i in range(9)]


@pytest.mark.parametrize("top_k", [0, 3])
def test_the_ends_of_the_random_range_pick_tokens_that_have_weight(top_k: int) -> None:
    scores = torch.tensor([[-math.inf, 0.0, -1.0, -math.inf]] * 2)
    uniform = torch.tensor([[0.0], [1.0]], dtype=torch.float64)
    assert sample_tokens(SamplingBatch(scores, torch.ones(2, 1), torch.zeros(2, 1), uniform), top_k).tolist() == [1, 2]


def test_tokens_are_plain_numbers() -> None:
    [token] = choose(torch.randn(1, 10), [row(SamplingParams(logprobs=2))])
    assert type(token.token_id) is int
    assert isinstance(token.logprobs, TokenLogprobs)
    assert all(type(i) is int and type(value) is float for i, value in token.logprobs.top)
