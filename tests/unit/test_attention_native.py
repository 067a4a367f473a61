"""The reference backend with compiled kernels, against dense attention in float64, over a cache poisoned with NaN."""

import pytest
import torch

from engine.attention.sdpa import SdpaBackend
from engine.native.compiler import NoKernels
from engine.native.kernels import MAX_GROUP, load_kernels
from tests.unit.attention_simulation import CPU, Shape, Simulation


@pytest.fixture(autouse=True)
def _same_numbers_every_time() -> None:
    torch.manual_seed(0)


def simulation(*shapes: Shape) -> Simulation:
    try:
        kernels = load_kernels(shapes[0].dtype, 2)
    except NoKernels as error:
        pytest.skip(f"no native kernels here: {error}")
    return Simulation(list(shapes), backend=SdpaBackend(CPU, kernels))


@pytest.mark.parametrize("block_size", [1, 3, 32, 528])
@pytest.mark.parametrize("window", [None, 1, 5, 40])
def test_chunked_sequence_equals_dense_attention(block_size: int, window: int | None) -> None:
    simulated = simulation(Shape(block_size=block_size, window=window))
    for count in (7, 1, 1, 20, 1, 64, 1, 1, 2):
        simulated.step((0, count))


@pytest.mark.parametrize(("soft_cap", "sinks"), [(None, False), (2.0, False), (None, True)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim"), [(9, 3, 16), (4, 4, 20), (5, 1, 64), (MAX_GROUP, 1, 8), (MAX_GROUP + 1, 1, 16), (2, 1, 256)]
)
def test_head_layouts_equal_dense_attention(
    heads: int, kv_heads: int, head_dim: int, dtype: torch.dtype, soft_cap: float | None, sinks: bool
) -> None:
    simulated = simulation(Shape(heads=heads, kv_heads=kv_heads, head_dim=head_dim, dtype=dtype, soft_cap=soft_cap, sinks=sinks))
    simulated.step((0, 33), (1, 1))
    simulated.step((1, 1), (0, 1), (2, 5))
    simulated.step((0, 9), (2, 1), (1, 1))


@pytest.mark.parametrize("window", [None, 100, 700])
@pytest.mark.parametrize(("soft_cap", "sinks"), [(None, False), (5.0, True)])
def test_long_chunks_equal_dense_attention(window: int | None, soft_cap: float | None, sinks: bool) -> None:
    simulated = simulation(Shape(window=window, soft_cap=soft_cap, sinks=sinks, heads=2, kv_heads=1))
    simulated.step((0, 257), (1, 128))
    simulated.step((0, 384), (1, 133))
    simulated.step((0, 1), (1, 500))


def test_long_decodes_are_put_together_from_parts() -> None:
    simulated = simulation(Shape(block_size=32))
    simulated.step((0, 511), (1, 512), (2, 513), (3, 1600), (4, 3))
    for _ in range(3):
        simulated.step(*((name, 1) for name in range(5)))


def test_decodes_and_chunks_mix_in_any_order_and_narrow() -> None:
    simulated = simulation(Shape(layers=(0, 1, 2)), Shape(layers=(3, 4), window=24, block_size=4))
    simulated.step((0, 40), (1, 1), (2, 17))
    simulated.step((1, 1), (0, 1), (3, 12), (2, 1))
    simulated.step((3, 30), (2, 1), (1, 13), (0, 1), (4, 1), keep=2)
    simulated.step((0, 1), (1, 1), (2, 1), (3, 1), (4, 1), keep=0)
