"""Scheduler, caches and capture under random loads, with a model whose every value says which tokens it was computed from.

The fake runner writes token ids into the KV cache and reads each row's whole context back through its block table; a row's hidden
state is a number made of the layer and all tokens up to it. So a wrong block, a stale page or a lost row can't go unnoticed. Blocks and
pages whose contents are dead are filled with NaN.
"""

from collections.abc import Sequence as List
from dataclasses import dataclass, field
from zlib import crc32

import numpy as np
import torch
from engine.sampler import SampledToken
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

from engine.batch import Batch
from engine.cache.kv import KVCache, KVGroup
from engine.cache.spec import KVSpec, LayerKV
from engine.cache.states import StateStore
from engine.core import CoreParts, EngineCore
from engine.errors import InvalidRequest, SaveError
from engine.layers import LayerId
from engine.limits import RequestLimits
from engine.prefix import PrefixFinder
from engine.request import EngineRequest, RequestOutput, SamplingParams
from engine.runner import StepResult
from engine.saves.chunk import RowChunk, SaveEnd
from engine.saves.spec import RowSelection, SaveEvent, SaveSpec
from engine.scheduler import Scheduler

NUM_LAYERS, VOCAB, MAX_MODEL_LEN = 3, 5, 40


def value_of(layer: LayerId, tokens: List[int]) -> float:
    """Exact in float32, and different for different prefixes and layers."""
    return float(crc32(repr((layer, list(tokens))).encode()) % (1 << 22)) + 1


def next_token(tokens: List[int]) -> int:
    return crc32(repr(list(tokens)).encode()) % VOCAB


class Target:
    directory_fd, name, path, replace = -1, "x", "x", False

    def published(self) -> None: ...
    def abandoned(self) -> None: ...


@dataclass
class FakeJob:
    """Keeps chunks and reads their rows only when they are released, as late as a slow disk would."""

    spec: SaveSpec
    store: StateStore
    chunks: list[RowChunk] = field(default_factory=list)
    rows: dict[int, list[float]] = field(default_factory=dict)
    end: SaveEnd | None = None
    error: SaveError | None = None
    started: int = 0

    @property
    def failed(self) -> bool:
        return self.error is not None

    def start(self) -> None:
        self.started += 1

    def append(self, chunk: RowChunk) -> None:
        assert self.end is None
        assert self.started == 1
        self.chunks.append(chunk)

    def finish(self, end: SaveEnd) -> None:
        self.end = end

    def cancel(self, error: SaveError) -> None:
        self.error = self.error or error

    def write_one(self) -> None:
        chunk, size = self.chunks.pop(0), self.store.page_size
        for position in range(chunk.position, chunk.position + chunk.count):
            block = position // size - chunk.position // size
            assert position not in self.rows, "a row is written twice"
            assert not self.rows or position > max(self.rows)
            self.rows[position] = [float(self.store.pages[pages[block], position % size, 0]) for pages in chunk.pages]
        chunk.release()


