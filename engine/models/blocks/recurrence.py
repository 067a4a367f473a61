"""Recurrences over packed sequences, from the states that earlier steps have left: a short convolution, gated delta rule, state space.

A run of rows is computed in chunks of `CHUNK` positions, counted from position 0 of its sequence: what a state is at a multiple of `CHUNK`
doesn't depend on how the prompt was cut there. Rows of a run that begins within such a chunk, or ends there, are padded with rows that
change nothing.
"""

from collections.abc import Callable

import torch
from torch.nn.functional import conv1d, pad

from engine.models.base import RecurrentRows, RecurrentRun, RecurrentSingles

CHUNK = 64


def causal_conv(states: RecurrentRows, part: int, inputs: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """Each channel over its last `taps` positions: `[rows, channels]` of `[rows, channels]`; weight `[channels, taps]`, bias `[channels]`.

    The state is the last `taps - 1` inputs, `[taps - 1, channels]`.
    """
    out, cache, taps = torch.empty_like(inputs), states.parts[part], weight.shape[1]
    if states.singles is not None:
        which = states.singles
        seen = torch.cat([cache.index_select(0, which.reads), inputs.index_select(0, which.rows)[:, None]], dim=1)  # [n, taps, channels]
        mixed = (seen * weight.t()).sum(dim=1)
        out.index_copy_(0, which.rows, mixed if bias is None else mixed.add_(bias))
        cache.index_copy_(0, which.writes, seen[:, 1:])
    for run in states.runs:
        rows = inputs[run.first : run.end]
        before = cache[run.read] if run.read else rows.new_zeros(taps - 1, rows.shape[1])
        seen = torch.cat([before, rows])
        out[run.first : run.end] = conv1d(seen.t()[None], weight[:, None], bias, groups=rows.shape[1])[0].t()
        cache[run.write] = seen[len(rows) :]
    return out


def gated_delta_rule(
    states: RecurrentRows, part: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, decay: torch.Tensor, rate: torch.Tensor
) -> torch.Tensor:
    """S = exp(decay) S; S = S + key (rate (value - key S)); out = query S (Gated DeltaNet, arXiv 2412.06464).

    All in float32: query and key `[rows, heads, key_dim]`, value `[rows, heads, value_dim]`, decay and rate `[rows, heads]`; returns
    `[rows, heads, value_dim]`. The state is `[heads, key_dim, value_dim]`.
    """

    def step(of: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        of.mul_(g.exp()[..., None, None])
        change = (v - torch.einsum("nhk,nhkv->nhv", k, of)) * b[..., None]
        of.add_(k[..., None] * change[..., None, :])
        return torch.einsum("nhk,nhkv->nhv", q, of)

    return _recur(states, part, step, _delta_chunks, [query, key, value, decay, rate])


def state_space(
    states: RecurrentRows, part: int, read: torch.Tensor, write: torch.Tensor, inputs: torch.Tensor, decay: torch.Tensor
) -> torch.Tensor:
    """S = exp(decay) S + write inputs; out = read S (Mamba 2, arXiv 2405.21060, section 6: C, B, dt x and dt A).

    All in float32: read and write `[rows, heads, state_dim]`, inputs `[rows, heads, head_dim]`, decay `[rows, heads]`; returns
    `[rows, heads, head_dim]`. The state is `[heads, state_dim, head_dim]`.
    """

    def step(of: torch.Tensor, c: torch.Tensor, b: torch.Tensor, x: torch.Tensor, g: torch.Tensor) -> torch.Tensor:
        of.mul_(g.exp()[..., None, None]).add_(b[..., None] * x[..., None, :])
        return torch.einsum("nhk,nhkv->nhv", c, of)

    return _recur(states, part, step, _space_chunks, [read, write, inputs, decay])


def _recur(
    states: RecurrentRows,
    part: int,
    step: Callable[..., torch.Tensor],
    chunks: Callable[..., torch.Tensor],
    arrays: list[torch.Tensor],
) -> torch.Tensor:
    """Single rows by `step(states, *arrays)` of `[n, heads, …]`, runs by `chunks(state, *arrays)` of `[heads, chunks, CHUNK, …]`; both
    leave new states in the place of the old ones. The third array is as wide as what comes out."""
    out, cache = torch.empty_like(arrays[2]), states.parts[part]
    if states.singles is not None:
        _recur_singles(states.singles, cache, step, arrays, out)
    for run in states.runs:
        state = cache[run.read].clone() if run.read else torch.zeros_like(cache[0])
        out[run.first : run.end] = _recur_run(run, state, chunks, arrays)
        cache[run.write] = state
    return out


def _recur_singles(
    which: RecurrentSingles, cache: torch.Tensor, step: Callable[..., torch.Tensor], arrays: list[torch.Tensor], out: torch.Tensor
) -> None:
    of = cache.index_select(0, which.reads)
    out.index_copy_(0, which.rows, step(of, *(array.index_select(0, which.rows) for array in arrays)))
    cache.index_copy_(0, which.writes, of)


def _recur_run(run: RecurrentRun, state: torch.Tensor, chunks: Callable[..., torch.Tensor], arrays: list[torch.Tensor]) -> torch.Tensor:
    count, before = run.end - run.first, run.start % CHUNK
    behind = -(before + count) % CHUNK
    padded = []
    for array in arrays:
        of_heads = array[run.first : run.end].transpose(0, 1)  # [heads, count, …]
        whole = pad(of_heads, (*(0, 0) * (array.dim() - 2), before, behind))
        padded.append(whole.reshape(len(whole), -1, CHUNK, *whole.shape[2:]))
    return chunks(state, *padded).flatten(1, 2)[:, before : before + count].transpose(0, 1)


def _decays(decay: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Of log decays `[heads, chunks, CHUNK]`: summed up from the chunk's beginning on; and exp of the sums from each position to each
    later one, `[heads, chunks, CHUNK (later), CHUNK]`, 0 from later ones."""
    # In float64: a weak decay behind strong ones is the small difference of two large sums.
    summed = decay.double().cumsum(-1)
    later = torch.ones(CHUNK, CHUNK, dtype=torch.bool, device=decay.device).triu(1)
    return summed, (summed[..., None] - summed[..., None, :]).masked_fill(later, float("-inf")).exp().to(decay.dtype)


def _delta_chunks(
    state: torch.Tensor, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, decay: torch.Tensor, rate: torch.Tensor
) -> torch.Tensor:
    """The rule in its chunk-parallel form (arXiv 2412.06464, section 3.3): within a chunk the changes solve a triangular system, and
    chunks follow each other through their states."""
    summed, between = _decays(decay)
    grown = summed.exp()[..., None].to(decay.dtype)
    weighted = key * rate[..., None]
    system = (weighted @ key.transpose(-1, -2)) * between
    right = torch.cat([value * rate[..., None], weighted * grown], dim=-1)
    solved = torch.linalg.solve_triangular(system, right, upper=False, unitriangular=True)
    values, keys = solved.split_with_sizes([value.shape[-1], key.shape[-1]], dim=-1)
    within, from_state = (query @ key.transpose(-1, -2)) * between, query * grown
    to_state, kept = key * (summed[..., -1:] - summed).exp()[..., None].to(decay.dtype), grown[..., -1:, :]
    out = torch.empty_like(value)
    for number in range(value.shape[1]):
        changes = values[:, number] - keys[:, number] @ state
        out[:, number] = from_state[:, number] @ state + within[:, number] @ changes
        state.mul_(kept[:, number]).add_(to_state[:, number].transpose(-1, -2) @ changes)
    return out


def _space_chunks(state: torch.Tensor, read: torch.Tensor, write: torch.Tensor, inputs: torch.Tensor, decay: torch.Tensor) -> torch.Tensor:
    """The recurrence in its chunk-parallel form (arXiv 2405.21060, section 6)."""
    summed, between = _decays(decay)
    grown = summed.exp()[..., None].to(decay.dtype)
    within = ((read @ write.transpose(-1, -2)) * between) @ inputs
    from_state, kept = read * grown, grown[..., -1:, :]
    changes = (write * (summed[..., -1:] - summed).exp()[..., None].to(decay.dtype)).transpose(-1, -2) @ inputs
    for number in range(inputs.shape[1]):
        within[:, number] += from_state[:, number] @ state
        state.mul_(kept[:, number]).add_(changes[:, number])
    return within
