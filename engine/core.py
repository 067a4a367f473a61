"""What the engine thread does: takes requests in, runs steps, hands results out. Knows nothing of threads or queues."""

import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from engine.cache.chain import HashChain
from engine.cache.kv import KVCache
from engine.cache.pool import IntArray
from engine.cache.states import StateStore
from engine.capture.row_capture import Job, RowCapture
from engine.capture.sink import Landing
from engine.capture.transfers import PagesInFlight
from engine.device.streams import CopyStream
from engine.errors import EngineError, RequestAborted, SaveError, StepFailed
from engine.execution.executor import ComputedStep, LaunchedStep, StepExecutor, StepOutcome, restore_generators
from engine.execution.faults import StepFault, note_step_fault
from engine.execution.runner import ModelRunner
from engine.layers import depth_of
from engine.request import EngineRequest, FinishReason, RequestOutput
from engine.sampling.penalties import Penalties
from engine.sampling.prompt_logprobs import PromptLogprobs
from engine.sampling.sampler import SampledToken, Sampler
from engine.scheduling.limits import RequestLimits, saved_rows
from engine.scheduling.plan import Chunk
from engine.scheduling.prefix import PrefixFinder
from engine.scheduling.scheduler import Scheduler
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
    sampler: Sampler
    limits: RequestLimits
    eos_token_ids: frozenset[int]
    device: torch.device
    prefix_cache: bool
    trim_last_layer: bool = True
    overlap: bool = False
    """Gives the device the next step before the tokens of the last one are looked at."""
    stream: CopyStream | None = None
    """Brings token ids to the host; None: what the device needs."""


