"""Settings of the engine, resolved once and passed down."""

from dataclasses import dataclass
from typing import Literal

Durability = Literal["none", "file", "full"]
Checksum = Literal["none", "sha256", "xxh3"]
Switch = Literal["auto", "on", "off"]
AttentionName = Literal["auto", "sdpa", "varlen", "flashinfer"]


@dataclass(frozen=True)
class EngineConfig:
    """What the engine is asked to do. None means "choose": the choice is logged at start."""

    model: str
    """A model folder."""
    device: str = "auto"
    """`cpu`, `cuda`, `cuda:1`; auto takes a GPU where there is one."""
    dtype: str = "auto"
    """`float32`, `bfloat16`, `float16`; auto is the checkpoint's, but float32 on a CPU that doesn't multiply bfloat16 natively."""
    max_model_len: int | None = None
    """Positions that may be fed to the model for one request."""
    block_size: int | None = None
    """Tokens per KV block."""
    state_page_size: int = 32
    """Rows per hidden-state page, whatever the block size is."""
    kv_cache_tokens: int | None = None
    kv_cache_memory: int | None = None
    """Bytes; at most one of the two is given."""
    snapshot_distance: int = 1024
    """Tokens between snapshots of recurrent layers' states, at which cached prefixes of such models end."""
    recurrent_state_memory: int | None = None
    """Bytes for the states of recurrent layers, snapshots included; None: a part of the KV cache's memory."""
    state_cache_memory: int | None = None
    """Bytes of host memory for hidden-state pages."""
    prefault_caches: bool = False
    """Touches the memory of the caches at start, on a CPU, so that no step waits for the system to hand it over."""
    prefix_cache: bool = True
    max_batch_tokens: int | None = None
    """Tokens computed in one step, over all requests."""
    prompt_logprobs_memory: int = 256 * 2**20
    """Bytes of host memory for the log-probabilities of prompts, over all requests that haven't ended."""
    inter_token_ms: float | None = None
    """How long a step beside text that is being generated may take, in milliseconds; 0: no limit."""
    max_running: int = 256
    max_queued: int = 1024
    attention: AttentionName = "auto"
    """The attention backend; auto takes the first one that the device, the dtype, the model and the block size allow."""
    native_kernels: Switch = "auto"
    """Compiled kernels on a CPU; auto takes them where there are some or a C compiler can make them."""
    packed_weights: Switch = "auto"
    """Weights laid out for oneDNN's products on a CPU; auto times both ways at start."""
    cuda_graphs: Switch = "auto"
    """Decoding steps recorded as CUDA graphs at start; auto: where the device and the attention backend have them."""
    overlap: Switch = "auto"
    """Whether the device is given the next step before the last one's tokens are looked at; auto: on CUDA."""
    trim_last_layer: bool = True
    """Rows whose last state nobody wants end with the keys and values of the last layer."""
    threads: int | None = None
    """Compute threads on a CPU; None: as many as this process may use processors."""
    writer_threads: int = 2
    durability: Durability = "file"
    checksum: Checksum = "none"
    umask: int = 0o022
    self_check: bool = True
    """At start a short prompt is computed in two ways, which must agree."""
    poison: bool = False
    """Fills blocks and pages whose contents are dead with NaN, so that a read of them can't go unnoticed (for tests)."""

    @property
    def sizes_kv_cache(self) -> bool:
        """Whether the KV cache takes a share of the memory that is free, since nobody has said how large it is."""
        return self.kv_cache_tokens is None and self.kv_cache_memory is None
