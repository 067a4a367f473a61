"""One step's input as plain arrays: the same chunks give positions, slots, tables, sampled rows and captured rows.

There is no live object in it, so that another process can run the step.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from engine.attention.facade import GroupInput, StepRows
from engine.attention.index import plan_group
from engine.cache.kv import KVCache
from engine.cache.pool import IntArray
from engine.capture.row_capture import CapturePlan, RowCapture
from engine.layers import LayerId
from engine.scheduling.plan import Chunk


@dataclass(frozen=True)
class CaptureInput:
    """Rows that are wanted of one layer, and where they go."""

    rows: IntArray  # [n], ascending
    slots: IntArray  # [n], row numbers in the store of hidden-state pages


@dataclass(frozen=True, eq=False)
class SlotInput:
    """Where recurrent states come from and go to, of one group: `[sequences]` each."""

    reads: IntArray
    """0: the sequence starts from nothing."""
    writes: IntArray


@dataclass(frozen=True)
class ScoreInput:
    """Rows of one prompt whose next tokens are scored: row `first_row + i` scores token `targets[i]`."""

    first_row: int
    targets: IntArray  # [n]
    num_top: int
    """How many of the likeliest tokens are reported beside each."""


@dataclass(frozen=True, eq=False)
class StepInput:
    """Sequences ordered by the layers they need, most first."""

    token_ids: IntArray  # [rows]
    unknown_rows: IntArray  # [n], rows whose token is one that the step before gives
    unknown_from: IntArray  # [n], which of its sampled rows gives it
    positions: IntArray  # [rows]
    sequences: StepRows
    groups: Mapping[int, GroupInput]
    """By the number of the KV group: those that some row reaches."""
    slots: Mapping[int, SlotInput]
    """By the number of the group of recurrent layers: those that some row reaches."""
    rows_at_layer: Sequence[int]
    """How many leading rows run through each decoder layer."""
    captures: Mapping[LayerId, CaptureInput]
    """Of the last layer and of "norm": rows of what leaves the last layer."""
    sampled_rows: IntArray  # [n], rows of what leaves the last layer whose logits give the next tokens
    scores: Sequence[ScoreInput]
    """Of rows of what leaves the last layer."""
    final_rows: IntArray | None  # [n], ascending
    """The rows that leave the last layer; None: all that reach it."""

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def all_single(self) -> bool:
        """Whether every sequence has one row, which runs through all layers and leaves the last one."""
        return len(self.sequences.starts) == self.num_tokens == self.rows_at_layer[-1] and self.final_rows is None


def in_order(chunks: Sequence[Chunk]) -> list[Chunk]:
    """The order in which chunks stand in a step: those that need the most layers first, so that narrowing is a slice."""
    return sorted(chunks, key=lambda chunk: -chunk.depth)


def build_step(
    chunks: Sequence[Chunk], kv: KVCache, num_layers: int, sampled_before: Sequence[Chunk] = (), *, trim: bool = True
) -> StepInput:
    """Packs chunks that are `in_order`. With `trim`, rows that nobody wants end with the keys and values of the last layer.

    `sampled_before`: the sampled chunks of the step that is in flight, whose tokens aren't known yet.
    """
    rows = StepRows(np.array([c.start for c in chunks], np.int64), np.array([c.count for c in chunks], np.int64))
    firsts = rows.first_rows
    rows_at_layer = _rows_at_layer(chunks, firsts, num_layers)
    captures = _captures(chunks, firsts)
    sampled = np.array([firsts[i + 1] - 1 for i, chunk in enumerate(chunks) if chunk.samples], np.int64)
    scores = [score for i, chunk in enumerate(chunks) if (score := _score(chunk, int(firsts[i])))]
    final = _final_rows(captures, num_layers, sampled, scores, rows_at_layer[-1]) if trim else None
    unknown = [i for i, chunk in enumerate(chunks) if chunk.end > len(chunk.sequence.token_ids)]
    places = {chunk.sequence: place for place, chunk in enumerate(sampled_before)} if unknown else {}
    return StepInput(
        token_ids=_token_ids(chunks),
        unknown_rows=firsts[1:][unknown] - 1,
        unknown_from=np.array([places[chunks[i].sequence] for i in unknown], np.int64),
        positions=rows.positions,
        sequences=rows,
        groups=_groups(chunks, rows, kv, rows_at_layer),
        slots=_slots(chunks, kv, rows_at_layer) if kv.has_recurrent else {},
        rows_at_layer=rows_at_layer,
        captures={layer: _moved(wanted, final) if _is_final(layer, num_layers) else wanted for layer, wanted in captures.items()},
        sampled_rows=_places(sampled, final),
        scores=[ScoreInput(int(_places(np.array([s.first_row]), final)[0]), s.targets, s.num_top) for s in scores],
        final_rows=final,
    )


def _token_ids(chunks: Sequence[Chunk]) -> IntArray:
    """`[rows]`; 0 for those that aren't known."""
    token_ids: list[int] = []
    for chunk in chunks:
        token_ids += chunk.sequence.token_ids[chunk.start : chunk.end]
        if chunk.end > len(chunk.sequence.token_ids):
            token_ids.append(0)
    return np.array(token_ids, np.int64)


