"""Steps of single tokens, recorded at start once per size of the batch and replayed: the host launches one graph instead of every kernel.

A recorded step reads and writes memory that stays where it is. Its inputs are filled before a replay: token ids, positions and, through
the attention backend, block tables. Rows beyond the batch are padding, whose keys and values go to the null block. What comes out lies
in buffers that all graphs share, and is to be used before the next replay: the logits and, where rows are captured, every layer's rows.
"""

import gc
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch

from engine.attention.facade import FixedShape, GraphBackend, GroupCache, GroupStep, RefillableContext
from engine.attention.transfer import StepBuffer
from engine.execution.step_input import StepInput
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

    def free_bytes(self) -> int:
        """Of the device's memory, once what no save uses has been given back."""


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

    def free_bytes(self) -> int:
        gc.collect()
        torch.cuda.synchronize(self._device)
        torch.cuda.empty_cache()
        free, _ = torch.cuda.mem_get_info(self._device)
        return free


@dataclass(frozen=True)
class _Size:
    """Steps of up to `rows` sequences."""

    rows: int
    inputs: StepBuffer
    context: RefillableContext
    graphs: dict[bool, Replay]
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
    """What is recorded may be replayed on another thread, one step at a time."""

    def __init__(self, model: Model, backend: GraphBackend, recorder: Recorder, *, max_len: int, max_batch: int = MAX_BATCH) -> None:
        """`max_len`: positions of the longest sequence there can be; `max_batch`: sequences of the largest step to be recorded."""
        config = model.config
        self._model = model
        self._backend = backend
        self._recorder = recorder
        self._max_len = max_len
        self._sizes: dict[int, _Size] = {}
        self.max_batch = min(max_batch, MAX_BATCH)
        rows = _padded(self.max_batch)
        self.logits = torch.empty(rows, config.vocab_size, dtype=torch.float32, device=model.device)
        self.states = torch.empty(config.num_layers + 2, rows, config.hidden_size, dtype=model.dtype, device=model.device)
        self.num_replays = 0

    @property
    def num_recorded(self) -> int:
        return sum(len(size.graphs) for size in self._sizes.values())

    @torch.inference_mode()
    def record(self, caches: Sequence[GroupCache]) -> None:
        """Records steps of every size over the caches of all KV groups; nothing can be replayed before.

        The largest ones come first, so that the others find room in the memory that those needed.
        """
        rows = _padded(self.max_batch)
        while rows:
            self._sizes[rows] = self._record_size(rows, caches)
            rows //= 2

    def fits(self, step: StepInput) -> bool:
        """Whether the step is one of single tokens that all run through all layers, with no logits wanted but for sampling."""
        return 0 < step.num_tokens <= self.max_batch and step.all_single and len(step.sampled_rows) > 0 and not step.scores

    def run(self, step: StepInput, groups: Sequence[GroupStep], given: torch.Tensor | None = None) -> GraphStep:
        """Computes a step that `fits`. `given`: `[rows]` token ids on the device, in the place of the step's."""
        count = step.num_tokens
        size = self._sizes[_padded(count)]
        size.context.refill(step.sequences, [group for _, group in groups])
        padding = (0, size.rows - count)
        token_ids, _ = size.inputs.send([np.pad(array, padding) for array in (step.token_ids, step.positions)])
        if given is not None:
            token_ids[:count].copy_(given)
        size.graphs[bool(step.captures)]()
        self.num_replays += 1
        return GraphStep(self.logits[:count], self.states[:, :count])

    def _record_size(self, rows: int, caches: Sequence[GroupCache]) -> _Size:
        inputs, nothing = StepBuffer(self._model.device), np.zeros(rows, np.int64)
        context = self._backend.plan_decodes(FixedShape(rows, self._max_len), caches)
        token_ids, positions = inputs.send([nothing, nothing])  # `run` sends to the same addresses
        works = {capturing: self._work(rows, context, token_ids, positions, capturing) for capturing in (True, False)}
        return _Size(rows, inputs, context, {capturing: self._recorder.record(work) for capturing, work in works.items()})

    def _work(
        self, rows: int, context: RefillableContext, token_ids: torch.Tensor, positions: torch.Tensor, capturing: bool
    ) -> Callable[[], None]:
        num_layers = self._model.config.num_layers

        def capture(layer: int, hidden: torch.Tensor) -> None:
            if capturing:
                self.states[layer, :rows].copy_(hidden)

        def work() -> None:
            hidden = self._model.forward(ForwardBatch(token_ids, positions, [rows] * num_layers, context, capture))
            normed = self._model.final_norm(hidden)
            if capturing:
                self.states[-1, :rows].copy_(normed)
            self.logits[:rows].copy_(self._model.logits(normed))

        return work


def _padded(count: int) -> int:
    """The size of the graph for a step of so many sequences."""
    return 1 << (count - 1).bit_length()


class GraphRunner:
    """Replays the steps for which there is a graph. After a replay has failed, none is replayed any more, since it would fail again."""

    def __init__(self, graphs: DecodeGraphs | None) -> None:
        self._graphs = graphs

    @property
    def usable(self) -> bool:
        return self._graphs is not None

    def run(self, step: StepInput, groups: Sequence[GroupStep], given: torch.Tensor | None = None) -> GraphStep | None:
        """None: the step is to be computed without a graph."""
        if self._graphs is None or not self._graphs.fits(step):
            return None
        try:
            return self._graphs.run(step, groups, given)
        except Exception:
            _log.exception("a decoding step could not be replayed; CUDA graphs are disabled from now on")
            self._graphs = None
            return None
