"""Tokens that a request may not choose next: those it hasn't allowed, those that complete a bad word, and ends that come too early."""

import math
from collections import deque
from collections.abc import Sequence

import torch

from engine.device.streams import to_device
from engine.request import SamplingParams

Completion = tuple[tuple[int, ...], int]
"""The tokens of a bad word but for the last one, and the last one."""


def needs_mask(params: SamplingParams) -> bool:
    return bool(params.min_tokens or params.allowed_token_ids or params.bad_words)


class TokenMask:
    """Belongs to one request, and follows its output token by token."""

    def __init__(self, params: SamplingParams, eos_token_ids: frozenset[int]) -> None:
        self._min_tokens = params.min_tokens
        self._ends = sorted(params.stop_token_ids | eos_token_ids)
        self._allowed = torch.tensor(sorted(set(params.allowed_token_ids)), dtype=torch.int64)
        words = [(word[:-1], word[-1]) for word in params.bad_words]
        self._always_banned = [last for before, last in words if not before]
        self._completions = _by_last_token(words)
        self._recent: deque[int] = deque(maxlen=max((len(before) for before, _ in words), default=0))
        self._num_output = 0

    @classmethod
    def of(cls, params: SamplingParams, eos_token_ids: frozenset[int]) -> "TokenMask | None":
        """None where every token may be chosen."""
        return cls(params, eos_token_ids) if needs_mask(params) else None

    def count(self, token_id: int) -> None:
        """A token was appended to the output."""
        self._num_output += 1
        self._recent.append(token_id)

    def banned(self) -> list[int]:
        """Tokens that may not come next, whatever is allowed."""
        ends = self._ends if self._num_output < self._min_tokens else []
        return [*self._always_banned, *ends, *self._completing()]

    def apply(self, logits: torch.Tensor) -> None:
        """Sets what may not be chosen of the request's `[vocab]` float32 logits to -inf, in place.

        Adding -inf leaves NaN and +inf unsound wherever they stand, so the sampler still sees them. On a device the host waits for nothing.
        """
        if len(self._allowed):
            allowed = to_device(self._allowed, logits.device)
            kept = logits.index_select(0, allowed)
            logits.add_(-math.inf)
            logits.index_copy_(0, allowed, kept)
        banned = self.banned()
        if banned:
            ids, low = torch.tensor(banned), torch.full((len(banned),), -math.inf)
            logits.index_add_(0, to_device(ids, logits.device), to_device(low, logits.device))

    def _completing(self) -> list[int]:
        """Last tokens of bad words whose other tokens have just come."""
        if not self._recent:
            return []
        recent = tuple(self._recent)
        return [last for before, last in self._completions.get(recent[-1], ()) if recent[-len(before) :] == before]


def _by_last_token(words: Sequence[Completion]) -> dict[int, list[Completion]]:
    """Bad words of several tokens by the last but one: the others need not be looked at."""
    found: dict[int, list[Completion]] = {}
    for before, last in words:
        if before:
            found.setdefault(before[-1], []).append((before, last))
    return found
