"""What a user of the engine (the HTTP service, an offline job, a test double) can rely on."""

from dataclasses import dataclass
from typing import Literal, Protocol

from engine.models.base import ModelConfig
from engine.request import EngineRequest
from engine.stats import EngineStats

EngineState = Literal["starting", "running", "draining", "stopped", "dead"]


@dataclass(frozen=True)
class CacheGroupInfo:
    """A group of layers that keep the same thing."""

    kind: str
    """For people: `keys and values`, `latents`, with or without a window, or `recurrent states`."""
    num_layers: int
    block_size: int
    """Tokens per block; of recurrent states those between two snapshots."""
    num_blocks: int
    bytes_per_block: int
    wasted_bytes: int
    """Allocated beyond what the blocks hold: padding."""


@dataclass(frozen=True)
class EngineInfo:
    """What was resolved at start."""

    model: ModelConfig
    device: str
    dtype: str
    """Compute dtype: `float32`, `bfloat16` or `float16`."""
    max_model_len: int
    block_size: int
    attention: str
    max_batch_tokens: int
    kv_cache_tokens: int
    """Tokens that fit the KV cache, over all requests: those of layers without a window, where there are any."""
    state_cache_rows: int
    """Rows (of one layer each) that fit the hidden-state pages."""
    state_page_size: int
    """Rows per page."""
    cache_groups: tuple[CacheGroupInfo, ...] = ()
    attention_workspace_bytes: int = 0
    """What the attention backend's buffers can grow to, beside the caches."""
    attention_reason: str = ""
    """Why that backend runs and not another; empty where there was no choice."""
    native_kernels: str = ""
    """Whether compiled kernels run, or why not."""
    packed_weights: str = ""
    """Whether weights are packed, and why."""
    self_check: str = ""
    """The outcome of the model's self-check at start."""
    cuda_graphs: str = ""
    """How many decoding steps are recorded as graphs, or why none are."""


class EngineAPI(Protocol):
    """Methods may be called from any thread."""

    info: EngineInfo

    @property
    def state(self) -> EngineState: ...

    def submit(self, request: EngineRequest) -> None:
        """Queues a request; its outputs go to the listener.

        Raises `InvalidRequest` for one that can never run, `QueueFull` for one that may later, or `EngineUnavailable`. When it
        raises, nothing was taken over: the save's target still belongs to the caller.
        """

    def abort(self, request_id: str) -> None:
        """Ends a request within a step; its save is cancelled, also when only the writing is left. Unknown ids are ignored."""

    def save_bytes_written(self, save_id: str) -> int:
        """Bytes that a running save has put into its temporary file; 0 for one that isn't running."""

    def stats(self) -> EngineStats: ...

    def drain(self) -> None:
        """Takes no new requests; those it has go on."""

    def wait_idle(self, timeout_seconds: float) -> bool:
        """Waits until no request and no save is left. False: some were when the time was up."""

    def stop(self) -> None:
        """Aborts what is left, ends the threads. Idempotent."""
