"""Computes steps: gives them to the device, waits for their tokens, and where a step raises finds the requests that cause it.

A step can be tried again: what it writes to the KV cache and to pages it writes to the same places, and nothing is committed before
it has gone well. So a step that raised is split in two until what raises is a single chunk. Where memory has run out, smaller parts
need less of it, and a single chunk is halved further, down to one token.

Where nothing at all could be computed, a step of the engine's own tells whether that was the requests' fault.
"""

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from engine.cache.kv import KVCache
from engine.cache.pool import IntArray
from engine.capture.sink import Landing
from engine.capture.transfers import PagesInFlight
from engine.device.streams import CopyStream, HostCopies, copy_stream
from engine.errors import EngineError
from engine.execution.faults import StepFault, fault_of, log_request_fault
from engine.execution.probe import Probe
from engine.execution.runner import ModelRunner, StepOutput
from engine.execution.step_input import StepInput, build_step, in_order, scored_range
from engine.sampling.logprobs import TokenScores
from engine.sampling.prompt_logprobs import ScoredTokens
from engine.sampling.sampler import SampledRow, SampledToken, Sampler, SamplerOutput
from engine.scheduling.plan import Chunk
from engine.scheduling.scheduler import Scheduler

_log = logging.getLogger(__name__)

GeneratorStates = Sequence[tuple[torch.Generator, torch.Tensor]]
"""Generators of seeded requests, with their states."""


@dataclass(frozen=True, eq=False)
class LaunchedStep:
    """A step that the device was given."""

    chunks: Sequence[Chunk]
    """In the order of the step."""
    sampled: Sequence[Chunk]
    sampler_output: SamplerOutput | None
    """On the device."""
    host_output: SamplerOutput | None
    """The same on the host, once the `copies` have arrived."""
    scores: Sequence[tuple[Chunk, IntArray, TokenScores]]
    """Of each chunk that is scored the tokens, and what was found out, on the host once the `copies` have arrived."""
    copies: HostCopies
    landing: Landing
    generator_states: GeneratorStates
    """As they were before the step."""
    started: float
    """`time.perf_counter` when it was begun."""

    @property
    def num_tokens(self) -> int:
        return sum(chunk.count for chunk in self.chunks)


@dataclass(frozen=True)
class ComputedStep:
    """A step, or a part of one, that has gone well."""

    chunks: Sequence[Chunk]
    tokens: Sequence[tuple[Chunk, SampledToken | EngineError]]
    """Of the chunks that were sampled the token, or what kept it from having one."""
    scores: Sequence[tuple[Chunk, ScoredTokens]]
    landing: Landing

    @property
    def num_tokens(self) -> int:
        return sum(chunk.count for chunk in self.chunks)


@dataclass
class StepOutcome:
    """What became of the chunks of a step. Each of them is computed, in whole or in part, or failed, or is left for a later step."""

    computed: list[ComputedStep] = field(default_factory=list)
    failed: list[tuple[Chunk, StepFault]] = field(default_factory=list)
    deferred: list[Chunk] = field(default_factory=list)
    ran_out_of_memory: bool = False

    @property
    def num_tokens(self) -> int:
        return sum(part.num_tokens for part in self.computed)


