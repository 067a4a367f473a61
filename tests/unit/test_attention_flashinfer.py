"""The backend over flashinfer, with slow doubles of its wrappers, against dense attention in float64."""

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.attention.facade import FixedShape
from engine.attention.flashinfer import FlashInferBackend, is_installed
from engine.errors import ConfigError
from tests.unit.attention_simulation import CPU, PagedGroup, Shape, Simulation, dense_reference, rows_of_members
from tests.unit.paged_kernels import FakeDecodeWrapper, FakeFlashInfer, FakePrefillWrapper

NEVER_READ = (10**6, -1, 0, 7)
"""What block tables hold behind the blocks in use."""


@pytest.fixture(autouse=True)
def _same_numbers_every_time() -> None:
    torch.manual_seed(0)


@pytest.fixture
def library() -> FakeFlashInfer:
    return FakeFlashInfer()


def paged(**fields: Any) -> Shape:  # noqa: ANN401 - any field of a shape
    return Shape(**{"heads": 4, "kv_heads": 2, "head_dim": 8} | fields)


def backend_over(library: FakeFlashInfer) -> FlashInferBackend:
    return FlashInferBackend(CPU, library, workspace_bytes=64)


def simulation(library: FakeFlashInfer, *shapes: Shape) -> Simulation:
    return Simulation(shapes, tail=NEVER_READ, backend=backend_over(library))


def plans(library: FakeFlashInfer) -> int:
    return sum(wrapper.num_plans for wrapper in library.made)


@pytest.mark.parametrize("block_size", [1, 3, 16, 528])
@pytest.mark.parametrize("window", [None, 1, 5, 40])
def test_chunked_sequence_equals_dense_attention(library: FakeFlashInfer, block_size: int, window: int | None) -> None:
    run = simulation(library, paged(block_size=block_size, window=window))
    for count in (7, 1, 1, 20, 1, 64, 1, 1, 2):
        run.step((0, count))


