"""How much memory the caches get where the operator doesn't say."""

from pathlib import Path

import torch

from engine.cache.spec import KVSpec
from engine.config import EngineConfig
from engine.errors import ConfigError

GIB = 1 << 30
_CGROUP = Path("/sys/fs/cgroup")
_CGROUP_MEMORY = (
    ("memory.max", "memory.current"),  # version 2
    ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"),  # version 1, where no limit is a huge one
)
_KV_SHARE_OF_HOST, _KV_LIMIT_ON_HOST = 0.25, 4 * GIB
_KV_SHARE_OF_DEVICE = 0.85
_STATE_SHARE_OF_HOST, _STATE_LIMIT = 0.15, 2 * GIB
_AUTO_BLOCKS = 1 << 16
"""More blocks than this are made only where the operator asks for them: the books of a pool cost memory too."""


def host_memory_available() -> int:
    """Bytes that this process may still take: what the machine has, or what its control group leaves."""
    fields = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
    available = int(fields["MemAvailable"].split()[0]) * 1024
    for limit_file, used_file in _CGROUP_MEMORY:
        limit, used = _cgroup_bytes(limit_file), _cgroup_bytes(used_file)
        if limit is not None and used is not None:
            return max(0, min(available, limit - used))
    return available


def _cgroup_bytes(name: str) -> int | None:
    try:
        text = (_CGROUP / name).read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None


def kv_blocks(specs: tuple[KVSpec, ...], config: EngineConfig, max_model_len: int, device: torch.device) -> list[int]:
    """Blocks per group, the null block included, so that every group holds the same number of tokens.

    A sliding-window group needs no more than its window of one request, but serves as many requests as the others.
    Raises `ConfigError` where not even one request of `max_model_len` tokens fits.
    """
    per_token = sum(spec.bytes_per_token for spec in specs)
    tokens = config.kv_cache_tokens or int(_kv_bytes(config, device) // per_token)
    asked = bool(config.kv_cache_tokens or config.kv_cache_memory)
    if not asked:
        tokens = min(tokens, max(max_model_len, _AUTO_BLOCKS * min(spec.block_size for spec in specs)))
    if tokens < max_model_len and not asked:
        raise ConfigError(
            f"the KV cache gets {tokens} tokens of the free memory, less than one request of {max_model_len}: "
            "give --kv-cache-memory, or a smaller --max-model-len"
        )
    if tokens < max_model_len:
        raise ConfigError(f"the KV cache of {tokens} tokens is smaller than one request of --max-model-len {max_model_len} tokens")
    return [_blocks(spec, tokens) for spec in specs]


def _blocks(spec: KVSpec, tokens: int) -> int:
    return -(-tokens // spec.block_size) + 1 + (spec.kind.window is not None)


def _kv_bytes(config: EngineConfig, device: torch.device) -> float:
    if config.kv_cache_memory:
        return config.kv_cache_memory
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return free * _KV_SHARE_OF_DEVICE
    return min(_KV_LIMIT_ON_HOST, host_memory_available() * _KV_SHARE_OF_HOST)


def state_pages(config: EngineConfig, page_size: int, width: int, dtype: torch.dtype) -> int:
    """Hidden-state pages, the null page included. Raises `ConfigError` where not even one fits."""
    page_bytes = page_size * width * dtype.itemsize
    automatic = min(_STATE_LIMIT, host_memory_available() * _STATE_SHARE_OF_HOST, _AUTO_BLOCKS * page_bytes)
    size = config.state_cache_memory or int(automatic)
    if size < page_bytes:
        raise ConfigError(f"--state-cache-memory {size} is less than one page of {page_bytes} bytes")
    return size // page_bytes + 1
