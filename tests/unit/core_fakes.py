"""A core with a model whose every value says which tokens it was computed from.

The fake device writes tokens into the KV cache layer by layer and reads each row's whole context back through the step's tables; a row's
hidden state is a number made of the layer and all tokens up to it. So a wrong block, a stale page or a lost row can't go unnoticed.
Blocks and pages whose contents are dead are NaN. The cache salt is part of every value, as if it were a token before the first.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from zlib import crc32

import numpy as np
import torch

from engine.cache.groups import KVGroup
from engine.cache.kv import KVCache
from engine.cache.pool import IntArray
from engine.cache.spec import KVSpec, LayerKV
from engine.cache.states import StateStore
from engine.capture.sink import DirectSink, RowSink
from engine.core import CoreParts, EngineCore
from engine.device.streams import CopyStream
from engine.errors import SaveError
from engine.execution.executor import ComputedStep, LaunchedStep
from engine.execution.runner import StepOutput
from engine.execution.step_input import StepInput, in_order
from engine.layers import LayerId, depth_of
from engine.request import EngineRequest, RequestOutput, SamplingParams
from engine.sampling.sampler import Sampler
from engine.saves.chunk import RowChunk, SaveEnd
from engine.saves.selection import ALL_ROWS, RowSelection
from engine.saves.spec import SaveEvent, SaveSpec
from engine.scheduling.limits import RequestLimits
from engine.scheduling.plan import Chunk
from engine.scheduling.prefix import PrefixFinder
from engine.scheduling.scheduler import Scheduler
from engine.scheduling.sequence import TokenSequence

NUM_LAYERS, VOCAB, MAX_MODEL_LEN, WINDOW = 3, 5, 40, 5


def value_of(layer: LayerId, tokens: Sequence[int], salt: str) -> float:
    """Exact in float32, and different for different prefixes and layers."""
    return float(crc32(repr((layer, salt, list(tokens))).encode()) % (1 << 22)) + 1


def key_of(token: int, layer: int, salt: str) -> float:
    return float(token + 10 * layer + 100 * len(salt))


def next_token(tokens: Sequence[int]) -> int:
    return crc32(repr(list(tokens)).encode()) % VOCAB


class Target:
    """A save's target that nobody writes to."""

    directory_fd, name, path, replace = -1, "x", "x", False

    def published(self) -> None: ...
    def abandoned(self) -> None: ...


@dataclass
class FakeJob:
    """Keeps chunks and reads their rows only when it is told to, as late as a slow disk would."""

    spec: SaveSpec
    store: StateStore
    chunks: list[RowChunk] = field(default_factory=list)
    rows: dict[int, torch.Tensor] = field(default_factory=dict)
    """`[layers, width]` by position."""
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
        assert self.end is None
        self.end = end

    def cancel(self, error: SaveError) -> None:
        self.error = self.error or error

    def write_one(self) -> None:
        chunk = self.chunks.pop(0)
        positions = chunk.positions(0, chunk.count)
        slots = chunk.slots(positions, self.store.page_size)
        for position, of_layers in zip(positions.tolist(), slots, strict=True):
            assert position not in self.rows, "a row is written twice"
            assert not self.rows or position > max(self.rows)
            self.rows[position] = self.store.rows[torch.from_numpy(of_layers)].clone()
        chunk.release()

    def write_all(self) -> None:
        while self.chunks:
            self.write_one()


