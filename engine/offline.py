"""The engine without HTTP: runs a list of requests and returns when their files stand."""

import os
import threading
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType

from engine.config import EngineConfig
from engine.engine import Engine
from engine.errors import EngineError, QueueFull
from engine.request import EngineRequest, FinishReason, RequestOutput, TokenLogprobs
from engine.saves.spec import SavedFile, SaveEvent


class LocalTarget:
    """A file in a directory that the caller trusts: no allowlist, no lock file."""

    def __init__(self, path: Path, *, replace: bool = False) -> None:
        self.path = str(path.resolve())
        self.name = path.name
        self.replace = replace
        self.directory_fd = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)

    def published(self) -> None:
        os.close(self.directory_fd)

    def abandoned(self) -> None:
        os.close(self.directory_fd)


@dataclass
class Completion:
    """What became of one request."""

    request_id: str
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: Sequence[TokenLogprobs | None] | None = None
    finish_reason: FinishReason | None = None
    num_cached_tokens: int = 0
    file: SavedFile | None = None
    error: EngineError | None = None


class _Results:
    """Collects what the engine says, and wakes whoever waits for the end of a request and of its save."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self._completions: dict[str, Completion] = {}
        self._of_save: dict[str, str] = {}
        self._open_parts: dict[str, int] = {}
        self._dead: BaseException | None = None

    def expect(self, request: EngineRequest) -> None:
        with self.changed:
            self._completions[request.request_id] = Completion(request.request_id)
            self._open_parts[request.request_id] = 1 + (request.save is not None)
            if request.save is not None:
                self._of_save[request.save.save_id] = request.request_id

    def take(self, request_id: str) -> Completion:
        with self.changed:
            self.changed.wait_for(lambda: not self._open_parts[request_id])
            del self._open_parts[request_id]
            return self._completions.pop(request_id)

    def on_step(self, outputs: Sequence[RequestOutput], num_tokens: int, seconds: float) -> None:
        with self.changed:
            for output in outputs:
                self._add(self._completions[output.request_id], output)
            self.changed.notify_all()

    def on_save(self, event: SaveEvent) -> None:
        if event.status in ("running", "writing"):
            return
        with self.changed:
            completion = self._completions[self._of_save.pop(event.save_id)]
            completion.file = event.file
            completion.error = event.error or completion.error
            self._open_parts[completion.request_id] -= 1
            self.changed.notify_all()

    def on_dead(self, error: BaseException) -> None:
        """Every request has been answered with an error already."""

    def _add(self, completion: Completion, output: RequestOutput) -> None:
        completion.token_ids += output.token_ids
        completion.logprobs += output.logprobs or ()
        completion.prompt_logprobs = output.prompt_logprobs or completion.prompt_logprobs
        completion.num_cached_tokens = output.num_cached_tokens
        if output.finish_reason is not None:
            completion.finish_reason = output.finish_reason
            completion.error = completion.error or output.error
            self._open_parts[completion.request_id] -= 1


class OfflineEngine:
    """`with OfflineEngine(config) as engine: engine.generate(requests)`."""

    def __init__(self, config: EngineConfig) -> None:
        self._results = _Results()
        self.engine = Engine(config, self._results)

    def __enter__(self) -> "OfflineEngine":
        self.engine.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.engine.stop()

    def generate(self, requests: Iterable[EngineRequest], progress: Callable[[Completion], None] | None = None) -> list[Completion]:
        """Runs the requests together and returns their completions in order, files published. Waits where the queue is full."""
        submitted = []
        for request in requests:
            self.submit(request)
            submitted.append(request.request_id)
        completions = []
        for request_id in submitted:
            completions.append(self.wait(request_id))
            if progress is not None:
                progress(completions[-1])
        return completions

    def submit(self, request: EngineRequest) -> None:
        """Raises what `Engine.submit` raises, but waits where the queue is full."""
        self._results.expect(request)
        while True:
            with suppress(QueueFull):
                self.engine.submit(request)
                return
            with self._results.changed:
                self._results.changed.wait(1.0)

    def wait(self, request_id: str) -> Completion:
        """The completion of a submitted request, once it has ended and its file stands."""
        return self._results.take(request_id)
