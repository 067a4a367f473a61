"""Fields that change the scores of tokens, over HTTP, against transformers' processors on transformers' own logits."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest
import torch
from transformers import (
    LlamaForCausalLM,
    MinNewTokensLengthLogitsProcessor,
    NoBadWordsLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    SuppressTokensLogitsProcessor,
)

if TYPE_CHECKING:
    from pathlib import Path

    from tests.http.conftest import Service

Process = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
PROMPT = list(b"The same words, the same words")
NUM_TOKENS = 24
EOS, VOCAB_SIZE = 257, 258
ALLOWED = range(40, 90)
BIAS = {5: 3.0, 65: -4.5, 100: 2.25, 200: 100.0, 201: -100.0}


def subtracting(presence: float, frequency: float) -> Process:
    """The OpenAI API's penalties: off for having been generated, and off for each time that was."""

    def process(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        counts = torch.bincount(ids[0, len(PROMPT) :], minlength=scores.shape[1])
        return scores - frequency * counts - presence * (counts > 0)

    return process


CASES: dict[str, tuple[dict[str, Any], list[Process]]] = {
    "none": ({}, []),
    "bias": ({"logit_bias": {str(token): bias for token, bias in BIAS.items() if abs(bias) < 50}},
             [SequenceBiasLogitsProcessor([[[token], bias] for token, bias in BIAS.items() if abs(bias) < 50])]),
    "bias that decides": ({"logit_bias": {str(token): bias for token, bias in BIAS.items()}},
                          [SequenceBiasLogitsProcessor([[[token], bias] for token, bias in BIAS.items()])]),
    "repetition": ({"repetition_penalty": 1.3}, [RepetitionPenaltyLogitsProcessor(1.3)]),
    "repetition wanted": ({"repetition_penalty": 0.7}, [RepetitionPenaltyLogitsProcessor(0.7)]),
    "presence": ({"presence_penalty": 1.5}, [subtracting(1.5, 0)]),
    "frequency": ({"frequency_penalty": -1.25}, [subtracting(0, -1.25)]),
    "both": ({"presence_penalty": 0.5, "frequency_penalty": 0.75}, [subtracting(0.5, 0.75)]),
    "allowed": ({"allowed_token_ids": [*ALLOWED]}, [SuppressTokensLogitsProcessor([*{*range(VOCAB_SIZE)} - {*ALLOWED}])]),
    "a least length": ({"logit_bias": {str(EOS): 100}, "min_tokens": 7},
                       [SequenceBiasLogitsProcessor([[[EOS], 100.0]]), MinNewTokensLengthLogitsProcessor(len(PROMPT), 7, EOS)]),
}  # fmt: skip


@pytest.fixture(scope="module")
def model(model_folder: Path) -> LlamaForCausalLM:
    loaded: LlamaForCausalLM = LlamaForCausalLM.from_pretrained(model_folder, dtype=torch.float32).eval()
    return loaded


@torch.inference_mode()
def greedy(model: LlamaForCausalLM, processes: list[Process]) -> list[int]:
    ids = torch.tensor([PROMPT])
    for _ in range(NUM_TOKENS):
        scores = model(ids).logits[:, -1]
        for process in processes:
            scores = process(ids, scores)
        ids = torch.cat([ids, scores.argmax(-1, keepdim=True)], dim=1)
    tokens: list[int] = ids[0, len(PROMPT) :].tolist()
    return tokens


@pytest.mark.parametrize("case", CASES)
def test_the_tokens_are_those_of_the_processors(case: str, service: Service, model: LlamaForCausalLM) -> None:
    fields, processes = CASES[case]
    body = fields | {"max_tokens": NUM_TOKENS, "ignore_eos": True, "return_token_ids": True}
    expected = greedy(model, processes)
    assert service.completed(prompt=PROMPT, **body)["choices"][0]["token_ids"] == expected
    assert case == "none" or expected != greedy(model, [])


def test_bad_words_are_those_of_the_processor(service: Service, model: LlamaForCausalLM) -> None:
    """A word of two tokens, and one of a single token that begins another one which is not forbidden."""
    plain = greedy(model, [])
    spelt = {token: service.client.post("/detokenize", json={"tokens": [token]}).json()["prompt"] for token in plain}
    clear = [place for place, token in enumerate(plain) if spelt[token].isascii() and spelt[token].strip()]
    first, second = next((plain[at], plain[at + 1]) for at in clear if at + 1 in clear and plain[at] != PROMPT[-1])
    alone = next(plain[at] for at in clear if plain[at] not in (first, second))
    body = {
        "max_tokens": NUM_TOKENS,
        "ignore_eos": True,
        "return_token_ids": True,
        "bad_words": [spelt[first] + spelt[second], spelt[alone]],
    }
    expected = greedy(model, [NoBadWordsLogitsProcessor([[first, second], [alone]])])
    assert expected != plain
    assert service.completed(prompt=PROMPT, **body)["choices"][0]["token_ids"] == expected
