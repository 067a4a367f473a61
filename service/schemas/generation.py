"""What the bodies of completions and of chat completions have in common."""

import logging
from collections.abc import Mapping
from heapq import nsmallest
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import ConfigDict, Field, PlainValidator, WithJsonSchema, model_validator

from engine.errors import InvalidRequest
from service.schemas.fields import Body, Text, checked_text, is_number, shown
from service.schemas.transfer import TransferParams
from service.schemas.unsupported import refuse_unsupported, shown_name

log = logging.getLogger(__name__)

WHOLE_VOCABULARY = -1
"""Of a number of log-probabilities."""
WHOLE_CONTEXT = -1
"""Of `truncate_prompt_tokens`."""
SHOWN_NAMES = 32
"""Of fields that are ignored, in the log."""
MAX_CHOICES = 128
MAX_STOP_STRINGS = 64
MAX_STOP_LENGTH = 1024
MAX_BAD_WORDS = 128
MAX_BAD_WORD_LENGTH = 256
MAX_ALLOWED_TOKENS = 2**20
REQUEST_ID_PATTERN = r"^[\x21-\x7e]{1,128}$"
"""Request ids are answered in a header, so: printable ASCII without spaces."""


def _stop(value: object) -> tuple[str, ...]:
    items = [value] if isinstance(value, str) else value
    if not isinstance(items, list) or not all(isinstance(item, str) for item in items):
        raise InvalidRequest(f"stop must be a string or a list of strings, got {shown(value)}", "stop")
    if len(items) > MAX_STOP_STRINGS:
        raise InvalidRequest(f"stop holds {len(items)} strings, at most {MAX_STOP_STRINGS} are allowed", "stop")
    if not all(1 <= len(item) <= MAX_STOP_LENGTH for item in items):
        raise InvalidRequest(f"stop holds a string that is not 1 to {MAX_STOP_LENGTH} characters long", "stop")
    return tuple(checked_text(item, "stop") for item in items)


def _bad_words(value: object) -> tuple[str, ...]:
    if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
        raise InvalidRequest(f"bad_words must be a list of strings, got {shown(value)}", "bad_words")
    if len(value) > MAX_BAD_WORDS:
        raise InvalidRequest(f"bad_words holds {len(value)} words, at most {MAX_BAD_WORDS} are allowed", "bad_words")
    if not all(item.strip() and len(item) <= MAX_BAD_WORD_LENGTH for item in value):
        raise InvalidRequest(f"bad_words holds a word that is blank or longer than {MAX_BAD_WORD_LENGTH} characters", "bad_words")
    return tuple(checked_text(item, "bad_words") for item in value)


def _logit_bias(value: object) -> dict[int, float]:
    if not isinstance(value, dict):
        raise InvalidRequest(f"logit_bias must be an object of token id to number, got {shown(value)}", "logit_bias")
    return {_bias_key(key): _bias(bias) for key, bias in value.items()}


def _bias_key(key: str) -> int:
    # Only the one spelling of a number: "07" would be another key for the same token.
    if key.isascii() and key.isdigit() and len(key) <= 18 and (key == "0" or key[0] != "0"):
        return int(key)
    raise InvalidRequest(f"logit_bias holds the key {shown(key)}; keys are token ids", "logit_bias")


def _bias(value: object) -> float:
    if isinstance(value, int | float) and is_number(value) and -100 <= value <= 100:
        return float(value)
    raise InvalidRequest(f"logit_bias holds {shown(value)}; values are numbers from -100 to 100", "logit_bias")


TEXT_SCHEMA: dict[str, Any] = {"type": "string", "minLength": 1}
_STOP_SCHEMA = {"anyOf": [TEXT_SCHEMA, {"type": "array", "maxItems": MAX_STOP_STRINGS, "items": TEXT_SCHEMA}]}
_WORDS_SCHEMA = {"type": "array", "maxItems": MAX_BAD_WORDS, "items": TEXT_SCHEMA, "default": []}
_BIAS_SCHEMA = {"type": "object", "additionalProperties": {"type": "number", "minimum": -100, "maximum": 100}, "default": {}}

TokenId = Annotated[int, Field(ge=0)]


class StreamOptions(Body):
    """Options of a streamed answer."""

    model_config = ConfigDict(extra="allow")

    include_usage: bool = Field(False, description="A last chunk without choices carries the usage.")
    continuous_usage_stats: bool = Field(False, description="With include_usage: every chunk carries the usage so far.")


class PromptRequest(Body):
    """A body that holds a prompt, to be run or only to be turned into tokens. Fields that nobody knows are ignored."""

    model_config = ConfigDict(extra="allow")

    unsupported: ClassVar[Mapping[str, tuple[object, ...]]] = {}
    """Known fields that are refused, with the values beside null that ask for nothing."""

    model: Text | None = Field(None, description="The served model's name; absent: that model.")

    @model_validator(mode="after")
    def _only_supported(self) -> Self:
        extra = self.model_extra or {}
        refuse_unsupported(extra, self.unsupported)
        if extra and log.isEnabledFor(logging.DEBUG):
            # As Python writes a list: a name can't break out of its line.
            log.debug("ignored fields of a request: %s", ascii(nsmallest(SHOWN_NAMES, extra))[:500])
        return self


