"""The service under test as a process of its own, with an engine whose steps are timed or with one that answers at once."""

import json
import multiprocessing
import queue
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch

from benchmarks.client import BenchmarkError
from engine.api import EngineInfo, EngineState
from engine.cache.pool import PoolStats
from engine.config import EngineConfig
from engine.engine import Engine
from engine.models.base import ModelConfig
from engine.request import EngineRequest, RequestOutput, SamplingParams
from engine.saves.spec import SaveEvent
from engine.stats import EngineListener, EngineStats
from service.config.settings import Settings
from service.http.server import listen, serve
from service.runtime import EngineFactory, Runtime, StartableEngine

HOST = "127.0.0.1"
START_SECONDS = 300.0
IDLE_SECONDS = 600.0


@dataclass(frozen=True)
class Step:
    """One step of the engine."""

    num_tokens: int
    num_outputs: int
    seconds: float
    """As the engine reports it."""
    ended: float
    """When the listener heard of it, on a clock of this process."""


@dataclass(frozen=True)
class Taken:
    """What happened in the child process since it was last asked."""

    steps: list[Step]
    loop_seconds: float
    """Processor time of the thread that runs the event loop."""


class StepClock:
    """Listens for the service and notes every step on the way."""

    def __init__(self, listener: EngineListener) -> None:
        self.steps: list[Step] = []
        self._listener = listener

    def on_step(self, outputs: Sequence[RequestOutput], num_tokens: int, seconds: float) -> None:
        self.steps.append(Step(num_tokens, len(outputs), seconds, time.perf_counter()))
        self._listener.on_step(outputs, num_tokens, seconds)

    def on_save(self, event: SaveEvent) -> None:
        self._listener.on_save(event)

    def on_dead(self, error: BaseException) -> None:
        self._listener.on_dead(error)


class InstantEngine:
    """Answers every request with one token as soon as its thread wakes up. Computes and saves nothing."""

    def __init__(self, config: EngineConfig, listener: EngineListener) -> None:
        known = json.loads((Path(config.model) / "config.json").read_text())
        self.info = _info(ModelConfig("none", 2, 8, known["vocab_size"], known["max_position_embeddings"], (), torch.float32))
        self._listener = listener
        self._state: EngineState = "starting"
        self._requests: queue.SimpleQueue[EngineRequest | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="instant-engine", daemon=True)

    @property
    def state(self) -> EngineState:
        return self._state

    def start(self, progress: Callable[[int, int], None] | None = None) -> None:
        self._thread.start()
        self._state = "running"

    def submit(self, request: EngineRequest) -> None:
        self._requests.put(request)

    def abort(self, request_id: str) -> None:
        pass

    def save_bytes_written(self, save_id: str) -> int:
        return 0

    def stats(self) -> EngineStats:
        nothing = PoolStats(0, 0, 0, 0)
        return EngineStats(0, 0, nothing, nothing, 0, 0, 0, 0, 0, 0, 0, 0.0)

    def drain(self) -> None:
        self._state = "draining"

    def wait_idle(self, timeout_seconds: float) -> bool:
        return True

    def stop(self) -> None:
        self._state = "stopped"
        self._requests.put(None)
        self._thread.join()

    def _run(self) -> None:
        while (request := self._requests.get()) is not None:
            arrived = [request]
            with suppress(queue.Empty):
                while (more := self._requests.get_nowait()) is not None:
                    arrived.append(more)
            outputs = [RequestOutput(each.request_id, each.prompt_token_ids[-1:], finish_reason="length") for each in arrived]
            self._listener.on_step(outputs, len(outputs), 0.0)


def _info(model: ModelConfig) -> EngineInfo:
    return EngineInfo(model, "cpu", "float32", model.max_model_len, 16, "none", 2048, 1 << 20, 1 << 20, 32)


class EdgeService:
    """A service in a child process, ready inside of `with`. `instant`: with an `InstantEngine`."""

    def __init__(self, settings: dict[str, Any], *, instant: bool) -> None:
        with listen(HOST, 0) as probe:
            self.port: int = probe.getsockname()[1]
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(settings | {"host": HOST, "port": self.port}, instant, theirs))
        self._theirs = theirs

    def __enter__(self) -> Self:
        self._process.start()
        self._theirs.close()
        try:
            self._wait_ready()
        except BaseException:
            self._process.terminate()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._process.terminate()
        self._process.join()
        self._pipe.close()

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    def take(self) -> Taken:
        """What happened since the last call. Waits until the engine is idle."""
        return self.run_without_http(())

    def run_without_http(self, requests: Sequence[EngineRequest]) -> Taken:
        """Hands the requests to the engine inside of its process and waits for them; nobody reads the outputs."""
        try:
            self._pipe.send(requests)
            taken: Taken = self._pipe.recv()
        except (EOFError, OSError) as error:
            raise BenchmarkError("the service has ended") from error
        return taken

    def _wait_ready(self) -> None:
        if not self._pipe.poll(START_SECONDS):
            raise BenchmarkError(f"the service wasn't ready after {START_SECONDS:.0f} s")
        try:
            self._pipe.recv()
        except EOFError:
            raise BenchmarkError("the service ended before it was ready") from None


def greedy(request_id: str, prompt: list[int], max_tokens: int) -> EngineRequest:
    """What the service makes of a greedy request with `ignore_eos`."""
    return EngineRequest(request_id, prompt, SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True))


def _serve(settings: dict[str, Any], instant: bool, pipe: Connection) -> None:
    """The child process."""
    clocks: list[StepClock] = []

    def make(config: EngineConfig, listener: EngineListener) -> StartableEngine:
        clocks.append(StepClock(listener))
        factory: EngineFactory = InstantEngine if instant else Engine
        return factory(config, clocks[0])

    known = Settings(**settings)
    runtime = Runtime(known, make)
    threading.Thread(target=_answer, args=(runtime, clocks, pipe), name="questions", daemon=True).start()
    serve(known, runtime)


def _answer(runtime: Runtime, clocks: list[StepClock], pipe: Connection) -> None:
    while runtime.state == "starting":
        time.sleep(0.05)
    if runtime.ready is None:
        pipe.close()
        return
    pipe.send("ready")
    engine, clock, before = runtime.ready.engine, clocks[0], _loop_seconds()
    with suppress(EOFError):
        while True:
            for request in pipe.recv():
                engine.submit(request)
            engine.wait_idle(IDLE_SECONDS)
            steps, clock.steps = clock.steps, []
            now = _loop_seconds()
            pipe.send(Taken(steps, now - before))
            before = now


def _loop_seconds() -> float:
    identity = threading.main_thread().ident
    assert identity is not None
    return time.clock_gettime(time.pthread_getcpuclockid(identity))
