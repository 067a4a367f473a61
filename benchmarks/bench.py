"""What all workloads of one run share: the model, the options, a folder, and the systems that are started for them."""

import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from benchmarks import machine
from benchmarks.limits import ModelShape, ProductClock, model_shape
from benchmarks.machine import Machine
from benchmarks.targets import Row
from benchmarks.vllm import KV_CACHE_GIB, VllmProcess, environment
from benchmarks.workload import extraction
from engine.models.checkpoints.prepared import Progress
from engine.models.checkpoints.source import default_cache, resolve_model
from service.cli.launcher import ServiceProcess

UNTRIMMED = "--no-trim-last-layer"
WARM = ("--prefault-caches", "--kv-cache-memory", str(KV_CACHE_GIB << 30), "--state-cache-memory", str(1 << 30))


@dataclass(frozen=True)
class Options:
    """What the command line says."""

    dtype: str = "float32"
    rounds: int = 3
    concurrency: int = 16
    limit: int | None = None
    reference: bool = True
    vllm: bool = False
    serve_arguments: tuple[str, ...] = ()


@dataclass
class Result:
    """What a workload gave: lines for people, figures against targets, and everything that was measured."""

    lines: list[str] = field(default_factory=list)
    rows: list[Row] = field(default_factory=list)
    measured: dict[str, Any] = field(default_factory=dict)


class Bench:
    """One run. Whatever it has started has ended when `stack` is closed."""

    def __init__(self, options: Options, model: Path, directory: Path, facts: Machine, stack: ExitStack) -> None:
        self.options = options
        self.model = model
        self.directory = directory
        self.facts = facts
        self.dtype: torch.dtype = getattr(torch, options.dtype)
        self.clock = ProductClock(self.dtype)
        self._stack = stack
        self._config = json.loads((model / "config.json").read_text())

    @property
    def width(self) -> int:
        return int(self._config["hidden_size"])

    @property
    def num_layers(self) -> int:
        return int(self._config["num_hidden_layers"])

    @property
    def vocab_size(self) -> int:
        return int(self._config["vocab_size"])

    @cached_property
    def shape(self) -> ModelShape:
        return model_shape(self.model)

    def say(self, line: str) -> None:
        print(line, flush=True)

    @contextmanager
    def service(self, *arguments: str, model: Path | None = None) -> Iterator[ServiceProcess]:
        """A fresh service with a state of its own, which must end well. The command line's own options come last, so they win."""
        with tempfile.TemporaryDirectory(prefix="strata-bench-") as state_dir:
            own = ["--model", str(model or self.model), "--dtype", self.options.dtype, "--port", "0", "--state-dir", state_dir]
            own += ["--save-root", str(self.directory), *arguments, *self.options.serve_arguments]
            self.say(f"Starting the service {' '.join(arguments)}".rstrip())
            with ServiceProcess(own) as service:
                yield service
                service.stop()

    @contextmanager
    def warm_service(self, *arguments: str) -> Iterator[ServiceProcess]:
        """One whose caches are in memory, as after some minutes of work: as large as vLLM's, which writes to all of its own at start."""
        with self.service(*WARM, *arguments) as service:
            yield service

    @cached_property
    def can_leave_untrimmed(self) -> bool:
        """Whether the service can be told to compute all rows of the last layer."""
        command = [sys.executable, "-m", "service", "serve", "--help"]
        return UNTRIMMED in subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout

    @cached_property
    def vllm(self) -> VllmProcess:
        """Started for the first workload that asks, and kept to the end: starting takes minutes."""
        folder = environment()
        self.say("Starting vLLM, which takes a minute or two")
        layers, log = extraction(1).layers, self.directory / "vllm.log"
        return self._stack.enter_context(VllmProcess(folder, self.model, layers, self.options.dtype, self.directory, log))


@contextmanager
def open_bench(options: Options, model: str | None, parent: Path) -> Iterator[Bench]:
    """A run with a folder of its own below `parent`, which is gone afterwards. Raises `ModelError` where there is no such model."""
    parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="run-", dir=parent) as name, ExitStack() as stack:
        directory = Path(name).resolve()
        folder = resolve_model(model, cache=default_cache(), progress=Progress(print)).folder
        yield Bench(options, folder, directory, machine.look(directory), stack)
