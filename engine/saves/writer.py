"""Writer threads: they take the rows of many saves, write each save's in order, and publish the files."""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Literal

import torch

from engine.config import Checksum, Durability
from engine.device.threads import keep_to_one_compute_thread
from engine.errors import EngineUnavailable, SaveError
from engine.saves.builder import FileBuilder, WriterOptions
from engine.saves.chunk import RowChunk, SaveEnd
from engine.saves.convert import Scratch
from engine.saves.digest import new_digest
from engine.saves.file import disk_error
from engine.saves.job import Operation, SaveJob
from engine.saves.retry import RetryLater
from engine.saves.spec import SavedFile, SaveEvent, SaveSpec

__all__ = ["RowChunk", "SaveEnd", "SaveJob", "SaveWriter"]

FinalStatus = Literal["failed", "cancelled"]

logger = logging.getLogger(__name__)


class SaveWriter:
    """A pool of threads over a queue of saves.

    A save's operations run one at a time and in order; after each of them the save goes to the end of the queue, so that a long one
    doesn't hold up the short ones. A save whose disk is full or fails pauses outside the queue, and no thread waits for it.
    """

    def __init__(
        self,
        pages: torch.Tensor,
        on_event: Callable[[SaveEvent], None],
        *,
        threads: int = 2,
        durability: Durability = "file",
        checksum: Checksum = "none",
        umask: int = 0o022,
        retry_seconds: float = 5.0,
    ) -> None:
        """`pages` is the contiguous host tensor `[num_pages, page_size, width]` of the compute dtype.

        `on_event` is called from the engine thread ("running", "writing") and from writer threads (the last event of a save).
        Raises `ConfigError` for a checksum that needs a package which is not installed.
        """
        assert pages.is_contiguous()
        if checksum != "none":
            new_digest(checksum)
        self._pages = pages
        self._on_event = on_event
        self._options = WriterOptions(durability, checksum, umask, retry_seconds)
        self._lock = threading.Lock()
        self._work = threading.Condition(self._lock)
        self._idle = threading.Condition(self._lock)
        self._ready: deque[SaveJob] = deque()
        self._paused: set[SaveJob] = set()
        self._open: set[SaveJob] = set()
        self._active = 0
        self._depth = 0
        self._bytes = 0
        self._seconds = 0.0
        self._closing = False
        self._threads = [threading.Thread(target=self._run, name=f"save-writer-{i}", daemon=True) for i in range(threads)]
        for thread in self._threads:
            thread.start()

    @property
    def queue_depth(self) -> int:
        """Chunks and ends that were handed over and are not done yet."""
        return self._depth

    @property
    def bytes_written_total(self) -> int:
        return self._bytes

    @property
    def write_seconds_total(self) -> float:
        """Time spent in writing and in fsync, over all threads."""
        return self._seconds

    def begin(self, spec: SaveSpec, *, num_rows: int | None, max_rows: int, end: Callable[[], SaveEnd] | None = None) -> SaveJob:
        """Takes over the spec's target; nothing is created before there is something to write.

        `num_rows`: how many rows will be kept, where that is known; `max_rows`: how many at most; `end`: makes what `finish` will be
        given, where that is known. Raises `EngineUnavailable` once the writer has been closed.
        """
        stop = threading.Event()
        builder = FileBuilder(spec, self._pages, self._options, stop, num_rows=num_rows, max_rows=max_rows, end=end)
        job = SaveJob(self, spec, builder, stop)
        with self._lock:
            if self._closing:
                raise EngineUnavailable("the writer has been closed")
            self._open.add(job)
        return job

    def wait_idle(self, timeout_seconds: float) -> bool:
        """Waits until nothing that was handed over is left undone. False: something was when the time was up."""
        with self._idle:
            return self._idle.wait_for(self._is_idle, timeout_seconds)

    def close(self) -> None:
        """Finishes what was queued, fails saves that were not finished ("interrupted"), ends the threads. Idempotent."""
        with self._lock:
            unfinished = [job for job in self._open if job.finished_at is None]
        for job in unfinished:
            job.cancel(SaveError("interrupted", "the service stopped before all rows were computed"))
        with self._lock:
            self._closing = True
            self._work.notify_all()
        for thread in self._threads:
            thread.join()

    # For `SaveJob`.

    def submit(self, job: SaveJob, operation: Operation) -> None:
        with self._lock:
            closed = self._closing
            if not closed:
                job.operations.append(operation)
                self._depth += 1
                self._schedule(job)
        if closed and isinstance(operation, RowChunk):
            # There is no writer thread left to do it.
            self._guard(operation.release)

    def cancel(self, job: SaveJob, error: SaveError) -> None:
        with self._lock:
            if job.too_late_to_cancel or job.failed:
                return
            job.fail(error)
            if job in self._paused:
                self._wake(job)
            self._schedule(job)

    def announce(self, job: SaveJob, event: SaveEvent) -> None:
        """Passes an event on unless the save's last one has been passed on already."""
        last = event.status not in ("running", "writing")
        with job.event_lock:
            if job.ended:
                return
            job.ended = last
            self._guard(lambda: self._on_event(event), job)

    # The threads.

    def _schedule(self, job: SaveJob) -> None:
        if job.scheduled:
            return
        job.scheduled = True
        if job.not_before > time.monotonic() and not job.failed:
            self._paused.add(job)
        else:
            self._ready.append(job)
        self._work.notify()

    def _wake(self, job: SaveJob) -> None:
        self._paused.remove(job)
        self._ready.append(job)
        self._work.notify()

    def _is_idle(self) -> bool:
        return not self._ready and not self._paused and not self._active

    def _run(self) -> None:
        keep_to_one_compute_thread()
        scratch = Scratch()
        while (job := self._take()) is not None:
            self._advance(job, scratch)
            self._requeue(job)

    def _take(self) -> SaveJob | None:
        with self._work:
            while not self._ready:
                if self._closing and not self._paused:
                    return None
                self._work.wait(self._wake_due())
            self._active += 1
            return self._ready.popleft()

    def _wake_due(self) -> float | None:
        """Makes saves ready whose retry is due; returns the seconds until the next one is (None: there is none)."""
        now = time.monotonic()
        for job in [job for job in self._paused if job.not_before <= now]:
            self._wake(job)
        return 0.0 if self._ready else min((job.not_before - now for job in self._paused), default=None)

    def _requeue(self, job: SaveJob) -> None:
        builder = job.builder
        with self._lock:
            self._bytes += builder.bytes_written - job.counted_bytes
            self._seconds += builder.write_seconds - job.counted_seconds
            job.counted_bytes, job.counted_seconds = builder.bytes_written, builder.write_seconds
            self._active -= 1
            job.scheduled = False
            if job.operations or (job.failed and not job.ended):
                self._schedule(job)
            if self._is_idle():
                self._idle.notify_all()

    def _advance(self, job: SaveJob, scratch: Scratch) -> None:
        """One operation of a save that goes well; for one that has failed, all that is left to be done."""
        operation = self._next_operation(job)
        if operation is not None:
            pause = self._attempt(job, operation, scratch)
            if pause is None:
                self._done(operation)
            else:
                self._postpone(job, operation, pause)
        if job.failed or job.ended:
            self._abandon(job)

    def _next_operation(self, job: SaveJob) -> Operation | None:
        with self._lock:
            return job.operations.popleft() if job.operations and not (job.failed or job.ended) else None

    def _attempt(self, job: SaveJob, operation: Operation, scratch: Scratch) -> float | None:
        """Seconds until it is to be retried; None: it has succeeded, or failed for good."""
        try:
            self._execute(job, operation, scratch)
        except RetryLater as later:
            return later.seconds
        except BaseException as error:  # whatever it is, only this save fails
            with self._lock:
                job.fail(self._save_error(job, error))
        return None

    def _postpone(self, job: SaveJob, operation: Operation, seconds: float) -> None:
        with self._lock:
            job.operations.appendleft(operation)
            job.too_late_to_cancel = False  # where publishing is what failed
            job.not_before = time.monotonic() + seconds

    def _execute(self, job: SaveJob, operation: Operation, scratch: Scratch) -> None:
        if isinstance(operation, RowChunk):
            job.builder.add_rows(operation, scratch)
            return
        finished = job.builder.complete(operation, scratch)
        if self._begin_publishing(job):
            self._published(job, finished.publish(sync_directory=self._options.durability == "full"))

    def _begin_publishing(self, job: SaveJob) -> bool:
        """From now on the save can't be cancelled any more; False where it was cancelled before."""
        with self._lock:
            job.too_late_to_cancel = not job.failed
            return job.too_late_to_cancel

    def _published(self, job: SaveJob, file: SavedFile) -> None:
        self._guard(job.spec.target.published, job)
        self._end(job, SaveEvent(job.spec.save_id, "completed", file, seconds=job.seconds_since_finish()))

    def _abandon(self, job: SaveJob) -> None:
        with self._lock:
            job.too_late_to_cancel = True
            left = list(job.operations)
            job.operations.clear()
        for operation in left:
            self._done(operation)
        if job.ended:
            return
        assert job.error is not None
        self._guard(job.builder.discard, job)
        self._guard(job.spec.target.abandoned, job)
        status: FinalStatus = "cancelled" if job.error.code == "cancelled" else "failed"
        self._end(job, SaveEvent(job.spec.save_id, status, error=job.error, seconds=job.seconds_since_finish()))

    def _end(self, job: SaveJob, event: SaveEvent) -> None:
        self.announce(job, event)
        with self._lock:
            self._open.discard(job)

    def _done(self, operation: Operation) -> None:
        if isinstance(operation, RowChunk):
            self._guard(operation.release)
        with self._lock:
            self._depth -= 1

    def _save_error(self, job: SaveJob, error: BaseException) -> SaveError:
        if isinstance(error, SaveError):
            return error
        if isinstance(error, OSError):
            return disk_error(error)
        logger.error("a save failed with an unexpected error", exc_info=error, extra={"fields": job.spec.log_fields})
        return SaveError("engine_error", f"writing failed: {type(error).__name__}: {error}")

    def _guard(self, callback: Callable[[], None], job: SaveJob | None = None) -> None:
        """Runs foreign code that must not end a writer thread; `job` is the save that it belongs to."""
        try:
            callback()
        except BaseException:
            logger.exception("a callback of the save writer failed", extra={"fields": {} if job is None else job.spec.log_fields})
