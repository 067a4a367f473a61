"""How much memory the caches get."""

from __future__ import annotations

import pytest
import torch

from engine.cache import sizing
from engine.cache.sizing import kv_blocks, state_pages
from engine.cache.spec import KVSpec, LayerKV
from engine.config import EngineConfig
from engine.errors import ConfigError

CPU = torch.device("cpu")
FULL = KVSpec(LayerKV(2, 64), (0, 1), 16, torch.float32)
MIB, GIB = 1 << 20, 1 << 30


def config(**settings: object) -> EngineConfig:
    return EngineConfig("model", **settings)


def blocks(
    specs: tuple[KVSpec, ...],
    max_model_len: int = 1000,
    *,
    device: torch.device = CPU,
    batch: int = 64,
    workspace: int = 0,
    **settings: object,
) -> list[int]:
    return kv_blocks(specs, config(**settings), max_model_len, device, max_batch_tokens=batch, workspace_bytes=workspace)


@pytest.fixture
def memory(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """A machine with eight GiB to spare."""
    monkeypatch.setattr(sizing, "available_memory", lambda: 8 * GIB)
    return monkeypatch


def test_without_windows_every_group_holds_the_tokens_that_were_asked_for_in_blocks_of_its_own_size() -> None:
    wide = KVSpec(LayerKV(4, 64), (2,), 22, torch.float32)
    narrow_blocks, wide_blocks = blocks((FULL, wide), kv_cache_tokens=1000)
    assert (narrow_blocks - 1) * 16 >= 1000 > (narrow_blocks - 2) * 16
    assert (wide_blocks - 1) * 22 >= 1000 > (wide_blocks - 2) * 22


def test_a_quarter_of_the_free_memory_is_taken_by_itself_up_to_a_bound(memory: pytest.MonkeyPatch) -> None:
    wide = KVSpec(LayerKV(8, 128), tuple(range(32)), 16, torch.float32)
    (count,) = blocks((wide,))
    assert 0.99 * 2 * GIB < (count - 1) * wide.bytes_per_block <= 2 * GIB
    memory.setattr(sizing, "available_memory", lambda: 800 * GIB)
    (count,) = blocks((wide,))
    assert (count - 1) * wide.bytes_per_block <= 4 * GIB


@pytest.mark.usefixtures("memory")
def test_a_tiny_model_does_not_get_millions_of_blocks_by_itself() -> None:
    tiny = KVSpec(LayerKV(1, 8), (0,), 16, torch.float32)
    (count,) = blocks((tiny,))
    assert count <= (1 << 16) + 1
    (count,) = blocks((tiny,), kv_cache_tokens=4_000_000)
    assert (count - 1) * 16 == 4_000_000


def test_a_cache_that_does_not_hold_one_request_is_refused_with_both_numbers(memory: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"999 tokens .* --max-model-len 1000"):
        blocks((FULL,), kv_cache_tokens=999)
    memory.setattr(sizing, "available_memory", lambda: MIB)
    with pytest.raises(ConfigError, match="give --kv-cache-memory, or a smaller --max-model-len"):
        blocks((FULL,))


def test_on_a_gpu_what_is_free_there_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (4 * MIB, 16 * MIB))
    (count,) = blocks((FULL,), 100, device=torch.device("cuda", 0))
    assert 0.8 * 4 * MIB < (count - 1) * FULL.bytes_per_block <= 0.85 * 4 * MIB + FULL.bytes_per_block


def test_what_the_attention_backend_will_take_is_left_to_it(memory: pytest.MonkeyPatch) -> None:
    wide = KVSpec(LayerKV(8, 128), tuple(range(32)), 16, torch.float32)
    (count,) = blocks((wide,), workspace=2 * GIB)
    assert 0.99 * 6 * GIB * 0.25 < (count - 1) * wide.bytes_per_block <= 6 * GIB * 0.25
    memory.setattr(torch.cuda, "mem_get_info", lambda device: (4 * GIB, 16 * GIB))
    (count,) = blocks((wide,), workspace=GIB, device=torch.device("cuda", 0))
    assert 0.84 * 3 * GIB < count * wide.bytes_per_block <= 0.85 * 3 * GIB
    with pytest.raises(ConfigError, match=r"the KV cache gets 0\.0 MiB of the free memory, but one request"):
        blocks((wide,), workspace=9 * GIB)


def test_state_pages_fill_the_memory_that_was_asked_for_and_the_null_page_comes_on_top() -> None:
    page = 32 * 576 * 2
    assert state_pages(config(state_cache_memory=10 * page + 1), 32, 576, torch.bfloat16) == 11
    with pytest.raises(ConfigError, match=f"less than one page of {page} bytes"):
        state_pages(config(state_cache_memory=page - 1), 32, 576, torch.bfloat16)


def test_state_pages_take_a_share_of_the_free_memory_by_themselves(memory: pytest.MonkeyPatch) -> None:
    page = 32 * 4096 * 4
    assert (state_pages(config(), 32, 4096, torch.float32) - 1) * page <= 8 * GIB * 0.15
    memory.setattr(sizing, "available_memory", lambda: 800 * GIB)
    assert (state_pages(config(), 32, 4096, torch.float32) - 1) * page <= 2 * GIB
    assert state_pages(config(), 1, 8, torch.float32) <= (1 << 16) + 1
