"""Ranked log-probabilities, with one order everywhere: likeliest first, equal ones by token id."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from engine.device.streams import to_device
from engine.request import TokenLogprobs
from engine.sampling.prompt_logprobs import ScoredTokens

TokenIds = np.ndarray[tuple[int], np.dtype[np.int64]]

CPU_ELEMENTS = 1 << 18
"""Rows times vocabulary worked on at once: intermediate results that fit the cache and need no fresh memory from the system."""
GPU_ELEMENTS = 1 << 24


def rows_at_once(vocab_size: int, device: torch.device) -> int:
    """How many rows of logits to work on at once: bounds the memory of intermediate results."""
    return max(1, (CPU_ELEMENTS if device.type == "cpu" else GPU_ELEMENTS) // vocab_size)


def largest(scores: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Values and indices `[rows, count]` of the largest entries of `[rows, n]`, largest first, equal ones by index. No NaN."""
    if count >= scores.shape[-1]:
        values, index = scores.sort(dim=-1, descending=True, stable=True)
        return values, index
    if scores.device.type != "cpu":
        return largest_without_waiting(scores, count)
    values, index = scores.topk(count + 1)  # one more shows whether the last place is shared
    if not (values[:, 1:] == values[:, :-1]).any():
        return values[:, :count], index[:, :count]
    bound = values[:, count - 1 : count]
    above, equal = scores > bound, scores == bound
    room = count - above.sum(-1, keepdim=True)
    index = (above | (equal & (equal.cumsum(-1) <= room))).nonzero()[:, 1].view(-1, count)  # ascending
    values, order = scores.gather(-1, index).sort(dim=-1, descending=True, stable=True)
    return values, index.gather(-1, order)


def largest_without_waiting(scores: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """What `largest` gives, without a look at whether the last place is shared: a device would have to be waited for."""
    bound = scores.topk(count).values[:, -1:]
    above, equal = scores > bound, scores == bound
    room = count - above.sum(-1, keepdim=True)
    kept = above | (equal & (equal.cumsum(-1) <= room))  # just `count` of every row
    index = torch.where(kept, scores, -torch.inf).topk(count).indices.sort(-1).values
    values, order = scores.gather(-1, index).sort(dim=-1, descending=True, stable=True)
    return values, index.gather(-1, order)


@dataclass(frozen=True)
class TokenScores:
    """What `score` finds out of rows of logits."""

    logprobs: torch.Tensor  # [rows, 1 + top] float32: of the row's token, then of the likeliest ones
    numbers: torch.Tensor  # [rows, 1 + top] int64: the token's rank, then the likeliest tokens

    def moved(self, move: Callable[[torch.Tensor], torch.Tensor]) -> "TokenScores":
        return TokenScores(move(self.logprobs), move(self.numbers))

    def of(self, token_ids: TokenIds) -> ScoredTokens:
        """With the tokens that were scored. The scores must be on the host."""
        logprobs, numbers = self.logprobs.numpy(), self.numbers.numpy().astype(np.int32)
        return ScoredTokens(token_ids.astype(np.int32), logprobs[:, 0], numbers[:, 0], numbers[:, 1:], logprobs[:, 1:])


def token_logprobs(logits: torch.Tensor, token_ids: Sequence[int], top_n: int) -> list[TokenLogprobs]:
    """What `score_tokens` gives, as objects."""
    scored = score_tokens(logits, np.array(token_ids, np.int64), top_n)
    return scored.objects(0, len(scored))


def score_tokens(logits: torch.Tensor, token_ids: TokenIds, top_n: int) -> ScoredTokens:
    """What `score` finds out, on the host."""
    return score(logits, to_device(torch.from_numpy(token_ids), logits.device), top_n).moved(torch.Tensor.cpu).of(token_ids)


def score(logits: torch.Tensor, tokens: torch.Tensor, top_n: int) -> TokenScores:
    """Of each row of `[rows, vocab]` float32 logits: its token's log-probability and rank, and the `top_n` likeliest tokens.

    A row that holds NaN or +inf gets NaN for all its log-probabilities. `tokens` `[rows]` are where the logits are; on a device other
    than the CPU the host waits for nothing.
    """
    top, step = min(max(top_n, 0), logits.shape[-1]), rows_at_once(logits.shape[-1], logits.device)
    starts = range(0, max(1, len(tokens)), step)
    return joined([_score(logits[at : at + step], tokens[at : at + step, None], top) for at in starts])


def joined(pieces: Sequence[TokenScores]) -> TokenScores:
    """Rows of the pieces one behind the other; at least one piece."""
    if len(pieces) == 1:
        return pieces[0]
    return TokenScores(torch.cat([piece.logprobs for piece in pieces]), torch.cat([piece.numbers for piece in pieces]))


def _score(logits: torch.Tensor, tokens: torch.Tensor, top: int) -> TokenScores:
    normaliser = logits.logsumexp(-1, keepdim=True)  # [rows, 1]
    sound = logits.amax(-1, keepdim=True).isfinite()
    normaliser = torch.where(sound, normaliser, torch.nan)
    logits = torch.where(sound, logits, 0.0)
    chosen = logits.gather(-1, tokens)
    before = torch.arange(logits.shape[-1], device=logits.device) < tokens
    ranks = 1 + ((logits > chosen) | ((logits == chosen) & before)).sum(-1, keepdim=True)
    likeliest, top_ids = largest(logits, top) if top else (chosen[:, :0], tokens[:, :0])
    return TokenScores(torch.cat([chosen, likeliest], -1) - normaliser, torch.cat([ranks, top_ids], -1))