def _groups(chunks: Sequence[Chunk], rows: StepRows, kv: KVCache, rows_at_layer: Sequence[int]) -> dict[int, GroupInput]:
    return {
        number: plan_group(rows, [chunk.sequence.tables.blocks[number].array for chunk in chunks], group.spec.block_size, group.spec.border)
        for number, group in enumerate(kv.groups)
        if rows_at_layer[group.spec.layers[0]] and not group.spec.is_recurrent
    }


def _slots(chunks: Sequence[Chunk], kv: KVCache, rows_at_layer: Sequence[int]) -> dict[int, SlotInput]:
    """Of sequences that don't reach a group nothing is read or written there."""
    inputs = {
        number: SlotInput(np.zeros(len(chunks), np.int64), np.zeros(len(chunks), np.int64))
        for number, group in enumerate(kv.groups)
        if rows_at_layer[group.spec.layers[0]] and group.spec.is_recurrent
    }
    for row, chunk in enumerate(chunks):
        for pair in chunk.slots:
            if pair.group in inputs:
                inputs[pair.group].reads[row], inputs[pair.group].writes[row] = pair.read, pair.write
    return inputs


def _rows_at_layer(chunks: Sequence[Chunk], firsts: IntArray, num_layers: int) -> list[int]:
    rows, reached = [0] * num_layers, 0
    for number in range(len(chunks) - 1, -1, -1):  # the shallowest first
        for layer in range(reached, chunks[number].depth):
            rows[layer] = int(firsts[number + 1])
        reached = max(reached, chunks[number].depth)
    return rows


# Captured rows


def _captures(chunks: Sequence[Chunk], firsts: IntArray) -> dict[LayerId, CaptureInput]:
    gathered: dict[LayerId, list[CaptureInput]] = {}
    for layers, group in _by_layers(chunks).items():
        rows, slots = group.captured_rows(chunks, firsts)
        for layer, of_layer in zip(layers, slots, strict=True):
            gathered.setdefault(layer, []).append(CaptureInput(rows, of_layer))
    return {layer: parts[0] if len(parts) == 1 else _joined(parts) for layer, parts in gathered.items()}


