"""Log-probabilities of prompts as arrays: what they hold, what they take, and that the objects made of them are the same as ever."""

from __future__ import annotations

import gc
import json
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
import torch

from engine.cache.kv import BlockTables
from engine.offline import LocalTarget, OfflineEngine
from engine.request import EngineRequest, SamplingParams
from engine.sampling.logprobs import score_tokens, token_logprobs
from engine.sampling.prompt_logprobs import PromptLogprobs, ScoredTokens, prompt_logprobs_bytes
from engine.saves.spec import SaveSpec
from engine.scheduling.sequence import TokenSequence
from tests.unit.small_engine import PROMPT, save_tiny_llama, small_config

VOCAB = 60


def scored(count: int, top: int, seed: int = 0) -> tuple[torch.Tensor, list[int], ScoredTokens]:
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(count, VOCAB, generator=generator)
    tokens = torch.randint(VOCAB, (count,), generator=generator).tolist()
    return logits, tokens, score_tokens(logits, np.array(tokens, np.int64), top)


@pytest.mark.parametrize("top", [0, 1, 5, VOCAB, VOCAB + 7])
def test_arrays_hold_what_the_distribution_says(top: int) -> None:
    logits, tokens, found = scored(30, top)
    reference = logits.double().log_softmax(-1)
    order = reference.sort(dim=-1, descending=True, stable=True)
    kept = min(top, VOCAB)
    assert found.token_ids.tolist() == tokens
    assert found.logprobs.tolist() == pytest.approx([reference[i, token].item() for i, token in enumerate(tokens)], abs=1e-5)
    assert found.ranks.tolist() == [1 + order.indices[i].tolist().index(token) for i, token in enumerate(tokens)]
    assert found.top_ids.tolist() == order.indices[:, :kept].tolist()
    np.testing.assert_allclose(found.top_logprobs, order.values[:, :kept].numpy(), atol=1e-5)


def test_arrays_are_of_four_bytes_per_number() -> None:
    found = scored(3, 2)[2]
    assert [a.dtype.name for a in (found.token_ids, found.ranks, found.top_ids)] == ["int32"] * 3
    assert [a.dtype.name for a in (found.logprobs, found.top_logprobs)] == ["float32"] * 2


@pytest.mark.parametrize("top", [0, 4])
def test_a_prompt_in_parts_reads_like_the_list_of_its_objects(top: int) -> None:
    logits, tokens, _ = scored(600, top)
    expected = [None, *token_logprobs(logits, tokens, top)]
    prompt = PromptLogprobs(601, top)
    assert list(prompt) == [None]
    for start, end in ((0, 1), (1, 300), (300, 300), (300, 600)):
        prompt.extend(score_tokens(logits[start:end], np.array(tokens[start:end], np.int64), top))
        assert len(prompt) == end + 1
        assert list(prompt) == expected[: end + 1]
    assert [prompt[i] for i in range(601)] == expected
    assert (prompt[-1], prompt[-601], prompt[5:8], prompt[::-200]) == (expected[-1], None, expected[5:8], expected[::-200])
    for outside in (601, -602):
        with pytest.raises(IndexError):
            prompt[outside]


def test_objects_are_made_of_plain_numbers() -> None:
    prompt = PromptLogprobs(2, 3)
    prompt.extend(scored(1, 3)[2])
    entry = prompt[1]
    assert entry is not None
    assert (type(entry.token_id), type(entry.logprob), type(entry.rank)) == (int, float, int)
    assert [(type(token), type(logprob)) for token, logprob in entry.top] == [(int, float)] * 3


def test_a_prompt_of_one_token_has_no_logprobs() -> None:
    assert list(PromptLogprobs(1, 20)) == [None]
    assert PromptLogprobs(1, 20).nbytes == 0


