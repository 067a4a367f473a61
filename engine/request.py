"""A request as the engine sees it, and what it answers."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

from engine.errors import EngineError
from engine.saves.spec import SaveSpec

FinishReason = Literal["stop", "length", "abort", "error"]


class StopChecker(Protocol):
    """Text-level stop conditions, asked on the engine thread once per sampled token."""

    def completes_stop(self, token_id: int) -> bool:
        """Whether the text that ends with this token contains a stop string. Called once per token, in order."""


@dataclass(frozen=True)
class SamplingParams:
    """How tokens are chosen. Ranges are checked where the request is made (`service/schemas`)."""

    max_tokens: int = 16
    """0: the prompt is run and nothing is sampled."""
    temperature: float = 1.0
    """0 is greedy."""
    top_p: float = 1.0
    top_k: int = 0
    """0 or below: no limit."""
    min_p: float = 0.0
    seed: int | None = None
    stop_token_ids: frozenset[int] = frozenset()
    ignore_eos: bool = False
    logprobs: int | None = None
    """How many of the likeliest tokens are reported beside the sampled one; None: no log-probabilities."""
    prompt_logprobs: int | None = None
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    min_tokens: int = 0
    """Before so many tokens neither a stop token nor an end-of-sequence token can be chosen."""
    allowed_token_ids: Sequence[int] = ()
    """Only these can be chosen; empty: all."""
    bad_words: Sequence[tuple[int, ...]] = ()
    """Sequences of tokens, none empty, that the output never holds: the last token can't be chosen where the others have just come."""


@dataclass(frozen=True)
class EngineRequest:
    """One prompt, one choice. `n` choices are `n` requests."""

    request_id: str
    prompt_token_ids: Sequence[int]
    sampling: SamplingParams = SamplingParams()
    save: SaveSpec | None = None
    priority: int = 0
    """Lower runs first."""
    cache_salt: str = ""
    """Requests share cached prefixes only with requests of the same salt."""
    stop_checker: StopChecker | None = None
    client_request_id: str | None = None
    """What the client calls the request that this one belongs to: for log lines, it need not be unique."""
    made_ns: int = field(default_factory=time.time_ns, compare=False)
    """When it was made, in nanoseconds since 1970: its time in the queue is counted from here."""

    @property
    def log_fields(self) -> dict[str, str]:
        """What log lines about the request say of it."""
        known = {} if self.save is None else self.save.log_fields
        return known | {"request_id": self.client_request_id or self.request_id}


@dataclass(frozen=True)
class RequestTimes:
    """What happened to a request when, in nanoseconds since 1970; None: it didn't."""

    made: int
    started: int | None
    """It was given its first blocks; what happens after a preemption doesn't change this."""
    first_token: int | None
    ended: int
    """The text was done, or the request failed or was aborted."""


@dataclass(frozen=True)
class TokenLogprobs:
    """Log-probabilities at one position, from the model's own distribution (before temperature, penalties and bias)."""

    token_id: int
    logprob: float
    rank: int
    """1 is the likeliest token."""
    top: Sequence[tuple[int, float]] = ()
    """The likeliest tokens, likeliest first."""


@dataclass(slots=True)
class RequestOutput:
    """What one step added to one request. `finish_reason` marks the last one: the text is done; its save may not be."""

    request_id: str
    token_ids: Sequence[int] = ()
    logprobs: Sequence[TokenLogprobs] | None = None
    prompt_logprobs: Sequence[TokenLogprobs | None] | None = None
    """Once, with the first output, where asked for: None for the first position."""
    finish_reason: FinishReason | None = None
    stop_token_id: int | None = None
    """The token that ended the text, where one of `stop_token_ids` or an end-of-sequence token did."""
    num_cached_tokens: int = 0
    error: EngineError | None = None
    """With `finish_reason` "error"."""
    times: RequestTimes | None = field(default=None, compare=False)
    """With the last output of a request that the engine had taken in."""
