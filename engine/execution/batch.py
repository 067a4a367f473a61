"""One step's tokens, packed: the same (sequence, start, count) feeds positions, slots, sampled rows and captured rows."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import torch

from engine.device.streams import to_device
from engine.layers import LayerId
from engine.scheduling.scheduler import Chunk

Rows = np.ndarray[tuple[int], np.dtype[np.int64]]
Slots = np.ndarray[tuple[int, int], np.dtype[np.int64]]


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
        return hidden.index_select(0, to_device(self.rows, hidden.device))


@dataclass(frozen=True)
class Batch:
    """Chunks ordered by the layers they need, most first."""

    chunks: Sequence[Chunk]
    token_ids: torch.Tensor  # [rows] int64, host
    positions: torch.Tensor  # [rows] int64, host
    rows_at_layer: Sequence[int]
    captures: dict[LayerId, CaptureRows]
    """Of the last layer and of "norm": rows of what leaves the last layer."""
    sampled: Sequence[Chunk]
    """Chunks whose last row's logits give the next token."""
    sampled_rows: Sequence[int]
    """Rows of what leaves the last layer."""
    logprob_rows: Sequence[tuple[Chunk, int, int]]
    """`(chunk, first row, first position)` of prompts whose tokens are to be scored: the row at position p scores the token at p + 1.
    Rows of what leaves the last layer."""
    final_rows: torch.Tensor | None  # [n] int64, host
    """The rows of the batch that leave the last layer; None: all that reach it."""

    @property
    def num_tokens(self) -> int:
        return self.token_ids.numel()


def build_batch(planned: Sequence[Chunk], num_layers: int, *, trim: bool = True) -> Batch:
    """Packs the chunks of a step. With `trim`, rows that nobody wants end with the keys and values of the last layer."""
    chunks = sorted(planned, key=lambda chunk: -chunk.sequence.run_depth)
    firsts = [0, *accumulate(chunk.count for chunk in chunks)]
    token_ids = [token for chunk in chunks for token in chunk.sequence.token_ids[chunk.start : chunk.end]]
    positions = _positions(chunks, firsts)
    sampled = [(c, first + c.count - 1) for c, first in zip(chunks, firsts, strict=False) if _is_sampled(c)]
    scored = [scored for c, first in zip(chunks, firsts, strict=False) if (scored := _scored_rows(c, first))]
    rows_at_layer = _rows_at_layer(chunks, firsts, num_layers)
    captures = _captures(chunks, firsts)
    final = _FinalRows.of(captures, num_layers, sampled, scored, rows_at_layer[-1] if trim else 0)
    return Batch(
        chunks=chunks,
        token_ids=torch.tensor(token_ids, dtype=torch.int64),
        positions=torch.from_numpy(positions),
        rows_at_layer=rows_at_layer,
        captures=final.moved(captures, num_layers),
        sampled=[chunk for chunk, _ in sampled],
        sampled_rows=final.places([row for _, row in sampled]).tolist(),
        logprob_rows=[(chunk, int(final.places([row])[0]), position) for chunk, row, position in scored],
        final_rows=None if final.rows is None else torch.from_numpy(final.rows),
    )


def _positions(chunks: Sequence[Chunk], firsts: Sequence[int]) -> Rows:
    """Of every row: its place in the batch, moved by what its chunk is moved."""
    shifts = [chunk.start - first for chunk, first in zip(chunks, firsts, strict=False)]
    return np.arange(firsts[-1]) + np.repeat(np.array(shifts, dtype=np.int64), [chunk.count for chunk in chunks])


class _FinalRows:
    """Which rows leave the last layer, and where each of them stands among those that do."""

    def __init__(self, rows: Rows | None) -> None:
        self.rows = rows

    @classmethod
    def of(
        cls,
        captures: Mapping[LayerId, "CaptureRows"],
        num_layers: int,
        sampled: Sequence[tuple[Chunk, int]],
        scored: Sequence[tuple[Chunk, int, int]],
        reaching: int,
    ) -> "_FinalRows":
        """`reaching`: how many rows reach the last layer."""
        wanted = np.zeros(reaching, dtype=bool)
        if not reaching:
            return cls(None)
        for layer in _leaving(num_layers):
            if layer in captures:
                wanted[captures[layer].rows.numpy()] = True
        wanted[[row for _, row in sampled]] = True
        for chunk, row, position in scored:
            wanted[row : row + num_scored(chunk, position)] = True
        return cls(None if wanted.all() else np.flatnonzero(wanted))

    def places(self, rows: Rows | Sequence[int]) -> Rows:
        """Rows of the batch as rows of what leaves the last layer."""
        given = np.asarray(rows, dtype=np.int64)
        return given if self.rows is None else np.searchsorted(self.rows, given)

    def moved(self, captures: dict[LayerId, "CaptureRows"], num_layers: int) -> dict[LayerId, "CaptureRows"]:
        leaving = _leaving(num_layers)
        return {
            layer: CaptureRows(torch.from_numpy(self.places(wanted.rows.numpy())), wanted.slots) if layer in leaving else wanted
            for layer, wanted in captures.items()
        }