class FakeRunner:
    """A device that computes nothing, but checks that everything it would need is where the step's arrays say, and that nothing is done
    twice. What a row's tokens are it is told by `Bench`, which sees the chunks that a step is made of."""

    stream: CopyStream | None = None
    """Brings token ids to the host where steps overlap."""

    def __init__(self, kv: KVCache, store: StateStore) -> None:
        self.kv = kv
        self.store = store
        self.sink = self.make_sink()
        self.chunks: Sequence[Chunk] = ()
        """Those of the step that comes next."""
        self.steps: list[list[tuple[str, int, int]]] = []
        """Per step: request id, first position and end of every chunk."""
        self.max_captured = 0
        self.error: Exception | None = None
        """Raised by every step while it is set."""
        self.broken: AssertionError | None = None
        """A check that failed: for the core it is a failed step like any other, for the test it is not."""
        self._captured: set[tuple[str, LayerId, int]] = set()
        self._owners: dict[int, tuple[str, LayerId, int]] = {}
        """What each slot of the store was last written for."""

    def make_sink(self) -> RowSink:
        return DirectSink(self.store.rows)

    @property
    def busy(self) -> bool:
        return self.sink.busy

    def collect(self, *, wait: bool = False) -> None:
        self.sink.collect(wait=wait)

    def run(self, step: StepInput, sampled_before: torch.Tensor | None = None) -> StepOutput:
        chunks = self.chunks
        self.steps.append([(chunk.sequence.request.request_id, chunk.start, chunk.end) for chunk in chunks])
        try:
            if self.error is not None:
                raise self.error
            return self.compute(step, chunks, sampled_before)
        except AssertionError as error:
            self.broken = error
            raise
        except Exception:
            self.sink.discard()
            raise

    def forget(self, chunks: Sequence[Chunk]) -> None:
        """What was computed of these will be computed again."""
        for chunk in chunks:
            name = chunk.sequence.request.request_id
            self._captured -= {key for key in self._captured if key[0] == name and key[2] >= chunk.start}

    def compute(self, step: StepInput, chunks: Sequence[Chunk], sampled_before: torch.Tensor | None) -> StepOutput:
        contexts = self._contexts(step, chunks, sampled_before)
        self._check_depths(step, chunks)
        for number, group_input in step.groups.items():
            group, row = self.kv.groups[number], 0
            for place, chunk in enumerate(chunks):
                if group.spec.layers[0] < chunk.depth:
                    salt = chunk.sequence.request.cache_salt
                    keys = _Keys(group, group_input.tables[place], chunk.depth, salt)
                    keys.write(contexts[place], chunk, group_input.slots[row : row + chunk.count])
                    keys.check(contexts[place], chunk)
                row += chunk.count
        self._capture(step, chunks, contexts)
        logits = torch.full((len(step.sampled_rows), VOCAB), -torch.inf)
        for place, tokens in enumerate(tokens for tokens, chunk in zip(contexts, chunks, strict=True) if chunk.samples):
            logits[place, next_token(tokens)] = 0.0
        return StepOutput(logits if len(logits) else None, [], self.sink.flush())

    def _contexts(self, step: StepInput, chunks: Sequence[Chunk], sampled_before: torch.Tensor | None) -> list[list[int]]:
        """Per chunk all tokens up to its end, the one included that only the device knows. The step's arrays must say the same."""
        unknown = dict(zip(step.unknown_rows.tolist(), step.unknown_from.tolist(), strict=True))
        contexts, row = [], 0
        for chunk in chunks:
            tokens = chunk.sequence.token_ids[: chunk.end]
            if len(tokens) < chunk.end:
                assert sampled_before is not None
                tokens.append(int(sampled_before[unknown.pop(row + chunk.count - 1)]))
            known = step.token_ids[row : row + chunk.count].tolist()
            assert known[:-1] == tokens[chunk.start : -1]
            assert known[-1] == tokens[-1] or row + chunk.count - 1 in step.unknown_rows
            assert step.positions[row : row + chunk.count].tolist() == list(range(chunk.start, chunk.end))
            contexts.append(tokens)
            row += chunk.count
        assert not unknown
        assert row == step.num_tokens
        return contexts

    def _check_depths(self, step: StepInput, chunks: Sequence[Chunk]) -> None:
        """Narrowing is a slice: the leading rows of a layer must be just those that need it."""
        depths = [chunk.depth for chunk in chunks for _ in range(chunk.count)]
        assert depths == sorted(depths, reverse=True)
        assert list(step.rows_at_layer) == [sum(depth > layer for depth in depths) for layer in range(NUM_LAYERS)]
        for layer, wanted in step.captures.items():
            assert all(depths[row] >= depth_of([layer], NUM_LAYERS) for row in _rows_of_step(step, layer, wanted.rows).tolist())
        assert all(depths[row] == NUM_LAYERS for row in _rows_of_step(step, NUM_LAYERS, step.sampled_rows).tolist())

    def _capture(self, step: StepInput, chunks: Sequence[Chunk], contexts: Sequence[list[int]]) -> None:
        rows = [(place, position) for place, chunk in enumerate(chunks) for position in range(chunk.start, chunk.end)]
        self.max_captured = max(self.max_captured, sum(len(wanted.rows) for wanted in step.captures.values()))
        for layer, wanted in step.captures.items():
            kept = wanted.slots >= self.store.page_size  # what goes to the null page is nobody's
            taken = _rows_of_step(step, layer, wanted.rows[kept])
            for row, slot in zip(taken.tolist(), wanted.slots[kept].tolist(), strict=True):
                place, position = rows[row]
                sequence = chunks[place].sequence
                key = (sequence.request.request_id, layer, position)
                free = self.store.rows[slot].isnan().all() or self._owners.get(slot) == key
                assert free, "a row is written over: its page is shared, or captured before"
                assert key not in self._captured, "a row is captured twice"
                assert _may_be_kept(sequence, position), "a row that nobody keeps is captured"
                self._captured.add(key)
                self._owners[slot] = key
                value = value_of(layer, contexts[place][: position + 1], sequence.request.cache_salt)
                self.sink.put(torch.full((1, 1), value), torch.tensor([slot]))