class CutRequest(PromptRequest):
    """A body whose prompt may be cut."""

    truncate_prompt_tokens: int | None = Field(
        None, ge=-1, le=2**31 - 1, description="Keep this many tokens of a longer prompt; -1: as many as the context has."
    )
    truncation_side: Literal["left", "right"] = Field("left", description="Where a longer prompt is cut.")

    @model_validator(mode="after")
    def _keeps_something(self) -> Self:
        if self.truncate_prompt_tokens == 0:
            message = "truncate_prompt_tokens must be at least 1, or -1 for as many as the context has, got 0"
            raise InvalidRequest(message, "truncate_prompt_tokens")
        return self

    def cut(self, token_ids: list[int], context_length: int) -> list[int]:
        keep = context_length if self.truncate_prompt_tokens == WHOLE_CONTEXT else self.truncate_prompt_tokens
        if keep is None or len(token_ids) <= keep:
            return token_ids
        return token_ids[-keep:] if self.truncation_side == "left" else token_ids[:keep]


class GenerationRequest(CutRequest):
    """What to sample, how to answer and what to save. null is the same as an absent field."""

    max_tokens: int | None = Field(None, ge=0, le=2**31 - 1, description="0: only the prompt is run.")
    min_tokens: int = Field(
        0, ge=0, le=2**31 - 1, description="No end-of-sequence token, stop token or stop string ends a choice before so many tokens."
    )
    temperature: float = Field(1.0, ge=0, le=2, description="0 is greedy.")
    top_p: float = Field(1.0, gt=0, le=1)
    top_k: int = Field(0, ge=-1, le=2**31 - 1, description="0 or -1: no limit.")
    min_p: float = Field(0.0, ge=0, le=1)
    n: int = Field(1, ge=1, le=MAX_CHOICES, description="Choices per prompt.")
    best_of: int | None = Field(None, ge=1, description="Only the value of n: no choice is dropped.")
    seed: int | None = Field(None, ge=-(2**63), le=2**63 - 1)
    stop: Annotated[tuple[str, ...], PlainValidator(_stop), WithJsonSchema(_STOP_SCHEMA)] = Field(
        (), description="Text that ends a choice."
    )
    stop_token_ids: list[TokenId] = Field([], max_length=1024, description="Tokens that end a choice.")
    ignore_eos: bool = Field(False, description="Go on after an end-of-sequence token.")
    include_stop_str_in_output: bool = Field(False, description="Keep the stop string, or the text of the stop token, in the text.")
    skip_special_tokens: bool = Field(True, description="Leave special tokens out of the text.")
    allowed_token_ids: list[TokenId] | None = Field(
        None, min_length=1, max_length=MAX_ALLOWED_TOKENS, description="Only these tokens can be sampled."
    )
    bad_words: Annotated[tuple[str, ...], PlainValidator(_bad_words), WithJsonSchema(_WORDS_SCHEMA)] = Field(
        (), description="Words that are never generated: the last token of each can't follow the others."
    )
    logit_bias: Annotated[Mapping[int, float], PlainValidator(_logit_bias), WithJsonSchema(_BIAS_SCHEMA)] = Field({})
    presence_penalty: float = Field(0.0, ge=-2, le=2)
    frequency_penalty: float = Field(0.0, ge=-2, le=2)
    repetition_penalty: float = Field(1.0, ge=0.01, le=100)
    prompt_logprobs: int | None = Field(
        None, ge=-1, le=2**31 - 1, description="Log-probabilities of the prompt's tokens and of this many likeliest ones; -1: all."
    )
    stream: bool = Field(False, description="Answer with server-sent events.")
    stream_options: StreamOptions | None = Field(None, description="Only with stream.")
    user: Text | None = Field(None, description="Not used.")
    request_id: Text | None = Field(
        None, pattern=REQUEST_ID_PATTERN, description="Kept in the record and the file, and answered in X-Request-Id."
    )
    echo: bool = Field(False, description="What the text goes on with stands before it.")
    return_token_ids: bool = Field(False, description="The answer carries prompt_token_ids and token_ids.")
    return_tokens_as_token_ids: bool = Field(False, description="Log-probabilities name tokens as `token_id:…`.")
    cache_salt: Text = Field("", max_length=1024, description="Cached prefixes are shared only with requests of the same salt.")
    priority: int = Field(0, ge=-(2**31), le=2**31 - 1, description="Lower runs first.")
    kv_transfer_params: TransferParams | None = Field(None, description="What to save.")

    @model_validator(mode="after")
    def _streamed_options(self) -> Self:
        if self.stream_options is not None and not self.stream:
            raise InvalidRequest("stream_options is only allowed with stream: true", "stream_options")
        if self.prompt_logprobs is not None and self.stream:
            raise InvalidRequest("prompt_logprobs is not allowed with stream: true", "prompt_logprobs")
        return self

    @model_validator(mode="after")
    def _every_choice_is_answered(self) -> Self:
        if self.best_of is not None and self.best_of != self.n:
            raise InvalidRequest(f"best_of must be n, which is {self.n}, got {self.best_of}: no choice is dropped", "best_of")
        return self

    @model_validator(mode="after")
    def _no_unknown_report(self) -> Self:
        """An answer without what such a field asks for would be taken for one that has nothing to say of it."""
        for name, value in (self.model_extra or {}).items():
            if name.startswith("return_") and value is not None and name not in self.unsupported:
                raise InvalidRequest(f"{shown_name(name)} is not a known field", shown_name(name))
        return self

    @property
    def num_prompts(self) -> int:
        return 1

    @property
    def token_limit(self) -> int | None:
        """How many tokens may be sampled at most; None where the body doesn't say."""
        return self.max_tokens

    @property
    def num_logprobs(self) -> int | None:
        """How many likeliest tokens are reported beside the sampled one; -1: all; None: no report."""
        raise NotImplementedError

    @property
    def reports_echo(self) -> bool:
        """Whether the echoed prompt stands in the report of log-probabilities."""
        return False