@dataclass(slots=True)
class _LayerGroup:
    """The chunks of a step that capture the same layers, by their numbers."""

    page_size: int
    # Chunks of a row each, as most are in steps of text:
    singles: list[int] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)
    pages: list[IntArray] = field(default_factory=list)  # [layers] each
    # Others:
    plans: list[tuple[int, CapturePlan]] = field(default_factory=list)

    def captured_rows(self, chunks: Sequence[Chunk], firsts: IntArray) -> tuple[IntArray, IntArray]:
        """Rows `[n]` of the step, ascending, and their slots `[layers, n]` in the store."""
        parts: list[tuple[IntArray, IntArray]] = []
        if self.singles:
            pages = np.concatenate(self.pages).reshape(len(self.pages), -1)
            parts.append((firsts[self.singles], pages.T * self.page_size + np.array(self.positions) % self.page_size))
        for number, plan in self.plans:
            positions, slots = _capture_of(chunks[number]).slots(plan)
            parts.append((positions + (firsts[number] - chunks[number].start), slots))
        rows, slots = parts[0] if len(parts) == 1 else (np.concatenate(arrays, axis=-1) for arrays in zip(*parts, strict=True))
        if (rows[1:] > rows[:-1]).all():
            return rows, np.ascontiguousarray(slots)
        order = rows.argsort()
        return rows[order], slots[:, order]


def _by_layers(chunks: Sequence[Chunk]) -> dict[tuple[LayerId, ...], _LayerGroup]:
    groups: dict[tuple[LayerId, ...], _LayerGroup] = {}
    layers: tuple[LayerId, ...] | None = None
    for number, chunk in enumerate(chunks):
        capture, plan = chunk.sequence.capture, chunk.rows
        if capture is None or plan is None or not plan.ranges:
            continue
        wanted = capture.spec.layers
        if wanted is not layers and wanted != layers:  # mostly those of the chunk before, which costs less than to look them up
            layers = wanted
            group = groups.get(layers) or groups.setdefault(layers, _LayerGroup(capture.page_size))
        if plan.pages is None:
            group.plans.append((number, plan))
        else:
            group.singles.append(number)
            group.positions.append(plan.end - 1)
            group.pages.append(plan.pages)
    return groups


def _capture_of(chunk: Chunk) -> RowCapture:
    assert chunk.sequence.capture is not None
    return chunk.sequence.capture


def _joined(parts: Sequence[CaptureInput]) -> CaptureInput:
    """In ascending order of the rows, as what leaves the last layer is."""
    rows, slots = np.concatenate([part.rows for part in parts]), np.concatenate([part.slots for part in parts])
    order = rows.argsort()
    return CaptureInput(rows[order], slots[order])


# Rows that leave the last layer


def _is_final(layer: LayerId, num_layers: int) -> bool:
    """Whether the state is taken from what leaves the last layer."""
    return layer in (num_layers, "norm")


def _final_rows(
    captures: Mapping[LayerId, CaptureInput], num_layers: int, sampled: IntArray, scores: Sequence[ScoreInput], reaching: int
) -> IntArray | None:
    """`reaching`: how many rows reach the last layer."""
    wanted = np.zeros(reaching, dtype=bool)
    for layer, capture in captures.items():
        if _is_final(layer, num_layers):
            wanted[capture.rows] = True
    wanted[sampled] = True
    for score in scores:
        wanted[score.first_row : score.first_row + len(score.targets)] = True
    return None if wanted.all() else np.flatnonzero(wanted)


def _places(rows: IntArray, final: IntArray | None) -> IntArray:
    """Rows of the step as rows of what leaves the last layer."""
    return rows if final is None else np.searchsorted(final, rows)


def _moved(wanted: CaptureInput, final: IntArray | None) -> CaptureInput:
    return CaptureInput(_places(wanted.rows, final), wanted.slots)


def scored_range(chunk: Chunk) -> tuple[int, int] | None:
    """Positions of the chunk that score the next token of the prompt and haven't done so before; None where there are none."""
    sequence = chunk.sequence
    if not sequence.wants_prompt_logprobs:
        return None
    position = max(chunk.start, sequence.num_prompt_logprobs - 1)
    end = min(chunk.end, sequence.num_prompt_tokens - 1)
    return (position, end) if position < end else None


def _score(chunk: Chunk, first_row: int) -> ScoreInput | None:
    scored, sequence = scored_range(chunk), chunk.sequence
    if scored is None:
        return None
    targets = np.array(sequence.token_ids[scored[0] + 1 : scored[1] + 1], np.int64)
    return ScoreInput(first_row + scored[0] - chunk.start, targets, sequence.request.sampling.prompt_logprobs or 0)
