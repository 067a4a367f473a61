"""How many recurrent states there is room for beside the keys and values of the layers with attention."""

from __future__ import annotations

import pytest
import torch

from engine.cache import sizing
from engine.cache.sizing import kv_blocks
from engine.cache.spec import NUM_SPARES, KVSpec, LayerKV, LayerRecurrent, StatePart
from engine.config import EngineConfig
from engine.errors import ConfigError

CPU = torch.device("cpu")
MIB, GIB = 1 << 20, 1 << 30
LENGTH, DISTANCE, BATCH = 32_000, 1024, 2048
ATTENDING = KVSpec(LayerKV(2, 256), (3, 7), 32, torch.bfloat16)
RECURRENT = KVSpec(LayerRecurrent((StatePart((16, 128, 128), torch.float32),)), (0, 1, 2, 4, 5, 6), DISTANCE, torch.bfloat16)
PER_SLOT = 6 * MIB
ONE = 3 + NUM_SPARES
"""Slots of one long request."""


def counts(specs: tuple[KVSpec, ...] = (ATTENDING, RECURRENT), **settings: int) -> tuple[int, int]:
    """Blocks and slots, the null ones left out."""
    config = EngineConfig("model", **settings)  # type: ignore[arg-type]  # numbers
    blocks, slots = kv_blocks(specs, config, LENGTH, CPU, max_batch_tokens=BATCH)
    return blocks - 1, slots - 1


def num_bytes(blocks: int, slots: int) -> int:
    return (blocks + 1) * ATTENDING.bytes_per_block + (slots + 1) * PER_SLOT


def test_states_get_a_quarter_of_the_memory_and_keys_and_values_the_rest() -> None:
    assert RECURRENT.bytes_per_block == PER_SLOT
    blocks, slots = counts(kv_cache_memory=2 * GIB, max_running=200)
    assert slots == 2 * GIB // 4 // PER_SLOT
    assert 0 <= 2 * GIB - num_bytes(blocks, slots) < ATTENDING.bytes_per_block


def test_there_are_no_more_states_than_running_requests_and_as_many_kept_prefixes_could_fill() -> None:
    blocks, slots = counts(kv_cache_memory=2 * GIB, max_running=3)
    assert slots == 2 * 3 * ONE
    assert 0 <= 2 * GIB - num_bytes(blocks, slots) < ATTENDING.bytes_per_block, "what states don't need goes to keys and values"


def test_the_operator_says_how_much_the_states_take() -> None:
    blocks, slots = counts(kv_cache_memory=2 * GIB, max_running=3, recurrent_state_memory=GIB)
    assert slots == GIB // PER_SLOT
    assert 0 <= 2 * GIB - num_bytes(blocks, slots) < ATTENDING.bytes_per_block


def test_one_request_fits_in_the_least_memory_or_the_start_is_refused() -> None:
    needed = num_bytes(LENGTH // 32, ONE)
    assert counts(kv_cache_memory=needed) == (LENGTH // 32, ONE)
    with pytest.raises(ConfigError, match=r"--kv-cache-memory is .* but one request of --max-model-len 32000 tokens needs"):
        counts(kv_cache_memory=needed - 1)
    with pytest.raises(ConfigError, match=r"--recurrent-state-memory is 24\.0 MiB, but one request needs 5 recurrent states, 30\.0 MiB"):
        counts(kv_cache_memory=2 * GIB, recurrent_state_memory=4 * PER_SLOT)


def test_tokens_that_are_given_leave_the_states_their_share_of_the_free_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sizing, "available_memory", lambda: 8 * GIB)
    blocks, slots = counts(kv_cache_tokens=2 * LENGTH, max_running=200)
    assert blocks == 2 * LENGTH // 32
    assert slots == 2 * GIB // 4 // PER_SLOT, "a quarter of the quarter of it that the caches get"


def test_the_limit_on_blocks_by_itself_does_not_count_states(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sizing, "available_memory", lambda: 8 * GIB)
    monkeypatch.setattr(sizing, "_AUTO_BLOCKS", 1100)
    blocks, slots = counts(max_running=2000, recurrent_state_memory=GIB)
    assert (blocks, slots) == (1100, GIB // PER_SLOT)
    monkeypatch.setattr(sizing, "_AUTO_BLOCKS", 20)
    assert counts(max_running=2000, recurrent_state_memory=GIB) == (LENGTH // 32, GIB // PER_SLOT)
