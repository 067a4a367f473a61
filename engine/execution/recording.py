"""Graphs at start: what they take is found out before the KV cache takes the rest of the memory, and they are recorded when it is there."""

import logging
import time
from collections.abc import Callable, Sequence

import torch

from engine.attention.facade import AttentionBackend, GraphBackend, GroupCache, cache_of
from engine.cache.groups import KVGroup
from engine.cache.spec import KVSpec
from engine.config import Switch
from engine.errors import ConfigError
from engine.execution.faults import is_out_of_memory
from engine.execution.graphs import CudaRecorder, DecodeGraphs, Recorder
from engine.models.base import Model

RecorderFactory = Callable[[torch.device], Recorder | None]
"""None: the device has no graphs."""

_log = logging.getLogger(__name__)


def recorder_for(device: torch.device) -> Recorder | None:
    """See `RecorderFactory`."""
    return CudaRecorder(device) if device.type == "cuda" else None


class GraphRecording:
    """Belongs to the thread that puts the engine together."""

    def __init__(
        self,
        switch: Switch,
        model: Model,
        backend: AttentionBackend,
        *,
        max_len: int,
        max_batch: int,
        make_recorder: RecorderFactory = recorder_for,
    ) -> None:
        """`max_batch`: requests that can run at once. Raises `ConfigError` where graphs must be had and can't."""
        self.status = ""
        """The outcome of recording: how many graphs there are, or why there are none."""
        self._required = switch == "on"
        self._model = model
        self._backend = backend if isinstance(backend, GraphBackend) else None
        self._max_len, self._max_batch = max_len, max_batch
        self._make_recorder = make_recorder
        if switch == "off":
            self.status = "off"
        elif self._backend is None or make_recorder(model.device) is None:
            self._disable(f"attention {backend.name} on {model.device.type} has none")
        elif not model.config.has_head:
            self._disable("the model has no LM head, so no text is generated")
        elif not model.config.recordable:
            self._disable("some layers of the model wait for the device, as recurrent ones do, and experts in other dtypes than bfloat16")

    def bytes_needed(self, specs: Sequence[KVSpec]) -> int:
        """What the graphs will take of the device's memory: they are recorded over a cache that holds nothing, and dropped again.

        Raises `ConfigError` where they must be had and can't.
        """
        if self.status:
            return 0
        caches = [cache_of(KVGroup(spec, 1, self._model.device)) for spec in specs]  # padding needs the null block alone
        graphs = self._try_to_record(caches)
        if graphs is None:
            return 0
        recorder = self._recorder()
        with_graphs = recorder.free_bytes()
        del graphs
        return max(0, recorder.free_bytes() - with_graphs)

    def record(self, caches: Sequence[GroupCache]) -> DecodeGraphs | None:
        """The graphs over the engine's own caches. None: there are none, for the reason `status`.

        Raises `ConfigError` where they must be had and can't.
        """
        if self.status:
            return None
        started = time.perf_counter()
        graphs = self._try_to_record(caches)
        if graphs is not None:
            seconds = time.perf_counter() - started
            self.status = f"{graphs.num_recorded} recorded in {seconds:.1f} s, for steps of up to {graphs.max_batch} sequences"
        return graphs

    def _try_to_record(self, caches: Sequence[GroupCache]) -> DecodeGraphs | None:
        try:
            return self._record_over(caches)
        except Exception as error:
            _log.warning("decoding steps could not be recorded", exc_info=error)
            reason = "there was not enough memory" if is_out_of_memory(error) else f"recording failed: {type(error).__name__}: {error}"
        # The exception and the tensors that its traceback held are gone by now.
        self._recorder().free_bytes()
        self._disable(reason)
        return None

    def _record_over(self, caches: Sequence[GroupCache]) -> DecodeGraphs:
        assert self._backend is not None
        graphs = DecodeGraphs(self._model, self._backend, self._recorder(), max_len=self._max_len, max_batch=self._max_batch)
        graphs.record(caches)
        return graphs

    def _recorder(self) -> Recorder:
        """One of its own each time: its graphs share memory, which can't be used again once all of them are gone."""
        recorder = self._make_recorder(self._model.device)
        assert recorder is not None
        return recorder

    def _disable(self, reason: str) -> None:
        if self._required:
            raise ConfigError(f"--cuda-graphs is on, but {reason}")
        self.status = reason
