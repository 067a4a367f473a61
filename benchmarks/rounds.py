"""Rounds of several systems in turn."""

import itertools
import statistics
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

from benchmarks.results import Round
from benchmarks.systems import System
from benchmarks.workload import with_first_token

FIRST_TOKEN = 1000
WARM_UP_PROMPTS = 4
Item = TypeVar("Item")


def in_turn(items: Sequence[Item], count: int) -> Iterator[tuple[int, Item]]:
    """Every item once a round, another one first each time, so that a machine that slows down slows all of them."""
    for number in range(count):
        shift = number % len(items)
        for item in (*items[shift:], *items[:shift]):
            yield number, item


def take_turns(
    tested: Sequence[System], count: int, width: int, say: Callable[[str], None], between: Callable[[], None] = lambda: None
) -> dict[str, list[Round]]:
    """Warms every system up, then measures and checks `count` rounds of each, by label. No two rounds have a prompt in common.

    `between` is called before each round of all systems, while nothing else runs.
    """
    first_tokens = itertools.count(FIRST_TOKEN)
    for system in tested:
        say(f"Warming up: {system.label}")
        system.measure(with_first_token(system.workload.prompts[:WARM_UP_PROMPTS], next(first_tokens)), width)
    rounds: dict[str, list[Round]] = {system.label: [] for system in tested}
    for number, system in in_turn(tested, count):
        if not any(len(done) > number for done in rounds.values()):
            between()
        measured = system.measure(with_first_token(system.workload.prompts, next(first_tokens)), width)
        rounds[system.label].append(measured)
        say(f"Round {number + 1} of {count}, {system.label}: {measured.wall_seconds:.2f} s")
    return rounds


def paired_ratio(above: Sequence[Round], below: Sequence[Round], figure: Callable[[Round], float]) -> float:
    """The median over rounds of one system's figure over another's in the same round."""
    return statistics.median(figure(one) / figure(other) for one, other in zip(above, below, strict=True))
