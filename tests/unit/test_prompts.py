"""Prompts of a model whose tokenizer puts an end token behind every text, as those of embedding models do."""

import asyncio
from typing import Any

import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import models, processors

from service.schemas.chat import ChatRequest
from service.schemas.completions import CompletionRequest
from service.schemas.generation import GenerationRequest
from service.text.chat_templates import ChatTemplates
from service.text.prompts import Limits, PromptMaker, prepare_prompts
from service.text.tokenizer import Tokenizer

BOS, EOS, A = 0, 1, 2
MESSAGES = [{"role": "user", "content": "aa"}]


def _maker() -> PromptMaker:
    backend = Backend(models.BPE(vocab={"<s>": BOS, "</s>": EOS, "a": A}, merges=[]))
    backend.add_special_tokens(["<s>", "</s>"])
    backend.post_processor = processors.TemplateProcessing(single="<s> $A </s>", special_tokens=[("<s>", BOS), ("</s>", EOS)])
    tokenizer = Tokenizer(backend, {"bos_token": "<s>", "eos_token": "</s>"})
    return PromptMaker(tokenizer, ChatTemplates({"default": "{{ messages[0].content }}"}, {}), Limits(3, 64))


async def _at_once(function: Any, *arguments: Any) -> Any:  # noqa: ANN401  # as the threads run whatever they get
    return function(*arguments)


def _prompt(body: GenerationRequest) -> list[int]:
    [prepared] = asyncio.run(prepare_prompts(body, _maker(), False, _at_once))
    return prepared.token_ids


@pytest.mark.parametrize("fields", [{}, {"max_tokens": 1}, {"max_tokens": 9}])
def test_no_end_token_stands_behind_a_prompt_that_is_to_be_continued(fields: dict[str, Any]) -> None:
    assert _prompt(CompletionRequest(prompt="aa", **fields)) == [BOS, A, A]


def test_a_prompt_that_is_only_run_has_all_tokens_of_the_template() -> None:
    assert _prompt(CompletionRequest(prompt="aa", max_tokens=0)) == [BOS, A, A, EOS]
    assert _prompt(CompletionRequest(prompt="aa", max_tokens=0, add_special_tokens=False)) == [A, A]


def test_an_end_token_that_the_client_wrote_stays() -> None:
    assert _prompt(CompletionRequest(prompt="a</s>")) == [BOS, A, EOS]
    assert _prompt(CompletionRequest(prompt=[A, EOS])) == [A, EOS]


@pytest.mark.parametrize("max_tokens", [0, 5])
def test_no_end_token_stands_behind_messages(max_tokens: int) -> None:
    assert _prompt(ChatRequest.model_validate({"messages": MESSAGES, "add_special_tokens": True, "max_tokens": max_tokens})) == [BOS, A, A]
    assert _prompt(ChatRequest.model_validate({"messages": MESSAGES, "max_tokens": max_tokens})) == [A, A]


def test_texts_that_are_only_tokenized_are_those_that_are_to_be_continued() -> None:
    assert _maker().encode("prompt", "aa", add_special_tokens=True) == [BOS, A, A]
