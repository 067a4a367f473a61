"""A core around a tiny random model and a backend for pages whose kernels are doubles: what runs on a GPU, run on a processor.

Caches, pages and the outputs of graphs are full of NaN wherever nothing was written.
"""

from __future__ import annotations

import gc
import math
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from benchmarks.gpu.model import TINY, random_model
from engine.attention.facade import AttentionBackend, cache_of
from engine.attention.flashinfer import FlashInferBackend
from engine.attention.varlen import VarlenBackend
from engine.cache.groups import KVGroup
from engine.cache.kv import KVCache
from engine.cache.pool import IntArray
from engine.cache.spec import group_layers
from engine.cache.states import StateStore
from engine.capture.sink import DirectSink, RowSink
from engine.core import CoreParts, EngineCore
from engine.execution.graphs import DecodeGraphs, Replay
from engine.execution.runner import ModelRunner, StepOutput
from engine.execution.step_input import StepInput
from engine.layers import LayerId
from engine.request import EngineRequest, SamplingParams
from engine.sampling.sampler import Sampler
from engine.saves.spec import SaveSpec
from engine.scheduling.limits import RequestLimits
from engine.scheduling.prefix import PrefixFinder
from engine.scheduling.scheduler import Scheduler
from tests.unit.core_fakes import FakeJob, Listener, Target
from tests.unit.deferred_stream import DeferredStream
from tests.unit.paged_kernels import FakeFlashInfer, FakeVarlen

CPU = torch.device("cpu")
MAX_LEN, MAX_RUNNING, PAGE, NUM_PAGES = 512, 16, 32, 600
GRAPH_BYTES = 1 << 20


def make_backend(name: str) -> AttentionBackend:
    return VarlenBackend(CPU, FakeVarlen()) if name == "varlen" else FlashInferBackend(CPU, FakeFlashInfer(), 1024)


@dataclass
class FakeRecorder:
    """A recording that is run again instead of replayed; before that, everything a graph may write holds NaN."""

    recorded: int = 0
    outputs: list[torch.Tensor] = field(default_factory=list)
    error: Exception | None = None
    refuses_replays: bool = False
    memory: int = 1 << 30
    """Of the device, of which every graph takes `GRAPH_BYTES` for as long as it lives."""
    alive: weakref.WeakSet[Replay] = field(default_factory=weakref.WeakSet)

    def free_bytes(self) -> int:
        gc.collect()
        return self.memory - GRAPH_BYTES * len(self.alive)

    def record(self, work: Callable[[], None]) -> Replay:
        if self.error is not None:
            raise self.error
        self.recorded += 1
        work()

        def replay() -> None:
            if self.refuses_replays:
                raise RuntimeError("this can't be replayed")
            for output in self.outputs:
                output.fill_(math.nan)
            work()

        self.alive.add(replay)
        return replay


class CountingRunner(ModelRunner):
    """Counts the steps some of whose tokens were not known when they were launched."""

    num_ahead = 0

    def run(self, step: StepInput, sampled_before: torch.Tensor | None = None) -> StepOutput:
        self.num_ahead += len(step.unknown_rows) > 0
        return super().run(step, sampled_before)


class DecodeBench:
    """Takes requests, and steps until they are done."""

    def __init__(
        self,
        backend: str = "varlen",
        recorder: FakeRecorder | None = None,
        sink: Callable[[torch.Tensor], RowSink] = DirectSink,
        *,
        overlap: bool = False,
        stream: DeferredStream | None = None,
    ) -> None:
        self.model = random_model(TINY, CPU)
        attention = make_backend(backend)
        size = attention.default_block_size
        specs = group_layers(self.model.cache_layers(), size, self.model.dtype)
        self.kv = KVCache([KVGroup(spec, 30, CPU, poison=True) for spec in specs])
        for group in self.kv.groups:  # padding is written to the null block, and read from there
            assert group.keys[:, 0].isnan().all()
        self.store = StateStore(NUM_PAGES + 1, PAGE, TINY.width, TINY.dtype, poison=True)
        self.graphs = None
        if recorder is not None:
            self.graphs = DecodeGraphs(self.model, attention, recorder, max_len=MAX_LEN, max_batch=MAX_RUNNING)  # type: ignore[arg-type]  # a fake recorder
        caches = [cache_of(group) for group in self.kv.groups if isinstance(group, KVGroup)]
        if self.graphs is not None and recorder is not None:
            recorder.outputs += [self.graphs.logits, self.graphs.states]
            self.graphs.record(caches)
        self.runner = CountingRunner(self.model, caches, sink(self.store.rows), attention, self.graphs)
        prefixes = PrefixFinder(self.kv, PAGE, enabled=True)
        scheduler = Scheduler(self.kv, prefixes, max_batch_tokens=200, max_running=MAX_RUNNING)
        limits = RequestLimits(TINY.layers, TINY.vocab, MAX_LEN, self.kv, PAGE, NUM_PAGES, None)
        self.listener = Listener()
        self.released: list[IntArray] = []
        parts = CoreParts(
            self.kv,
            self.store,
            scheduler,
            prefixes,
            self.runner,
            Sampler(TINY.vocab, CPU),
            limits,
            frozenset(),
            CPU,
            prefix_cache=True,
            overlap=overlap,
            stream=stream,
        )
        self.core = EngineCore(parts, self.listener, self.released.append)
        self.jobs: dict[str, FakeJob] = {}

    def add(self, name: str, prompt: list[int], sampling: SamplingParams, layers: tuple[LayerId, ...] | None = None) -> None:
        save = None if layers is None else SaveSpec(name, Target(), layers, "float32", include_output_tokens=True)
        if save is not None:
            self.jobs[name] = FakeJob(save, self.store)
        self.core.add(EngineRequest(name, prompt, sampling, save), self.jobs.get(name))

    def run(self) -> None:
        while self.core.has_work:
            self.step()
        self.core.check_integrity()

    @torch.inference_mode()
    def step(self) -> None:
        self.core.step()
        for job in self.jobs.values():
            job.write_all()
        while self.released:
            self.core.release_pages([self.released.pop()])

    @property
    def num_ahead(self) -> int:
        return self.runner.num_ahead

    def tokens(self, name: str) -> list[int]:
        return [token for output in self.listener.outputs[name] for token in output.token_ids]

    def rows(self, name: str) -> torch.Tensor:
        """`[positions, layers, width]`."""
        rows = self.jobs[name].rows
        assert sorted(rows) == list(range(len(rows)))
        return torch.stack([rows[position] for position in range(len(rows))])