def _may_be_kept(sequence: TokenSequence, position: int) -> bool:
    capture = sequence.capture
    assert capture is not None
    return capture.total is None or any(low <= position < high for low, high in capture.spec.rows.ranges(capture.total))


def _rows_of_step(step: StepInput, layer: LayerId, rows: IntArray) -> IntArray:
    """Rows of what leaves `layer` as rows of the step."""
    trimmed = step.final_rows is not None and layer in (NUM_LAYERS, "norm")
    return step.final_rows[rows] if trimmed and step.final_rows is not None and len(rows) else rows


@dataclass
class _Keys:
    """One sequence's keys in one group."""

    group: KVGroup
    table: IntArray
    depth: int
    salt: str

    @property
    def layers(self) -> list[tuple[int, int]]:
        return [(index, layer) for index, layer in enumerate(self.group.spec.layers) if layer < self.depth]

    def write(self, tokens: Sequence[int], chunk: Chunk, slots: IntArray) -> None:
        size = self.group.spec.block_size
        positions = np.arange(chunk.start, chunk.end)
        blocks = self.table[positions // size]
        assert (blocks != 0).all()
        assert self.group.pool.is_referenced(np.unique(blocks)).all()
        assert (slots == blocks * size + positions % size).all()
        for block, position in zip(blocks.tolist(), positions.tolist(), strict=True):
            for index, layer in self.layers:
                self.group.keys[index, block, position % size] = key_of(tokens[position], layer, self.salt)

    def check(self, tokens: Sequence[int], chunk: Chunk) -> None:
        size, window = self.group.spec.block_size, self.group.spec.kind.window
        for position in range(chunk.start, chunk.end):
            first = 0 if window is None else max(0, position - window + 1)
            positions = np.arange(first, position + 1)
            blocks = torch.from_numpy(self.table[positions // size])
            for index, layer in self.layers:
                seen = self.group.keys[index, blocks, torch.from_numpy(positions % size), 0, 0]
                assert seen.tolist() == [key_of(token, layer, self.salt) for token in tokens[first : position + 1]]


class Listener:
    """Keeps all outputs by request."""

    def __init__(self) -> None:
        self.outputs: dict[str, list[RequestOutput]] = {}

    def on_step(self, outputs: Sequence[RequestOutput], num_tokens: int, seconds: float) -> None:
        for output in outputs:
            self.outputs.setdefault(output.request_id, []).append(output)

    def on_save(self, event: SaveEvent) -> None: ...
    def on_dead(self, error: BaseException) -> None: ...


def make_group(layers: tuple[int, ...], window: int | None, block_size: int, num_blocks: int) -> KVGroup:
    """One KV head of width 1, poisoned; `num_blocks` without the null block."""
    spec = KVSpec(LayerKV(1, 1, window), layers, block_size, torch.float32)
    return KVGroup(spec, num_blocks + 1, torch.device("cpu"), poison=True)


class Bench:
    """A core over two KV groups (layers 0 and 2, and layer 1 with a window of 5) and its surroundings."""

    def __init__(
        self,
        *,
        full_size: int = 2,
        full_blocks: int = 40,
        sliding_size: int = 2,
        sliding_blocks: int = 40,
        page_size: int = 2,
        pages: int = 60,
        budget: int = 64,
        inter_token_seconds: float = 0.0,
        max_running: int = 16,
        prefix_cache: bool = True,
        max_rows: int | None = None,
        runner: type[FakeRunner] = FakeRunner,
        overlap: bool = False,
    ) -> None:
        groups = [make_group((0, 2), None, full_size, full_blocks), make_group((1,), WINDOW, sliding_size, sliding_blocks)]
        self.kv = KVCache(groups)
        self.store = StateStore(pages + 1, page_size, 1, torch.float32, poison=True)
        self.prefixes = PrefixFinder(self.kv, page_size, enabled=prefix_cache)
        self.limits = RequestLimits(NUM_LAYERS, VOCAB, MAX_MODEL_LEN, self.kv, page_size, pages, max_rows)
        self.scheduler = Scheduler(
            self.kv,
            self.prefixes,
            max_batch_tokens=budget,
            max_running=max_running,
            max_capture_rows=max_rows,
            inter_token_seconds=inter_token_seconds,
        )
        self.runner = runner(self.kv, self.store)
        self.listener = Listener()
        self.released: list[IntArray] = []
        self.budget, self.max_running, self.max_rows = budget, max_running, max_rows
        parts = CoreParts(
            self.kv,
            self.store,
            self.scheduler,
            self.prefixes,
            self.runner,  # type: ignore[arg-type]  # has the methods that a core calls
            Sampler(VOCAB, torch.device("cpu")),
            self.limits,
            frozenset(),
            torch.device("cpu"),
            prefix_cache,
            overlap=overlap,
            stream=self.runner.stream if overlap else None,
        )
        self.core = EngineCore(parts, self.listener, self.released.append)
        self._show_chunks()
        self.requests: dict[str, EngineRequest] = {}
        self.jobs: dict[str, FakeJob] = {}

    def _show_chunks(self) -> None:
        """The device is told which chunks a step is made of: of the step itself it sees arrays only."""
        steps, runner = self.core._steps, self.runner
        launch, finish, withdraw, can_compute = steps.launch, steps.finish, steps.withdraw, steps.can_compute

        def launch_shown(planned: Sequence[Chunk], before: LaunchedStep | None = None) -> LaunchedStep:
            runner.chunks = in_order(planned)
            return launch(planned, before)

        def withdraw_shown(step: LaunchedStep) -> None:
            runner.forget(step.chunks)
            withdraw(step)

        def finish_shown(step: LaunchedStep) -> ComputedStep:
            try:
                return finish(step)
            except Exception:
                runner.forget(step.chunks)
                raise

        def can_compute_shown() -> bool | None:
            runner.chunks = [Chunk(steps._probe._sequence, 0, 1, NUM_LAYERS, samples=True)]
            return can_compute()

        steps.launch, steps.finish = launch_shown, finish_shown  # type: ignore[method-assign]  # told of, then done
        steps.withdraw, steps.can_compute = withdraw_shown, can_compute_shown  # type: ignore[method-assign]  # the same

    def add(
        self,
        name: str,
        prompt: Sequence[int],
        max_tokens: int = 0,
        layers: tuple[LayerId, ...] | None = None,
        *,
        output: bool = False,
        last: bool = False,
        rows: RowSelection = ALL_ROWS,
        stop: frozenset[int] = frozenset(),
        priority: int = 0,
        salt: str = "",
    ) -> None:
        """Queues a request that saves `layers` (None: a plain one). Raises `InvalidRequest`."""
        save = None if layers is None else SaveSpec(name, Target(), layers, "float32", output, last, rows)
        request = EngineRequest(name, prompt, SamplingParams(max_tokens=max_tokens, stop_token_ids=stop), save, priority, salt)
        self.limits.check(request)
        self.requests[name] = request
        if save is not None:
            self.jobs[name] = FakeJob(save, self.store)
        self.core.add(request, self.jobs.get(name))

    def step(self) -> bool:
        """One step, if there is work; budgets are checked."""
        before = len(self.runner.steps)
        progress = self.core.step() if self.core.has_work else False
        if self.runner.broken is not None:
            raise self.runner.broken
        for chunks in self.runner.steps[before:]:
            assert sum(end - start for _, start, end in chunks) <= self.budget
        assert len(self.scheduler.running) <= self.max_running
        assert self.max_rows is None or self.runner.max_captured <= self.max_rows
        return progress

    def write(self) -> None:
        """The disk catches up with everything."""
        for job in self.jobs.values():
            job.write_all()
        self.take_pages_back()

    def take_pages_back(self) -> None:
        while self.released:
            self.core.release_pages([self.released.pop()])

    def run(self, *, max_steps: int = 3000) -> None:
        """Steps until nothing is left to compute, with a fast disk."""
        for _ in range(max_steps):
            if not self.core.has_work:
                break
            self.step()
            self.write()
        assert not self.core.has_work, "something is never computed"
        self.write()
        self.core.check_integrity()
        assert self.store.pool.stats().referenced == 0

    def names(self, sequences: Sequence[object]) -> list[str]:
        return [sequence.request.request_id for sequence in sequences]

    @property
    def running(self) -> list[str]:
        return self.names(self.scheduler.running)

    @property
    def waiting(self) -> list[str]:
        return self.names(self.scheduler.waiting)

    def num_cached(self, name: str) -> int:
        return self.listener.outputs[name][-1].num_cached_tokens

    def tokens(self, name: str) -> list[int]:
        """What was generated."""
        return [token for output in self.listener.outputs.get(name, []) for token in output.token_ids]

    def steps_of(self, name: str) -> Counter[int]:
        """How many tokens of the request each step computed, by step number."""
        return Counter(
            {number: end - start for number, chunks in enumerate(self.runner.steps) for owner, start, end in chunks if owner == name}
        )

    def check_results(self, *, but: frozenset[str] = frozenset()) -> None:
        """Every request has ended once; all `but` some have the right text and file."""
        for name, request in self.requests.items():
            outputs = self.listener.outputs[name]
            assert [output.finish_reason is not None for output in outputs] == [False] * (len(outputs) - 1) + [True]
            if name not in but:
                self._check_result(name, request)

    def _check_result(self, name: str, request: EngineRequest) -> None:
        tokens = list(request.prompt_token_ids)
        for _ in range(request.sampling.max_tokens):
            tokens.append(next_token(tokens))
            if tokens[-1] in request.sampling.stop_token_ids:
                break
        assert self.tokens(name) == tokens[len(request.prompt_token_ids) :]
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
        assert job.end.num_prompt_tokens == len(request.prompt_token_ids)
        rows = {position: states[:, 0].tolist() for position, states in job.rows.items()}
        assert rows == {p: [value_of(layer, tokens[: p + 1], request.cache_salt) for layer in save.layers] for p in kept}
