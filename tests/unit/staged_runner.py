"""The fake runner of `core_fakes`, whose captured rows go through staging buffers and copies that end late."""

from __future__ import annotations

from dataclasses import replace

import torch

from engine.cache.kv import KVCache
from engine.cache.states import StateStore
from engine.capture.sink import StagedSink
from engine.execution.batch import Batch
from engine.execution.runner import StepResult
from tests.unit.core_fakes import FakeRunner
from tests.unit.deferred_stream import DeferredStream

MAX_ROWS = 400


class StagedRunner(FakeRunner):
    """A copy ends when it is awaited, or when the test lets `stream` advance."""

    def __init__(self, kv: KVCache, store: StateStore) -> None:
        super().__init__(kv, store)
        self.stream = DeferredStream()
        self.lands_midway = False
        """Rows of earlier steps land while a step is being computed."""
        self.sink = StagedSink(store.rows, MAX_ROWS, torch.device("cpu"), stream=self.stream)

    @property
    def busy(self) -> bool:  # type: ignore[override]  # a constant there
        return self.sink.busy

    def collect(self, *, wait: bool = False) -> None:
        self.sink.collect(wait=wait)

    def execute(self, batch: Batch) -> StepResult:
        try:
            result = super().execute(batch)
            if self.lands_midway:
                self.stream.advance(len(self.stream.pending))
                self.sink.collect()
            return replace(result, landing=self.sink.flush())
        except BaseException:
            self.sink.discard()
            raise

    def _put(self, slot: int, value: float) -> None:
        self.sink.put(torch.full((1, 1), value), torch.tensor([slot]))
