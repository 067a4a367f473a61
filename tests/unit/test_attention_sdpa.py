"""The reference attention backend against dense attention in float64, over a cache poisoned with NaN."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.attention.index import plan_group
from engine.attention.sdpa import PIECE_ROWS, SdpaBackend
from engine.errors import ConfigError
from tests.unit.attention_simulation import CPU, PagedGroup, Shape, Simulation, dense_reference, ints, rows_of, rows_of_members


@pytest.fixture(autouse=True)
def _same_numbers_every_time() -> None:
    torch.manual_seed(0)


@pytest.mark.parametrize("block_size", [1, 3, 16, 22, 32, 528])
@pytest.mark.parametrize("window", [None, 1, 5, 40])
def test_chunked_sequence_equals_dense_attention(block_size: int, window: int | None) -> None:
    simulation = Simulation([Shape(block_size=block_size, window=window)])
    for count in (7, 1, 1, 20, 1, 64, 1, 1, 2):
        simulation.step((0, count))


@pytest.mark.parametrize(("soft_cap", "sinks"), [(None, False), (2.0, False), (None, True)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("heads", "kv_heads"), [(9, 3), (4, 4), (5, 1)])
def test_head_layouts_and_dtypes_equal_dense_attention(
    heads: int, kv_heads: int, dtype: torch.dtype, soft_cap: float | None, sinks: bool
) -> None:
    simulation = Simulation([Shape(heads=heads, kv_heads=kv_heads, dtype=dtype, soft_cap=soft_cap, sinks=sinks)])
    simulation.step((0, 33), (1, 1))
    simulation.step((1, 1), (0, 1), (2, 5))
    simulation.step((0, 9), (2, 1), (1, 1))


@pytest.mark.parametrize("window", [None, 100, PIECE_ROWS, 700])
@pytest.mark.parametrize(("soft_cap", "sinks"), [(None, False), (5.0, True)])
def test_chunks_longer_than_a_piece_equal_dense_attention(window: int | None, soft_cap: float | None, sinks: bool) -> None:
    simulation = Simulation([Shape(window=window, soft_cap=soft_cap, sinks=sinks, heads=2, kv_heads=1)])
    simulation.step((0, 2 * PIECE_ROWS + 1), (1, PIECE_ROWS))
    simulation.step((0, 3 * PIECE_ROWS), (1, PIECE_ROWS + 5))
    simulation.step((0, 1), (1, 500))


def test_decodes_of_unlike_lengths_share_a_batch() -> None:
    simulation = Simulation([Shape(block_size=32)])
    lengths = (1, 3, 31, 32, 33, 64, 65, 100, 250, 600, 601, 640, 1200)
    simulation.step(*enumerate(lengths))
    for _ in range(3):
        simulation.step(*((name, 1) for name in range(len(lengths))))


def test_gathers_larger_than_the_bound_are_split() -> None:
    backend = SdpaBackend(CPU)
    backend.gather_bytes = 100 * 2 * 16 * 4  # a hundred slots
    simulation = Simulation([Shape()], backend=backend)
    simulation.step(*((name, 40) for name in range(7)), (7, 300))
    simulation.step(*((name, 1) for name in range(8)))


def test_decodes_and_chunks_mix_in_any_order() -> None:
    simulation = Simulation([Shape(layers=(0, 1, 2)), Shape(layers=(3, 4), window=24, block_size=4)])
    simulation.step((0, 40), (1, 1), (2, 17))
    simulation.step((1, 1), (0, 1), (3, 12), (2, 1))
    simulation.step((3, 30), (2, 1), (1, 13), (0, 1), (4, 1))
    simulation.step((0, 1), (1, 1), (2, 1), (3, 1), (4, 1))


@pytest.mark.parametrize("keep", [0, 1, 2, 3, 4])
def test_later_layers_may_run_for_the_leading_sequences_only(keep: int) -> None:
    simulation = Simulation([Shape(layers=(0, 1)), Shape(layers=(2, 3), window=6)])
    simulation.step((0, 20), (1, 1), (2, 9), (3, 1), keep=keep)


def test_narrowed_layers_continue_a_chunk() -> None:
    simulation = Simulation([Shape(layers=(0, 1))])
    simulation.step((0, 20), (1, 30), (2, 5))
    simulation.step((1, 1), (0, 9), (2, 4), keep=2)


@pytest.mark.parametrize("table", [[], [0, 0, 0]])
def test_sequences_that_never_reach_a_group_need_no_blocks_there(table: list[int]) -> None:
    group = PagedGroup(Shape())
    group.step([(0, 0, 3)])
    rows = rows_of((0, 3), (40, 1))
    step = group.cache, plan_group(rows, [ints(*group.tables[0]), ints(*table)], 16)
    query, key, value = torch.randn(3, 6, 16), torch.randn(3, 2, 16), torch.randn(3, 2, 16)
    out = SdpaBackend(CPU).plan(rows, [step]).attend(0, query, key, value, Shape().options)
    torch.testing.assert_close(out.double(), dense_reference(query, key, value, Shape()), rtol=1e-5, atol=1e-6)
    assert group.keys[:, 0].isnan().all()


def test_rows_that_end_inside_a_sequence_are_refused() -> None:
    group = PagedGroup(Shape())
    members = [(0, 0, 3), (1, 0, 2)]
    context = SdpaBackend(CPU).plan(rows_of_members(members), [group.step(members)])
    with pytest.raises(AssertionError, match="whole sequences"):
        context.attend(0, torch.zeros(4, 6, 16), torch.zeros(4, 2, 16), torch.zeros(4, 2, 16), Shape().options)


def test_groups_with_unlike_blocks_and_widths_stand_beside_each_other() -> None:
    wide = Shape(layers=(0, 2), block_size=528, kv_heads=3, heads=3, head_dim=8)
    narrow = Shape(layers=(1, 3), block_size=22, kv_heads=1, heads=4, head_dim=32, window=50)
    simulation = Simulation([wide, narrow], num_blocks=80)
    for counts in ((530, 21), (1, 1), (60, 23), (1, 600)):
        simulation.step(*enumerate(counts))


@settings(deadline=None)
@given(steps=st.lists(st.lists(st.tuples(st.integers(0, 4), st.integers(1, 40)), min_size=1, max_size=5), min_size=1, max_size=6))
def test_any_schedule_equals_dense_attention(steps: list[list[tuple[int, int]]]) -> None:
    simulation = Simulation([Shape(block_size=7), Shape(layers=(1,), block_size=4, window=9)], num_blocks=600)
    for wanted in steps:
        simulation.step(*dict(wanted).items())


def test_only_the_slots_of_the_batch_are_written() -> None:
    group = PagedGroup(Shape(layers=(0, 1), block_size=8))
    members = [(0, 0, 11), (1, 0, 1)]
    context = SdpaBackend(CPU).plan(rows_of_members(members), [group.step(members)])
    key, value = torch.randn(12, 2, 16), torch.randn(12, 2, 16)
    context.attend(1, torch.randn(12, 6, 16), key, value, Shape().options)
    expected_keys, expected_values = (torch.full_like(group.keys, math.nan) for _ in range(2))
    for row, (name, position) in enumerate([(0, p) for p in range(11)] + [(1, 0)]):
        where = (1, group.tables[name][position // 8], position % 8)
        expected_keys[where], expected_values[where] = key[row], value[row]
    torch.testing.assert_close(group.keys, expected_keys, rtol=0, atol=0, equal_nan=True)
    torch.testing.assert_close(group.values, expected_values, rtol=0, atol=0, equal_nan=True)


def test_rows_do_not_depend_on_what_else_is_in_the_batch() -> None:
    shape = Shape(block_size=32, heads=9, kv_heads=3, head_dim=64)
    lengths = [int(n) for n in torch.randint(1, 400, (33,))]
    counts = [1 if name % 3 else 20 for name in range(33)]
    group = PagedGroup(shape, num_blocks=1000)
    backend = SdpaBackend(CPU)
    past = [(name, 0, length) for name, length in enumerate(lengths)]
    rows = sum(lengths)
    prompt = (torch.randn(rows, 9, 64), torch.randn(rows, 3, 64), torch.randn(rows, 3, 64))
    backend.plan(rows_of_members(past), [group.step(past)]).attend(0, *prompt, shape.options)
    members = [(name, lengths[name], counts[name]) for name in range(33)]
    fresh = (torch.randn(sum(counts), 9, 64), torch.randn(sum(counts), 3, 64), torch.randn(sum(counts), 3, 64))
    together = backend.plan(rows_of_members(members), [group.step(members)]).attend(0, *fresh, shape.options)
    for index, part in enumerate(together.split(counts)):
        own = (x.split(counts)[index] for x in fresh)
        alone = backend.plan(rows_of_members([members[index]]), [group.step([members[index]])]).attend(0, *own, shape.options)
        torch.testing.assert_close(part, alone, rtol=0, atol=2e-6)


def test_one_backend_serves_inside_and_outside_inference_mode() -> None:
    simulation = Simulation([Shape()])
    with torch.inference_mode():
        simulation.step((0, 20), (1, 3))
        simulation.step((0, 20), (1, 1))
    outside = Simulation([Shape()], backend=simulation.backend)
    outside.step((0, 20), (1, 3))
    outside.step((0, 40), (1, 1))
    with torch.inference_mode():
        outside.step((0, 300), (1, 1))


def test_an_empty_batch_plans_and_attends_nothing() -> None:
    group = PagedGroup(Shape())
    out = SdpaBackend(CPU).plan(rows_of(), [group.step([])]).attend(0, *(torch.zeros(0, n, 16) for n in (6, 2, 2)), Shape().options)
    assert out.shape == (0, 6, 16)


def test_any_positive_block_size_is_accepted() -> None:
    backend = SdpaBackend(CPU)
    for size in (1, 22, 528):
        backend.check_block_size(size)
    with pytest.raises(ConfigError, match="block_size is 0, but must be at least 1"):
        backend.check_block_size(0)
