"""Log-probabilities of many tokens as plain arrays, which take a tenth of what objects would."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import overload

import numpy as np

from engine.request import SamplingParams, TokenLogprobs

Integers = np.ndarray[tuple[int], np.dtype[np.int32]]
Floats = np.ndarray[tuple[int], np.dtype[np.float32]]
IntegerRows = np.ndarray[tuple[int, int], np.dtype[np.int32]]
FloatRows = np.ndarray[tuple[int, int], np.dtype[np.float32]]

_NUMBER_BYTES = 4
"""Of each number that is kept."""
_OBJECTS_AT_ONCE = 256
"""How many objects are made at a time where all of them are read."""


@dataclass(frozen=True)
class ScoredTokens:
    """Tokens with their log-probabilities and ranks, and the likeliest tokens in their places, likeliest first."""

    token_ids: Integers  # [n]
    logprobs: Floats  # [n]
    ranks: Integers  # [n]
    top_ids: IntegerRows  # [n, top]
    top_logprobs: FloatRows  # [n, top]

    @classmethod
    def empty(cls, count: int, top: int) -> "ScoredTokens":
        """Memory for so many, to be filled by `put`."""
        single, rows = (count,), (count, top)
        return cls(
            np.empty(single, np.int32),
            np.empty(single, np.float32),
            np.empty(single, np.int32),
            np.empty(rows, np.int32),
            np.empty(rows, np.float32),
        )

    def __len__(self) -> int:
        return len(self.token_ids)

    @property
    def nbytes(self) -> int:
        return sum(array.nbytes for array in (self.token_ids, self.logprobs, self.ranks, self.top_ids, self.top_logprobs))

    def put(self, at: int, other: "ScoredTokens") -> None:
        """Copies all of `other` to the places from `at` on."""
        places = slice(at, at + len(other))
        self.token_ids[places] = other.token_ids
        self.logprobs[places] = other.logprobs
        self.ranks[places] = other.ranks
        self.top_ids[places] = other.top_ids
        self.top_logprobs[places] = other.top_logprobs

    def objects(self, start: int, end: int) -> list[TokenLogprobs]:
        """The places `start` to `end - 1`."""
        places = slice(start, end)
        tops = zip(self.top_ids[places].tolist(), self.top_logprobs[places].tolist(), strict=True)
        columns = zip(self.token_ids[places].tolist(), self.logprobs[places].tolist(), self.ranks[places].tolist(), tops, strict=True)
        return [TokenLogprobs(token, logprob, rank, list(zip(*top, strict=True))) for token, logprob, rank, top in columns]


class PromptLogprobs(Sequence[TokenLogprobs | None]):
    """Log-probabilities of a prompt's tokens, None for the first: as many as are known so far. Its memory is all there from the start.

    An entry becomes an object when it is read, so whoever reads all of them should let go of each before the next.
    """

    def __init__(self, num_tokens: int, top: int) -> None:
        """`num_tokens`: the prompt's length, at least 1. `top`: how many of the likeliest tokens are kept per place."""
        self._scored = ScoredTokens.empty(num_tokens - 1, top)
        self._num_scored = 0

    @classmethod
    def of(cls, num_tokens: int, params: SamplingParams, vocab_size: int) -> "PromptLogprobs | None":
        """None where none are asked for."""
        top = _num_top(params, vocab_size)
        return None if top is None else cls(num_tokens, top)

    @staticmethod
    def bytes_for(num_tokens: int, top: int) -> int:
        """What the arrays for a prompt of so many tokens take."""
        return _NUMBER_BYTES * (num_tokens - 1) * (3 + 2 * top)

    @property
    def nbytes(self) -> int:
        return self._scored.nbytes

    def extend(self, scored: ScoredTokens) -> None:
        """Takes those of the next tokens."""
        assert self._num_scored + len(scored) <= len(self._scored), "more log-probabilities than the prompt has tokens"
        self._scored.put(self._num_scored, scored)
        self._num_scored += len(scored)

    def __len__(self) -> int:
        return 1 + self._num_scored

    @overload
    def __getitem__(self, index: int) -> TokenLogprobs | None: ...
    @overload
    def __getitem__(self, index: slice) -> list[TokenLogprobs | None]: ...
    def __getitem__(self, index: int | slice) -> TokenLogprobs | list[TokenLogprobs | None] | None:
        if isinstance(index, slice):
            return [self._at(position) for position in range(*index.indices(len(self)))]
        return self._at(range(len(self))[index])

    def __iter__(self) -> Iterator[TokenLogprobs | None]:
        yield None
        for at in range(0, self._num_scored, _OBJECTS_AT_ONCE):
            yield from self._scored.objects(at, min(at + _OBJECTS_AT_ONCE, self._num_scored))

    def _at(self, position: int) -> TokenLogprobs | None:
        return None if position == 0 else self._scored.objects(position - 1, position)[0]


def prompt_logprobs_bytes(num_tokens: int, params: SamplingParams, vocab_size: int) -> int:
    """What the log-probabilities that a request wants of its prompt take in memory."""
    top = _num_top(params, vocab_size)
    return 0 if top is None else PromptLogprobs.bytes_for(num_tokens, top)


def _num_top(params: SamplingParams, vocab_size: int) -> int | None:
    """There are no more likeliest tokens than the vocabulary has."""
    return None if params.prompt_logprobs is None else min(max(params.prompt_logprobs, 0), vocab_size)
