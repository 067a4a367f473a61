"""One step ahead: the device is given the next step of text before the tokens of the last one are looked at.

Where every running request generates, and its next token needs nothing of the host, the next step can be planned without knowing that
token: it stays on the device. A request that turns out to have ended has then been computed one position too far. That position is
withdrawn: it is in no file, in no cached block, and gives no token; its blocks go back when the step has ended.
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from engine.cache.kv import BlockTables, KVCache
from engine.capture.row_capture import Flight
from engine.execution.batch import Batch, build_batch
from engine.execution.runner import Launched, ModelRunner, StepResult
from engine.sampling.penalties import needs_penalties
from engine.scheduling.scheduler import Chunk, Scheduler
from engine.scheduling.sequence import TokenSequence

_log = logging.getLogger(__name__)


@dataclass
class StepAhead:
    """A step that the device was given."""

    launched: Launched
    flights: dict[TokenSequence, Flight | None]
    """Per sequence the rows it captures."""
    left_behind: list[BlockTables] = field(default_factory=list)
    """Blocks of sequences that have ended meanwhile."""

    @property
    def batch(self) -> Batch:
        return self.launched.batch


class AheadLauncher:
    """Belongs to the engine thread."""

    def __init__(self, runner: ModelRunner, scheduler: Scheduler, kv: KVCache, num_layers: int, *, trim: bool) -> None:
        self._runner = runner
        self._scheduler = scheduler
        self._kv = kv
        self._num_layers = num_layers
        self._trim = trim

    def first(self, chunks: Sequence[Chunk]) -> StepAhead | None:
        """Launches a planned step after which another may follow without its tokens; None: it is to be computed as usual."""
        if not chunks or not all(_gives_plain_token(chunk) for chunk in chunks):
            return None
        return self._launch(chunks, None)

    def following(self, step: StepAhead) -> StepAhead | None:
        """Launches the step after `step`, whose tokens aren't known; None, and nothing has changed, where that can't be."""
        sequences = [chunk.sequence for chunk in step.batch.sampled if not chunk.sequence.ended]
        if set(sequences) != set(self._scheduler.running):
            return None
        going_on = [s for s in sequences if s.generating and s.num_output_tokens + 1 < s.request.sampling.max_tokens]
        chunks = self._scheduler.schedule_ahead(going_on)
        if chunks is None:
            return None
        for sequence in going_on:
            sequence.token_ids.append(0)  # holds the place of the token that isn't known
        try:
            return self._launch(chunks, step.launched)
        finally:
            for sequence in going_on:
                sequence.token_ids.pop()

    def finish(self, step: StepAhead) -> StepResult:
        """Waits for the step's tokens."""
        return self._runner.finish(step.launched)

    def end(self, step: StepAhead) -> None:
        """The step has ended: what it was still reading is nobody's now."""
        for tables in step.left_behind:
            self._kv.release(tables)

    def _launch(self, chunks: Sequence[Chunk], before: Launched | None) -> StepAhead | None:
        draws = [(g, g.get_state()) for chunk in chunks if (g := chunk.sequence.generator) is not None]
        try:
            batch = build_batch(chunks, self._num_layers, trim=self._trim)
            launched = self._runner.launch(batch, before)
        except Exception:
            _log.exception("a step could not be given to the device ahead of the last one's tokens")
        else:
            return StepAhead(launched, {chunk.sequence: _launch_rows(chunk, launched) for chunk in chunks})
        self._undo(chunks, draws, planned=before is not None)
        return None

    def _undo(self, chunks: Sequence[Chunk], draws: Sequence[tuple[torch.Generator, torch.Tensor]], *, planned: bool) -> None:
        """`planned`: the plan is given up, since nobody will compute it as usual."""
        for generator, state in draws:
            generator.set_state(state)
        for chunk in chunks:
            if planned and chunk.sequence.capture is not None:
                chunk.sequence.capture.clip(0)


def _gives_plain_token(chunk: Chunk) -> bool:
    sequence, params = chunk.sequence, chunk.sequence.request.sampling
    sampled = sequence.generating and chunk.end == len(sequence.token_ids)
    scored = params.logprobs is not None or sequence.wants_prompt_logprobs
    return sampled and not scored and not needs_penalties(params)


def _launch_rows(chunk: Chunk, launched: Launched) -> Flight | None:
    capture = chunk.sequence.capture
    return None if capture is None else capture.launch(chunk.end, launched.landing)
