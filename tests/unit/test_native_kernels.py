"""The compiled kernels against torch's operators; where there is no C compiler, that torch takes over and says why."""

import errno
import os
import platform
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.attention.facade import GroupCache
from engine.attention.index import plan_group
from engine.attention.sdpa import SdpaBackend
from engine.models.base import AttentionOptions
from engine.models.blocks.norm import RMSNorm
from engine.models.blocks.ops import NativeOps, TorchOps
from engine.models.blocks.rope import DefaultRope, RotaryAngles, RotaryTable
from engine.native import compiler
from engine.native import kernels as native
from engine.native.compiler import FAMILIES, NoKernels, compile_library, find_library
from engine.native.kernels import Kernels, load_kernels
from tests.unit.attention_simulation import ints, rows_of

THREADS = 2
DTYPES = [torch.float32, torch.bfloat16]
TOLERANCE = {torch.float32: 1e-6, torch.bfloat16: 4e-3}
"""Relative L2; one rounding to bfloat16 is 2^-9 at most."""


@pytest.fixture(scope="module", params=DTYPES, ids=["float32", "bfloat16"])
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    chosen: torch.dtype = request.param
    return chosen


@pytest.fixture(scope="module")
def kernels(dtype: torch.dtype) -> Kernels:
    try:
        return load_kernels(dtype, THREADS)
    except NoKernels as error:
        pytest.skip(f"no native kernels here: {error}")


@pytest.fixture(scope="module")
def ops(kernels: Kernels) -> NativeOps:
    return NativeOps(kernels)


def relative(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found.double() - expected.double()).norm() / expected.double().norm())


def states(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    """With outliers, as residual streams have them."""
    made = torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))
    made.view(-1)[::97] *= 1000
    return made.to(dtype)


def angles(rows: int, head_dim: int, dtype: torch.dtype) -> RotaryAngles:
    table = RotaryTable(DefaultRope(1e4), head_dim, 4096, dtype=dtype, device=torch.device("cpu"))
    return table.lookup(torch.arange(7, 7 + rows))


@pytest.mark.parametrize("weight_dtype", ["same", "wide"])
@pytest.mark.parametrize(("rows", "width"), [(1, 16), (3, 33), (70, 576)])
def test_norm_and_sum_are_those_of_torch(ops: NativeOps, dtype: torch.dtype, weight_dtype: str, rows: int, width: int) -> None:
    norm = RMSNorm(states(width, dtype=dtype if weight_dtype == "same" else torch.float32), 1e-5)
    hidden, delta = states(rows, width, dtype=dtype), states(rows + 1, width, dtype=dtype)[1:].contiguous()

    total, normed = ops.add_and_norm(hidden, delta, norm)

    expected_total, expected = TorchOps().add_and_norm(hidden, delta, norm)
    assert torch.equal(total, expected_total)
    assert relative(normed, expected) < TOLERANCE[dtype]
    assert relative(ops.norm(norm, hidden), norm(hidden)) < TOLERANCE[dtype]


@pytest.mark.parametrize("activation", ["silu", "gelu_pytorch_tanh", "relu"])
@pytest.mark.parametrize(("rows", "inner"), [(1, 5), (9, 64), (70, 1536)])
def test_gate_is_that_of_torch(ops: NativeOps, dtype: torch.dtype, activation: str, rows: int, inner: int) -> None:
    gate_up = states(rows, 2 * inner, dtype=dtype)
    assert relative(ops.gate(activation, gate_up), TorchOps().gate(activation, gate_up)) < TOLERANCE[dtype]


@pytest.mark.parametrize("normed", [None, "same", "wide"])
@pytest.mark.parametrize(("rows", "heads", "head_dim"), [(1, 1, 2), (5, 3, 10), (33, 12, 64), (4, 2, 514)])
def test_rotation_is_that_of_torch(ops: NativeOps, dtype: torch.dtype, normed: str | None, rows: int, heads: int, head_dim: int) -> None:
    qkv = states(rows, heads + 2, head_dim, dtype=dtype)
    weight = states(heads, head_dim, dtype=torch.float32 if normed == "wide" else dtype)
    norm = None if normed is None else RMSNorm(weight, 1e-6)
    of_rows = angles(rows, head_dim, dtype)

    rotated = ops.rotate(qkv[:, :heads], of_rows, norm)

    assert rotated.is_contiguous()
    assert relative(rotated, TorchOps().rotate(qkv[:, :heads], of_rows, norm)) < TOLERANCE[dtype]


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_what_is_not_finite_does_not_become_finite(ops: NativeOps, dtype: torch.dtype, bad: float) -> None:
    width = 64
    hidden = states(3, width, dtype=dtype)
    hidden[1, 5] = bad
    norm = RMSNorm(torch.ones(width, dtype=dtype), 1e-5)

    for found in (ops.norm(norm, hidden), ops.add_and_norm(hidden, hidden, norm)[1]):
        assert not found[1].isfinite().all()
        assert found[[0, 2]].isfinite().all()
    for activation in ("silu", "gelu_pytorch_tanh"):
        assert not ops.gate(activation, hidden)[1].isfinite().all()
    assert not ops.rotate(hidden.view(3, 2, 32), angles(3, 32, dtype), None)[1].isfinite().all()


