"""The engine's core without threads or HTTP: its steps are called one by one, and timed from inside and outside."""

import itertools
import queue
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from benchmarks.client import BenchmarkError
from engine.build import build_engine
from engine.config import EngineConfig
from engine.core import EngineCore
from engine.execution.batch import Batch
from engine.execution.runner import Launched, ModelRunner, StepResult
from engine.layers import LayerId
from engine.offline import LocalTarget
from engine.request import EngineRequest, RequestOutput, SamplingParams
from engine.saves.spec import SaveEvent, SaveSpec


class TimedRunner(ModelRunner):
    """Another runner, and how long its batches took: the model's execution with all that belongs to it."""

    def __init__(self, timed: ModelRunner) -> None:
        self.seconds = 0.0
        self._timed = timed

    @property
    def busy(self) -> bool:
        return self._timed.busy

    def collect(self, *, wait: bool = False) -> None:
        self._timed.collect(wait=wait)

    def launch(self, batch: Batch, before: Launched | None = None) -> Launched:
        return self._timed.launch(batch, before)

    def finish(self, launched: Launched) -> StepResult:
        started = time.perf_counter()
        try:
            return self._timed.finish(launched)
        finally:
            self.seconds += time.perf_counter() - started

    def execute(self, batch: Batch) -> StepResult:
        started = time.perf_counter()
        try:
            return self._timed.execute(batch)
        finally:
            self.seconds += time.perf_counter() - started


@dataclass(frozen=True)
class Step:
    """One step: all of it, and what of it was the model's execution."""

    seconds: float
    model_seconds: float
    num_outputs: int

    @property
    def outside_seconds(self) -> float:
        return self.seconds - self.model_seconds


@dataclass(frozen=True)
class Steps:
    """Steps in which every one of so many requests got a token and nothing else was computed."""

    num_requests: int
    steps: Sequence[Step]

    @property
    def seconds(self) -> float:
        return statistics.median(step.seconds for step in self.steps)

    @property
    def outside_seconds(self) -> float:
        return statistics.median(step.outside_seconds for step in self.steps)

    @property
    def tokens_per_second(self) -> float:
        return self.num_requests / self.seconds


class SteppedEngine:
    """An engine whose steps the caller takes. All calls belong to one thread."""

    def __init__(self, config: EngineConfig) -> None:
        self._saves: queue.SimpleQueue[SaveEvent] = queue.SimpleQueue()
        self._released: queue.SimpleQueue[Sequence[int]] = queue.SimpleQueue()
        self._parts = build_engine(config, self._saves.put)
        self._runner = TimedRunner(self._parts.core.runner)
        self._core = EngineCore(replace(self._parts.core, runner=self._runner), self, self._released.put)
        self._outputs = 0
        self._numbers = itertools.count()
        torch.set_num_threads(self._parts.threads)

    def close(self) -> None:
        self._parts.writer.close()

    @torch.inference_mode()
    def decode(self, prompts: Sequence[list[int]], max_tokens: int, save: tuple[Path, tuple[LayerId, ...]] | None = None) -> Steps:
        """Runs the prompts together, `max_tokens` each; `save`: a folder, and the layers that are saved of every token.

        Raises `BenchmarkError` where a save fails, or where there was no step with all of them in it.
        """
        for prompt in prompts:
            self._add(prompt, max_tokens, save)
        steps = []
        while self._core.has_work:
            steps.append(self._step())
        if save is not None:
            self._await_saves(len(prompts))
        full = [step for step in steps if step.num_outputs == len(prompts)]
        # The first of them may still compute prompts, the last one ends all requests.
        if len(full) < 3:
            raise BenchmarkError(f"{len(prompts)} requests were never generating at once")
        return Steps(len(prompts), full[1:-1])

    def on_step(self, outputs: Sequence[RequestOutput], num_tokens: int, seconds: float) -> None:
        """The core's listener."""
        errors = [output.error for output in outputs if output.error is not None]
        if errors:
            raise BenchmarkError(f"a request failed: {errors[0]}")
        self._outputs = len(outputs)

    def on_save(self, event: SaveEvent) -> None: ...

    def on_dead(self, error: BaseException) -> None: ...

    def _add(self, prompt: list[int], max_tokens: int, save: tuple[Path, tuple[LayerId, ...]] | None) -> None:
        name = str(next(self._numbers))
        spec = None
        if save is not None:
            folder, layers = save
            spec = SaveSpec(name, LocalTarget(folder / f"{name}.safetensors"), layers, "bfloat16", include_output_tokens=True)
        request = EngineRequest(name, prompt, SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True), spec)
        self._core.add(request, None if spec is None else self._parts.begin_save(request))

    def _step(self) -> Step:
        while not self._released.empty():
            self._core.release_pages(self._released.get())
        self._outputs, before = 0, self._runner.seconds
        started = time.perf_counter()
        self._core.step()
        return Step(time.perf_counter() - started, self._runner.seconds - before, self._outputs)

    def _await_saves(self, count: int) -> None:
        while count:
            event = self._saves.get()
            if event.status in ("failed", "cancelled"):
                raise BenchmarkError(f"a save failed: {event.error}")
            count -= event.status == "completed"
