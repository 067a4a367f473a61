"""The table of sizes in docs/operations.md, computed again from its own widths and layers."""

from __future__ import annotations

from pathlib import Path

import pytest

PAGE = (Path(__file__).parents[2] / "docs" / "operations.md").read_text()
SECTION = PAGE.partition("## Disk sizing\n")[2].partition("\n## ")[0]
ROWS = [[cell.strip() for cell in line.split("|")[1:-1]] for line in SECTION.splitlines() if line.startswith("|")][2:]
UNITS = {"KiB": 2**10, "MiB": 2**20, "MB/s": 1e6, "Gbit/s": 1e9 / 8, "TB": 1e12}


def bytes_per_token(layers: int, width: int, bytes_per_number: int = 2) -> int:
    return layers * width * bytes_per_number + 8


def shown(figure: str, size: float) -> bool:
    """Whether a figure is a size, as far as its digits go."""
    number, unit = figure.split()
    last_digit = 10.0 ** -len(number.partition(".")[2])
    return abs(size / UNITS[unit] - float(number)) <= last_digit / 2 + 1e-9


def test_there_are_models_in_the_table() -> None:
    assert len(ROWS) > 10


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[0])
def test_sizes_follow_from_width_and_layers(row: list[str]) -> None:
    _, width, layers, one, four, everything, per_second, billion = row
    size = bytes_per_token(4, int(width))
    assert shown(one, bytes_per_token(1, int(width)))
    assert shown(four, size)
    assert shown(everything, bytes_per_token(int(layers) + 1, int(width)))
    disk, network = per_second.split(", ")
    assert shown(disk, 1000 * size)
    assert shown(network, 1000 * size)
    assert shown(billion, 1e9 * size)