def _leaving(num_layers: int) -> tuple[LayerId, LayerId]:
    """The states that are taken from what leaves the last layer."""
    return num_layers, "norm"


def _is_sampled(chunk: Chunk) -> bool:
    return chunk.sequence.generating and chunk.end == len(chunk.sequence.token_ids)


def _rows_at_layer(chunks: Sequence[Chunk], firsts: Sequence[int], num_layers: int) -> list[int]:
    rows, reached = [0] * num_layers, 0
    for chunk, first in zip(reversed(chunks), reversed(firsts[:-1]), strict=True):  # the shallowest first
        for layer in range(reached, chunk.sequence.run_depth):
            rows[layer] = first + chunk.count
        reached = max(reached, chunk.sequence.run_depth)
    return rows


def _captures(chunks: Sequence[Chunk], firsts: Sequence[int]) -> dict[LayerId, CaptureRows]:
    gathered: dict[LayerId, list[tuple[Rows, Rows]]] = {}
    single_rows: dict[tuple[LayerId, ...], _SingleRows] = {}
    for chunk, first in zip(chunks, firsts, strict=False):
        capture = chunk.sequence.capture
        if capture is None:
            continue
        layers, shift = capture.spec.layers, first - chunk.start
        single = capture.planned_row()
        if single is not None:
            single_rows.setdefault(layers, _SingleRows(capture.page_size)).add(single, shift)
        elif (planned := capture.planned()) is not None:
            _add_rows(gathered, layers, planned[0] + shift, planned[1])
    for layers, singles in single_rows.items():
        _add_rows(gathered, layers, *singles.arrays())
    return {layer: _joined(parts) for layer, parts in gathered.items()}


class _SingleRows:
    """Rows of chunks that capture one each, of the same layers: turned into arrays together."""

    def __init__(self, page_size: int) -> None:
        self._page_size = page_size
        self._rows: list[int] = []
        self._offsets: list[int] = []
        self._pages: list[tuple[int, ...]] = []

    def add(self, planned: tuple[int, tuple[int, ...]], shift: int) -> None:
        position, pages = planned
        self._rows.append(position + shift)
        self._offsets.append(position % self._page_size)
        self._pages.append(pages)

    def arrays(self) -> tuple[Rows, Slots]:
        """Rows `[n]` of the batch and their slots `[layers, n]` in the store."""
        pages = np.array(self._pages, dtype=np.int64).T  # [layers, n]
        return np.array(self._rows, dtype=np.int64), pages * self._page_size + np.array(self._offsets, dtype=np.int64)


def _add_rows(gathered: dict[LayerId, list[tuple[Rows, Rows]]], layers: tuple[LayerId, ...], rows: Rows, slots: Slots) -> None:
    for layer, of_layer in zip(layers, slots, strict=True):
        gathered.setdefault(layer, []).append((rows, of_layer))


def _joined(parts: list[tuple[Rows, Rows]]) -> CaptureRows:
    """In ascending order of the rows, as what leaves the last layer is."""
    rows, slots = (np.concatenate(arrays) for arrays in zip(*parts, strict=True))
    order = rows.argsort()
    return CaptureRows(torch.from_numpy(rows[order]), torch.from_numpy(slots[order]))


def _scored_rows(chunk: Chunk, first: int) -> tuple[Chunk, int, int] | None:
    if not chunk.sequence.wants_prompt_logprobs:
        return None
    position = max(chunk.start, len(chunk.sequence.prompt_logprobs) - 1, 0)
    return (chunk, first + position - chunk.start, position) if num_scored(chunk, position) > 0 else None


def num_scored(chunk: Chunk, position: int) -> int:
    """How many rows from `position` on score a token of the prompt."""
    return min(chunk.end, chunk.sequence.num_prompt_tokens - 1) - position
