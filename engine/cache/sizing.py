"""How much memory the caches get where the operator doesn't say, and how the groups of the KV cache share it."""

from bisect import bisect_right
from dataclasses import dataclass, replace

import torch

from engine.cache.spec import KVSpec
from engine.config import EngineConfig
from engine.device.host import available_memory
from engine.errors import ConfigError

MIB, GIB = 1 << 20, 1 << 30
_KV_SHARE_OF_HOST, _KV_LIMIT_ON_HOST = 0.25, 4 * GIB
_KV_SHARE_OF_DEVICE = 0.85
_RECURRENT_SHARE = 0.25
"""Of the KV cache's memory, where layers are recurrent and nobody says how much their states may take."""
_STATE_SHARE_OF_HOST, _STATE_LIMIT = 0.15, 2 * GIB
_AUTO_BLOCKS = 1 << 16
"""More blocks than this are made only where the operator asks for them: the books of a pool cost memory too."""


@dataclass(frozen=True)
class _Load:
    """What the groups are to hold: requests of up to `max_model_len` tokens, `max_batch_tokens` of them computed in one step."""

    specs: tuple[KVSpec, ...]
    max_model_len: int
    max_batch_tokens: int
    num_slots: int = 0
    """Of each group of recurrent layers, the null slot left out."""

    def blocks(self, tokens: int) -> list[int]:
        """Blocks per group, the null block included, where groups without a window hold `tokens`."""
        return [1 + self._needed(spec, tokens) for spec in self.specs]

    def num_bytes(self, tokens: int) -> int:
        return sum(count * spec.bytes_per_block for count, spec in zip(self.blocks(tokens), self.specs, strict=True))

    def _needed(self, spec: KVSpec, tokens: int) -> int:
        """Of a window, what requests of full length hold at a time, as many as `tokens` are; and beside it one step's chunk, whose
        tokens are all there before the window passes any of them. Never more than without a window, which may cross a block's border.
        """
        if spec.is_recurrent:
            return self.num_slots
        whole = -(-tokens // spec.block_size)
        if spec.kind.window is None:
            return whole
        windows = -(-tokens * spec.blocks_for(self.max_model_len) // self.max_model_len)
        return min(whole + 1, windows + -(-self.max_batch_tokens // spec.block_size))


def kv_blocks(
    specs: tuple[KVSpec, ...],
    config: EngineConfig,
    max_model_len: int,
    device: torch.device,
    *,
    max_batch_tokens: int,
    workspace_bytes: int = 0,
) -> list[int]:
    """Blocks per group, the null block included: groups without a window hold the same number of tokens, the others follow.

    Of free memory `workspace_bytes` are left to the attention backend and to recorded graphs. Raises `ConfigError` where not even one
    request of `max_model_len` tokens fits beside one step's chunk.
    """
    tokens = config.kv_cache_tokens
    load, memory = _Load(specs, max_model_len, max_batch_tokens), 0
    if tokens is None or any(spec.is_recurrent for spec in specs):
        memory = config.kv_cache_memory or _free_for_kv(device, workspace_bytes)
        others = load.num_bytes(tokens or max_model_len)
        load = replace(load, num_slots=_num_slots(specs, config, max_model_len, memory, others))
    if tokens is None:
        _check_memory(load, memory, asked=bool(config.kv_cache_memory))
        tokens = _tokens_in(load, memory, config)
    elif tokens < max_model_len:
        raise ConfigError(f"the KV cache of {tokens} tokens is smaller than one request of --max-model-len {max_model_len} tokens")
    return load.blocks(tokens)


def _num_slots(specs: tuple[KVSpec, ...], config: EngineConfig, max_model_len: int, memory: int, others: int) -> int:
    """Slots per group of recurrent layers: what the requests use that run at once, and snapshots for later ones. Not more than
    `--max-running` requests could fill, with as many prefixes again kept for others, nor than the memory has beside the `others` that must
    be there. Raises `ConfigError` where one request lacks some.
    """
    recurrent = [spec for spec in specs if spec.is_recurrent]
    if not recurrent:
        return 0
    per_slot, least = sum(spec.bytes_per_block for spec in recurrent), max(spec.blocks_for(max_model_len) for spec in recurrent)
    most = 2 * config.max_running * least
    if config.recurrent_state_memory is None:
        return max(least, min(most, int(memory * _RECURRENT_SHARE) // per_slot, (memory - others) // per_slot - 1))
    if config.recurrent_state_memory < least * per_slot:
        needs = f"one request needs {least} recurrent states, {_mib(least * per_slot)}"
        raise ConfigError(f"--recurrent-state-memory is {_mib(config.recurrent_state_memory)}, but {needs}")
    return config.recurrent_state_memory // per_slot


def _check_memory(load: _Load, memory: int, *, asked: bool) -> None:
    one_request = load.num_bytes(load.max_model_len)
    if one_request <= memory:
        return
    needs = f"one request of --max-model-len {load.max_model_len} tokens needs {-(-one_request // MIB)} MiB"
    if asked:
        raise ConfigError(f"--kv-cache-memory is {_mib(memory)}, but {needs}")
    raise ConfigError(
        f"the KV cache gets {_mib(memory)} of the free memory, but {needs}: give --kv-cache-memory, or a smaller --max-model-len"
    )


def _tokens_in(load: _Load, memory: int, config: EngineConfig) -> int:
    """The most that the memory holds; by itself not above `_AUTO_BLOCKS` in any group, except where one request needs more."""

    def too_many(tokens: int) -> bool:
        counts = [count for count, spec in zip(load.blocks(tokens), load.specs, strict=True) if not spec.is_recurrent]
        many_blocks = not config.kv_cache_memory and max(counts, default=0) > _AUTO_BLOCKS + 1
        return many_blocks or load.num_bytes(tokens) > memory

    per_token = sum(spec.bytes_per_block / spec.block_size for spec in load.specs if spec.kind.window is None)
    # With windows alone tokens cost nothing but in the requests that run.
    most = int(memory / per_token) if per_token else config.max_running * load.max_model_len
    longer = range(load.max_model_len + 1, most + 1)
    return load.max_model_len + bisect_right(longer, False, key=too_many)


def _free_for_kv(device: torch.device, workspace_bytes: int) -> int:
    if device.type == "cuda":
        torch.cuda.empty_cache()  # what the allocator keeps for later is free too
        free, _ = torch.cuda.mem_get_info(device)
        return max(0, int((free - workspace_bytes) * _KV_SHARE_OF_DEVICE))
    return max(0, int(min(_KV_LIMIT_ON_HOST, (available_memory() - workspace_bytes) * _KV_SHARE_OF_HOST)))


def _mib(size: int) -> str:
    return f"{size / MIB:.1f} MiB"


def state_pages(config: EngineConfig, page_size: int, width: int, dtype: torch.dtype) -> int:
    """Hidden-state pages, the null page included. Raises `ConfigError` where not even one fits."""
    if page_size < 1:
        raise ConfigError(f"--state-page-size is {page_size}, but must be at least 1")
    page_bytes = page_size * width * dtype.itemsize
    automatic = min(_STATE_LIMIT, available_memory() * _STATE_SHARE_OF_HOST, _AUTO_BLOCKS * page_bytes)
    size = config.state_cache_memory or int(automatic)
    if size < page_bytes:
        raise ConfigError(f"--state-cache-memory {size} is less than one page of {page_bytes} bytes")
    return size // page_bytes + 1
