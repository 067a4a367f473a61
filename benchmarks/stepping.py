"""The engine's core without threads or HTTP: its steps are called one by one, and timed from inside and outside."""

import itertools
import queue
import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from benchmarks.client import BenchmarkError
from engine.build import build_engine
from engine.cache.pool import IntArray
from engine.config import EngineConfig
from engine.core import EngineCore
from engine.errors import EngineError
from engine.execution.runner import ModelRunner, StepOutput
from engine.execution.step_input import StepInput
from engine.layers import LayerId
from engine.offline import LocalTarget
from engine.request import EngineRequest, RequestOutput, SamplingParams
from engine.sampling.sampler import SampledRow, SampledToken, Sampler, SamplerOutput
from engine.saves.spec import SaveEvent, SaveSpec
from engine.scheduling.save_plan import plan_save


@dataclass
class Stopwatch:
    """How long the model's execution took, with all that belongs to it: from a step's arrays to its tokens, for a model in host memory."""

    seconds: float = 0.0

    @contextmanager
    def running(self) -> Iterator[None]:
        started = time.perf_counter()
        try:
            yield
        finally:
            self.seconds += time.perf_counter() - started


class TimedRunner(ModelRunner):
    """Another runner, and how long its steps took."""

    def __init__(self, timed: ModelRunner, stopwatch: Stopwatch) -> None:
        self._timed = timed
        self._stopwatch = stopwatch

    @property
    def busy(self) -> bool:
        return self._timed.busy

    def collect(self, *, wait: bool = False) -> None:
        self._timed.collect(wait=wait)

    def run(self, step: StepInput, sampled_before: torch.Tensor | None = None) -> StepOutput:
        with self._stopwatch.running():
            return self._timed.run(step, sampled_before)


class TimedSampler(Sampler):
    """Another sampler, and how long it took to choose."""

    def __init__(self, timed: Sampler, stopwatch: Stopwatch) -> None:
        self._timed = timed
        self._stopwatch = stopwatch

    def launch(self, logits: torch.Tensor, rows: Sequence[SampledRow]) -> SamplerOutput:
        with self._stopwatch.running():
            return self._timed.launch(logits, rows)

    def finish(self, choice: SamplerOutput, rows: Sequence[SampledRow]) -> list[SampledToken | EngineError]:
        with self._stopwatch.running():
            return self._timed.finish(choice, rows)


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
        self._released: queue.SimpleQueue[IntArray] = queue.SimpleQueue()
        self._parts = build_engine(config, self._saves.put)
        self._stopwatch, core = Stopwatch(), self._parts.core
        runner, sampler = TimedRunner(core.runner, self._stopwatch), TimedSampler(core.sampler, self._stopwatch)
        self._core = EngineCore(replace(core, runner=runner, sampler=sampler), self, self._released.put)
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
        self._core.add(request, self._parts.begin_save(plan_save(request)))

    def _step(self) -> Step:
        while not self._released.empty():
            self._core.release_pages([self._released.get()])
        self._outputs, before = 0, self._stopwatch.seconds
        started = time.perf_counter()
        self._core.step()
        return Step(time.perf_counter() - started, self._stopwatch.seconds - before, self._outputs)

    def _await_saves(self, count: int) -> None:
        while count:
            event = self._saves.get()
            if event.status in ("failed", "cancelled"):
                raise BenchmarkError(f"a save failed: {event.error}")
            count -= event.status == "completed"
