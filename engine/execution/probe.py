"""A step of the engine's own, to tell a request that can't be computed from an engine that computes nothing any more."""

from dataclasses import replace

import torch

from engine.cache.kv import KVCache
from engine.cache.pool import NULL_BLOCK
from engine.execution.batch import Batch, CaptureRows, build_batch
from engine.layers import LayerId
from engine.request import EngineRequest, SamplingParams
from engine.scheduling.scheduler import Chunk
from engine.scheduling.sequence import TokenSequence

PROBE_REQUEST = "probe"
"""The request id, for logs; requests of clients have others."""


class Probe:
    """One token through all layers and the head, sampled; a row of the first layer and of the last ones goes to the null page.

    Its keys and values lie in blocks of its own while it lasts, since attention reads no null block.
    """

    def __init__(self, kv: KVCache, num_layers: int) -> None:
        self._kv = kv
        self._num_layers = num_layers
        request = EngineRequest(PROBE_REQUEST, (0,), SamplingParams(max_tokens=1, temperature=0.0))
        self._sequence = TokenSequence(request, 0, num_layers, [0], {}, kv.new_tables(num_layers))

    def begin(self) -> Batch | None:
        """None where others hold every block of some group: then it takes them to tell. `end` is next, in any case."""
        sequence = self._sequence
        if self._kv.extend(sequence.tables, 0, 1) < 1:
            return None
        batch = build_batch([Chunk(sequence, 0, 1)], self._num_layers)
        return replace(batch, captures={layer: _null_page() for layer in self._captured()})

    def end(self) -> None:
        self._kv.release(self._sequence.tables)

    def _captured(self) -> list[LayerId]:
        return [0, self._num_layers, "norm"]


def _null_page() -> CaptureRows:
    """The batch's only row, and the first row of the page that nobody reads."""
    return CaptureRows(torch.tensor([0]), torch.tensor([NULL_BLOCK]))
