"""What is aimed at, and whether a measured figure is there."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

Unit = Literal["ratio", "percent", "ms"]


@dataclass(frozen=True)
class Target:
    """A bound on a figure."""

    bound: float
    at_least: bool

    def met_by(self, value: float) -> bool:
        return value >= self.bound if self.at_least else value <= self.bound


def at_least(bound: float) -> Target:
    return Target(bound, at_least=True)


def at_most(bound: float) -> Target:
    return Target(bound, at_least=False)


@dataclass(frozen=True)
class Row:
    """One figure, measured in this run. `target` None: told for what it is worth."""

    workload: str
    what: str
    value: float
    target: Target | None = None
    unit: Unit = "ratio"

    @property
    def verdict(self) -> str:
        if self.target is None:
            return ""
        return "met" if self.target.met_by(self.value) else "missed"


def target_lines(rows: Sequence[Row]) -> Iterator[str]:
    """One table of all figures against what is aimed at."""
    yield f"{'':<4}{'':<72}{'measured':>12}{'target':>12}"
    for row in rows:
        bound = "" if row.target is None else f"{'>=' if row.target.at_least else '<='} {_figure(row.target.bound, row.unit)}"
        yield f"{row.workload:<4}{row.what:<72}{_figure(row.value, row.unit):>12}{bound:>12}  {row.verdict}".rstrip()


def _figure(value: float, unit: Unit) -> str:
    if unit == "percent":
        return f"{100 * value:.1f} %"
    return f"{value:.1f} ms" if unit == "ms" else f"{value:.3f}"
