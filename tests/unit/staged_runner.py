"""The fake device of `core_fakes`, whose captured rows go through staging buffers and copies that end late."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from engine.capture.sink import RowSink, StagedSink
from engine.execution.runner import StepOutput
from engine.execution.step_input import StepInput
from engine.scheduling.plan import Chunk
from tests.unit.core_fakes import FakeRunner
from tests.unit.deferred_stream import DeferredStream

MAX_ROWS = 400


class StagedRunner(FakeRunner):
    """A copy ends when it is awaited, or when the test lets `stream` advance. With `overlap` token ids come by such copies too."""

    stream: DeferredStream

    def make_sink(self) -> RowSink:
        self.stream = DeferredStream()
        self.lands_midway = False
        """The device is so fast that rows land while the host is still at their step."""
        self.fails_behind_another = False
        """Raises for steps that are launched while another is in flight."""
        self.num_ahead = 0
        """Steps that were launched before the tokens of the last one were known."""
        return StagedSink(self.store.rows, MAX_ROWS, torch.device("cpu"), stream=self.stream)

    def collect(self, *, wait: bool = False) -> None:
        if self.lands_midway:
            self.stream.advance(len(self.stream.pending))
        super().collect(wait=wait)

    def compute(self, step: StepInput, chunks: Sequence[Chunk], sampled_before: torch.Tensor | None) -> StepOutput:
        if self.fails_behind_another and sampled_before is not None:
            raise RuntimeError("the device takes nothing")
        self.num_ahead += len(step.unknown_rows) > 0
        output = super().compute(step, chunks, sampled_before)
        self.collect()
        return output