class EngineCore:
    """All methods belong to one thread. `release` may be called by writers from theirs: it must bring pages back to `release_pages`.

    A step has one life: it is planned, launched, finished and committed. Where steps don't overlap, it is finished at once.
    """

    def __init__(self, parts: CoreParts, listener: EngineListener, release: Callable[[IntArray], None]) -> None:
        self.scheduler = parts.scheduler
        self.num_computed_tokens = 0
        self.num_step_failures = 0
        self._parts = parts
        self._pages = PagesInFlight(parts.states.pool)
        layers, trim = parts.limits.num_layers, parts.trim_last_layer
        self._steps = StepExecutor(
            parts.runner,
            parts.sampler,
            parts.scheduler,
            parts.kv,
            self._pages,
            layers,
            parts.device,
            trim=trim,
            has_head=parts.limits.has_head,
            stream=parts.stream,
        )
        self._in_flight: deque[LaunchedStep] = deque()
        """Launched steps, the oldest first."""
        self._max_in_flight = 1 if parts.overlap else 0
        """How many steps are left in flight while the next one is planned."""
        self._finished_at = 0.0
        self._listener = listener
        self._release = release
        self._sequences: dict[str, TokenSequence] = {}
        self._writing: dict[str, RowCapture] = {}
        """Those of requests whose text is done, by request id."""
        self._landing: set[RowCapture] = set()
        """Those with rows on their way to their pages."""
        self._arrivals = 0
        self._failed_steps = 0
        self._unreported: list[RequestOutput] = []
        """Outputs of the step after which the engine was found broken; `fail_all` reports them."""

    @property
    def has_work(self) -> bool:
        return bool(self._sequences or self._in_flight or self._landing) or self._parts.runner.busy

    def add(self, request: EngineRequest, job: Job | None) -> None:
        """Queues a request that `RequestLimits` has let through. One that can't be taken in fails alone."""
        self._arrivals += 1
        try:
            sequence = self._new_sequence(request, job)
        except Exception as error:
            _log.exception("a request could not be queued", extra={"fields": request.log_fields})
            self._refuse(request, job, StepFailed(f"the request could not be queued: {type(error).__name__}"))
            return
        self._sequences[request.request_id] = sequence
        self.scheduler.add(sequence)

    def abort(self, request_id: str) -> None:
        """Ends a request now; its save too, where only that is left."""
        reason = SaveError("cancelled", "the request was aborted")
        if request_id in self._writing:
            self._writing.pop(request_id).cancel(reason)
        elif request_id in self._sequences:
            outputs = self._terminate(self._sequences[request_id], "abort", RequestAborted("the request was aborted"), reason)
            self._listener.on_step(outputs, 0, 0.0)

    def fail_all(self, error: EngineError) -> None:
        """Answers every request with the error and fails what is being written."""
        reason = SaveError("engine_error", str(error))
        outputs, self._unreported = self._unreported, []
        for sequence in list(self._sequences.values()):
            outputs += self._terminate(sequence, "error", error, reason)
        for request_id in list(self._writing):
            self._writing.pop(request_id).cancel(reason)
        self._listener.on_step(outputs, 0, 0.0)
        while self._in_flight:
            self._steps.withdraw(self._in_flight.pop())

    def release_pages(self, pages: Sequence[IntArray]) -> None:
        self._parts.states.pool.release_all(pages)

    def save_ended(self, request_id: str) -> None:
        self._writing.pop(request_id, None)

    def step(self) -> bool:
        """Plans a step and launches it; finishes and commits the oldest one in flight. False: nothing could be done, since everything
        waits for pages.

        Rows of earlier steps that are still on their way to pages are waited for only where there is nothing to compute without them.
        Raises `StepFailed` once steps keep failing; `fail_all` is next.
        """
        started, before = time.perf_counter(), self.num_computed_tokens
        self._parts.runner.collect()
        self._process_landed()
        outputs = self._end_failed_saves()
        plan = self.scheduler.schedule()
        for sequence in plan.ready:
            outputs += self._finish_if_done(sequence)
        chunks = list(plan.chunks.values())
        launched = self._launch(chunks, outputs) if chunks else False
        finished = len(self._in_flight) > (self._max_in_flight if launched else 0)
        if finished:
            outputs += self._finish(self._in_flight.popleft())
        if outputs or chunks or finished:
            self._notify_listener(outputs, self.num_computed_tokens - before, started)
        return self._wait_for_landing() if not (plan.did_something or finished) else True

    def check_integrity(self) -> None:
        """Raises AssertionError where blocks or pages are held by nobody known."""
        self._parts.kv.check_integrity()
        self._parts.states.pool.check_integrity()
        if not self._sequences and not self._in_flight:
            assert self._parts.kv.stats().referenced == 0, "KV blocks are held although no request is left"

    def _new_sequence(self, request: EngineRequest, job: Job | None) -> TokenSequence:
        parts, save, sampling = self._parts, request.save, request.sampling
        num_layers = parts.limits.num_layers
        token_ids = list(request.prompt_token_ids)
        sizes = {group.spec.block_size for group in parts.kv.groups} | {parts.states.page_size}
        chains = {size: HashChain(token_ids, size, request.cache_salt) for size in sizes}
        shallow = save is not None and not sampling.max_tokens and sampling.prompt_logprobs is None
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
            None if sampling.seed is None or not sampling.temperature else torch.Generator().manual_seed(sampling.seed),
            prompt_logprobs=PromptLogprobs.of(len(token_ids), sampling, parts.limits.vocab_size),
            penalties=Penalties.of(sampling, request.prompt_token_ids, parts.eos_token_ids),
        )

    # A step

    def _launch(self, chunks: Sequence[Chunk], outputs: list[RequestOutput]) -> bool:
        """Gives the device a planned step. Where that raises it is computed in parts, once nothing else is in flight; False then."""
        try:
            self._in_flight.append(self._steps.launch(chunks, self._in_flight[-1] if self._in_flight else None))
            return True
        except Exception as error:
            if self._in_flight:
                _log.exception("a step could not be launched while another is in flight; it will be rescheduled")
                for chunk in reversed(chunks):
                    self.scheduler.withdraw(chunk)
                return False
            fault = note_step_fault(error, chunks)
        # The exception and the tensors it held are gone by now.
        outputs += self._commit_outcome(self._retry_in_parts(chunks, fault))
        return False

    def _finish(self, step: LaunchedStep) -> list[RequestOutput]:
        try:
            computed = self._steps.finish(step)
        except Exception as error:
            fault = note_step_fault(error, step.chunks)
        else:
            self._observe(step)
            return self._commit_outcome(StepOutcome([computed]))
        while self._in_flight:  # what they compute follows from what this one should have given
            self._steps.withdraw(self._in_flight.pop())
        restore_generators(step.generator_states)
        return self._commit_outcome(self._retry_in_parts(step.chunks, fault))

    def _observe(self, step: LaunchedStep) -> None:
        now = time.perf_counter()
        seconds, self._finished_at = now - max(step.started, self._finished_at), now
        self.scheduler.observe(step.chunks, seconds)

    def _retry_in_parts(self, chunks: Sequence[Chunk], fault: StepFault) -> StepOutcome:
        self.num_step_failures += 1
        gone = [chunk for chunk in chunks if chunk.sequence.ended]
        for chunk in gone:
            self.scheduler.withdraw(chunk)
        left = [chunk for chunk in chunks if not chunk.sequence.ended]
        outcome = self._steps.retry_in_parts(left, fault) if left else StepOutcome()
        if outcome.ran_out_of_memory:
            self.scheduler.shrink_token_budget(sum(chunk.count for chunk in chunks))
        return outcome

    def _commit_outcome(self, outcome: StepOutcome) -> list[RequestOutput]:
        """Commits the results of a step."""
        self.num_computed_tokens += outcome.num_tokens
        if not outcome.ran_out_of_memory:
            self.scheduler.grow_token_budget()
        outputs: list[RequestOutput] = []
        for part in outcome.computed:
            outputs += self._commit(part)
        for chunk in outcome.deferred:
            self.scheduler.withdraw(chunk)
        for chunk, fault in outcome.failed:
            self.scheduler.withdraw(chunk)
            outputs += self._fail(chunk.sequence, StepFailed(str(fault)))
        self._count_engine_failure(outcome)
        return outputs

    def _commit(self, step: ComputedStep) -> list[RequestOutput]:
        outputs: list[RequestOutput] = []
        going_on = [chunk for chunk in step.chunks if self._commit_chunk(chunk, step.landing)]
        for chunk, scores in step.scores:
            known = chunk.sequence.prompt_logprobs
            assert known is not None
            known.extend(scores)
        for chunk, token in step.tokens:
            # Where the text has ended meanwhile it is the last token's own position, wanted for its row.
            if chunk.sequence.generating and not chunk.sequence.ended:
                outputs += self._append_token(chunk.sequence, token)
        for chunk in going_on:
            if not chunk.sequence.ended:
                outputs += self._finish_if_done(chunk.sequence)
        return outputs

    def _commit_chunk(self, chunk: Chunk, landing: Landing) -> bool:
        if not self.scheduler.commit(chunk):
            return False
        capture = chunk.sequence.capture
        if capture is not None and chunk.rows is not None and capture.commit(chunk.rows, landing):
            self._landing.add(capture)
        return True

    def _process_landed(self) -> None:
        """Records rows that have landed and releases the pages held for them."""
        self._pages.release_landed()
        for capture in list(self._landing):
            capture.process_landed()
            if not capture.in_flight:
                self._landing.discard(capture)

    def _wait_for_landing(self) -> bool:
        """There is nothing to compute: waits for rows that are in flight."""
        if not self._parts.runner.busy:
            return False
        self._parts.runner.collect(wait=True)
        self._process_landed()
        return True

    # Bookkeeping

    def _notify_listener(self, outputs: list[RequestOutput], num_tokens: int, started: float) -> None:
        """Reports outputs. Where the engine is broken, `fail_all` does: a client that has its error must not find the engine healthy."""
        if self._failed_steps >= _FAILED_STEPS_IN_A_ROW:
            self._unreported = outputs
            raise StepFailed(f"{self._failed_steps} steps in a row have failed")
        self._listener.on_step(outputs, num_tokens, time.perf_counter() - started)

    def _count_engine_failure(self, outcome: StepOutcome) -> None:
        """Counts consecutive steps that failed through the engine's own fault. Failed requests have released their blocks by now."""
        works = bool(outcome.computed) or self._steps.can_compute()
        if works is not None:
            self._failed_steps = 0 if works else self._failed_steps + 1

    def _fail(self, sequence: TokenSequence, error: EngineError) -> list[RequestOutput]:
        return self._terminate(sequence, "error", error, SaveError("engine_error", str(error)))

    def _refuse(self, request: EngineRequest, job: Job | None, error: EngineError) -> None:
        if job is not None:
            job.cancel(SaveError("engine_error", str(error)))
        self._listener.on_step([RequestOutput(request.request_id, finish_reason="error", error=error)], 0, 0.0)

    def _append_token(self, sequence: TokenSequence, token: SampledToken | EngineError) -> list[RequestOutput]:
        if isinstance(token, EngineError):
            return self._fail(sequence, token)
        first = not sequence.num_output_tokens
        if first:
            sequence.first_token_ns = time.time_ns()
        sequence.append(token.token_id)
        try:
            reason, stop_token_id = sequence.stop_reason(token.token_id, self._parts.eos_token_ids)
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

    def _finish_if_done(self, sequence: TokenSequence) -> list[RequestOutput]:
        """Finishes a sequence that has nothing left to compute; the writer owns its file from then on."""
        if not sequence.done:
            return []
        request_id, capture = sequence.request.request_id, sequence.capture
        self._remove(sequence)
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
                outputs += self._terminate(sequence, "error", error, error)
        return outputs

    def _terminate(self, sequence: TokenSequence, reason: FinishReason, error: EngineError, save_error: SaveError) -> list[RequestOutput]:
        """Ends a sequence before it is done. Where its text was done already, its save reports the end."""
        self._remove(sequence)
        if sequence.capture is not None:
            sequence.capture.cancel(save_error)
        if sequence.finish_reason is not None:
            return []
        request_id, cached = sequence.request.request_id, sequence.num_cached
        return [RequestOutput(request_id, finish_reason=reason, error=error, num_cached_tokens=cached, times=sequence.times())]

    def _remove(self, sequence: TokenSequence) -> None:
        """Removes an ended sequence from the books and from the scheduler."""
        del self._sequences[sequence.request.request_id]
        self.scheduler.remove(sequence)
