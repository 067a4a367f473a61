"""What a choice keeps of a prompt's log-probabilities: one report, made in one reading, and not the engine's arrays beside it."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from engine.request import EngineRequest, SamplingParams, TokenLogprobs
from engine.sampling.prompt_logprobs import PromptLogprobs, ScoredTokens
from service.engine_events import Update
from service.requests.choice import Choice, ChoiceResult, Delta, Reports
from service.text.choice_text import ChoiceText, TokenNames, echo_of, logprobs_object
from service.text.prompts import PreparedPrompt

PROMPT = [4, 5, 6]
NAMES = TokenNames(None)


def echoing_choice() -> Choice:
    request = EngineRequest("r", PROMPT, SamplingParams(logprobs=1, prompt_logprobs=1))
    reports, echo = Reports(NAMES), echo_of(None, PROMPT, None)
    return Choice(0, PreparedPrompt(PROMPT, None, 4), request, None, reports, ChoiceText(None), echo, waits_for_save=True)


def prompt_scores() -> PromptLogprobs:
    column = np.array([[1], [2]])
    scores = PromptLogprobs(3, 1)
    ids, logprobs = column.astype(np.int32), -column.astype(np.float32)
    scores.extend(ScoredTokens(ids[:, 0], logprobs[:, 0], ids[:, 0], ids, logprobs))
    return scores


def sampled(token: int, **more: Any) -> Update:  # noqa: ANN401 - fields of an update
    return Update([token], [TokenLogprobs(token, -0.5, 1, [(token, -0.5)])], **more)


def test_an_update_that_is_still_held_does_not_hold_the_prompts_arrays() -> None:
    choice, update = echoing_choice(), sampled(7, prompt_logprobs=prompt_scores())
    arrays = weakref.ref(update.prompt_logprobs)  # type: ignore[arg-type]  # it was just given
    delta = choice.advance(update)
    gc.collect()
    assert arrays() is None
    assert delta.logprobs is not None
    assert delta.logprobs["token_logprobs"] == [None, -1.0, -2.0, -0.5]
    assert delta.logprobs["tokens"] == ["token_id:4", "token_id:5", "token_id:6", "token_id:7"]


def test_a_growing_answer_does_not_copy_what_it_has() -> None:
    choice, finished = echoing_choice(), ChoiceResult()
    finished.add(choice.advance(sampled(7, prompt_logprobs=prompt_scores())))
    assert finished.logprobs is not None
    lists = {name: id(values) for name, values in finished.logprobs.items()}
    for token in (8, 9):
        finished.add(choice.advance(sampled(token)))
    finished.add(Delta())
    assert finished.logprobs["tokens"] == [f"token_id:{token}" for token in (*PROMPT, 7, 8, 9)]
    assert {name: id(values) for name, values in finished.logprobs.items()} == lists


def test_scores_are_read_once() -> None:
    class Counted(Sequence[TokenLogprobs | None]):
        num_readings = 0

        def __len__(self) -> int:
            return len(PROMPT)

        def __getitem__(self, index: Any) -> Any:  # noqa: ANN401 - not to be used
            raise AssertionError("entries are to be read in order")

        def __iter__(self) -> Iterator[TokenLogprobs | None]:
            self.num_readings += 1
            return iter(prompt_scores())

    scores = Counted()
    assert len(logprobs_object(NAMES, PROMPT, scores, [0, 0, 0])["top_logprobs"]) == 3
    assert scores.num_readings == 1
