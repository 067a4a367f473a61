"""One step's tokens, packed: the same (sequence, start, count) feeds positions, slots, sampled rows and captured rows."""

from collections.abc import Sequence as List
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import torch

from engine.layers import LayerId
from engine.scheduler import Chunk


@dataclass(frozen=True)
class CaptureRows:
    """Rows of the batch that are wanted of one layer, and where they go."""

    rows: torch.Tensor  # [n] int64, host
    slots: torch.Tensor  # [n] int64, host

    def select(self, hidden: torch.Tensor) -> torch.Tensor:
        """The wanted rows of `hidden`: a slice where they stand side by side, as they mostly do."""
        first, last, count = int(self.rows[0]), int(self.rows[-1]), self.rows.numel()
        if last - first + 1 == count:
            return hidden[first : last + 1]
        return hidden.index_select(0, self.rows.to(hidden.device))


@dataclass(frozen=True)
class Batch:
    """Chunks ordered by the layers they need, most first."""

    chunks: List[Chunk]
    token_ids: torch.Tensor  # [rows] int64, host
    positions: torch.Tensor  # [rows] int64, host
    rows_at_layer: List[int]
    captures: dict[LayerId, CaptureRows]
    sampled: List[Chunk]
    """Chunks whose last row's logits give the next token."""
    sampled_rows: List[int]
    logprob_rows: List[tuple[Chunk, int, int]]
    """`(chunk, first row, first position)` of prompts whose tokens are to be scored: the row at position p scores the token at p + 1."""

    @property
    def num_tokens(self) -> int:
        return self.token_ids.numel()


def build_batch(planned: List[Chunk], num_layers: int) -> Batch:
    """Packs the chunks of a step."""
    chunks = sorted(planned, key=lambda chunk: -chunk.sequence.run_depth)
    firsts = [0, *accumulate(chunk.count for chunk in chunks)]
    token_ids = [token for chunk in chunks for token in chunk.sequence.token_ids[chunk.start : chunk.end]]
    positions = np.concatenate([np.arange(chunk.start, chunk.end) for chunk in chunks])
    sampled = [(c, first + c.count - 1) for c, first in zip(chunks, firsts, strict=False) if _is_sampled(c)]
    return Batch(
        chunks=chunks,
        token_ids=torch.tensor(token_ids, dtype=torch.int64),
        positions=torch.from_numpy(positions),
        rows_at_layer=_rows_at_layer(chunks, firsts, num_layers),
        captures=_captures(chunks, firsts),
        sampled=[chunk for chunk, _ in sampled],
        sampled_rows=[row for _, row in sampled],
        logprob_rows=[scored for c, first in zip(chunks, firsts, strict=False) if (scored := _scored_rows(c, first))],
    )


def _is_sampled(chunk: Chunk) -> bool:
    return chunk.sequence.generating and chunk.end == len(chunk.sequence.token_ids)


def _rows_at_layer(chunks: List[Chunk], firsts: List[int], num_layers: int) -> list[int]:
    rows = [0] * num_layers
    for chunk, first in zip(chunks, firsts, strict=False):
        for layer in range(chunk.sequence.run_depth):
            rows[layer] = first + chunk.count
    return rows


def _captures(chunks: List[Chunk], firsts: List[int]) -> dict[LayerId, CaptureRows]:
    rows: dict[LayerId, list[np.ndarray]] = {}
    slots: dict[LayerId, list[np.ndarray]] = {}
    for chunk, first in zip(chunks, firsts, strict=False):
        planned = chunk.sequence.capture.planned() if chunk.sequence.capture else None
        if chunk.sequence.capture is None or planned is None:
            continue
        positions, layer_slots = planned
        for index, layer in enumerate(chunk.sequence.capture.spec.layers):
            rows.setdefault(layer, []).append(positions - chunk.start + first)
            slots.setdefault(layer, []).append(layer_slots[index])
    return {
        layer: CaptureRows(torch.from_numpy(np.concatenate(rows[layer])), torch.from_numpy(np.concatenate(slots[layer]))) for layer in rows
    }


def _scored_rows(chunk: Chunk, first: int) -> tuple[Chunk, int, int] | None:
    sequence = chunk.sequence
    if not sequence.wants_prompt_logprobs:
        return None
    position = max(chunk.start, len(sequence.prompt_logprobs) - 1, 0)
    if position >= min(chunk.end, sequence.num_prompt_tokens - 1):
        return None
    return chunk, first + position - chunk.start, position
