"""Ranked log-probabilities, with one order everywhere: likeliest first, equal ones by token id."""

from collections.abc import Sequence

import torch

from engine.request import TokenLogprobs

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


def token_logprobs(logits: torch.Tensor, token_ids: Sequence[int], top_n: int) -> list[TokenLogprobs]:
    """Of each row of `[rows, vocab]` float32 logits: its token's log-probability and rank, and the `top_n` likeliest tokens.

    A row that holds NaN or +inf gets NaN for all its log-probabilities.
    """
    step = rows_at_once(logits.shape[-1], logits.device)
    starts = range(0, len(token_ids), step)
    return [found for at in starts for found in _token_logprobs(logits[at : at + step], token_ids[at : at + step], top_n)]


def _token_logprobs(logits: torch.Tensor, token_ids: Sequence[int], top_n: int) -> list[TokenLogprobs]:
    normaliser = logits.logsumexp(-1, keepdim=True)  # [rows, 1]
    sound = logits.amax(-1, keepdim=True).isfinite()
    normaliser = torch.where(sound, normaliser, torch.nan)
    logits = torch.where(sound, logits, 0.0)
    tokens = torch.tensor(token_ids, device=logits.device)[:, None]
    chosen = logits.gather(-1, tokens)
    before = torch.arange(logits.shape[-1], device=logits.device) < tokens
    ranks = 1 + ((logits > chosen) | ((logits == chosen) & before)).sum(-1)
    top: list[list[tuple[int, float]]] = [[] for _ in token_ids]
    if top_n > 0:
        values, ids = largest(logits, top_n)
        values = values - normaliser
        top = [list(zip(*pair, strict=True)) for pair in zip(ids[:, :top_n].tolist(), values[:, :top_n].tolist(), strict=True)]
    columns = zip(token_ids, (chosen - normaliser)[:, 0].tolist(), ranks.tolist(), top, strict=True)
    return [TokenLogprobs(int(token), logprob, rank, likeliest) for token, logprob, rank, likeliest in columns]
