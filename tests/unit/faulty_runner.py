"""The fake runner of `core_fakes`, with steps that raise."""

from __future__ import annotations

import torch

from engine.execution.batch import Batch
from engine.execution.runner import StepResult
from tests.unit.core_fakes import FakeRunner


def run_out_of_memory() -> None:
    """Makes the allocator of the host raise what it raises."""
    torch.empty(1 << 60, dtype=torch.uint8)


class FaultyRunner(FakeRunner):
    """Raises for the requests in `bad`, and runs out of memory over more than `room` tokens or for a request in `large`."""

    late = False
    """Raise when all the work has been done instead of before it."""

    def __init__(self, *arguments: object) -> None:
        super().__init__(*arguments)  # type: ignore[arg-type]  # the fake's own
        self.bad: set[str] = set()
        self.large: set[str] = set()
        self.room: int | None = None
        self.computed: list[list[str]] = []
        """Request ids of every execution that went well."""

    def execute(self, batch: Batch) -> StepResult:
        names = [chunk.sequence.request.request_id for chunk in batch.chunks]
        if not self._is_faulty(names, batch.num_tokens):
            self.computed.append(names)
            return super().execute(batch)
        if self.late:
            self._work_in_vain(batch)
        if self.bad & set(names):
            raise RuntimeError("the model stumbled")
        run_out_of_memory()
        raise AssertionError("there was so much memory after all")

    def _is_faulty(self, names: list[str], num_tokens: int) -> bool:
        return bool((self.bad | self.large) & set(names)) or (self.room is not None and num_tokens > self.room)

    def _work_in_vain(self, batch: Batch) -> None:
        """Caches and pages are written, and nobody hears of it. The fake's own check against writing twice is told to forget it."""
        captured = set(self._captured)
        super().execute(batch)
        self._captured = captured
        for wanted in batch.captures.values():
            self.store.rows[wanted.slots] = torch.nan


class LateFaultyRunner(FaultyRunner):
    late = True
