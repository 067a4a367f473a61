"""An engine around a model that is there already, whose steps the caller takes: requests in, seconds out."""

import itertools
import os
import queue
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file

from engine.build import assemble
from engine.cache.pool import IntArray
from engine.capture.row_capture import Job
from engine.config import EngineConfig
from engine.core import EngineCore
from engine.device.host import usable_cpus
from engine.errors import SaveError
from engine.layers import LayerId
from engine.models.base import Model
from engine.offline import LocalTarget
from engine.request import EngineRequest, RequestOutput, SamplingParams
from engine.saves.chunk import RowChunk, SaveEnd
from engine.saves.spec import SaveEvent, SaveSpec
from engine.scheduling.save_plan import plan_save


class CheckFailed(Exception):
    """A request or a save failed, so there are no figures."""


@dataclass(frozen=True)
class Extraction:
    """What is saved of every request. `folder` None: rows are dropped once they stand in host memory."""

    layers: tuple[LayerId, ...]
    folder: Path | None = None


@dataclass(frozen=True)
class Run:
    """What a set of requests took."""

    seconds: float
    tokens: int
    """Computed."""
    decode_seconds: float
    decode_tokens: int
    """Of the steps that gave every request a token, and took no prompt."""


Rows = list[tuple[list[int], torch.Tensor]]
"""Per prompt: token ids of the saved rows, and the rows `[rows, layers, width]`."""


class _FleetingTarget(LocalTarget):
    """A file that goes as soon as it stands, so that many fit a small file system."""

    def published(self) -> None:
        os.unlink(self.name, dir_fd=self.directory_fd)
        super().published()


class _Dropping:
    """A save that nobody writes: rows are let go as soon as they are handed over."""

    error: SaveError | None = None
    failed = False

    def start(self) -> None: ...

    def append(self, chunk: RowChunk) -> None:
        chunk.release()

    def finish(self, end: SaveEnd) -> None: ...
    def cancel(self, error: SaveError) -> None: ...


class Driver:
    """All calls belong to one thread."""

    def __init__(self, model: Model, config: EngineConfig, max_model_len: int) -> None:
        self._events: queue.SimpleQueue[SaveEvent] = queue.SimpleQueue()
        self._released: queue.SimpleQueue[IntArray] = queue.SimpleQueue()
        self.parts = assemble(model, config, self._events.put, max_model_len=max_model_len, threads=usable_cpus())
        self._core = EngineCore(self.parts.core, self, self._release)
        self._device, self._vocab = model.device, model.config.vocab_size
        self._numbers = itertools.count()
        self._random = random.Random(0)
        self._outputs = 0
        self._open_saves = 0

    def close(self) -> None:
        self.parts.writer.close()

    @torch.inference_mode()
    def run(self, count: int, length: int, new_tokens: int, extraction: Extraction | None = None) -> Run:
        """`count` random prompts of `length` tokens at once, `new_tokens` generated for each (0: prompts only). Ends when files stand."""
        requests = [self._request(length, new_tokens, extraction) for _ in range(count)]
        synchronize(self._device)
        before, started = self._core.num_computed_tokens, time.perf_counter()
        for request in requests:
            self._core.add(request, self._job(request, extraction))
        decode_seconds, decode_tokens = self._step_through(count)
        synchronize(self._device)
        self._await_saves()
        return Run(time.perf_counter() - started, self._core.num_computed_tokens - before, decode_seconds, decode_tokens)

    def has_graphs(self) -> bool:
        """Whether decoding steps are recorded and replayed, which ends when one can't be."""
        return self.parts.core.runner.has_graphs

    @torch.inference_mode()
    def rows(self, lengths: Sequence[int], layers: tuple[LayerId, ...], folder: Path, new_tokens: int = 8) -> Rows:
        """What is saved of prompts of these lengths, the same ones whenever they are asked for, run together."""
        paths = []
        for number, length in enumerate(lengths):
            path = folder / f"rows-{next(self._numbers)}.safetensors"
            prompt = [(7919 * number + 31 * i + i * i) % self._vocab for i in range(length)]
            save = SaveSpec(path.stem, LocalTarget(path), layers, "bfloat16", include_output_tokens=True)
            sampling = SamplingParams(max_tokens=new_tokens, temperature=0.0, ignore_eos=True)
            request = EngineRequest(path.stem, prompt, sampling, save, cache_salt=path.stem)
            self._open_saves += 1
            self._core.add(request, self.parts.begin_save(plan_save(request)))
            paths.append(path)
        self._step_through(len(lengths))
        self._await_saves()
        return [_read(path) for path in paths]

    def on_step(self, outputs: Sequence[RequestOutput], num_tokens: int, seconds: float) -> None:
        """The core's listener."""
        errors = [output.error for output in outputs if output.error is not None]
        if errors:
            raise CheckFailed(f"a request failed: {errors[0]}")
        self._outputs += sum(len(output.token_ids) for output in outputs)

    def on_save(self, event: SaveEvent) -> None: ...

    def on_dead(self, error: BaseException) -> None: ...

    def _release(self, pages: IntArray) -> None:
        self._released.put(pages)

    def _step_through(self, count: int) -> tuple[float, int]:
        """Steps to the end. The first full step may still hold prompts and the last ones end requests: neither is counted."""
        full: list[tuple[float, int]] = []
        while self._core.has_work:
            while not self._released.empty():
                self._core.release_pages([self._released.get()])
            self._outputs, started = 0, time.perf_counter()
            if not self._core.step():
                self._core.release_pages([self._released.get(timeout=60)])
            if self._outputs == count:
                full.append((time.perf_counter() - started, self._outputs))
        counted = full[1:-1]
        return sum(seconds for seconds, _ in counted), sum(tokens for _, tokens in counted)

    def _request(self, length: int, new_tokens: int, extraction: Extraction | None) -> EngineRequest:
        name = f"check-{next(self._numbers)}"
        prompt = [self._random.randrange(self._vocab) for _ in range(length)]
        save = None
        if extraction is not None:
            target = _FleetingTarget((extraction.folder or Path.cwd()) / f"{name}.safetensors")
            save = SaveSpec(name, target, extraction.layers, "bfloat16", include_output_tokens=new_tokens > 0)
        return EngineRequest(name, prompt, SamplingParams(max_tokens=new_tokens, temperature=0.0, ignore_eos=True), save)

    def _job(self, request: EngineRequest, extraction: Extraction | None) -> Job | None:
        if request.save is None or extraction is None:
            return None
        if extraction.folder is None:
            request.save.target.abandoned()
            return _Dropping()
        self._open_saves += 1
        return self.parts.begin_save(plan_save(request))

    def _await_saves(self) -> None:
        while self._open_saves:
            event = self._events.get()
            if event.status in ("failed", "cancelled"):
                raise CheckFailed(f"a save failed: {event.error}")
            self._open_saves -= event.status == "completed"
        while not self._released.empty():
            self._core.release_pages([self._released.get()])


def _read(path: Path) -> tuple[list[int], torch.Tensor]:
    saved = load_file(path)
    path.unlink()
    return saved["token_ids"].tolist(), saved["hidden_states"]


def synchronize(device: torch.device) -> None:
    """Waits until the device has done what it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
