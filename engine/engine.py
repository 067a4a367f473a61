"""The engine as its users see it: loads a model, runs the core on a thread of its own, stops it again."""

import logging
import queue
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, wait
from contextlib import suppress
from functools import partial

import torch

from engine.api import EngineInfo, EngineState
from engine.build import EngineParts, build_engine
from engine.cache.pool import IntArray
from engine.config import EngineConfig
from engine.core import EngineCore
from engine.device.resolve import use_device
from engine.device.threads import release_compute_threads
from engine.errors import EngineError, EngineUnavailable, QueueFull, SaveError
from engine.request import EngineRequest, RequestOutput
from engine.saves.spec import SaveEvent
from engine.saves.writer import SaveJob
from engine.scheduling.limits import PromptLogprobsMemory
from engine.scheduling.save_plan import SavePlan, plan_save
from engine.stats import EngineListener, EngineStats

_IDLE_SECONDS = 1.0
"""How long the engine thread sleeps before it looks around by itself."""
_INTEGRITY_SECONDS = 60.0
"""How often an idle engine looks whether the pools' books agree: that takes milliseconds, and nobody is to wait for them."""

_log = logging.getLogger(__name__)


class Engine:
    """Implements `engine.api.EngineAPI`. `start` loads and must have returned before anything else is called."""

    info: EngineInfo

    def __init__(self, config: EngineConfig, listener: EngineListener) -> None:
        self._config = config
        self._listener = listener
        self._state: EngineState = "starting"
        self._commands: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._returned: queue.SimpleQueue[IntArray] = queue.SimpleQueue()
        """Hidden-state pages that writers are done with."""
        self._changed = threading.Condition()
        self._open: set[tuple[str, str]] = set()
        """Requests and their saves that were taken over and haven't ended, by the request's id."""
        self._saves: dict[str, tuple[str, SaveJob]] = {}
        """Request id and job of every open save, by save id."""
        self._prompt_logprobs = PromptLogprobsMemory(config.prompt_logprobs_memory)
        self._num_arriving = 0
        self._checked_at = time.monotonic()
        self._parts: EngineParts
        self._core: EngineCore
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    @property
    def state(self) -> EngineState:
        return self._state

    def start(self, progress: Callable[[int, int], None] | None = None) -> None:
        """Loads the model and starts the threads; blocks until the engine is ready. Raises `ConfigError`.

        `progress(done, total)` hears of the bytes of the checkpoint read so far. Raises `EngineUnavailable` where `stop` came first.
        """
        self._parts = build_engine(self._config, self.on_save, progress)
        release_compute_threads()
        self.info = self._parts.info
        self._core = EngineCore(self._parts.core, self, self._release_later)
        with self._changed:
            if self._state == "starting":
                self._thread.start()
                self._state = "running"
                return
        self._parts.writer.close()
        raise EngineUnavailable("the engine was stopped while it started")

    def submit(self, request: EngineRequest) -> None:
        limits = self._parts.core.limits
        limits.check(request)
        plan, prompt_logprobs_bytes = plan_save(request), limits.prompt_logprobs_bytes(request)
        with self._changed:  # every step needs the lock, so nothing that grows with the request is done under it
            if self._state != "running":
                raise EngineUnavailable(f"the engine is {self._state}")
            if len(self._core.scheduler.waiting) + self._num_arriving >= self._config.max_queued:
                raise QueueFull(f"{self._config.max_queued} requests are waiting already")
            self._check_ids(request)
            self._prompt_logprobs.check(prompt_logprobs_bytes)
            job = self._begin_save(request, plan)
            self._prompt_logprobs.reserve(request.request_id, prompt_logprobs_bytes)
            self._open.add(("request", request.request_id))
            self._num_arriving += 1
            self._commands.put(lambda: self._add(request, job))

    def abort(self, request_id: str) -> None:
        self._commands.put(lambda: self._core.abort(request_id))

    def save_bytes_written(self, save_id: str) -> int:
        request_id_and_job = self._saves.get(save_id)
        return 0 if request_id_and_job is None else request_id_and_job[1].bytes_written

    def stats(self) -> EngineStats:
        parts, scheduler = self._parts, self._core.scheduler
        return EngineStats(
            running=len(scheduler.running),
            waiting=len(scheduler.waiting) + self._num_arriving,
            kv_blocks=parts.core.kv.stats(recurrent=False),
            recurrent_slots=parts.core.kv.stats(recurrent=True),
            state_pages=parts.core.states.pool.stats(),
            computed_tokens_total=self._core.num_computed_tokens,
            prefix_query_tokens_total=parts.core.prefixes.query_tokens_total,
            prefix_hit_tokens_total=parts.core.prefixes.hit_tokens_total,
            state_hit_rows_total=parts.core.prefixes.state_hit_rows_total,
            preemptions_total=scheduler.num_preemptions,
            writer_queue_depth=parts.writer.queue_depth,
            bytes_written_total=parts.writer.bytes_written_total,
            write_seconds_total=parts.writer.write_seconds_total,
            step_failures_total=self._core.num_step_failures,
        )

    def drain(self) -> None:
        with self._changed:
            if self._state == "running":
                self._state = "draining"

    def wait_idle(self, timeout_seconds: float) -> bool:
        with self._changed:
            return self._changed.wait_for(lambda: not self._open, timeout_seconds)

    def stop(self) -> None:
        """Aborts what is left and ends the threads. Idempotent."""
        with self._changed:
            started = self._thread.ident is not None
            if self._state != "dead":
                self._state = "stopped"
        if not started:
            return
        self._commands.put(lambda: None)
        self._thread.join()
        self._parts.writer.close()

    def check_integrity(self) -> None:
        """Raises AssertionError where the pools' books don't agree; for tests, with the engine idle."""
        checked: Future[None] = Future()

        def check() -> None:
            try:
                self._core.check_integrity()
            except Exception as error:
                checked.set_exception(error)
            else:
                checked.set_result(None)

        self._commands.put(check)
        while self._thread.is_alive() and not checked.done():
            wait([checked], _IDLE_SECONDS)
        if not checked.done():
            raise EngineUnavailable(f"the engine is {self._state}")
        checked.result()

    # The engine hears the core and the writers first, so that it knows what is open.

    def on_step(self, outputs: Sequence[RequestOutput], num_tokens: int, seconds: float) -> None:
        self._listener.on_step(outputs, num_tokens, seconds)
        self._close(("request", output.request_id) for output in outputs if output.finish_reason is not None)

    def on_save(self, event: SaveEvent) -> None:
        try:
            self._listener.on_save(event)
        except BaseException as error:
            # A client that waits for this save would wait for ever.
            self._commands.put(partial(_raise, error))
            raise
        finally:
            if event.status not in ("running", "writing"):
                self._save_ended(event.save_id)

    def on_dead(self, error: BaseException) -> None:
        self._listener.on_dead(error)

    def _release_later(self, pages: IntArray) -> None:
        self._returned.put(pages)
        self._commands.put(self._release_returned)

    def _release_returned(self) -> None:
        """All at once, since a call costs the pool more than the pages do; further commands of the kind find nothing left."""
        pages = [self._returned.get_nowait() for _ in range(self._returned.qsize())]
        if pages:
            self._core.release_pages(pages)

    def _check_ids(self, request: EngineRequest) -> None:
        """A request's id is its own until its save has ended too, which may be long after its text."""
        if not self._open.isdisjoint({("request", request.request_id), ("save", request.request_id)}):
            raise EngineError(f"request id {request.request_id} is in use")
        if request.save is not None and request.save.save_id in self._saves:
            raise EngineError(f"save id {request.save.save_id} is in use")

    def _begin_save(self, request: EngineRequest, plan: SavePlan | None) -> SaveJob | None:
        job = self._parts.begin_save(plan)
        if job is not None:
            self._saves[job.spec.save_id] = (request.request_id, job)
            self._open.add(("save", request.request_id))
        return job

    def _add(self, request: EngineRequest, job: SaveJob | None) -> None:
        with self._changed:
            self._num_arriving -= 1
        self._core.add(request, job)

    def _save_ended(self, save_id: str) -> None:
        request_id, _ = self._saves.pop(save_id)
        self._commands.put(lambda: self._core.save_ended(request_id))
        self._close([("save", request_id)])

    def _close(self, ended: Iterable[tuple[str, str]]) -> None:
        with self._changed:
            for kind, name in ended:
                self._open.discard((kind, name))
                if kind == "request":
                    self._prompt_logprobs.release(name)
            self._changed.notify_all()

    # The engine thread.

    def _run(self) -> None:
        torch.set_num_threads(self._parts.threads)
        try:
            use_device(self._parts.core.device)
            with torch.inference_mode():
                self._loop()
        except BaseException as error:
            self._fail_engine(error)
        else:
            self._fail_open_requests(EngineUnavailable("the engine has stopped"))

    def _loop(self) -> None:
        progress = True
        while self._state not in ("stopped", "dead"):
            # Without work, or with everything waiting for pages, the next command is what changes that.
            self._run_commands(wait=not (self._core.has_work and progress))
            progress = self._core.step() if self._core.has_work else True

    def _run_commands(self, *, wait: bool) -> None:
        try:
            if wait:
                self._commands.get(timeout=_IDLE_SECONDS)()
            while True:
                self._commands.get_nowait()()
        except queue.Empty:
            self._check_integrity_if_due()

    def _check_integrity_if_due(self) -> None:
        now = time.monotonic()
        if not self._core.has_work and now - self._checked_at >= _INTEGRITY_SECONDS:
            self._checked_at = now
            self._core.check_integrity()

    def _fail_engine(self, error: BaseException) -> None:
        _log.critical("the engine is dead", exc_info=error)
        with self._changed:
            self._state = "dead"
        self._fail_open_requests(EngineUnavailable(f"the engine is dead: {type(error).__name__}"))
        _guard(lambda: self._listener.on_dead(error))

    def _fail_open_requests(self, failure: EngineUnavailable) -> None:
        """Fails every open request, including those still queued as commands, whatever state the core is in."""
        with suppress(queue.Empty):
            while True:
                _guard(self._commands.get_nowait())
        _guard(lambda: self._core.fail_all(failure))
        # What the core has lost sight of, where its books are broken or the listener failed.
        with self._changed:
            unanswered = [name for kind, name in self._open if kind == "request"]
        for request_id in unanswered:
            self._report(RequestOutput(request_id, finish_reason="error", error=failure))
        for _, job in list(self._saves.values()):
            job.cancel(SaveError("engine_error", str(failure)))

    def _report(self, output: RequestOutput) -> None:
        _guard(lambda: self._listener.on_step([output], 0, 0.0))
        self._close([("request", output.request_id)])


def _guard(callback: Callable[[], None]) -> None:
    """Logs what a step of the shutdown raises, so that the other requests are still answered."""
    try:
        callback()
    except BaseException:
        _log.exception("a cleanup failed while the engine stopped")


def _raise(error: BaseException) -> None:
    raise error
