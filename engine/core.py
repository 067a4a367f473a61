"""What the engine thread does: takes requests in, runs steps, hands results out. Knows nothing of threads or queues."""

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from engine.cache.chain import HashChain
from engine.cache.kv import KVCache
from engine.cache.states import StateStore
from engine.capture.row_capture import Flight, Job, RowCapture
from engine.capture.sink import Landing
from engine.errors import EngineError, RequestAborted, SaveError, StepFailed
from engine.execution.ahead import AheadLauncher, StepAhead
from engine.execution.batch import Batch
from engine.execution.runner import ModelRunner, StepResult
from engine.execution.steps import StepExecutor, StepOutcome
from engine.layers import depth_of
from engine.request import EngineRequest, FinishReason, RequestOutput
from engine.sampling.sampler import SampledToken
from engine.scheduling.limits import RequestLimits, saved_rows
from engine.scheduling.prefix import PrefixFinder
from engine.scheduling.scheduler import Chunk, Scheduler
from engine.scheduling.sequence import TokenSequence
from engine.stats import EngineListener

_FAILED_STEPS_IN_A_ROW = 3
"""After so many in which nothing at all could be computed, the engine's own probe included, it is taken to be broken."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class CoreParts:
    """What a core works with; made at start and never replaced."""

    kv: KVCache
    states: StateStore
    scheduler: Scheduler
    prefixes: PrefixFinder
    runner: ModelRunner
    limits: RequestLimits
    eos_token_ids: frozenset[int]
    device: torch.device
    prefix_cache: bool
    trim_last_layer: bool = True
    overlap: bool = False
    """Gives the device the next step of text before the tokens of the last one are looked at."""


class EngineCore:
    """All methods belong to one thread. `release` may be called by writers from theirs: it must bring pages back to `release_pages`."""

    def __init__(self, parts: CoreParts, listener: EngineListener, release: Callable[[Sequence[int]], None]) -> None:
        self.scheduler = parts.scheduler
        self.num_computed_tokens = 0
        self.num_step_failures = 0
        self._parts = parts
        self._steps = StepExecutor(parts.runner, parts.kv, parts.limits.num_layers, parts.device, trim=parts.trim_last_layer)
        self._launcher = None
        if parts.overlap:
            layers, trim = parts.limits.num_layers, parts.trim_last_layer
            self._launcher = AheadLauncher(parts.runner, parts.scheduler, parts.kv, layers, trim=trim)
        self._ahead: StepAhead | None = None
        """The latest step that the device was given and whose tokens are to come."""
        self._listener = listener
        self._release = release
        self._sequences: dict[str, TokenSequence] = {}
        self._writing: dict[str, RowCapture] = {}
        """Those of requests whose text is done, by request id."""
        self._arrivals = 0
        self._failed_steps = 0
        self._untold: list[RequestOutput] = []
        """What came of the step that showed the engine to be broken."""

    @property
    def has_work(self) -> bool:
        return bool(self._sequences) or self._ahead is not None or self._parts.runner.busy

    def add(self, request: EngineRequest, job: Job | None) -> None:
        """Queues a request that `RequestLimits` has let through. One that can't be taken in fails alone."""
        self._arrivals += 1
        try:
            sequence = self._new_sequence(request, job)
        except Exception as error:
            _log.exception("a request could not be taken in", extra={"fields": request.log_fields})
            self._refuse(request, job, StepFailed(f"the request could not be taken in: {type(error).__name__}"))
            return
        self._sequences[request.request_id] = sequence
        self.scheduler.add(sequence)

    def abort(self, request_id: str) -> None:
        """Ends a request now; its save too, where only that is left."""
        reason = SaveError("cancelled", "the request was aborted")
        if request_id in self._writing:
            self._writing.pop(request_id).cancel(reason)
        elif request_id in self._sequences:
            outputs = self._drop(self._sequences[request_id], "abort", RequestAborted("the request was aborted"), reason)
            self._listener.on_step(outputs, 0, 0.0)

    def fail_all(self, error: EngineError) -> None:
        """Answers every request with the error and fails what is being written."""
        reason = SaveError("engine_error", str(error))
        outputs, self._untold = self._untold, []
        for sequence in list(self._sequences.values()):
            outputs += self._drop(sequence, "error", error, reason)
        for request_id in list(self._writing):
            self._writing.pop(request_id).cancel(reason)
        self._listener.on_step(outputs, 0, 0.0)

    def release_pages(self, pages: Sequence[int]) -> None:
        for page in pages:
            self._parts.states.pool.release(page)

    def save_ended(self, request_id: str) -> None:
        self._writing.pop(request_id, None)

    def step(self) -> bool:
        """Computes one batch. False: nothing could be computed now, since everything waits for pages.

        Rows of earlier steps that are still on their way to pages are waited for only where there is nothing to compute without them.

        Raises `StepFailed` once steps keep failing; `fail_all` is next.
        """
        started, before = time.perf_counter(), self.num_computed_tokens
        self._parts.runner.collect()
        outputs = self._end_failed_saves()
        if self._launcher is not None and self._ahead is not None:
            outputs += self._take_ahead(self._launcher, self._ahead)
            self._tell(outputs, self.num_computed_tokens - before, started)
            return True
        chunks, ready = self.scheduler.schedule()
        for sequence in ready:
            outputs += self._advance(sequence)
        if self._launcher is not None:
            self._ahead = self._launcher.first(chunks)
        if chunks and self._ahead is None:
            outputs += self._run(chunks)
        if outputs or chunks:
            self._tell(outputs, self.num_computed_tokens - before, started)
        landing = self._parts.runner.busy and not chunks and not ready
        if landing:
            self._parts.runner.collect(wait=True)
        return bool(chunks or ready or landing)

    def check_integrity(self) -> None:
        """Raises AssertionError where blocks or pages are held by nobody known."""
        self._parts.kv.check_integrity()
        self._parts.states.pool.check_integrity()
        if not self._sequences and self._ahead is None:
            assert self._parts.kv.stats().referenced == 0, "KV blocks are held although no request is left"

    def _new_sequence(self, request: EngineRequest, job: Job | None) -> TokenSequence:
        parts, save, seed = self._parts, request.save, request.sampling.seed
        num_layers = parts.limits.num_layers
        token_ids = list(request.prompt_token_ids)
        sizes = {group.spec.block_size for group in parts.kv.groups} | {parts.states.page_size}
        chains = {size: HashChain(token_ids, size, request.cache_salt) for size in sizes}
        shallow = save is not None and not request.sampling.max_tokens and request.sampling.prompt_logprobs is None
        depth = depth_of(save.layers, num_layers) if save is not None and shallow else num_layers
        capture = None
        if save is not None:
            assert job is not None
            lowest, highest = saved_rows(request)
            capture = RowCapture(
                save,
                job,
                parts.states,
                chains[parts.states.page_size] if parts.prefix_cache else None,
                total=highest if lowest == highest else None,
                max_total=highest,
                release=self._release,
            )
        return TokenSequence(
            request,
            self._arrivals,
            num_layers,
            token_ids,
            chains,
            parts.kv.new_tables(depth),
            capture,
            None if seed is None else torch.Generator(parts.device).manual_seed(seed),
            prompt_logprobs=[] if request.sampling.prompt_logprobs is None else [None],
        )

    def _run(self, chunks: Sequence[Chunk]) -> list[RequestOutput]:
        outcome = self._steps.run(chunks)
        self.num_step_failures += outcome.raised
        self.num_computed_tokens += outcome.num_tokens
        if outcome.ran_out_of_memory:
            self.scheduler.use_fewer_tokens(sum(chunk.count for chunk in chunks))
        else:
            self.scheduler.use_more_tokens()
        outputs: list[RequestOutput] = []
        for batch, result in outcome.computed:
            outputs += self._update(batch, result)
        for chunk, fault in outcome.failed:
            outputs += self._fail(chunk.sequence, StepFailed(str(fault)))
        self._judge(outcome)
        return outputs

    def _take_ahead(self, launcher: AheadLauncher, step: StepAhead) -> list[RequestOutput]:
        """Launches the step after this one, if it can be without this one's tokens; then takes those."""
        self._ahead = launcher.following(step)
        outputs: list[RequestOutput] = []
        try:
            result = launcher.finish(step)
        except Exception as error:
            _log.exception("a step that was launched ahead failed")
            self._failed_steps += 1
            self.num_step_failures += 1
            for chunk in step.batch.chunks:
                if not chunk.sequence.ended:
                    outputs += self._fail(chunk.sequence, StepFailed(f"the step that computed this request failed: {type(error).__name__}"))
        else:
            self._failed_steps = 0
            self.num_computed_tokens += step.batch.num_tokens
            self.scheduler.use_more_tokens()
            outputs += self._update_ahead(step, result)
        launcher.end(step)
        return outputs

    def _update_ahead(self, step: StepAhead, result: StepResult) -> list[RequestOutput]:
        outputs = []
        for chunk, token in zip(step.batch.sampled, result.tokens, strict=True):
            sequence = chunk.sequence
            if sequence.ended:
                continue
            self._computed_ahead(chunk, step.flights[sequence])
            if sequence.generating:  # else it is the last token's own position, wanted for its row
                outputs += self._sampled(sequence, token)
            if not sequence.ended:
                outputs += self._advance(sequence)
        return outputs

    def _computed_ahead(self, chunk: Chunk, flight: Flight | None) -> None:
        sequence = chunk.sequence
        sequence.num_computed = chunk.end
        self._parts.prefixes.register(sequence)
        if sequence.capture is not None and flight is not None:
            sequence.capture.confirm(flight)
            sequence.capture.hand_over(chunk.end)

    def _let_go(self, sequence: TokenSequence) -> None:
        """The end of a sequence in the scheduler. What a step that is under way computes of it is withdrawn."""
        del self._sequences[sequence.request.request_id]
        sequence.ended = True
        step = self._ahead
        under_way = step is not None and sequence in step.flights
        self.scheduler.remove(sequence, keep_blocks=under_way)
        if step is not None and under_way:
            step.left_behind.append(sequence.tables)
            flight = step.flights[sequence]
            if flight is not None and sequence.capture is not None:
                sequence.capture.withdraw(flight)

    def _tell(self, outputs: list[RequestOutput], num_tokens: int, started: float) -> None:
        """Where the engine is broken, `fail_all` tells them instead: who has heard the last failure must not find the engine healthy."""
        if self._failed_steps >= _FAILED_STEPS_IN_A_ROW:
            self._untold = outputs
            raise StepFailed(f"{self._failed_steps} steps in a row have failed")
        self._listener.on_step(outputs, num_tokens, time.perf_counter() - started)

    def _judge(self, outcome: StepOutcome) -> None:
        """Counts steps that the engine is to blame for. Those that have failed have given their blocks back by now."""
        works = bool(outcome.computed) or self._steps.can_compute()
        if works is not None:
            self._failed_steps = 0 if works else self._failed_steps + 1

    def _fail(self, sequence: TokenSequence, error: EngineError) -> list[RequestOutput]:
        return self._drop(sequence, "error", error, SaveError("engine_error", str(error)))

    def _refuse(self, request: EngineRequest, job: Job | None, error: EngineError) -> None:
        if job is not None:
            job.cancel(SaveError("engine_error", str(error)))
        self._listener.on_step([RequestOutput(request.request_id, finish_reason="error", error=error)], 0, 0.0)

    def _update(self, batch: Batch, result: StepResult) -> list[RequestOutput]:
        for chunk in batch.chunks:
            self._computed(chunk, result.landing)
        for sequence, scored in result.prompt_logprobs:
            sequence.prompt_logprobs.extend(scored)
        outputs = []
        for chunk, token in zip(batch.sampled, result.tokens, strict=True):
            outputs += self._sampled(chunk.sequence, token)
        for chunk in batch.chunks:
            if chunk.sequence.request.request_id in self._sequences:
                outputs += self._advance(chunk.sequence)
        return outputs

    def _computed(self, chunk: Chunk, landing: Landing | None) -> None:
        sequence = chunk.sequence
        sequence.num_computed = chunk.end
        self._parts.prefixes.register(sequence)
        if sequence.capture is not None:
            sequence.capture.commit(chunk.end, landing)
            sequence.capture.hand_over(chunk.end)

    def _sampled(self, sequence: TokenSequence, token: SampledToken | EngineError) -> list[RequestOutput]:
        if isinstance(token, EngineError):
            return self._fail(sequence, token)
        first = not sequence.num_output_tokens
        if first:
            sequence.first_token_ns = time.time_ns()
        sequence.token_ids.append(token.token_id)
        try:
            reason, stop_token_id = self._stop_reason(sequence, token.token_id)
        except BaseException as error:  # foreign code: whatever it is, only this request fails
            _log.exception("the stop condition of a request failed", extra={"fields": sequence.request.log_fields})
            return self._fail(sequence, StepFailed(f"the stop condition of this request failed: {type(error).__name__}"))
        if reason is not None:
            sequence.generating = False
            sequence.finish_reason = reason
        output = RequestOutput(
            sequence.request.request_id,
            (token.token_id,),
            None if token.logprobs is None else (token.logprobs,),
            sequence.prompt_logprobs if first and sequence.wants_prompt_logprobs else None,
            reason,
            stop_token_id,
            sequence.num_cached,
            times=None if reason is None else sequence.times(),
        )
        return [output]

    def _stop_reason(self, sequence: TokenSequence, token_id: int) -> tuple[FinishReason | None, int | None]:
        params, checker = sequence.request.sampling, sequence.request.stop_checker
        completes = checker is not None and checker.completes_stop(token_id)
        if token_id in params.stop_token_ids or (not params.ignore_eos and token_id in self._parts.eos_token_ids):
            return "stop", token_id
        if completes:
            return "stop", None
        return ("length", None) if sequence.num_output_tokens >= params.max_tokens else (None, None)

    def _advance(self, sequence: TokenSequence) -> list[RequestOutput]:
        """Ends a sequence that has nothing left to compute; its file is the writer's from then on."""
        if not sequence.done:
            return []
        request_id, capture = sequence.request.request_id, sequence.capture
        self._let_go(sequence)
        if capture is not None:
            self._writing[request_id] = capture
            capture.finish(sequence.token_ids, sequence.num_saved_rows, sequence.num_prompt_tokens)
        if sequence.finish_reason is not None:
            return []
        scores = sequence.prompt_logprobs if sequence.wants_prompt_logprobs else None
        cached, times = sequence.num_cached, sequence.times()
        return [RequestOutput(request_id, prompt_logprobs=scores, finish_reason="length", num_cached_tokens=cached, times=times)]

    def _end_failed_saves(self) -> list[RequestOutput]:
        """A request whose file can't be written isn't worth computing."""
        outputs: list[RequestOutput] = []
        for sequence in list(self._sequences.values()):
            error = None if sequence.capture is None else sequence.capture.job.error
            if error is not None:
                outputs += self._drop(sequence, "error", error, error)
        return outputs

    def _drop(self, sequence: TokenSequence, reason: FinishReason, error: EngineError, save_error: SaveError) -> list[RequestOutput]:
        """Takes a sequence out before it is done. Where its text was done already, it is heard of through its save."""
        self._let_go(sequence)
        if sequence.capture is not None:
            sequence.capture.cancel(save_error)
        if sequence.finish_reason is not None:
            return []
        request_id, cached = sequence.request.request_id, sequence.num_cached
        return [RequestOutput(request_id, finish_reason=reason, error=error, num_cached_tokens=cached, times=sequence.times())]
