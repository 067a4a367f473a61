"""How groups with a sliding window share the KV cache's memory with those without."""

from __future__ import annotations

import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.cache.groups import KVGroup
from engine.cache.kv import BlockTables, KVCache
from engine.cache.sizing import kv_blocks
from engine.cache.spec import KVSpec, LayerKV
from engine.config import EngineConfig
from engine.errors import ConfigError

CPU = torch.device("cpu")
MIB, GIB = 1 << 20, 1 << 30
LENGTH, BATCH = 32_000, 2048


def gemma3_1b(block_size: int = 32) -> tuple[KVSpec, KVSpec]:
    """22 layers with a window of 512, 4 without."""
    full = tuple(range(5, 26, 6))
    sliding = tuple(layer for layer in range(26) if layer not in full)
    return (
        KVSpec(LayerKV(1, 256, 512), sliding, block_size, torch.bfloat16),
        KVSpec(LayerKV(1, 256), full, block_size, torch.bfloat16),
    )


def blocks(specs: tuple[KVSpec, ...], length: int = LENGTH, *, batch: int = BATCH, **settings: int) -> list[int]:
    return kv_blocks(specs, EngineConfig("model", **settings), length, CPU, max_batch_tokens=batch)  # type: ignore[arg-type]  # numbers


def num_bytes(specs: tuple[KVSpec, ...], counts: list[int]) -> int:
    return sum(count * spec.bytes_per_block for count, spec in zip(counts, specs, strict=True))


def num_requests(specs: tuple[KVSpec, ...], counts: list[int], length: int = LENGTH, batch: int = BATCH) -> int:
    """How many of full length fit beside each other, one of them with a whole step's chunk."""
    rooms = []
    for spec, count in zip(specs, counts, strict=True):
        chunk = 0 if spec.kind.window is None else -(-batch // spec.block_size)
        rooms.append((count - 1 - chunk) // spec.blocks_for(length))
    return min(rooms)


def test_a_gemma_3_1b_serves_29_long_requests_with_4_gib() -> None:
    specs = gemma3_1b()
    assert num_requests(specs, blocks(specs, kv_cache_memory=4 * GIB)) == 29


def test_a_window_group_needs_its_window_for_each_long_request_and_room_for_a_chunk() -> None:
    sliding, full = gemma3_1b()
    of_sliding, of_full = blocks((sliding, full), kv_cache_tokens=3 * LENGTH)
    assert (of_full - 1) * full.block_size == 3 * LENGTH
    assert of_sliding - 1 == 3 * sliding.blocks_for(LENGTH) + BATCH // sliding.block_size
    assert sliding.blocks_for(LENGTH) * sliding.block_size == 512 + 2 * 32


@settings(deadline=None)
@given(
    memory=st.integers(GIB // 4, 8 * GIB),
    sizes=st.tuples(st.sampled_from([1, 16, 22, 32, 256, 528]), st.sampled_from([1, 16, 32, 256, 528])),
    window=st.sampled_from([1, 8, 512, 4096, 40_000]),
    length=st.sampled_from([100, 4096, 8192]),
    batch=st.sampled_from([1, 64, 2048, 8192]),
)
def test_the_memory_is_used_up_but_never_exceeded(memory: int, sizes: tuple[int, int], window: int, length: int, batch: int) -> None:
    specs = (
        KVSpec(LayerKV(1, 256, window), tuple(range(22)), sizes[0], torch.bfloat16),
        KVSpec(LayerKV(1, 256), tuple(range(22, 26)), sizes[1], torch.bfloat16),
    )
    counts = blocks(specs, length, batch=batch, kv_cache_memory=memory)
    rest = memory - num_bytes(specs, counts)
    assert 0 <= rest <= sum(spec.bytes_per_block for spec in specs)
    tokens = (counts[1] - 1) * sizes[1]
    assert (counts[0] - 2) * sizes[0] < tokens + sizes[0], "no more than without a window"


def test_a_short_context_needs_no_more_than_without_a_window() -> None:
    specs = gemma3_1b(16)
    assert blocks(specs, 300, kv_cache_tokens=3000) == [188 + 1 + 1, 188 + 1]  # a window's blocks may cross a border


def test_layers_that_all_have_a_window_hold_as_many_requests_as_run_or_as_fit() -> None:
    (sliding, _) = gemma3_1b()
    one, chunk = sliding.blocks_for(LENGTH), BATCH // sliding.block_size
    assert blocks((sliding,), kv_cache_memory=64 * GIB, max_running=9) == [9 * one + chunk + 1]
    (count,) = blocks((sliding,), kv_cache_memory=GIB)
    assert 0 <= GIB - count * sliding.bytes_per_block < sliding.bytes_per_block
    assert count > 70 * one + chunk
    assert blocks((sliding,), kv_cache_tokens=2 * LENGTH) == [2 * one + chunk + 1]


def test_one_long_request_with_a_whole_chunk_fits_or_the_start_is_refused() -> None:
    specs = gemma3_1b()
    needed = num_bytes(specs, blocks(specs, kv_cache_tokens=LENGTH))
    assert num_requests(specs, blocks(specs, kv_cache_memory=needed)) == 1
    with pytest.raises(
        ConfigError, match=r"--kv-cache-memory is 182\.2 MiB, but one request of --max-model-len 32000 tokens needs 183 MiB"
    ):
        blocks(specs, kv_cache_memory=needed - 1)


class Cache:
    """A KV cache of the size that the rule gives, for as many requests of full length as it is for."""

    def __init__(self, sizes: tuple[int, int], window: int, length: int, batch: int, requests: int) -> None:
        specs = (
            KVSpec(LayerKV(1, 1, window), (0,), sizes[0], torch.float32),
            KVSpec(LayerKV(1, 1), (1,), sizes[1], torch.float32),
        )
        # Lengths that don't fill their last block take more than their tokens.
        tokens = requests * -(-length // sizes[1]) * sizes[1]
        counts = blocks(specs, length, batch=batch, kv_cache_tokens=tokens)
        self.kv = KVCache([KVGroup(spec, count, CPU) for spec, count in zip(specs, counts, strict=True)])
        self.tables: list[BlockTables] = [self.kv.new_tables(2) for _ in range(requests)]
        self.computed = [0] * requests

    def step(self, counts: dict[int, int]) -> None:
        """Each request is given all the positions that it asks for."""
        self.kv.drop_passed(zip(self.tables, self.computed, strict=True))
        for request, count in counts.items():
            start = self.computed[request]
            assert self.kv.extend(self.tables[request], start, start + count) == start + count
            self.computed[request] += count


@pytest.mark.parametrize("seed", range(100))
def test_requests_of_full_length_never_lack_a_window_however_steps_are_shared(seed: int) -> None:
    draw = random.Random(seed)
    length, window, batch, requests = 60, draw.randint(1, 30), draw.randint(1, 24), draw.randint(1, 4)
    cache = Cache((draw.randint(1, 7), draw.randint(1, 7)), window, length, batch, requests)
    while unfinished := [request for request in range(requests) if cache.computed[request] < length]:
        draw.shuffle(unfinished)
        left, counts = batch, {}
        for request in unfinished[:left]:
            counts[request] = min(draw.randint(1, left), length - cache.computed[request])
            left -= counts[request]
            if not left:
                break
        cache.step(counts)
    cache.kv.check_integrity()
