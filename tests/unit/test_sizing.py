"""How much memory the caches get."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from engine.cache import sizing
from engine.cache.sizing import host_memory_available, kv_blocks, state_pages
from engine.cache.spec import KVSpec, LayerKV
from engine.config import EngineConfig
from engine.errors import ConfigError

CPU = torch.device("cpu")
FULL = KVSpec(LayerKV(2, 64), (0, 1), 16, torch.float32)
SLIDING = KVSpec(LayerKV(2, 64, window=32), (2, 3, 4), 22, torch.float32)
MIB, GIB = 1 << 20, 1 << 30


def config(**settings: object) -> EngineConfig:
    return EngineConfig("model", **settings)


@pytest.fixture
def memory(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """A machine with eight GiB to spare."""
    monkeypatch.setattr(sizing, "host_memory_available", lambda: 8 * GIB)
    return monkeypatch


def test_every_group_holds_the_tokens_that_were_asked_for_in_blocks_of_its_own_size() -> None:
    full, sliding = kv_blocks((FULL, SLIDING), config(kv_cache_tokens=1000), 1000, CPU)
    assert (full - 1) * 16 >= 1000 > (full - 2) * 16
    assert (sliding - 2) * 22 >= 1000 > (sliding - 3) * 22


def test_a_memory_limit_is_divided_by_what_a_token_costs_in_all_groups() -> None:
    per_token = FULL.bytes_per_token + SLIDING.bytes_per_token
    assert per_token == 5 * 2 * 2 * 64 * 4
    full, _ = kv_blocks((FULL, SLIDING), config(kv_cache_memory=1600 * per_token), 1000, CPU)
    assert (full - 1) * 16 == 1600


def test_a_quarter_of_the_free_memory_is_taken_by_itself_up_to_a_bound(memory: pytest.MonkeyPatch) -> None:
    wide = KVSpec(LayerKV(8, 128), tuple(range(32)), 16, torch.float32)
    (blocks,) = kv_blocks((wide,), config(), 1000, CPU)
    assert 0.99 * 2 * GIB < (blocks - 1) * wide.bytes_per_block <= 2 * GIB
    memory.setattr(sizing, "host_memory_available", lambda: 800 * GIB)
    (blocks,) = kv_blocks((wide,), config(), 1000, CPU)
    assert (blocks - 1) * wide.bytes_per_block <= 4 * GIB


@pytest.mark.usefixtures("memory")
def test_a_tiny_model_does_not_get_millions_of_blocks_by_itself() -> None:
    tiny = KVSpec(LayerKV(1, 8), (0,), 16, torch.float32)
    (blocks,) = kv_blocks((tiny,), config(), 1000, CPU)
    assert blocks <= (1 << 16) + 1
    (blocks,) = kv_blocks((tiny,), config(kv_cache_tokens=4_000_000), 1000, CPU)
    assert (blocks - 1) * 16 == 4_000_000


def test_a_cache_that_does_not_hold_one_request_is_refused_with_both_numbers(memory: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"999 tokens .* --max-model-len 1000"):
        kv_blocks((FULL,), config(kv_cache_tokens=999), 1000, CPU)
    memory.setattr(sizing, "host_memory_available", lambda: MIB)
    with pytest.raises(ConfigError, match="give --kv-cache-memory, or a smaller --max-model-len"):
        kv_blocks((FULL,), config(), 1000, CPU)


def test_on_a_gpu_what_is_free_there_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (4 * MIB, 16 * MIB))
    (blocks,) = kv_blocks((FULL,), config(), 100, torch.device("cuda", 0))
    assert 0.8 * 4 * MIB < (blocks - 1) * FULL.bytes_per_block <= 0.85 * 4 * MIB + FULL.bytes_per_block


def test_state_pages_fill_the_memory_that_was_asked_for_and_the_null_page_comes_on_top() -> None:
    page = 32 * 576 * 2
    assert state_pages(config(state_cache_memory=10 * page + 1), 32, 576, torch.bfloat16) == 11
    with pytest.raises(ConfigError, match=f"less than one page of {page} bytes"):
        state_pages(config(state_cache_memory=page - 1), 32, 576, torch.bfloat16)


def test_state_pages_take_a_share_of_the_free_memory_by_themselves(memory: pytest.MonkeyPatch) -> None:
    page = 32 * 4096 * 4
    assert (state_pages(config(), 32, 4096, torch.float32) - 1) * page <= 8 * GIB * 0.15
    memory.setattr(sizing, "host_memory_available", lambda: 800 * GIB)
    assert (state_pages(config(), 32, 4096, torch.float32) - 1) * page <= 2 * GIB
    assert state_pages(config(), 1, 8, torch.float32) <= (1 << 16) + 1


def test_a_control_group_bounds_what_is_free(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sizing, "_CGROUP", tmp_path)
    machine = host_memory_available()
    assert machine > 0
    (tmp_path / "memory.max").write_text("max\n")
    (tmp_path / "memory.current").write_text("4096\n")
    assert host_memory_available() > 5 * 4096
    (tmp_path / "memory.max").write_text("20480\n")
    assert host_memory_available() == 4 * 4096
    (tmp_path / "memory.current").write_text("30000\n")
    assert host_memory_available() == 0


def test_a_control_group_of_the_first_version_bounds_it_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sizing, "_CGROUP", tmp_path)
    (tmp_path / "memory").mkdir()
    (tmp_path / "memory" / "memory.usage_in_bytes").write_text("4096\n")
    (tmp_path / "memory" / "memory.limit_in_bytes").write_text("9223372036854771712\n")
    assert host_memory_available() > 5 * 4096
    (tmp_path / "memory" / "memory.limit_in_bytes").write_text("20480\n")
    assert host_memory_available() == 4 * 4096