class StepExecutor:
    """Belongs to the engine thread. Steps are launched and finished in the same order."""

    def __init__(
        self,
        runner: ModelRunner,
        sampler: Sampler,
        scheduler: Scheduler,
        kv: KVCache,
        pages: PagesInFlight,
        num_layers: int,
        device: torch.device,
        *,
        trim: bool = True,
        has_head: bool = True,
        stream: CopyStream | None = None,
    ) -> None:
        """`stream` brings token ids and log-probabilities to the host."""
        self._runner = runner
        self._sampler = sampler
        self._scheduler = scheduler
        self._kv = kv
        self._pages = pages
        self._num_layers = num_layers
        self._device = device
        self._trim = trim
        self._stream = stream or copy_stream(device)
        self._probe = Probe(kv, num_layers, has_head=has_head)

    def launch(self, planned: Sequence[Chunk], before: LaunchedStep | None = None) -> LaunchedStep:
        """Launches a step without waiting for its tokens. `before`: the step before, if that is in flight still.

        Whatever the step raises; then nothing has happened, and it may be tried again.
        """
        started, chunks = time.perf_counter(), in_order(planned)
        generator_states = [(g, g.get_state()) for chunk in chunks if chunk.samples and (g := chunk.sequence.generator) is not None]
        try:
            sampled_before = [] if before is None else before.sampled
            step = build_step(chunks, self._kv, self._num_layers, sampled_before, trim=self._trim)
            output = self._runner.run(step, None if before is None or before.sampler_output is None else before.sampler_output.ids)
            self._pages.hold(output.landing, [] if output.landing.landed else _pages_of(chunks))
            return self._sample(chunks, step, output, generator_states, started)
        except BaseException:
            restore_generators(generator_states)
            raise

    def _sample(
        self, chunks: Sequence[Chunk], step: StepInput, output: StepOutput, generator_states: GeneratorStates, started: float
    ) -> LaunchedStep:
        sampled = [chunk for chunk in chunks if chunk.samples]
        scored = [chunk for chunk in chunks if scored_range(chunk)]
        sampler_output = None if output.logits is None else self._sampler.launch(output.logits, _sampled_rows(sampled))
        copies = HostCopies(self._stream)
        host_output = None if sampler_output is None else sampler_output.moved(copies.start)
        scores = [
            (chunk, given.targets, found.moved(copies.start))
            for chunk, given, found in zip(scored, step.scores, output.scores, strict=True)
        ]
        copies.end(self._device)
        return LaunchedStep(chunks, sampled, sampler_output, host_output, scores, copies, output.landing, generator_states, started)

    def finish(self, step: LaunchedStep) -> ComputedStep:
        """Waits for a step, the oldest one in flight, and takes its tokens. Raises whatever the step raises; then the steps behind it must
        be withdrawn and its generators restored, in this order."""
        tokens: list[tuple[Chunk, SampledToken | EngineError]] = []
        # The device may still be at the step: time to see to rows of earlier ones.
        self._runner.collect()
        step.copies.wait()
        if step.host_output is not None:
            answers = self._sampler.finish(step.host_output, _sampled_rows(step.sampled))
            tokens = list(zip(step.sampled, answers, strict=True))
        scores = [(chunk, found.of(targets)) for chunk, targets, found in step.scores]
        return ComputedStep(step.chunks, tokens, scores, step.landing)

    def withdraw(self, step: LaunchedStep) -> None:
        """Discards the latest step in flight; its chunks are planned again."""
        restore_generators(step.generator_states)
        for chunk in reversed(step.chunks):
            self._scheduler.withdraw(chunk)

    def retry_in_parts(self, chunks: Sequence[Chunk], fault: StepFault) -> StepOutcome:
        """Computes the chunks of a step that has raised, in as many parts as it takes. No step is in flight."""
        outcome = StepOutcome()
        self._record_fault(fault, outcome)
        parts = [*reversed(self._split(chunks, fault, outcome))]
        while parts:
            part = parts.pop()
            try:
                outcome.computed.append(self._compute(part))
                continue
            except Exception as raised:
                if len(part) == 1:
                    log_request_fault(raised, part[0])
                fault = fault_of(raised)
            # The exception and the tensors it held are gone by now.
            self._record_fault(fault, outcome)
            parts += reversed(self._split(part, fault, outcome))
        if not outcome.computed and all(fault.out_of_memory for _, fault in outcome.failed):
            _fail_only_the_youngest(outcome)
        return outcome

    def _compute(self, part: Sequence[Chunk]) -> ComputedStep:
        step = self.launch(part)
        try:
            return self.finish(step)
        except BaseException:
            restore_generators(step.generator_states)
            raise

    def can_compute(self) -> bool | None:
        """Whether a step that no request is part of goes well; None where there is no block left to find that out with."""
        try:
            step = self._probe.begin()
            if step is None:
                return None
            output = self._runner.run(step)
            if output.logits is not None:
                self._sampler.sample(output.logits, [self._probe.sampled_row])
        except Exception as error:
            _log.error("the engine's probe step, without any request, failed as well: %s: %s", type(error).__name__, error)
            return False
        finally:
            self._probe.end()
        return True

    def _record_fault(self, fault: StepFault, outcome: StepOutcome) -> None:
        outcome.ran_out_of_memory |= fault.out_of_memory
        if fault.out_of_memory and self._device.type == "cuda":
            torch.cuda.empty_cache()

    def _split(self, part: Sequence[Chunk], fault: StepFault, outcome: StepOutcome) -> list[list[Chunk]]:
        """What to try instead, older requests first; nothing where the fault can only be this chunk's."""
        if len(part) > 1:
            by_age = sorted(part, key=lambda chunk: chunk.sequence.order)
            middle = -(-len(part) // 2)
            return [by_age[:middle], by_age[middle:]]
        chunk = part[0]
        if fault.out_of_memory and chunk.count > 1:
            return [[self._scheduler.shorten(chunk, chunk.start + chunk.count // 2)]]
        outcome.failed.append((chunk, fault))
        return []


def restore_generators(generator_states: GeneratorStates) -> None:
    """Restores the generators to their states before a step that failed or was withdrawn."""
    for generator, state in generator_states:
        generator.set_state(state)


def _sampled_rows(sampled: Sequence[Chunk]) -> list[SampledRow]:
    return [SampledRow(s.request.sampling, s.penalties, s.generator) for s in (chunk.sequence for chunk in sampled)]


def _pages_of(chunks: Sequence[Chunk]) -> list[IntArray]:
    """The pages that rows of the step are on their way to."""
    planned = [(chunk.sequence.capture, chunk.rows) for chunk in chunks]
    return [c.pages.pages_of(c.pages.blocks_of(plan.ranges)).reshape(-1) for c, plan in planned if c is not None and plan and plan.ranges]


def _fail_only_the_youngest(outcome: StepOutcome) -> None:
    """Where no request has memory for a single token, only the youngest fails; the others are deferred to the next step."""
    outcome.failed.sort(key=lambda failed: failed[0].sequence.order)
    outcome.deferred += [chunk for chunk, _ in outcome.failed[:-1]]
    del outcome.failed[:-1]
