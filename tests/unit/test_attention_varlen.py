"""The backend over torch's varlen kernel, with a slow double of that kernel, against dense attention in float64."""

import inspect
import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.attention.varlen import varlen_attn

from engine.attention.facade import FixedShape, GroupCache
from engine.attention.index import plan_group
from engine.attention.sdpa import SdpaBackend
from engine.attention.varlen import VarlenBackend, VarlenContext
from engine.errors import ConfigError
from tests.unit.attention_simulation import CPU, PagedGroup, Shape, Simulation, dense_reference, ints, rows_of, rows_of_members
from tests.unit.paged_kernels import FakeVarlen, Operations

NEVER_READ = (10**6, -1, 0, 7)
"""What block tables hold behind the blocks in use."""


@pytest.fixture(autouse=True)
def _same_numbers_every_time() -> None:
    torch.manual_seed(0)


@pytest.fixture
def kernel() -> FakeVarlen:
    return FakeVarlen()


def paged(**fields: Any) -> Shape:  # noqa: ANN401 - any field of a shape
    return Shape(**{"block_size": 256, "heads": 4, "kv_heads": 2, "head_dim": 8} | fields)


def simulation(kernel: FakeVarlen, *shapes: Shape) -> Simulation:
    return Simulation(shapes, num_blocks=60, tail=NEVER_READ, backend=VarlenBackend(CPU, kernel))


def test_the_double_has_the_signature_of_the_kernel() -> None:
    real, double = inspect.signature(varlen_attn).parameters, inspect.signature(FakeVarlen().__call__).parameters
    assert {name: (p.kind, p.default) for name, p in double.items()} == {name: (p.kind, p.default) for name, p in real.items()}


@pytest.mark.parametrize("shape", [paged(), paged(window=300), paged(heads=2), paged(window=5, dtype=torch.bfloat16)])
def test_the_kernel_of_this_torch_takes_the_calls(kernel: FakeVarlen, shape: Shape) -> None:
    run = simulation(kernel, shape)
    run.step((0, 300), (1, 1))
    run.step((0, 1), (1, 1))
    for call in kernel.calls:
        arguments = {name: value.to("meta") if isinstance(value, torch.Tensor) else value for name, value in call.items()}
        out = varlen_attn(**arguments)
        assert isinstance(out, torch.Tensor)
        assert (out.shape, out.dtype) == (call["query"].shape, shape.dtype)


@pytest.mark.parametrize("window", [None, 1, 5, 256, 300])
@pytest.mark.parametrize("block_size", [256, 512])
def test_chunked_sequence_equals_dense_attention(kernel: FakeVarlen, block_size: int, window: int | None) -> None:
    run = simulation(kernel, paged(block_size=block_size, window=window))
    for count in (7, 1, 248, 1, 1, 300, 1, 2):
        run.step((0, count))


def test_decodes_and_chunks_mix_in_any_order(kernel: FakeVarlen) -> None:
    run = simulation(kernel, paged(layers=(0, 1, 2)), paged(layers=(3, 4), window=24, kv_heads=1))
    run.step((0, 257), (1, 1), (2, 17))
    run.step((1, 1), (0, 1), (3, 12), (2, 1))
    run.step((3, 300), (2, 1), (1, 13), (0, 1), (4, 1))
    run.step((0, 1), (1, 1), (2, 1), (3, 1), (4, 1))


@pytest.mark.parametrize("keep", [0, 1, 2, 3, 4])
def test_later_layers_may_run_for_the_leading_sequences_only(kernel: FakeVarlen, keep: int) -> None:
    simulation(kernel, paged(layers=(0, 1)), paged(layers=(2, 3), window=6)).step((0, 20), (1, 1), (2, 290), (3, 1), keep=keep)


