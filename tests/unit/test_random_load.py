"""The whole core under random loads on a device and a disk that misbehave: see `random_load`."""

from __future__ import annotations

import pytest

from tests.unit.random_load import Kind, RandomLoad

LOADS: list[tuple[Kind, int, bool, int]] = [
    ("mixed", 3, False, 75),
    ("mixed", 3, True, 75),
    ("rings", 1, False, 75),
    ("rings", 1, True, 50),
    ("crowd", 0, False, 250),
]


@pytest.mark.parametrize(("kind", "seed", "overlap", "num_steps"), LOADS)
def test_every_request_ends_once_with_the_right_file_and_nobody_is_starved(kind: Kind, seed: int, overlap: bool, num_steps: int) -> None:
    RandomLoad(seed, overlap, kind).run(num_steps)


@pytest.mark.slow
@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("kind", ["mixed", "rings", "crowd"])
def test_a_long_run_of_random_loads(kind: Kind, overlap: bool) -> None:
    """10,200 steps in all six."""
    for seed in range(8):
        RandomLoad(100 + seed, overlap, kind).run(200)
    RandomLoad(99, overlap, kind).run(100)
