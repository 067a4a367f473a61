"""The recurrent states of a step, as the model's layers see them."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from engine.attention.facade import StepRows
from engine.device.packing import arrays_to_device
from engine.execution.step_input import SlotInput
from engine.models.base import RecurrentRows, RecurrentRun, RecurrentSingles


@dataclass(frozen=True)
class RecurrentCache:
    """One group of recurrent layers: what stays from step to step."""

    layers: tuple[int, ...]
    parts: Sequence[torch.Tensor]  # [layers, slots, …] each


class RecurrentStates:
    """Implements `RecurrentContext` for one step."""

    def __init__(self, rows: StepRows, groups: Sequence[tuple[RecurrentCache, SlotInput]]) -> None:
        self._rows = rows
        self._groups = {layer: (cache, number, given) for cache, given in groups for number, layer in enumerate(cache.layers)}
        self._planned: dict[tuple[int, int], tuple[RecurrentSingles | None, list[RecurrentRun]]] = {}

    def rows_of(self, layer: int, num_rows: int) -> RecurrentRows:
        """See `RecurrentContext.rows_of`."""
        cache, number, given = self._groups[layer]
        key = id(given), num_rows
        if key not in self._planned:
            self._planned[key] = self._plan(given, self._rows.num_leading(num_rows), cache.parts[0].device)
        singles, runs = self._planned[key]
        return RecurrentRows([part[number] for part in cache.parts], singles, runs)

    def _plan(self, given: SlotInput, num_sequences: int, device: torch.device) -> tuple[RecurrentSingles | None, list[RecurrentRun]]:
        rows = self._rows
        reads, writes = given.reads[:num_sequences], given.writes[:num_sequences]
        assert (writes > 0).all(), "a sequence lacks a slot"
        assert ((reads > 0) == (rows.starts[:num_sequences] > 0)).all(), "a sequence lacks the state that it goes on from"
        alone = (rows.counts[:num_sequences] == 1) & (reads > 0)
        singles, several = np.flatnonzero(alone), np.flatnonzero(~alone)
        runs = [
            RecurrentRun(first, first + count, start, read, write)
            for first, count, start, read, write in zip(
                *(array[several].tolist() for array in (rows.first_rows, rows.counts, rows.starts, reads, writes)), strict=True
            )
        ]
        if not len(singles):
            return None, runs
        return RecurrentSingles(*arrays_to_device([rows.first_rows[singles], reads[singles], writes[singles]], device)), runs
