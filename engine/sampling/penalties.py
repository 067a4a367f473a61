"""Penalties and biases on logits: per request, in place, only for the requests that ask for them."""

from collections.abc import Sequence

import numpy as np
import torch

from engine.request import SamplingParams


def needs_penalties(params: SamplingParams) -> bool:
    """Whether `penalise` would change anything."""
    return params.repetition_penalty != 1.0 or bool(params.presence_penalty or params.frequency_penalty or params.logit_bias)


def penalise(logits: torch.Tensor, params: SamplingParams, prompt_token_ids: Sequence[int], output_token_ids: Sequence[int]) -> None:
    """Changes one request's `[vocab]` logits in place: repetition penalty, then presence and frequency penalty, then bias."""
    if params.repetition_penalty != 1.0:
        _penalise_repetition(logits, params.repetition_penalty, [*prompt_token_ids, *output_token_ids])
    if output_token_ids and (params.presence_penalty or params.frequency_penalty):
        _penalise_presence(logits, params.presence_penalty, params.frequency_penalty, output_token_ids)
    if params.logit_bias:
        index = torch.tensor(list(params.logit_bias), device=logits.device)
        logits.index_add_(0, index, torch.tensor(list(params.logit_bias.values()), dtype=logits.dtype, device=logits.device))


def _penalise_repetition(logits: torch.Tensor, penalty: float, token_ids: Sequence[int]) -> None:
    """Once per token of prompt and output: positive logits are divided, negative ones multiplied (arXiv 1909.05858, section 4.1)."""
    index = torch.tensor(token_ids, dtype=torch.int64, device=logits.device)
    seen = logits[index]
    logits[index] = torch.where(seen < 0, seen * penalty, seen / penalty)  # a repeated index writes the same value again


def _penalise_presence(logits: torch.Tensor, presence: float, frequency: float, token_ids: Sequence[int]) -> None:
    """logit - count * frequency - (count > 0) * presence, counted over the output, as the OpenAI API defines them."""
    index, counts = np.unique(np.array(token_ids, np.int64), return_counts=True)
    penalties = torch.from_numpy(frequency * counts + presence).to(logits.device, logits.dtype)
    logits.index_add_(0, torch.from_numpy(index).to(logits.device), penalties, alpha=-1)