@pytest.mark.parametrize("soft_cap", [None, 2.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("heads", "kv_heads"), [(9, 3), (4, 4), (5, 1)])
def test_head_layouts_and_soft_caps_equal_dense_attention(
    library: FakeFlashInfer, heads: int, kv_heads: int, dtype: torch.dtype, soft_cap: float | None
) -> None:
    run = simulation(library, paged(heads=heads, kv_heads=kv_heads, dtype=dtype, soft_cap=soft_cap))
    run.step((0, 33), (1, 1))
    run.step((1, 1), (0, 1), (2, 5))
    run.step((2, 1), (0, 1))


def test_decodes_and_chunks_mix_in_any_order(library: FakeFlashInfer) -> None:
    run = simulation(library, paged(layers=(0, 1, 2)), paged(layers=(3, 4), window=24, block_size=4, soft_cap=3.0))
    run.step((0, 40), (1, 1), (2, 17))
    run.step((1, 1), (0, 1), (3, 12), (2, 1))
    run.step((3, 30), (2, 1), (1, 13), (0, 1), (4, 1))
    run.step((0, 1), (1, 1), (2, 1), (3, 1), (4, 1))


@pytest.mark.parametrize("keep", [0, 1, 2, 3, 4])
def test_later_layers_may_run_for_the_leading_sequences_only(library: FakeFlashInfer, keep: int) -> None:
    simulation(library, paged(layers=(0, 1)), paged(layers=(2, 3), window=6)).step((0, 1), (1, 1), (2, 29), (3, 1), keep=keep)


@settings(deadline=None, max_examples=60)
@given(
    window=st.one_of(st.none(), st.integers(1, 50)),
    block_size=st.integers(1, 40),
    deep=st.integers(0, 4),
    steps=st.lists(st.dictionaries(st.integers(0, 3), st.integers(1, 40), min_size=1), min_size=1, max_size=5),
)
def test_any_schedule_equals_dense_attention(window: int | None, block_size: int, deep: int, steps: list[dict[int, int]]) -> None:
    run = simulation(FakeFlashInfer(), paged(layers=(0, 1), block_size=block_size, window=window), paged(layers=(2,), block_size=5))
    for step in steps:
        wanted = sorted(step.items())
        run.step(*wanted, keep=sum(name < deep for name, _ in wanted))


def test_layers_of_one_kind_share_a_plan(library: FakeFlashInfer) -> None:
    run = simulation(library, paged(layers=(0, 1, 2)), paged(layers=(3, 4), window=24))
    run.step((0, 40), (1, 1))
    assert plans(library) == 2
    assert sum(wrapper.num_runs for wrapper in library.made) == 5


def test_a_narrowed_batch_has_a_plan_of_its_own(library: FakeFlashInfer) -> None:
    simulation(library, paged(layers=(0, 1, 2))).step((0, 1), (1, 9), keep=1)
    assert [(type(wrapper), wrapper.num_plans, wrapper.num_runs) for wrapper in library.made] == [
        (FakePrefillWrapper, 1, 1),
        (FakeDecodeWrapper, 1, 2),
    ]


def test_wrappers_are_used_again_in_later_steps(library: FakeFlashInfer) -> None:
    run = simulation(library, paged(), paged(layers=(1,), window=5))
    for _ in range(4):
        run.step((0, 9), (1, 1))
        run.step((0, 1), (1, 1))
    assert len(library.made) == 4
    assert plans(library) == 16


@pytest.mark.parametrize(("kv_heads", "expected"), [(4, False), (2, True)])
def test_decodes_use_tensor_cores_where_heads_share_keys(library: FakeFlashInfer, kv_heads: int, expected: bool) -> None:
    simulation(library, paged(kv_heads=kv_heads)).step((0, 1))
    (wrapper,) = library.made
    assert isinstance(wrapper, FakeDecodeWrapper)
    assert wrapper.use_tensor_cores is expected


@pytest.mark.parametrize("shape", [paged(), paged(window=3, soft_cap=2.0)])
def test_a_context_of_fixed_shape_is_planned_anew_in_the_same_wrapper(library: FakeFlashInfer, shape: Shape) -> None:
    group = PagedGroup(shape, num_blocks=20, tail=NEVER_READ)
    context = backend_over(library).plan_decodes(FixedShape(3, 50), [group.cache])
    inputs = [torch.randn(3, heads, 8) for heads in (4, 2, 2)]
    context.attend(0, *inputs, shape.options)
    (wrapper,) = library.made
    steps = [[(0, 0)], [(0, 1), (1, 0)], *([(1, n), (0, n + 1)] for n in range(1, 40)), [(2, 0), (1, 40), (0, 41)]]
    for number, starts in enumerate(steps):
        members = [(name, start, 1) for name, start in starts]
        context.refill(rows_of_members(members), [group.step(members)[1]])
        assert wrapper.num_plans == number + 2, "a replayed graph makes no plan, so the refill must"
        query, key, value = (x.normal_() for x in inputs)
        out = context.attend(0, query, key, value, shape.options)
        for row, (name, _, _) in enumerate(members):
            past = group.remember(name, 0, key[row : row + 1].clone(), value[row : row + 1].clone())
            torch.testing.assert_close(out[row : row + 1].double(), dense_reference(query[row : row + 1], *past, shape), rtol=0, atol=1e-5)
    assert library.made == [wrapper]


def test_any_positive_block_size_is_accepted(library: FakeFlashInfer) -> None:
    backend = backend_over(library)
    for size in (1, 22, 528):
        backend.check_block_size(size)
    with pytest.raises(ConfigError, match="block_size is 0, but must be at least 1"):
        backend.check_block_size(0)


def test_the_library_is_imported_when_the_backend_is_made_and_not_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "flashinfer.py").write_text("raise RuntimeError('no compiler')")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "flashinfer", raising=False)
    assert is_installed()
    with pytest.raises(ConfigError, match="attention flashinfer can't run: importing it failed: no compiler"):
        FlashInferBackend(CPU, workspace_bytes=64)
