"""The forms that answers have: what sets those of a chat apart from those of a completion."""

from collections.abc import Callable
from dataclasses import dataclass

from service.schemas.chat import ChatRequest
from service.schemas.generation import GenerationRequest
from service.wire import Json

ChoiceBody = Callable[[int, str, Json | None, str | None], Json]
"""From index, text, log-probabilities and finish reason."""


@dataclass(frozen=True)
class ResponseShape:
    """Two shapes exist; `shape_of` says which one a request's answer has."""

    id_prefix: str
    whole_object: str
    chunk_object: str
    whole: ChoiceBody
    """A choice of an answer in one piece."""
    chunk: ChoiceBody
    """A part of a choice."""
    opening: ChoiceBody
    """The first part of a choice."""
    always_opens: bool
    """Whether a stream says something of each choice before its first token, whatever was asked for."""
    prompt_at_top: bool
    """Where `prompt_token_ids` and `prompt_logprobs` stand: at the top level, or in each choice."""


def _text_choice(index: int, text: str, logprobs: Json | None, finish_reason: str | None) -> Json:
    return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": finish_reason}


def _message_choice(index: int, text: str, logprobs: Json | None, finish_reason: str | None) -> Json:
    return _chat_choice(index, "message", {"role": "assistant", "content": text}, logprobs, finish_reason)


def _delta_choice(index: int, text: str, logprobs: Json | None, finish_reason: str | None) -> Json:
    return _chat_choice(index, "delta", {"content": text} if text else {}, logprobs, finish_reason)


def _opening_choice(index: int, text: str, logprobs: Json | None, finish_reason: str | None) -> Json:
    return _chat_choice(index, "delta", {"role": "assistant", "content": text}, logprobs, finish_reason)


def _chat_choice(index: int, name: str, message: Json, logprobs: Json | None, finish_reason: str | None) -> Json:
    # The model never refuses by another way than its text; the OpenAI API has a place for that here.
    report = None if logprobs is None else {**logprobs, "refusal": None}
    return {"index": index, name: message, "logprobs": report, "finish_reason": finish_reason}


COMPLETION = ResponseShape(
    id_prefix="cmpl-",
    whole_object="text_completion",
    chunk_object="text_completion",
    whole=_text_choice,
    chunk=_text_choice,
    opening=_text_choice,
    always_opens=False,
    prompt_at_top=False,
)
CHAT = ResponseShape(
    id_prefix="chatcmpl-",
    whole_object="chat.completion",
    chunk_object="chat.completion.chunk",
    whole=_message_choice,
    chunk=_delta_choice,
    opening=_opening_choice,
    always_opens=True,
    prompt_at_top=True,
)


def shape_of(body: GenerationRequest) -> ResponseShape:
    return CHAT if isinstance(body, ChatRequest) else COMPLETION