@st.composite
def schedules(draw: st.DrawFn) -> tuple[int | None, int, list[list[tuple[int, int]]]]:
    """A window, how many sequences run all layers (the leading ones of any step), and steps of (sequence, count)."""
    counts = st.one_of(st.just(1), st.integers(1, 600))
    steps = st.lists(st.dictionaries(st.integers(0, 3), counts, min_size=1), min_size=1, max_size=4)
    window = draw(st.one_of(st.none(), st.integers(1, 700)))
    return window, draw(st.integers(0, 4)), [sorted(step.items()) for step in draw(steps)]


@settings(deadline=None, max_examples=40)
@given(schedule=schedules())
def test_any_schedule_equals_dense_attention(schedule: tuple[int | None, int, list[list[tuple[int, int]]]]) -> None:
    window, deep, steps = schedule
    run = simulation(FakeVarlen(), paged(layers=(0, 1), heads=2, kv_heads=1, window=window), paged(layers=(2,), heads=2))
    for wanted in steps:
        run.step(*wanted, keep=sum(name < deep for name, _ in wanted))


def test_it_agrees_with_the_reference_backend(kernel: FakeVarlen) -> None:
    group, counts = PagedGroup(paged(window=100), num_blocks=20), (300, 1, 40)
    members = [(name, 0, count) for name, count in enumerate(counts)]
    arguments = [torch.randn(sum(counts), heads, 8) for heads in (4, 2, 2)]
    outs = [
        backend.plan(rows_of_members(members), [group.step(members)]).attend(0, *arguments, group.shape.options)
        for backend in (VarlenBackend(CPU, kernel), SdpaBackend(CPU))
    ]
    torch.testing.assert_close(*outs, rtol=0, atol=1e-6)


def test_single_rows_are_attended_without_a_mask_so_that_the_kernel_can_pack_their_heads(kernel: FakeVarlen) -> None:
    run = simulation(kernel, paged())
    run.step((0, 5), (1, 1))
    run.step((0, 1), (1, 1))
    assert [call["window_size"] for call in kernel.calls] == [(-1, 0), (-1, -1)]


def test_pages_before_a_sliding_window_are_not_named(kernel: FakeVarlen) -> None:
    run = simulation(kernel, paged(window=10))
    run.step((0, 600))
    run.step((0, 1))
    assert kernel.calls[1]["block_table"].tolist() == [run.groups[0].tables[0][2:]]
    assert kernel.calls[1]["seqused_k"].tolist() == [601 - 512]


def test_rows_that_end_inside_a_sequence_are_refused(kernel: FakeVarlen) -> None:
    group = PagedGroup(paged(), num_blocks=9)
    members = [(0, 0, 3), (1, 0, 2)]
    context = VarlenBackend(CPU, kernel).plan(rows_of_members(members), [group.step(members)])
    with pytest.raises(AssertionError, match="whole sequences"):
        context.attend(0, *(torch.zeros(4, heads, 8) for heads in (4, 2, 2)), group.shape.options)


def one_row_at(kernel: FakeVarlen, position: int, table: Sequence[int], window: int | None = None) -> None:
    shape = paged(window=window)
    cache = torch.zeros(1, 9, 256, 2, 8)
    rows = rows_of((position, 1))
    step = GroupCache((0,), 256, cache, cache.clone()), plan_group(rows, [ints(*table)], 256)
    context = VarlenBackend(CPU, kernel).plan(rows, [step])
    context.attend(0, *(torch.zeros(1, heads, 8) for heads in (4, 2, 2)), shape.options)


@pytest.mark.parametrize("table", [[], [0, 0, 0], [4], [4, 0, 5], [0, 4, 5], [4, 5, 0]])
def test_a_table_without_the_blocks_in_use_is_refused(kernel: FakeVarlen, table: list[int]) -> None:
    with pytest.raises(AssertionError, match="block"):
        one_row_at(kernel, 600, table)


def test_a_table_without_blocks_that_a_window_sees_is_refused(kernel: FakeVarlen) -> None:
    one_row_at(kernel, 600, [0, 4, 5], window=600 - 256 + 1)
    with pytest.raises(AssertionError, match="null block"):
        one_row_at(kernel, 600, [0, 4, 5], window=600 - 256 + 2)


