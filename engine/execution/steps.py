"""Computes the chunks of a step; where that raises, finds out which of them it was for, so that only those fail.

A step can be tried again: what it writes to the KV cache and to pages it writes to the same places, and nothing is committed before
it has gone well. So a step that raised is split in two until what raises is a single chunk. Where memory has run out, smaller parts
need less of it, and a single chunk is halved further, down to one token.

Where nothing at all could be computed, a step of the engine's own tells whether that was the requests' fault.
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch

from engine.cache.kv import KVCache
from engine.execution.batch import Batch, build_batch
from engine.execution.probe import Probe
from engine.execution.runner import StepResult
from engine.scheduling.scheduler import Chunk

_log = logging.getLogger(__name__)


class Runner(Protocol):
    """What is needed of `ModelRunner`."""

    @property
    def busy(self) -> bool: ...
    def execute(self, batch: Batch) -> StepResult: ...
    def collect(self, *, wait: bool = False) -> None: ...


@dataclass(frozen=True)
class StepFault:
    """Why chunks could not be computed. The exception itself isn't kept: its traceback would keep the tensors of the attempt."""

    name: str
    """Of the exception's class."""
    out_of_memory: bool

    def __str__(self) -> str:
        if self.out_of_memory:
            return f"there was not enough memory to compute this request: {self.name}"
        return f"the step that computed this request failed: {self.name}"


@dataclass
class StepOutcome:
    """What became of the chunks of a step. Each of them is computed, in whole or in part, or failed, or is left for a later step."""

    computed: list[tuple[Batch, StepResult]] = field(default_factory=list)
    failed: list[tuple[Chunk, StepFault]] = field(default_factory=list)
    raised: bool = False
    ran_out_of_memory: bool = False

    @property
    def num_tokens(self) -> int:
        return sum(batch.num_tokens for batch, _ in self.computed)


class StepExecutor:
    """Belongs to the engine thread."""

    def __init__(self, runner: Runner, kv: KVCache, num_layers: int, device: torch.device, *, trim: bool = True) -> None:
        self._runner = runner
        self._trim = trim
        self._probe = Probe(kv, num_layers)
        self._num_layers = num_layers
        self._device = device

    def run(self, chunks: Sequence[Chunk]) -> StepOutcome:
        """Computes the chunks together or, where that raises, in as many parts as it takes."""
        outcome = StepOutcome()
        parts = [list(chunks)]
        while parts:
            part = parts.pop()
            fault = self._attempt(part, outcome)
            if fault is not None:
                smaller = _smaller(part, fault)
                parts += reversed(smaller)
                outcome.failed += [] if smaller else [(part[0], fault)]
        if not outcome.computed and all(fault.out_of_memory for _, fault in outcome.failed):
            _spare_the_older(outcome)
        return outcome

    def can_compute(self) -> bool | None:
        """Whether a step that no request is part of goes well; None where there is no block left to find that out with."""
        try:
            batch = self._probe.begin()
            if batch is None:
                return None
            self._runner.execute(batch)
        except Exception as error:
            _log.error("a step without any request failed as well: %s: %s", type(error).__name__, error)
            return False
        finally:
            self._probe.end()
        return True

    def _attempt(self, part: Sequence[Chunk], outcome: StepOutcome) -> StepFault | None:
        draws: list[tuple[torch.Generator, torch.Tensor]] = []
        try:
            batch = build_batch(part, self._num_layers, trim=self._trim)
            draws += [(g, g.get_state()) for chunk in batch.sampled if (g := chunk.sequence.generator) is not None]
            outcome.computed.append((batch, self._runner.execute(batch)))
            return None
        except Exception as error:
            if not outcome.raised:
                _log.exception("a step over %d requests failed", len(part), extra={"fields": _fields_of(part)})
            elif len(part) == 1:
                _log.error("a request alone: %s: %s", type(error).__name__, error, extra={"fields": _fields_of(part)})
            fault = StepFault(type(error).__name__, is_out_of_memory(error))
        # The exception and the tensors it held are gone by now.
        for generator, state in draws:
            generator.set_state(state)
        outcome.raised = True
        if fault.out_of_memory:
            outcome.ran_out_of_memory = True
            self._free_memory()
        return fault

    def _free_memory(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.empty_cache()


def _fields_of(part: Sequence[Chunk]) -> dict[str, object]:
    """What a log line about these chunks says of their requests."""
    fields = [chunk.sequence.request.log_fields for chunk in part]
    return dict(fields[0]) if len(fields) == 1 else {"request_ids": [each["request_id"] for each in fields]}


def is_out_of_memory(error: Exception) -> bool:
    """Devices have an exception of their own; the host's allocator and cuBLAS raise a RuntimeError that only its text tells apart."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    text = str(error)
    return isinstance(error, RuntimeError) and ("can't allocate memory" in text or "CUBLAS_STATUS_ALLOC_FAILED" in text)


def _smaller(part: list[Chunk], fault: StepFault) -> list[list[Chunk]]:
    """What to try instead, older requests first; nothing where the fault can only be this chunk's."""
    if len(part) > 1:
        by_age = sorted(part, key=lambda chunk: chunk.sequence.order)
        middle = -(-len(part) // 2)
        return [by_age[:middle], by_age[middle:]]
    if fault.out_of_memory and part[0].count > 1:
        return [[_halved(part[0])]]
    return []


def _halved(chunk: Chunk) -> Chunk:
    """The first half; the scheduler plans the rest anew."""
    half = Chunk(chunk.sequence, chunk.start, chunk.count // 2)
    if chunk.sequence.capture is not None:
        chunk.sequence.capture.clip(half.end)
    return half


def _spare_the_older(outcome: StepOutcome) -> None:
    """Where nobody has room for a single token, it is nobody's own fault: the youngest request goes, the others try again."""
    outcome.failed.sort(key=lambda failed: failed[0].sequence.order)
    for chunk, _ in outcome.failed[:-1]:
        if chunk.sequence.capture is not None:
            chunk.sequence.capture.clip(0)
    del outcome.failed[:-1]
