"""A request while the engine has it: its tokens, and how far they have been computed."""

import time
from dataclasses import dataclass, field

import torch

from engine.cache.chain import HashChain
from engine.cache.kv import BlockTables
from engine.capture.row_capture import RowCapture
from engine.layers import depth_of
from engine.request import EngineRequest, FinishReason, RequestTimes
from engine.sampling.penalties import Penalties
from engine.sampling.prompt_logprobs import PromptLogprobs


@dataclass(eq=False)
class TokenSequence:
    """`num_cached <= num_computed <= num_planned`, and `num_computed <= target`; they fall back to 0 only in a preemption.

    There is no prefill or decode phase: `num_computed` chases `target`. Between the two counts lie the chunks of steps that are in flight.
    """

    request: EngineRequest
    arrival: int
    num_layers: int
    token_ids: list[int]
    chains: dict[int, HashChain]
    """Block names per block size in use."""
    tables: BlockTables
    capture: RowCapture | None = None
    generator: torch.Generator | None = None
    num_computed: int = 0
    num_planned: int = 0
    """Positions that steps were planned for."""
    num_unknown: int = 0
    """Tokens that steps in flight sample: they follow `token_ids`."""
    num_in_flight: int = 0
    """Steps in flight that it is part of."""
    num_cached: int = 0
    last_turn: int = 0
    """When it last had its turn, or began to wait."""
    blocked_by: tuple[int, ...] | None = None
    """Per KV group the room there was when it was found to lack blocks."""
    awaited: tuple[int, int] = (-1, 0)
    """The arrival of the prompt that computes what this one begins with, and how far that is worth waiting for."""
    started_ns: int | None = None
    """When it got its first blocks, in nanoseconds since 1970."""
    first_token_ns: int | None = None
    generating: bool = field(init=False)
    order: tuple[int, int] = field(init=False)
    """Who goes first: lower priority numbers, then earlier arrivals."""
    finish_reason: FinishReason | None = None
    ended: bool = False
    """The engine has let go of it."""
    prompt_logprobs: PromptLogprobs | None = None
    penalties: Penalties | None = None

    def __post_init__(self) -> None:
        self.generating = self.request.sampling.max_tokens > 0
        self.order = self.request.priority, self.arrival

    def stop_reason(self, token_id: int, eos_token_ids: frozenset[int]) -> tuple[FinishReason | None, int | None]:
        """Why the text ends with its last token, `token_id`, and which token stopped it; None where it goes on.

        Whatever the request's stop checker, foreign code, raises.
        """
        params, checker = self.request.sampling, self.request.stop_checker
        completes = checker is not None and checker.completes_stop(token_id)
        if token_id in params.stop_token_ids or (not params.ignore_eos and token_id in eos_token_ids):
            return "stop", token_id
        if completes:
            return "stop", None
        return ("length", None) if self.num_output_tokens >= params.max_tokens else (None, None)

    def append(self, token_id: int) -> None:
        """Takes over a sampled token. A step that is tried again comes here once, so each token is counted once."""
        self.token_ids.append(token_id)
        if self.penalties is not None:
            self.penalties.count(token_id)

    def times(self) -> RequestTimes:
        """Of a request that ends now."""
        return RequestTimes(self.request.made_ns, self.started_ns, self.first_token_ns, time.time_ns())

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.request.prompt_token_ids)

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def wants_prompt_logprobs(self) -> bool:
        return self.request.sampling.prompt_logprobs is not None

    @property
    def num_prompt_logprobs(self) -> int:
        """Tokens of the prompt whose log-probabilities are known, where they are wanted, the first included, which has none."""
        assert self.prompt_logprobs is not None
        return len(self.prompt_logprobs)

    @property
    def target(self) -> int:
        """Positions to be computed before something happens: a token is sampled, or the sequence is done.

        Where nothing is sampled, nothing behind the last row that is kept need be computed.
        """
        if self.generating:
            return len(self.token_ids)
        if self.num_output_tokens:
            return len(self.token_ids) - (not self.keeps_last_token)
        if self.capture is None:
            return len(self.token_ids)
        kept_end = None if self.wants_prompt_logprobs else self.capture.kept_end
        return len(self.token_ids) if kept_end is None else kept_end

    @property
    def remaining(self) -> int:
        """Positions that may be planned now. A token that isn't known yet can be fed to the model, but nothing may depend on what it is."""
        if not self.num_unknown:
            return (len(self.token_ids) if self.generating else self.target) - self.num_planned
        may_follow = self.generating and self.num_output_tokens + self.num_unknown < self.request.sampling.max_tokens
        return int(may_follow and self.penalties is None)

    @property
    def num_sure(self) -> int:
        """Rows that the sequence is sure to have, whatever tokens come."""
        return len(self.token_ids)

    def samples(self, end: int) -> bool:
        """Whether a chunk that ends there gives a token."""
        return self.generating and end == len(self.token_ids) + self.num_unknown

    @property
    def keeps_last_token(self) -> bool:
        """Whether the last sampled token is fed to the model too, for its row."""
        return self.capture is not None and self.capture.spec.include_last_token

    @property
    def run_depth(self) -> int:
        """Decoder layers that the next rows must run through."""
        if self.generating or self.wants_prompt_logprobs or self.capture is None:
            return self.num_layers
        return depth_of(self.capture.spec.layers, self.num_layers)

    @property
    def num_saved_rows(self) -> int:
        """Rows of the sequence that the save selects from, once the text is done."""
        assert self.capture is not None
        spec, num_output = self.capture.spec, self.num_output_tokens
        if not num_output or not (spec.include_output_tokens or spec.include_last_token):
            return self.num_prompt_tokens
        return len(self.token_ids) - (not self.keeps_last_token)

    @property
    def prefix_limit(self) -> int:
        """How long a cached prefix may be: rows that are read for their logits must be computed."""
        if self.wants_prompt_logprobs and self.num_prompt_logprobs < self.num_prompt_tokens:
            return self.num_prompt_logprobs - 1
        return self.target - self.generating

    @property
    def done(self) -> bool:
        return not self.generating and self.num_computed >= self.target
