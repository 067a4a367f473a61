"""A step of the engine's own, to tell a request that can't be computed from an engine that computes nothing any more."""

from dataclasses import replace

import numpy as np

from engine.cache.kv import KVCache
from engine.cache.pool import NULL_BLOCK
from engine.execution.step_input import CaptureInput, StepInput, build_step
from engine.layers import LayerId
from engine.request import EngineRequest, SamplingParams
from engine.sampling.sampler import SampledRow
from engine.scheduling.plan import Chunk
from engine.scheduling.sequence import TokenSequence

PROBE_REQUEST = "probe"
"""The request id, for logs; requests of clients have others."""


class Probe:
    """One token through all layers and the head (where there is one), sampled; a row of the first layer and of the last ones goes to the
    null page.

    Its keys and values lie in blocks of its own while it lasts, since attention reads no null block.
    """

    def __init__(self, kv: KVCache, num_layers: int, *, has_head: bool = True) -> None:
        self._kv = kv
        self._has_head = has_head
        self._num_layers = num_layers
        request = EngineRequest(PROBE_REQUEST, (0,), SamplingParams(max_tokens=1, temperature=0.0))
        self._sequence = TokenSequence(request, 0, num_layers, [0], {}, kv.new_tables(num_layers))
        self.sampled_row = SampledRow(request.sampling, None, None)

    def begin(self) -> StepInput | None:
        """None where others hold every block of some group: then it takes them to tell. `end` is next, in any case."""
        sequence = self._sequence
        if self._kv.extend(sequence.tables, 0, 1) < 1:
            return None
        slots = self._kv.begin_chunk(sequence.tables, 0)
        step = build_step([Chunk(sequence, 0, 1, self._num_layers, samples=self._has_head, slots=slots)], self._kv, self._num_layers)
        return replace(step, captures={layer: _null_page() for layer in self._captured()})

    def end(self) -> None:
        self._kv.release(self._sequence.tables)

    def _captured(self) -> list[LayerId]:
        # A row that nobody samples goes through the last layer only as far as others need it.
        return [0, self._num_layers, "norm"] if self._has_head else [self._num_layers - 1]


def _null_page() -> CaptureInput:
    """The step's only row, and the first row of the page that nobody reads."""
    return CaptureInput(np.array([0]), np.array([NULL_BLOCK]))
