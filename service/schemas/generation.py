"""What the bodies of completions and of chat completions have in common."""

import logging
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import ConfigDict, Field, PlainValidator, WithJsonSchema, model_validator

from engine.errors import InvalidRequest
from service.schemas.fields import Body, Text, checked_text, is_number, shown
from service.schemas.transfer import TransferParams
from service.schemas.unsupported import COMMON, refuse_unsupported

log = logging.getLogger(__name__)

MAX_LOGPROBS = 20
MAX_CHOICES = 128
MAX_STOP_STRINGS = 64
MAX_STOP_LENGTH = 1024
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


def _logit_bias(value: object) -> dict[int, float]:
    if not isinstance(value, dict):
        raise InvalidRequest(f"logit_bias must be an object of token id to number, got {shown(value)}", "logit_bias")
    return {_bias_key(key): _bias(bias) for key, bias in value.items()}


def _bias_key(key: str) -> int:
    if key.isascii() and key.isdigit() and len(key) <= 18:
        return int(key)
    raise InvalidRequest(f"logit_bias holds the key {shown(key)}; keys are token ids", "logit_bias")


def _bias(value: object) -> float:
    if isinstance(value, int | float) and is_number(value) and -100 <= value <= 100:
        return float(value)
    raise InvalidRequest(f"logit_bias holds {shown(value)}; values are numbers from -100 to 100", "logit_bias")


TEXT_SCHEMA: dict[str, Any] = {"type": "string", "minLength": 1}
_STOP_SCHEMA = {"anyOf": [TEXT_SCHEMA, {"type": "array", "maxItems": MAX_STOP_STRINGS, "items": TEXT_SCHEMA}]}
_BIAS_SCHEMA = {"type": "object", "additionalProperties": {"type": "number", "minimum": -100, "maximum": 100}, "default": {}}

TokenId = Annotated[int, Field(ge=0)]


class StreamOptions(Body):
    """Options of a streamed answer."""

    model_config = ConfigDict(extra="allow")

    include_usage: bool = Field(False, description="A last chunk without choices carries the usage.")

    @model_validator(mode="after")
    def _known(self) -> Self:
        refuse_unsupported(self.model_extra or {}, COMMON)
        return self


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
        if extra:
            log.debug("ignored fields of a request: %s", ", ".join(sorted(extra))[:500])
        return self


class CutRequest(PromptRequest):
    """A body whose prompt may be cut."""

    truncate_prompt_tokens: int | None = Field(None, ge=1, le=2**31 - 1, description="Keep this many tokens of a longer prompt.")
    truncation_side: Literal["left", "right"] = Field("left", description="Where a longer prompt is cut.")

    def cut(self, token_ids: list[int]) -> list[int]:
        keep = self.truncate_prompt_tokens
        if keep is None or len(token_ids) <= keep:
            return token_ids
        return token_ids[-keep:] if self.truncation_side == "left" else token_ids[:keep]


class GenerationRequest(CutRequest):
    """What to sample, how to answer and what to save. null is the same as an absent field."""

    max_tokens: int | None = Field(None, ge=0, le=2**31 - 1, description="0: only the prompt is run.")
    temperature: float = Field(1.0, ge=0, le=2, description="0 is greedy.")
    top_p: float = Field(1.0, gt=0, le=1)
    top_k: int = Field(0, ge=-1, le=2**31 - 1, description="0 or -1: no limit.")
    min_p: float = Field(0.0, ge=0, le=1)
    n: int = Field(1, ge=1, le=MAX_CHOICES, description="Choices per prompt.")
    seed: int | None = Field(None, ge=-(2**63), le=2**63 - 1)
    stop: Annotated[tuple[str, ...], PlainValidator(_stop), WithJsonSchema(_STOP_SCHEMA)] = Field(
        (), description="Text that ends a choice."
    )
    stop_token_ids: list[TokenId] = Field([], max_length=1024, description="Tokens that end a choice.")
    ignore_eos: bool = Field(False, description="Go on after an end-of-sequence token.")
    logit_bias: Annotated[Mapping[int, float], PlainValidator(_logit_bias), WithJsonSchema(_BIAS_SCHEMA)] = Field({})
    presence_penalty: float = Field(0.0, ge=-2, le=2)
    frequency_penalty: float = Field(0.0, ge=-2, le=2)
    repetition_penalty: float = Field(1.0, ge=0.01, le=100)
    stream: bool = Field(False, description="Answer with server-sent events.")
    stream_options: StreamOptions | None = Field(None, description="Only with stream.")
    user: Text | None = Field(None, description="Not used.")
    request_id: Text | None = Field(
        None, pattern=REQUEST_ID_PATTERN, description="Kept in the record and the file, and answered in X-Request-Id."
    )
    return_token_ids: bool = Field(False, description="The answer carries prompt_token_ids and token_ids.")
    cache_salt: Text = Field("", max_length=1024, description="Cached prefixes are shared only with requests of the same salt.")
    priority: int = Field(0, ge=-(2**31), le=2**31 - 1, description="Lower runs first.")
    kv_transfer_params: TransferParams | None = Field(None, description="What to save.")

    @model_validator(mode="after")
    def _streamed_options(self) -> Self:
        if self.stream_options is not None and not self.stream:
            raise InvalidRequest("stream_options is only allowed with stream: true", "stream_options")
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
        """How many likeliest tokens are reported beside the sampled one; None: no report."""
        raise NotImplementedError

    @property
    def echoes_prompt(self) -> bool:
        return False
