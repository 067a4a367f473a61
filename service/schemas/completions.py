"""The body of `POST /v1/completions`."""

from typing import Annotated, ClassVar

from pydantic import Field, PlainValidator, WithJsonSchema

from engine.errors import InvalidRequest
from service.schemas.fields import checked_text, kinds_of
from service.schemas.generation import TEXT_SCHEMA, GenerationRequest
from service.schemas.unsupported import COMPLETIONS

Prompt = str | list[int]


def _prompts(value: object) -> tuple[tuple[Prompt, ...], bool]:
    """The prompts, and whether the client sent a list of prompts."""
    if isinstance(value, str):
        return (_text_prompt(value),), False
    if isinstance(value, list):
        if not value:
            raise InvalidRequest("prompt must not be empty", "prompt")
        kinds = kinds_of(value)
        if kinds == {str}:
            return tuple(_text_prompt(item) for item in value), True
        if kinds == {list}:
            return tuple(_token_prompt(item) for item in value), True
        if kinds == {int}:
            return (value,), False
    raise InvalidRequest("prompt must be a string, a list of strings, a list of token ids or a list of such lists", "prompt")


def _text_prompt(text: str) -> str:
    if not text:
        raise InvalidRequest("prompt must not be empty", "prompt")
    return checked_text(text, "prompt")


def _token_prompt(ids: list[int]) -> list[int]:
    if not ids:
        raise InvalidRequest("prompt must not be empty", "prompt")
    if kinds_of(ids) != {int}:
        raise InvalidRequest("prompt holds a list whose items are not all integers", "prompt")
    return ids


_IDS_SCHEMA = {"type": "array", "minItems": 1, "items": {"type": "integer", "minimum": 0}}
_PROMPT_SCHEMA = {
    "anyOf": [
        TEXT_SCHEMA,
        {"type": "array", "minItems": 1, "items": TEXT_SCHEMA},
        _IDS_SCHEMA,
        {"type": "array", "minItems": 1, "items": _IDS_SCHEMA},
    ]
}

PromptField = Annotated[tuple[tuple[Prompt, ...], bool], PlainValidator(_prompts), WithJsonSchema(_PROMPT_SCHEMA)]


class CompletionRequest(GenerationRequest):
    """An OpenAI completion, with what Strata adds. null is the same as an absent field."""

    unsupported: ClassVar = COMPLETIONS

    prompt: PromptField = Field(description="Text, token ids, or a list of either.")
    max_tokens: int | None = Field(None, ge=0, le=2**31 - 1, description="Absent: 16, or what room is left. 0: only the prompt is run.")
    add_special_tokens: bool = Field(True, description="Whether text prompts get the tokenizer's special tokens.")
    echo: bool = Field(False, description="The prompt stands before the text.")
    logprobs: int | None = Field(
        None,
        ge=-1,
        le=2**31 - 1,
        description="Log-probabilities of the token and this many likeliest ones, up to --max-logprobs; -1: all.",
    )

    @property
    def prompts(self) -> tuple[Prompt, ...]:
        return self.prompt[0]

    @property
    def num_prompts(self) -> int:
        return len(self.prompts)

    @property
    def num_logprobs(self) -> int | None:
        return self.logprobs

    @property
    def reports_echo(self) -> bool:
        return self.echo
