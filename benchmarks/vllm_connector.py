"""Loaded into vLLM's own process, in vLLM's own environment: its hidden-states connector, made to work without a GPU.

The stock connector copies a finished request's rows through pinned memory on a CUDA stream of its own, neither of which a CPU has. Here the
rows are copied at once, which on a CPU is all that is left of it; locking, writing and bookkeeping stay the stock connector's.
"""

from concurrent.futures import Executor, Future
from functools import partial
from typing import TYPE_CHECKING, Protocol

import torch

if TYPE_CHECKING:

    class ExampleHiddenStatesConnector:
        """What is used of the class in vLLM, which isn't installed where types are checked."""

        _kv_cache: torch.Tensor | None  # [blocks, layers, block_size, width]
        _block_size: int
        _executor: Executor
        _lock_fds: dict[str, int]
        _req_futures: dict[str, Future[None]]
        _req_copy_events: dict[str, "CopyDone"]

        @staticmethod
        def _write_tensors(tensors: dict[str, torch.Tensor], event: "CopyDone", filename: str, lock_fd: int | None) -> None: ...
        def _on_write_done(self, req_id: str, future: Future[None]) -> None: ...

else:
    from vllm.distributed.kv_transfer.kv_connector.v1.example_hidden_states_connector import ExampleHiddenStatesConnector


class FinishedRequest(Protocol):
    """What the scheduler's side says of a request whose rows are to be written."""

    req_id: str
    filename: str
    token_ids: torch.Tensor
    block_ids: list[int]


class CopyDone:
    """Stands where the stock connector has a CUDA event: the copy is over by the time anybody asks."""

    def synchronize(self) -> None:
        """Returns at once."""

    def query(self) -> bool:
        return True


class CpuHiddenStatesConnector(ExampleHiddenStatesConnector):
    """Named in vLLM's `--kv-transfer-config`, with this module as `kv_connector_module_path`."""

    def _submit_async_write(self, pending: FinishedRequest) -> None:
        assert self._kv_cache is not None
        positions = torch.arange(len(pending.token_ids))
        blocks = torch.tensor(pending.block_ids)[positions // self._block_size]
        rows = self._kv_cache[blocks, :, positions % self._block_size]  # [tokens, layers, width]: indexing by tensors copies
        done = CopyDone()
        lock = self._lock_fds.pop(pending.req_id, None)
        tensors = {"hidden_states": rows, "token_ids": pending.token_ids}
        written = self._executor.submit(self._write_tensors, tensors, done, pending.filename, lock)
        self._req_copy_events[pending.req_id] = done
        self._req_futures[pending.req_id] = written
        written.add_done_callback(partial(self._on_write_done, pending.req_id))