@pytest.mark.parametrize("table", [[], [0]])
def test_sequences_that_never_reach_a_group_need_no_blocks_there(kernel: FakeVarlen, table: list[int]) -> None:
    group = PagedGroup(paged(), num_blocks=9)
    group.step([(0, 0, 3)])
    rows = rows_of((0, 3), (40, 1))
    step = group.cache, plan_group(rows, [ints(*group.tables[0]), ints(*table)], 256)
    arguments = [torch.randn(3, heads, 8) for heads in (4, 2, 2)]
    out = VarlenBackend(CPU, kernel).plan(rows, [step]).attend(0, *arguments, group.shape.options)
    torch.testing.assert_close(out.double(), dense_reference(*arguments, group.shape), rtol=1e-5, atol=1e-6)
    assert group.keys[:, 0].isnan().all()


def test_an_empty_batch_plans_and_attends_nothing(kernel: FakeVarlen) -> None:
    group = PagedGroup(paged(), num_blocks=9)
    context = VarlenBackend(CPU, kernel).plan(rows_of(), [group.step([])])
    assert context.attend(0, *(torch.zeros(0, heads, 8) for heads in (4, 2, 2)), group.shape.options).shape == (0, 4, 8)


def silent(query: torch.Tensor, *_: object, **__: object) -> torch.Tensor:
    return query


def test_a_step_costs_one_transfer_and_its_layers_none() -> None:
    groups = [PagedGroup(paged(layers=(0, 1)), num_blocks=20), PagedGroup(paged(layers=(2, 3), window=9), num_blocks=20)]
    members = [(0, 0, 300), (1, 0, 1)]
    steps = [group.step(members) for group in groups]
    with Operations() as planning:
        context = VarlenBackend(CPU, silent).plan(rows_of_members(members), steps)
    assert len(planning.named("copy_", "_to_copy")) == 1
    with Operations() as running:
        for group in groups:
            for layer in group.shape.layers:
                context.attend(layer, *(torch.zeros(301, heads, 8) for heads in (4, 2, 2)), group.shape.options)
    assert running.named("copy_", "_to_copy", "_local_scalar_dense") == []
    assert len(running.named("index_copy_")) == 8


class Captured:
    """A context of fixed shape over one group; `step` is what a graph would replay, and may differ in nothing but contents."""

    def __init__(self, shape: Shape, num_sequences: int, max_len: int) -> None:
        self.kernel = FakeVarlen()
        self.group = PagedGroup(shape, num_blocks=40, tail=NEVER_READ)
        self.inputs = [torch.zeros(num_sequences, heads, 8) for heads in (4, 2, 2)]
        fixed = FixedShape(num_sequences, max_len)
        self.context: VarlenContext = VarlenBackend(CPU, self.kernel).plan_decodes(fixed, [self.group.cache])

    def prefill(self, name: int, count: int) -> None:
        query, key, value = (torch.randn(count, heads, 8) for heads in (4, 2, 2))
        context = VarlenBackend(CPU, self.kernel).plan(rows_of((0, count)), [self.group.step([(name, 0, count)])])
        context.attend(0, query, key, value, self.group.shape.options)
        self.group.remember(name, 0, key, value)

    def step(self, *starts: tuple[int, int]) -> torch.Tensor:
        members = [(name, start, 1) for name, start in starts]
        self.context.refill(rows_of_members(members), [self.group.step(members)[1]])
        for x in self.inputs:
            x.normal_()
        with Operations() as operations:
            out = self.context.attend(0, *self.inputs, self.group.shape.options)
        self.writes = operations.named("index_copy_")
        for row, (name, _) in enumerate(starts):
            query, key, value = (x[row : row + 1].clone() for x in self.inputs)
            past = self.group.remember(name, 0, key, value)
            torch.testing.assert_close(out[row : row + 1].double(), dense_reference(query, *past, self.group.shape), rtol=0, atol=1e-5)
        return out

    def frozen(self) -> tuple[Any, ...]:
        """Everything about the last step that a graph would have kept."""
        call = self.kernel.calls[-1]
        arguments = {name: (x.data_ptr(), x.shape, x.stride()) if isinstance(x, torch.Tensor) else x for name, x in call.items()}
        return arguments, self.writes


