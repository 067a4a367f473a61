"""One running save, as the engine sees it and as the writer threads keep it."""

import threading
import time
from collections import deque
from typing import Protocol

from engine.errors import SaveError
from engine.saves.builder import FileBuilder
from engine.saves.chunk import RowChunk, SaveEnd
from engine.saves.spec import SaveEvent, SaveSpec

Operation = RowChunk | SaveEnd


class JobOwner(Protocol):
    """The side of the writer that a job sees."""

    def submit(self, job: "SaveJob", operation: Operation) -> None: ...
    def announce(self, job: "SaveJob", event: SaveEvent) -> None: ...
    def cancel(self, job: "SaveJob", error: SaveError) -> None: ...


class SaveJob:
    """One running save. Its methods are called from the engine thread and never wait for a disk."""

    def __init__(self, writer: JobOwner, spec: SaveSpec, builder: FileBuilder, stop: threading.Event) -> None:
        """Made by `SaveWriter.begin`. `stop` tells the builder that the save has failed."""
        self.spec = spec
        self.builder = builder
        self.operations: deque[Operation] = deque()
        self.scheduled = False
        """Whether it lies in the writer's queue, pauses, or a thread works on it."""
        self.not_before = 0.0
        """Monotonic time until which it pauses: the disk didn't take what it had to write."""
        self.error: SaveError | None = None
        self.too_late_to_cancel = False
        """The file is being published, or the save has ended: too late to cancel."""
        self.ended = False
        self.finished_at: float | None = None
        self.counted_bytes = 0
        self.counted_seconds = 0.0
        self.event_lock = threading.RLock()
        self._stop = stop
        self._writer = writer

    @property
    def failed(self) -> bool:
        """A write failed, or the save was cancelled: no more rows are needed."""
        return self.error is not None

    @property
    def bytes_written(self) -> int:
        return self.builder.bytes_written

    def start(self) -> None:
        """The request's rows are being computed."""
        self._writer.announce(self, SaveEvent(self.spec.save_id, "running"))

    def append(self, chunk: RowChunk) -> None:
        """Hands over rows; chunks come in ascending order of position."""
        self._writer.submit(self, chunk)

    def finish(self, end: SaveEnd) -> None:
        """No rows will follow: the file is completed and published once those before are written."""
        self.finished_at = time.monotonic()
        self._writer.announce(self, SaveEvent(self.spec.save_id, "writing"))
        self.builder.expect(lambda: end)
        self._writer.submit(self, end)

    def cancel(self, error: SaveError) -> None:
        """Ends the save unless it is published already; a writer thread removes what there is of it. Idempotent."""
        self._writer.cancel(self, error)

    def fail(self, error: SaveError) -> None:
        """The first error stays. For the writer."""
        self.error = self.error or error
        self._stop.set()

    def seconds_since_finish(self) -> float:
        return 0.0 if self.finished_at is None else time.monotonic() - self.finished_at
