"""Steps of single tokens, recorded once per size of the batch and replayed: the host launches one graph instead of every kernel.

A recorded step reads and writes memory that stays where it is. Its inputs are filled before a replay: token ids, positions and, through
the attention backend, block tables. Rows beyond the batch are padding, whose keys and values go to the null block. What comes out lies
in buffers that all graphs share, and is to be used before the next replay: the logits and, where rows are captured, every layer's rows.
"""

import logging
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import torch

from engine.attention.facade import AttentionBackend, FixedShape, GraphBackend, GroupPlan, RefillableContext, SequencePlan
from engine.attention.transfer import StepBuffer
from engine.execution.batch import Batch
from engine.layers import LayerId
from engine.models.base import ForwardBatch, Model

MAX_BATCH = 256
"""Larger steps gain little: their kernels take longer than it takes to launch them."""

Replay = Callable[[], None]

_log = logging.getLogger(__name__)


class Recorder(Protocol):
    """Makes graphs."""

    def record(self, work: Callable[[], None]) -> Replay:
        """Runs `work` at least once as it is, then records it. It must neither wait for the device nor allocate what outlives it."""


class CudaRecorder:
    """Graphs of CUDA. They share one pool of memory, since only one runs at a time."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        make: Any = torch.cuda.Stream
        self._stream = make(device)
        self._pool = torch.cuda.graph_pool_handle()

    def record(self, work: Callable[[], None]) -> Replay:
        current = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            for _ in range(2):  # libraries allocate and choose kernels when they are first called
                work()
        current.wait_stream(self._stream)
        graph = torch.cuda.CUDAGraph()
        # Writer threads go on meanwhile; what they do is none of the graph's business.
        with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
            work()
        return graph.replay


@dataclass
class _Size:
    """Steps of up to `rows` sequences."""

    rows: int
    inputs: StepBuffer
    context: RefillableContext
    graphs: dict[bool, Replay] = field(default_factory=dict)
    """By whether rows are captured."""


@dataclass(frozen=True)
class GraphStep:
    """What came of a replay; valid until the next one."""

    logits: torch.Tensor  # [rows, vocab] float32
    states: torch.Tensor  # [num_layers + 2, rows, width]: by layer id, "norm" last; of use only where rows were to be captured

    def state(self, layer: LayerId) -> torch.Tensor:
        """`[rows, width]`."""
        return self.states[-1 if layer == "norm" else layer]


class DecodeGraphs:
    """Belongs to the engine thread. Graphs are recorded when they are first needed."""

    def __init__(self, model: Model, backend: GraphBackend, recorder: Recorder, *, max_len: int, max_batch: int = MAX_BATCH) -> None:
        """`max_len`: positions of the longest sequence there can be."""
        config = model.config
        self._model = model
        self._backend = backend
        self._recorder = recorder
        self._max_len = max_len
        self._sizes: dict[int, _Size] = {}
        self._max_batch = min(max_batch, MAX_BATCH)
        rows = self._padded(self._max_batch)
        self.logits = torch.empty(rows, config.vocab_size, dtype=torch.float32, device=model.device)
        self.states = torch.empty(config.num_layers + 2, rows, config.hidden_size, dtype=model.dtype, device=model.device)
        self.num_replays = 0

    def fits(self, batch: Batch) -> bool:
        """Whether the step is one of single tokens that all run through all layers, with no logits wanted but for sampling."""
        rows = batch.num_tokens
        return (
            0 < rows <= self._max_batch
            and len(batch.chunks) == rows
            and batch.rows_at_layer[-1] == rows
            and batch.final_rows is None
            and bool(batch.sampled)
            and not batch.logprob_rows
        )

    def run(
        self, batch: Batch, sequences: Sequence[SequencePlan], groups: Sequence[GroupPlan], on_device: torch.Tensor | None = None
    ) -> GraphStep:
        """Computes a step that `fits`. `on_device`: token ids that take the place of the batch's."""
        count, capturing = batch.num_tokens, bool(batch.captures)
        size = self._size(count, groups)
        size.context.refill(sequences, groups)
        padding = (0, size.rows - count)
        token_ids, positions = size.inputs.send([np.pad(array.numpy(), padding) for array in (batch.token_ids, batch.positions)])
        if on_device is not None:
            token_ids[:count].copy_(on_device)
        if capturing not in size.graphs:
            work = self._work(size, token_ids, positions, capturing)
            size.graphs[capturing] = self._recorder.record(work)
        size.graphs[capturing]()
        self.num_replays += 1
        return GraphStep(self.logits[:count], self.states[:, :count])

    def _size(self, count: int, groups: Sequence[GroupPlan]) -> _Size:
        rows = self._padded(count)
        if rows not in self._sizes:
            context = self._backend.plan_decodes(FixedShape(rows, self._max_len), groups)
            self._sizes[rows] = _Size(rows, StepBuffer(self._model.device), context)
        return self._sizes[rows]

    def _padded(self, count: int) -> int:
        return 1 << (count - 1).bit_length()

    def _work(self, size: _Size, token_ids: torch.Tensor, positions: torch.Tensor, capturing: bool) -> Callable[[], None]:
        rows, num_layers = size.rows, self._model.config.num_layers

        def capture(layer: int, hidden: torch.Tensor) -> None:
            if capturing:
                self.states[layer, :rows].copy_(hidden)

        def work() -> None:
            hidden = self._model.forward(ForwardBatch(token_ids, positions, [rows] * num_layers, size.context, capture))
            normed = self._model.final_norm(hidden)
            if capturing:
                self.states[-1, :rows].copy_(normed)
            self.logits[:rows].copy_(self._model.logits(normed))

        return work


class GraphsOrNot:
    """Replays what can be replayed, until recording fails: from then on nothing, since it would fail again."""

    def __init__(self, graphs: DecodeGraphs | None) -> None:
        self._graphs = graphs

    @property
    def usable(self) -> bool:
        return self._graphs is not None

    def run(
        self,
        batch: Batch,
        sequences: Sequence[SequencePlan],
        groups: Callable[[], Sequence[GroupPlan]],
        on_device: torch.Tensor | None = None,
    ) -> GraphStep | None:
        """None: the step is to be computed without a graph."""
        if self._graphs is None or not self._graphs.fits(batch):
            return None
        try:
            return self._graphs.run(batch, sequences, groups(), on_device)
        except Exception:
            _log.exception("a decoding step could not be recorded or replayed; from now on every kernel is launched by itself")
            self._graphs = None
            return None


def graphs_for(model: Model, backend: AttentionBackend, *, max_len: int, max_batch: int) -> DecodeGraphs | None:
    """None where the device or the attention backend has no graphs, or where there is no memory for their buffers."""
    if model.device.type == "cuda" and isinstance(backend, GraphBackend):
        with suppress(torch.OutOfMemoryError):
            return DecodeGraphs(model, backend, CudaRecorder(model.device), max_len=max_len, max_batch=max_batch)
    return None
