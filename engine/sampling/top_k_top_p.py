"""Sampling of tokens: filters by top-k, top-p and min-p, then samples from the candidates that remain.

A row is sampled by inverse transform: a single uniform number on the cumulative distribution in token-id order. So a seeded
request needs one random number per token, and rounding of the logits moves its outcome only where the number falls within that rounding
of a border.
"""

from dataclasses import dataclass

import torch

from engine.sampling.logprobs import largest

NUCLEUS_WIDTHS = (512, 8192)
"""On a CPU a nucleus is looked for among so many of the likeliest tokens before the whole vocabulary is sorted."""


@dataclass(frozen=True)
class SamplingBatch:
    """Rows for which a token is to be sampled."""

    scores: torch.Tensor  # [rows, vocab] float32, logits / temperature, up to a constant per row
    top_p: torch.Tensor  # [rows, 1]; 1 or above: no limit
    min_p: torch.Tensor  # [rows, 1]
    uniform: torch.Tensor  # [rows, 1] float64 in [0, 1)

    def select(self, rows: torch.Tensor) -> "SamplingBatch":
        return SamplingBatch(self.scores[rows], self.top_p[rows], self.min_p[rows], self.uniform[rows])


@dataclass(frozen=True)
class Candidates:
    """The candidates of each row: weights that need not sum to one, and the tokens they belong to (None: all, in order)."""

    weights: torch.Tensor  # [rows, candidates]
    ids: torch.Tensor | None = None  # [rows, candidates]


def sample_tokens(batch: SamplingBatch, top_k: int, *, nucleus: bool = True) -> torch.Tensor:
    """Token ids `[rows]`. `top_k` holds for all rows; 0: no limit. `nucleus`: whether some row's `top_p` is below 1.

    On a device other than the CPU the host waits for nothing.
    """
    if top_k:
        return _sample_from_cdf(top_k_candidates(batch, top_k), batch.uniform)
    if not nucleus:
        return _sample_from_cdf(all_candidates(batch), batch.uniform)
    if batch.scores.device.type != "cpu":
        return _sample_from_cdf(nucleus_candidates(batch, batch.scores.shape[-1])[0], batch.uniform)
    return _sample_from_nucleus(batch)


def _sample_from_nucleus(batch: SamplingBatch) -> torch.Tensor:
    rows, vocab = batch.scores.shape
    narrow = [width for width in NUCLEUS_WIDTHS if width < vocab]
    ids = torch.empty(rows, dtype=torch.int64, device=batch.scores.device)
    rest = torch.arange(rows, device=ids.device)
    for width in (*narrow, vocab):
        members = batch.select(rest)
        candidates, complete = nucleus_candidates(members, width)
        ids[rest] = _sample_from_cdf(candidates, members.uniform)
        rest = rest[~complete]
        if not len(rest):
            break
    return ids


def all_candidates(batch: SamplingBatch) -> Candidates:
    """Min-p alone: no order of the tokens is needed."""
    probs = batch.scores.softmax(-1)
    return Candidates(probs.masked_fill(probs < batch.min_p * probs.amax(-1, keepdim=True), 0))


def top_k_candidates(batch: SamplingBatch, top_k: int) -> Candidates:
    """The `top_k` likeliest tokens (of equal ones the lowest ids), and of their distribution what top-p and min-p leave."""
    scores, ids = largest(batch.scores, top_k)
    return Candidates(_apply_top_p_min_p(scores.softmax(-1), batch), ids)


def nucleus_candidates(batch: SamplingBatch, width: int) -> tuple[Candidates, torch.Tensor]:
    """What top-p and min-p leave of the `width` likeliest tokens, and `[rows]` whether no further token would be left."""
    scores, ids = largest(batch.scores, width)
    probs = (scores - batch.scores.logsumexp(-1, keepdim=True)).exp()
    complete = probs.sum(-1, dtype=torch.float64) >= batch.top_p[:, 0]
    weights = _apply_top_p_min_p(probs, batch)
    if width < batch.scores.shape[-1]:
        return Candidates(weights, ids), complete
    return Candidates(torch.empty_like(weights).scatter_(-1, ids, weights)), torch.ones_like(complete)


def _apply_top_p_min_p(probs: torch.Tensor, batch: SamplingBatch) -> torch.Tensor:
    """Zeroes what top-p and min-p drop of probabilities `[rows, candidates]` in descending order.

    Top-p keeps a token if those before it do not reach p (arXiv 1904.09751), min-p if it has min_p times the first one's
    probability (arXiv 2407.01082). The first token always stays.
    """
    before = probs.cumsum(-1, dtype=torch.float64) - probs
    dropped = ((batch.top_p < 1) & (before >= batch.top_p)) | (probs < batch.min_p * probs[:, :1])
    dropped[:, 0] = False
    return probs.masked_fill(dropped, 0)


def _sample_from_cdf(candidates: Candidates, uniform: torch.Tensor) -> torch.Tensor:
    """The inverse of the cumulative distribution, in float64: `[rows]` token ids, never one of weight zero."""
    weights, ids = candidates.weights, candidates.ids
    if ids is not None:
        ids, order = ids.sort(-1)
        weights = weights.gather(-1, order)
    heights = weights.cumsum(-1, dtype=torch.float64)
    total = heights[:, -1:].contiguous()
    target = torch.minimum(uniform * total, total.nextafter(torch.zeros_like(total)))
    index = torch.searchsorted(heights, target, right=True)
    return (index if ids is None else ids.gather(-1, index))[:, 0]