@pytest.mark.parametrize("num_tokens", [1, 2, 1000])
@pytest.mark.parametrize("top", [0, 1, 20])
def test_the_formula_is_what_is_allocated(num_tokens: int, top: int) -> None:
    assert PromptLogprobs(num_tokens, top).nbytes == PromptLogprobs.bytes_for(num_tokens, top)


def test_what_a_request_takes_is_what_is_made_for_it() -> None:
    for wanted in (None, 0, 7, VOCAB + 1):
        params = SamplingParams(prompt_logprobs=wanted)
        made = PromptLogprobs.of(50, params, VOCAB)
        assert prompt_logprobs_bytes(50, params, VOCAB) == (0 if made is None else made.nbytes)
        assert (made is None) == (wanted is None)


def test_a_long_prompts_logprobs_take_little_more_than_their_numbers(tmp_path: Path) -> None:
    length, top = 1000, 20
    save_tiny_llama(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 2048}))
    prompt = [(7 * i * i + 3 * i) % 97 for i in range(length)]
    with OfflineEngine(small_config(tmp_path, kv_cache_tokens=2048)) as engine:
        tracemalloc.start()
        try:
            [completion] = engine.generate([EngineRequest("long", prompt, SamplingParams(max_tokens=0, prompt_logprobs=top))])
            assert completion.prompt_logprobs is not None
            assert len(completion.prompt_logprobs) == length
            gc.collect()
            with_them = tracemalloc.get_traced_memory()[0]
            completion.prompt_logprobs = None
            gc.collect()
            taken = with_them - tracemalloc.get_traced_memory()[0]
        finally:
            tracemalloc.stop()
    numbers = (length - 1) * 4 * (3 + 2 * top)
    assert 0.9 * numbers < taken < 2 * numbers


def test_logprobs_of_a_prompt_in_chunks_are_those_of_the_whole(tmp_path: Path) -> None:
    save_tiny_llama(tmp_path)
    sampling = SamplingParams(max_tokens=2, temperature=0.0, prompt_logprobs=3)
    found = []
    for budget in (3, 64):
        with OfflineEngine(small_config(tmp_path, max_batch_tokens=budget)) as engine:
            [completion] = engine.generate([EngineRequest("r", PROMPT, sampling)])
            found.append([entry for entry in completion.prompt_logprobs or () if entry is not None])
    chunked, whole = found
    assert [entry.token_id for entry in chunked] == PROMPT[1:] == [entry.token_id for entry in whole]
    assert [entry.logprob for entry in chunked] == pytest.approx([entry.logprob for entry in whole], abs=1e-4)
    assert [[token for token, _ in entry.top] for entry in chunked] == [[token for token, _ in entry.top] for entry in whole]


def test_logprobs_are_computed_of_a_prompt_whose_rows_all_lie_in_cached_pages(tmp_path: Path) -> None:
    save_tiny_llama(tmp_path)
    prompt = [*PROMPT, *PROMPT][:16]
    with OfflineEngine(small_config(tmp_path)) as engine:
        for name, wanted in (("first", None), ("second", 1)):
            save = SaveSpec(name, LocalTarget(tmp_path / name), (1,), "float32")
            sampling = SamplingParams(max_tokens=0, prompt_logprobs=wanted)
            [completion] = engine.generate([EngineRequest(name, prompt, sampling, save)])
    assert [entry.token_id for entry in completion.prompt_logprobs or () if entry is not None] == prompt[1:]


def test_a_cached_prefix_ends_before_the_first_row_whose_logprobs_are_not_known_yet() -> None:
    logprobs = PromptLogprobs(len(PROMPT), 0)
    request = EngineRequest("r", PROMPT, SamplingParams(max_tokens=0, prompt_logprobs=0))
    sequence = TokenSequence(request, 0, 2, PROMPT, {}, BlockTables(2, []), prompt_logprobs=logprobs)
    limits = [sequence.prefix_limit]
    for count in (4, 3, 1):
        logprobs.extend(scored(count, 0)[2])
        limits.append(sequence.prefix_limit)
    assert limits == [0, 4, 7, 9]
