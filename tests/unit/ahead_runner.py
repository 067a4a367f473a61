"""The fake runner of `core_fakes` as a device: it is given steps whose tokens only it knows, and tells them when it is asked."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from engine.cache.kv import KVCache
from engine.cache.states import StateStore
from engine.capture.sink import Landing
from engine.execution.batch import Batch
from engine.execution.runner import StepResult
from engine.sampling.sampler import SampledToken
from engine.scheduling.sequence import TokenSequence
from tests.unit.core_fakes import next_token
from tests.unit.deferred_stream import DeferredCopy
from tests.unit.staged_runner import StagedRunner


@dataclass
class FakeLaunched:
    """A step that the fake device was given."""

    batch: Batch
    tokens: dict[TokenSequence, int]
    """What it gives, as the device knows it."""
    ids: torch.Tensor
    arrived: DeferredCopy
    landing: Landing | None


class AheadRunner(StagedRunner):
    """Fills the places of tokens that nobody knows yet with those of the step before, for as long as it computes."""

    def __init__(self, kv: KVCache, store: StateStore) -> None:
        super().__init__(kv, store)
        self.num_ahead = 0
        self.fails_to_launch = False
        self.fails_to_finish = False

    def launch(self, batch: Batch, before: FakeLaunched | None = None) -> FakeLaunched:
        if self.fails_to_launch:
            raise RuntimeError("the device takes nothing")
        for chunk in batch.chunks if before is not None else ():
            assert before is not None
            assert chunk.count == 1
            chunk.sequence.token_ids[chunk.start] = before.tokens[chunk.sequence]
        self.num_ahead += before is not None
        result = self.execute(batch)
        tokens = {chunk.sequence: next_token(chunk.sequence.token_ids) for chunk in batch.sampled}
        source = torch.tensor([tokens[chunk.sequence] for chunk in batch.sampled])
        ids = torch.empty_like(source)
        return FakeLaunched(batch, tokens, ids, self.stream.copy(ids, source), result.landing)

    def finish(self, launched: FakeLaunched) -> StepResult:
        if self.lands_midway:  # the device has ended the step after this one too
            self.stream.advance(len(self.stream.pending))
        self.sink.collect()
        launched.arrived.wait()
        if self.fails_to_finish:
            raise RuntimeError("the device is lost")
        return StepResult([SampledToken(token, None) for token in launched.ids.tolist()], [], launched.landing)
