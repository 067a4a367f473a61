"""What the buffers of attention backends can grow to: told at start, kept in every step."""

from __future__ import annotations

import pytest
import torch

from engine.attention.flashinfer import FlashInferBackend
from engine.attention.sdpa import SdpaBackend
from engine.attention.varlen import VarlenBackend
from engine.cache.spec import KVSpec, LayerKV
from engine.native.compiler import NoKernels
from engine.native.kernels import MAX_HEAD_DIM, Kernels, load_kernels
from tests.unit.attention_simulation import CPU, Shape, Simulation
from tests.unit.paged_kernels import FakeFlashInfer, FakeVarlen

LENGTH, STEP = 300, 140
SHAPES = (Shape(layers=(0, 1)), Shape(layers=(2,), window=24, kv_heads=3), Shape(layers=(3,), window=8))


def specs_of(*shapes: Shape) -> tuple[KVSpec, ...]:
    return tuple(KVSpec(LayerKV(s.kv_heads, s.head_dim, s.window), s.layers, s.block_size, s.dtype) for s in shapes)


def grown(backend: SdpaBackend) -> int:
    """Bytes of its buffers."""
    pairs = [tensor for pair in backend.scratch._buffers.values() for tensor in pair]
    return sum(tensor.nbytes for tensor in (*pairs, *backend.masks._buffers.values()))


def run_to_the_end(backend: SdpaBackend, *shapes: Shape) -> None:
    """Sequences of full length, in the largest steps there may be, and many single positions."""
    simulation = Simulation(list(shapes), backend=backend)
    for start in range(0, LENGTH - 1, STEP):
        simulation.step((0, min(STEP, LENGTH - 1 - start)))
    simulation.step((1, 2), (0, 1))
    simulation.step(*((name, 1) for name in range(1, 8)))


@pytest.fixture(autouse=True)
def _same_numbers_every_time() -> None:
    torch.manual_seed(0)


@pytest.mark.parametrize("shapes", [SHAPES, SHAPES[:1], SHAPES[1:], SHAPES[2:]])
def test_the_reference_backend_takes_what_it_has_said_and_no_more(shapes: tuple[Shape, ...]) -> None:
    backend = SdpaBackend(CPU)
    backend.gather_bytes = 1024  # else these few keys would all be less than what is gathered for many sequences at once
    run_to_the_end(backend, *shapes)
    assert grown(backend) == backend.workspace_bytes(specs_of(*shapes), LENGTH, STEP)


def test_windows_bound_what_long_contexts_take() -> None:
    backend, (full, sliding, _) = SdpaBackend(CPU), specs_of(*SHAPES)
    of_full = [backend.workspace_bytes((full,), length, 2048) for length in (1 << 17, 1 << 18)]
    of_sliding = [backend.workspace_bytes((sliding,), length, 2048) for length in (1 << 17, 1 << 18)]
    assert of_full[1] > 1.8 * of_full[0]
    assert of_sliding[0] == of_sliding[1] < of_full[0] / 5


def kernels(dtype: torch.dtype) -> Kernels:
    try:
        return load_kernels(dtype, 2)
    except NoKernels as error:
        pytest.skip(f"no native kernels here: {error}")


def test_layers_that_compiled_kernels_take_on_gather_nothing() -> None:
    backend = SdpaBackend(CPU, kernels(torch.float32))
    run_to_the_end(backend, *SHAPES)
    assert grown(backend) == backend.workspace_bytes(specs_of(*SHAPES), LENGTH, STEP) == 0
    assert backend.workspace_bytes(specs_of(Shape(head_dim=MAX_HEAD_DIM + 1)), LENGTH, STEP) > 0


def test_where_there_are_kernels_for_single_positions_alone_chunks_gather() -> None:
    shapes = [Shape(dtype=torch.bfloat16), Shape(layers=(1,), dtype=torch.bfloat16, window=24)]
    backend = SdpaBackend(CPU, kernels(torch.bfloat16))
    backend.gather_bytes = 1024
    run_to_the_end(backend, *shapes)
    assert grown(backend) == backend.workspace_bytes(specs_of(*shapes), LENGTH, STEP) > 0


def test_kernels_that_read_pages_where_they_lie_need_no_more_than_they_have() -> None:
    for backend in (VarlenBackend(CPU, FakeVarlen()), FlashInferBackend(CPU, FakeFlashInfer(), 1024)):
        assert backend.workspace_bytes(specs_of(*SHAPES), 1 << 17, 8192) == 0