@st.composite
def decodes(draw: st.DrawFn) -> tuple[list[int], int, int, int, int, int | None, float | None, bool]:
    lengths = draw(st.lists(st.integers(1, 1300), min_size=1, max_size=5))
    kv_heads, group = draw(st.integers(1, 3)), draw(st.integers(1, 4))
    head_dim = draw(st.sampled_from([2, 10, 16, 64, 80, 128, 256]))
    window = draw(st.none() | st.integers(1, 600))
    soft_cap = draw(st.none() | st.floats(1.0, 50.0))
    return lengths, kv_heads, group, head_dim, draw(st.sampled_from([1, 7, 32])), window, soft_cap, draw(st.booleans())


@settings(max_examples=40, deadline=None)
@given(case=decodes(), seed=st.integers(0, 1000))
def test_attention_reads_its_own_positions_and_nothing_else(
    kernels: Kernels, dtype: torch.dtype, case: tuple[list[int], int, int, int, int, int | None, float | None, bool], seed: int
) -> None:
    lengths, kv_heads, group, head_dim, block_size, window, soft_cap, with_sinks = case
    random = torch.Generator().manual_seed(seed)
    blocks_of = [-(-length // block_size) for length in lengths]
    order = (torch.randperm(sum(blocks_of), generator=random) + 1).tolist()
    tables = torch.zeros(len(lengths), max(blocks_of), dtype=torch.int64)  # the tail names the null block
    cache = [torch.full(((sum(blocks_of) + 1) * block_size, kv_heads, head_dim), torch.nan, dtype=dtype) for _ in range(2)]
    query = torch.randn(len(lengths) + 1, kv_heads * group, head_dim, generator=random).to(dtype)
    rows = torch.arange(len(lengths)).flip(0) + 1
    out = torch.full_like(query, torch.nan)
    ends = torch.tensor(lengths)
    begins = torch.zeros_like(ends) if window is None else (ends - window).clamp(min=0)
    expected = torch.empty(len(lengths), kv_heads * group, head_dim, dtype=torch.float64)
    scale = head_dim**-0.5
    sinks = torch.randn(kv_heads * group, generator=random) * 3 if with_sinks else None
    for i, length in enumerate(lengths):
        taken, order = order[: blocks_of[i]], order[blocks_of[i] :]
        tables[i, : len(taken)] = torch.tensor(taken)
        positions = torch.arange(int(begins[i]), length)
        slots = tables[i][positions // block_size] * block_size + positions % block_size
        for tensor in cache:
            tensor[slots] = torch.randn(len(positions), kv_heads, head_dim, generator=random).to(dtype)
        keys, values = (tensor[slots].double().repeat_interleave(group, 1) for tensor in cache)  # [positions, heads, head_dim]
        scores = torch.einsum("hd,phd->hp", query[rows[i]].double(), keys) * scale
        scores = scores if soft_cap is None else soft_cap * (scores / soft_cap).tanh()
        scores = scores if sinks is None else torch.cat([scores, sinks.double()[:, None]], -1)
        expected[i] = torch.einsum("hp,phd->hd", scores.softmax(-1)[:, : len(positions)], values)

    kernels.attend_decodes(query, rows, (cache[0], cache[1]), tables, (begins, ends), block_size, scale, soft_cap, sinks, out)

    # Values are of the order of 1, but their mean may be close to nothing.
    assert (out[rows].double() - expected).abs().max() < 8 * TOLERANCE[dtype]
    assert out[0].isnan().all(), "a row of no sequence was written"


def test_attention_over_heads_that_are_too_wide_for_the_kernels_is_left_to_torch(kernels: Kernels, dtype: torch.dtype) -> None:
    head_dim, end = native.MAX_HEAD_DIM + 2, 3
    query, key, value = (states(1, heads, head_dim, dtype=dtype) for heads in (4, 2, 2))
    attended = []
    for those in (kernels, None):
        keys, values = (states(1, 3, 2, 2, head_dim, dtype=dtype) for _ in range(2))  # blocks of two
        rows = rows_of((end - 1, 1))
        step = GroupCache((0,), 2, keys, values), plan_group(rows, [ints(1, 2)], 2)
        context = SdpaBackend(torch.device("cpu"), those).plan(rows, [step])
        attended.append(context.attend(0, query, key, value, AttentionOptions(head_dim**-0.5)))
    assert torch.equal(*attended)


def test_a_dtype_without_kernels_is_refused() -> None:
    with pytest.raises(NoKernels, match="not written for float16"):
        load_kernels(torch.float16, THREADS)


def test_libraries_are_compiled_once_and_kept(tmp_path: Path) -> None:
    try:
        first = find_library(tmp_path)
    except NoKernels as error:
        pytest.skip(str(error))
    written = first.stat().st_mtime_ns
    assert find_library(tmp_path) == first
    assert first.stat().st_mtime_ns == written
    assert [path.name for path in tmp_path.iterdir()] == [first.name]


@pytest.fixture
def own_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Made in a folder of its own, under a umask that forbids nothing, by a compiler that only makes the file."""
    quick = tmp_path / "quick-cc"
    quick.write_text('#!/bin/sh\nwhile [ "$1" != -o ]; do shift; done\n: > "$2"\n')
    quick.chmod(0o755)
    monkeypatch.setenv("CC", str(quick))
    monkeypatch.setattr(compiler, "PREBUILT", tmp_path / "none")
    before = os.umask(0)
    try:
        return find_library(tmp_path / "kernels")
    except NoKernels as error:
        pytest.skip(str(error))
    finally:
        os.umask(before)


def test_what_was_compiled_under_a_loose_umask_can_be_loaded(own_library: Path) -> None:
    assert find_library(own_library.parent) == own_library


@pytest.mark.parametrize("part", ["library", "folder"])
def test_a_library_that_others_may_write_to_is_not_loaded(own_library: Path, part: str) -> None:
    (own_library if part == "library" else own_library.parent).chmod(0o777)
    with pytest.raises(NoKernels, match="others may write to it"):
        find_library(own_library.parent)


def test_a_library_of_another_user_is_not_loaded(own_library: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if os.geteuid() == 0:
        os.chown(own_library, 1, -1)
    else:
        monkeypatch.setattr(os, "geteuid", lambda: own_library.stat().st_uid + 1)
    with pytest.raises(NoKernels, match="belongs to another user"):
        find_library(own_library.parent)


def test_a_cache_that_cannot_be_looked_into_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: Path) -> bool:
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    monkeypatch.setattr(Path, "exists", refuse)
    with pytest.raises(NoKernels, match="can't be read: Permission denied"):
        find_library(tmp_path)


def test_compute_threads_that_are_not_where_they_are_said_to_be_are_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    maps = tmp_path / "maps"
    maps.write_text("7f0000000000-7f0000001000 r-xp 00000000 08:01 42    /opt/my torch/libgomp.so.1\n")
    monkeypatch.setattr(native, "_MAPS", maps)
    monkeypatch.setattr(native, "find_library", lambda: tmp_path)
    with pytest.raises(NoKernels, match="threads were not found: /opt/my torch/libgomp"):
        load_kernels(torch.float32, THREADS)


def test_without_a_compiler_the_reason_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(compiler, "PREBUILT", tmp_path)
    with pytest.raises(NoKernels, match="no C compiler"):
        find_library(tmp_path)


def test_what_the_compiler_says_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = tmp_path / "broken-cc"
    broken.write_text("#!/bin/sh\necho out of paper >&2\nexit 1\n")
    broken.chmod(0o755)
    monkeypatch.setenv("CC", str(broken))
    family = next(iter(FAMILIES.values()))[0]
    with pytest.raises(NoKernels, match="out of paper"):
        compile_library(family, tmp_path / "kernels.so")
    assert not (tmp_path / "kernels.so").exists()


def test_a_folder_that_cannot_be_written_is_told(tmp_path: Path) -> None:
    family = FAMILIES.get(platform.machine(), FAMILIES["x86_64"])[0]
    (tmp_path / "file").touch()
    with pytest.raises(NoKernels, match="could not be compiled into"):
        compile_library(family, tmp_path / "file" / "kernels.so")


def test_a_processor_that_is_not_known_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiler, "cpu_flags", frozenset)
    with pytest.raises(NoKernels, match="processor"):
        find_library(tmp_path)