class FakeRunner:
    """Computes nothing, but checks that everything it would need is where the plan says."""

    def __init__(self, kv: KVCache, store: StateStore) -> None:
        self.kv = kv
        self.store = store
        self.max_tokens_seen = 0

    def execute(self, batch: Batch) -> StepResult:
        self.max_tokens_seen = max(self.max_tokens_seen, batch.num_tokens)
        for chunk in batch.chunks:
            for index, group in enumerate(self.kv.groups):
                if group.spec.layers[0] < chunk.sequence.run_depth:
                    self._write_and_check(group, chunk.sequence.tables.blocks[index], chunk.sequence.token_ids, chunk.start, chunk.end)
        row_tokens = [chunk.sequence.token_ids[: p + 1] for chunk in batch.chunks for p in range(chunk.start, chunk.end)]
        for layer, wanted in batch.captures.items():
            values = torch.tensor([value_of(layer, row_tokens[row]) for row in wanted.rows.tolist()])
            self.store.rows[wanted.slots, 0] = values
        tokens = [SampledToken(next_token(chunk.sequence.token_ids), None) for chunk in batch.sampled]
        return StepResult(tokens, [])

    def _write_and_check(self, group: KVGroup, table: list[int], tokens: List[int], start: int, end: int) -> None:
        size, window = group.spec.block_size, group.spec.kind.window
        for position in range(start, end):
            assert table[position // size] != 0
            group.keys[0, table[position // size], position % size] = tokens[position]
        for position in range(start, end):
            first = 0 if window is None else max(0, position - window + 1)
            positions = np.arange(first, position + 1)
            blocks = np.array(table)[positions // size]
            seen = group.keys[0, torch.from_numpy(blocks), torch.from_numpy(positions % size), 0, 0]
            assert seen.tolist() == [float(token) for token in tokens[first : position + 1]]


class Listener:
    def __init__(self) -> None:
        self.outputs: dict[str, list[RequestOutput]] = {}

    def on_step(self, outputs: List[RequestOutput], num_tokens: int, seconds: float) -> None:
        for output in outputs:
            self.outputs.setdefault(output.request_id, []).append(output)

    def on_save(self, event: SaveEvent) -> None: ...
    def on_dead(self, error: BaseException) -> None: ...


def make_group(layers: tuple[int, ...], window: int | None, block_size: int, num_blocks: int) -> KVGroup:
    spec = KVSpec(LayerKV(1, 1, window), layers, block_size, torch.float32)
    return KVGroup(spec, num_blocks, torch.device("cpu"), poison=True)


class CoreMachine(RuleBasedStateMachine):
    """Requests come, are computed, aborted and written in any order."""

    @initialize(
        blocks=st.tuples(st.sampled_from([1, 2, 4]), st.sampled_from([1, 2, 3]), st.sampled_from([1, 2, 4])),
        spare=st.integers(0, 12),
        pages=st.integers(6, 40),
        budget=st.integers(1, 12),
        running=st.integers(1, 4),
        prefix_cache=st.booleans(),
        max_rows=st.sampled_from([None, 4, 9]),
    )
    def build(
        self,
        blocks: tuple[int, int, int],
        spare: int,
        pages: int,
        budget: int,
        running: int,
        prefix_cache: bool,
        max_rows: int | None,
    ) -> None:
        full, sliding, page = blocks
        need = MAX_MODEL_LEN // min(full, sliding) + 4 + spare
        self.kv = KVCache([make_group((0, 2), None, full, need), make_group((1,), 5, sliding, 12 + spare)])
        self.store = StateStore(pages, page, 1, torch.float32, poison=True)
        self.prefixes = PrefixFinder(self.kv, page, enabled=prefix_cache)
        limits = RequestLimits(NUM_LAYERS, VOCAB, MAX_MODEL_LEN, self.kv, page, pages - 1, max_rows)
        scheduler = Scheduler(self.kv, self.prefixes, max_batch_tokens=budget, max_running=running, max_capture_rows=max_rows)
        self.runner = FakeRunner(self.kv, self.store)
        self.listener = Listener()
        self.released: list[List[int]] = []
        self.limits, self.budget = limits, budget
        parts = CoreParts(
            self.kv, self.store, scheduler, self.prefixes, self.runner, limits, frozenset(), torch.device("cpu"), prefix_cache
        )  # the fake runner has the method that a core calls
        self.core = EngineCore(parts, self.listener, self.released.append)
        self.requests: dict[str, EngineRequest] = {}
        self.jobs: dict[str, FakeJob] = {}
        self.aborted: set[str] = set()

    @rule(
        prompt=st.lists(st.integers(0, 1), min_size=1, max_size=20),
        max_tokens=st.integers(0, 8),
        stop=st.frozensets(st.integers(0, VOCAB - 1), max_size=1),
        layers=st.none() | st.lists(st.sampled_from([0, 1, 2, 3, "norm"]), min_size=1, max_size=3, unique=True),
        output=st.sampled_from(["prompt", "output", "last"]),
        pairs=st.sampled_from([((0, None),), ((-1, None),), ((0, 2), (-3, -1)), ((1, 4),), ((2, -2),)]),
        priority=st.integers(0, 1),
        salt=st.sampled_from(["", "other"]),
    )
    def add(
        self,
        prompt: list[int],
        max_tokens: int,
        stop: frozenset[int],
        layers: list[LayerId] | None,
        output: str,
        pairs: tuple[tuple[int, int | None], ...],
        priority: int,
        salt: str,
    ) -> None:
        name = f"r{len(self.requests)}"
        save = None
        if layers is not None:
            ordered = tuple(sorted(layers, key=lambda layer: (layer == "norm", layer)))
            save = SaveSpec(name, Target(), ordered, "float32", output == "output", output == "last", RowSelection(pairs))
        request = EngineRequest(name, prompt, SamplingParams(max_tokens=max_tokens, stop_token_ids=stop), save, priority, salt)
        try:
            self.limits.check(request)
        except InvalidRequest:
            return
        self.requests[name] = request
        if save is not None:
            self.jobs[name] = FakeJob(save, self.store)
        self.core.add(request, self.jobs.get(name))

    @rule()
    def step(self) -> None:
        if self.core.has_work:
            self.core.step()
        assert self.runner.max_tokens_seen <= self.budget

    @rule()
    def step_often(self) -> None:
        for _ in range(5):
            self.step()

    @rule(data=st.data())
    def write(self, data: st.DataObject) -> None:
        busy = [job for job in self.jobs.values() if job.chunks]
        if busy:
            data.draw(st.sampled_from(busy)).write_one()

    @rule()
    def take_pages_back(self) -> None:
        while self.released:
            self.core.release_pages(self.released.pop())

    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        if self.requests:
            name = data.draw(st.sampled_from(sorted(self.requests)))
            self.core.abort(name)
            self.aborted.add(name)

    @rule()
    def check(self) -> None:
        self.core.check_integrity()

    def teardown(self) -> None:
        if not hasattr(self, "core"):
            return
        for _ in range(3000):
            if not self.core.has_work:
                break
            self.core.step()
            for job in self.jobs.values():
                while job.chunks:
                    job.write_one()
            self.take_pages_back()
        assert not self.core.has_work, "something is never computed"
        for job in self.jobs.values():
            while job.chunks:
                job.write_one()
        self.take_pages_back()
        self.core.check_integrity()
        assert self.store.pool.stats().referenced == 0
        for name, request in self.requests.items():
            self._check_result(name, request)

    def _check_result(self, name: str, request: EngineRequest) -> None:
        outputs = self.listener.outputs[name]
        assert [output.finish_reason is not None for output in outputs] == [False] * (len(outputs) - 1) + [True]
        if name in self.aborted:
            return
        tokens = list(request.prompt_token_ids)
        for _ in range(request.sampling.max_tokens):
            tokens.append(next_token(tokens))
            if tokens[-1] in request.sampling.stop_token_ids:
                break
        assert [token for output in outputs for token in output.token_ids] == tokens[len(request.prompt_token_ids) :]
        if request.save is not None:
            self._check_file(request, tokens, self.jobs[name])

    def _check_file(self, request: EngineRequest, tokens: list[int], job: FakeJob) -> None:
        save = job.spec
        total = len(request.prompt_token_ids)
        if request.sampling.max_tokens and (save.include_output_tokens or save.include_last_token):
            total = len(tokens) - (not save.include_last_token)
        kept = [position for low, high in save.rows.ranges(total) for position in range(low, high)]
        assert not job.failed
        assert job.end is not None
        assert list(job.end.token_ids) == [tokens[position] for position in kept]
        assert (list(job.end.positions) if job.end.positions is not None else list(range(total))) == kept
        assert job.end.num_tokens == total
        assert job.rows == {p: [value_of(layer, tokens[: p + 1]) for layer in save.layers] for p in kept}


CoreMachine.TestCase.settings = settings(
    max_examples=150, stateful_step_count=40, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large]
)
TestCoreMachine = CoreMachine.TestCase