@pytest.mark.parametrize("window", [None, 3])
def test_a_captured_graph_finds_every_step_at_the_same_addresses(window: int | None) -> None:
    captured = Captured(paged(window=window), num_sequences=4, max_len=700)
    captured.step()
    frozen = captured.frozen()
    captured.prefill(0, 510)
    for members in ([(0, 510)], [(1, 0), (0, 511)], [(0, 512), (1, 1), (2, 0)], [(2, 1), (3, 0), (1, 2), (0, 513)], [(3, 1)]):
        captured.step(*members)
        assert captured.frozen() == frozen


def test_padding_rows_write_into_the_null_block_only() -> None:
    captured = Captured(paged(), num_sequences=4, max_len=300)
    out = captured.step((0, 0))
    written = captured.group.keys.isfinite().any(-1).any(-1)[0].nonzero().tolist()
    assert sorted(written) == sorted([[0, 0], [captured.group.tables[0][0], 0]])
    assert out.isfinite().all()


@pytest.mark.parametrize(
    ("sequences", "message"),
    [
        ([(0, 1)] * 3, "more sequences"),
        ([(300, 1)], "longer than"),
        ([(0, 2)], "single rows"),
    ],
)
def test_what_does_not_fit_a_fixed_shape_is_refused(sequences: list[tuple[int, int]], message: str) -> None:
    captured = Captured(paged(), num_sequences=2, max_len=300)
    _, given = captured.group.step([(name, *sequence) for name, sequence in enumerate(sequences)])
    with pytest.raises(AssertionError, match=message):
        captured.context.refill(rows_of(*sequences), [given])


def test_a_fixed_shape_without_the_blocks_in_use_is_refused() -> None:
    captured = Captured(paged(), num_sequences=2, max_len=300)
    rows = rows_of((0, 1))
    with pytest.raises(AssertionError, match="lacks blocks"):
        captured.context.refill(rows, [plan_group(rows, [ints(0)], 256)])


def test_one_backend_serves_inside_and_outside_inference_mode(kernel: FakeVarlen) -> None:
    run = simulation(kernel, paged())
    with torch.inference_mode():
        run.step((0, 20), (1, 3))
    outside = Simulation([paged()], num_blocks=60, backend=run.backend)
    outside.step((0, 20), (1, 3))
    with torch.inference_mode():
        outside.step((0, 300), (1, 1))


def test_block_sizes_are_multiples_of_256() -> None:
    backend = VarlenBackend(CPU)
    for size in (backend.default_block_size, 768):
        backend.check_block_size(size)
    for size in (0, 32, 300):
        with pytest.raises(ConfigError, match=f"block_size is {size}, but the attention backend varlen needs a multiple of 256"):
            backend.check_block_size(size)


def test_the_double_shows_a_read_of_what_was_never_written() -> None:
    query, cache = torch.zeros(1, 1, 8), torch.zeros(2, 256, 1, 8)
    cache[1, 5:] = math.nan
    arrays = {"cu_seq_q": [0, 1], "cu_seq_k": [0, 6], "seqused_k": [6]}
    arguments: dict[str, Any] = {name: torch.tensor(values, dtype=torch.int32) for name, values in arrays.items()}
    table = torch.tensor([[1]], dtype=torch.int32)
    out = FakeVarlen()(query, cache, cache, max_q=1, max_k=6, scale=1.0, block_table=table, num_splits=1, **arguments)
    assert out.isnan().all()
