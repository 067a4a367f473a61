"""Penalties, biases and masks on logits: per request, in place, only for the requests that ask for them."""

from collections.abc import Sequence

import numpy as np
import torch

from engine.device.streams import to_device
from engine.request import SamplingParams
from engine.sampling.token_mask import TokenMask, needs_mask

Numbers = np.ndarray[tuple[int], np.dtype[np.int64]]
_FIRST_CAPACITY = 16


def needs_penalties(params: SamplingParams) -> bool:
    """Whether a request's logits are changed at all."""
    penalised = params.repetition_penalty != 1.0 or bool(params.presence_penalty or params.frequency_penalty)
    return penalised or bool(params.logit_bias) or needs_mask(params)


class TokenCounts:
    """The distinct tokens of a text, and how often each stands in its output: read once from the prompt, then added to.

    Memory follows the distinct tokens, not the vocabulary.
    """

    def __init__(self, prompt_token_ids: Sequence[int]) -> None:
        ordered = np.sort(np.fromiter(prompt_token_ids, np.int64, len(prompt_token_ids)))
        self._prompt_ids = ordered[np.diff(ordered, prepend=-1) > 0]  # ascending; no id is below 0
        self._seen = _GrowingArray(self._prompt_ids)
        self._output = _GrowingArray()
        self._counts = _GrowingArray()
        self._places: dict[int, int] = {}
        """Of the output's distinct tokens, by token id."""

    @property
    def seen(self) -> Numbers:
        """`[n]`: each token of prompt and output once."""
        return self._seen.values

    @property
    def output(self) -> tuple[Numbers, Numbers]:
        """`[n]` and `[n]`: each token of the output once, and how often it stands there."""
        return self._output.values, self._counts.values

    def add(self, token_id: int) -> None:
        """Appends a token to the output."""
        place = self._places.setdefault(token_id, len(self._places))
        if place == len(self._output.values):
            self._output.append(token_id)
            self._counts.append(0)
            if not self._in_prompt(token_id):
                self._seen.append(token_id)
        self._counts.values[place] += 1

    def _in_prompt(self, token_id: int) -> bool:
        place = int(np.searchsorted(self._prompt_ids, token_id))
        return place < len(self._prompt_ids) and int(self._prompt_ids[place]) == token_id


class Penalties:
    """How one request's logits are changed. Made once per request; counts each token of its output once, when it is appended."""

    def __init__(self, params: SamplingParams, prompt_token_ids: Sequence[int], eos_token_ids: frozenset[int] = frozenset()) -> None:
        self._params = params
        self._mask = TokenMask.of(params, eos_token_ids)
        self._counts = TokenCounts(prompt_token_ids if params.repetition_penalty != 1.0 else ())
        self._bias_ids = torch.tensor(list(params.logit_bias), dtype=torch.int64)
        self._biases = torch.tensor(list(params.logit_bias.values()), dtype=torch.float32)

    @classmethod
    def of(cls, params: SamplingParams, prompt_token_ids: Sequence[int], eos_token_ids: frozenset[int] = frozenset()) -> "Penalties | None":
        """None where the request's logits stay as they are."""
        return cls(params, prompt_token_ids, eos_token_ids) if needs_penalties(params) else None

    def count(self, token_id: int) -> None:
        """A token was appended to the output."""
        self._counts.add(token_id)
        if self._mask is not None:
            self._mask.count(token_id)

    def apply(self, logits: torch.Tensor) -> None:
        """Changes the request's `[vocab]` float32 logits in place: repetition penalty, presence and frequency penalty, bias, then the mask.

        On a device other than the CPU the host waits for nothing.
        """
        params, (output, counts) = self._params, self._counts.output
        if params.repetition_penalty != 1.0:
            _penalise_repetition(logits, params.repetition_penalty, self._counts.seen)
        if len(output) and (params.presence_penalty or params.frequency_penalty):
            _penalise_presence(logits, params.presence_penalty, params.frequency_penalty, output, counts)
        if params.logit_bias:
            logits.index_add_(0, to_device(self._bias_ids, logits.device), to_device(self._biases, logits.device))
        if self._mask is not None:
            self._mask.apply(logits)


def _penalise_repetition(logits: torch.Tensor, penalty: float, token_ids: Numbers) -> None:
    """Once per token of prompt and output: positive logits are divided, negative ones multiplied (arXiv 1909.05858, section 4.1)."""
    index = to_device(torch.from_numpy(token_ids), logits.device)
    seen = logits[index]
    logits[index] = torch.where(seen < 0, seen * penalty, seen / penalty)


def _penalise_presence(logits: torch.Tensor, presence: float, frequency: float, token_ids: Numbers, counts: Numbers) -> None:
    """logit - count * frequency - (count > 0) * presence, counted over the output, as the OpenAI API defines them."""
    index = to_device(torch.from_numpy(token_ids), logits.device)
    penalties = torch.from_numpy((frequency * counts + presence).astype(np.float32))
    logits.index_add_(0, index, to_device(penalties, logits.device), alpha=-1)


class _GrowingArray:
    """Whole numbers that are appended to, in memory whose capacity doubles."""

    def __init__(self, initial: Numbers | None = None) -> None:
        self._length = 0 if initial is None else len(initial)
        self._memory = np.empty(_FIRST_CAPACITY, np.int64) if initial is None else initial

    @property
    def values(self) -> Numbers:
        """`[n]`, a view that may be written to; it holds until the next `append`."""
        return self._memory[: self._length]

    def append(self, value: int) -> None:
        if self._length == len(self._memory):
            grown = np.empty(max(_FIRST_CAPACITY, 2 * self._length), np.int64)
            grown[: self._length] = self._memory
            self._memory = grown
        self._memory[self._length] = value
        self._length += 1
