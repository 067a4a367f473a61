"""The fake device of `core_fakes`, with steps that raise."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from engine.execution.runner import StepOutput
from engine.execution.step_input import StepInput
from engine.scheduling.plan import Chunk
from tests.unit.core_fakes import FakeRunner
from tests.unit.staged_runner import StagedRunner


def run_out_of_memory() -> None:
    """Makes the allocator of the host raise what it raises."""
    torch.empty(1 << 60, dtype=torch.uint8)


class FaultyRunner(FakeRunner):
    """Raises for the requests in `bad`, and runs out of memory over more than `room` tokens or for a request in `large`."""

    late = False
    """Raise when all the work has been done instead of before it."""

    def make_faults(self) -> None:
        self.bad: set[str] = set()
        self.large: set[str] = set()
        self.room: int | None = None
        self.computed: list[list[str]] = []
        """Request ids of every execution that went well."""

    def __init__(self, *arguments: object) -> None:
        super().__init__(*arguments)  # type: ignore[arg-type]  # the fake's own
        self.make_faults()

    def compute(self, step: StepInput, chunks: Sequence[Chunk], sampled_before: torch.Tensor | None) -> StepOutput:
        names = [chunk.sequence.request.request_id for chunk in chunks]
        if not self._is_faulty(names, step.num_tokens):
            self.computed.append(names)
            return super().compute(step, chunks, sampled_before)
        if self.late:  # caches and pages are written, and nobody hears of it
            super().compute(step, chunks, sampled_before)
            self.forget(chunks)
        if self.bad & set(names):
            raise RuntimeError("the model stumbled")
        run_out_of_memory()
        raise AssertionError("there was so much memory after all")

    def _is_faulty(self, names: list[str], num_tokens: int) -> bool:
        return bool((self.bad | self.large) & set(names)) or (self.room is not None and num_tokens > self.room)


class LateFaultyRunner(FaultyRunner):
    late = True


class StagedFaultyRunner(FaultyRunner, StagedRunner):
    """Rows of the parts of a step that was split land late."""
