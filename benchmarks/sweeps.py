"""What extraction costs as one thing changes: the length of prompts, requests at once, layers, what the disk can take."""

import os
import statistics
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain, count, islice
from pathlib import Path

from benchmarks import machine, systems
from benchmarks.bench import Bench
from benchmarks.results import summarize
from benchmarks.rounds import FIRST_TOKEN, in_turn, take_turns
from benchmarks.systems import System
from benchmarks.workload import Prompts, Workload, extraction, with_first_token

LENGTHS = (64, 128, 256, 512, 1024, 2048)
BATCHES = (1, 2, 4, 8, 16, 32)
OTHERS = (0, 1, 2, 4)
SAVING, NOT_SAVING = "saving", "not saving"
TOKENS_PER_POINT = 4096
PIECE_BYTES, FILE_BYTES = 8 << 20, 256 << 20
Point = tuple[float, float]


@dataclass(frozen=True)
class Plot:
    """Curves over one changing thing."""

    name: str
    x_label: str
    y_label: str
    curves: dict[str, list[Point]]
    log_x: bool = True


@dataclass(frozen=True)
class Setting:
    """One point of a curve, before it has been measured."""

    x: float
    workload: Workload
    curve: str


def all_plots(bench: Bench) -> Iterator[Plot]:
    """Measures one plot after the other, each on a fresh service."""
    yield _plot(bench, "length", "tokens per prompt", _lengths(bench))
    yield _plot(bench, "batch", "requests at once", _batches(bench))
    yield _plot(bench, "layers", "layers saved", _layers(bench), log_x=False)
    yield _disk(bench)


def prose(num_prompts: int, length: int) -> Prompts:
    """Prompts of one length, cut from the prose of W1; repeated where that runs out."""
    text = list(chain.from_iterable(extraction(1).prompts))
    tokens = (text[index % len(text)] for index in count())
    return [list(islice(tokens, length)) for _ in range(num_prompts)]


def _lengths(bench: Bench) -> Iterator[Setting]:
    for length in LENGTHS[: bench.options.limit]:
        yield from _both(length, _workload(prose(max(2, TOKENS_PER_POINT // length), length), concurrency=8))


def _batches(bench: Bench) -> Iterator[Setting]:
    for at_once in BATCHES[: bench.options.limit]:
        yield from _both(at_once, _workload(prose(max(16, at_once), 256), concurrency=at_once))


def _layers(bench: Bench) -> Iterator[Setting]:
    last = bench.num_layers
    counts = sorted({1, 2, 4, 8, 16, last} & set(range(last + 1)))
    prompts = prose(16, 256)
    yield Setting(0, _workload(prompts, concurrency=8), NOT_SAVING)
    for number in counts[: bench.options.limit]:
        # The last one is always among them, so that the whole model runs.
        layers = tuple(range(last - number + 1, last + 1))
        yield Setting(number, Workload("layers", prompts, layers, max_tokens=1, concurrency=8), SAVING)


def _both(x: float, workload: Workload) -> Iterator[Setting]:
    yield Setting(x, workload, SAVING)
    yield Setting(x, workload, NOT_SAVING)


def _workload(prompts: Prompts, concurrency: int) -> Workload:
    return Workload("sweep", prompts, extraction(1).layers, max_tokens=1, concurrency=concurrency)


def _plot(bench: Bench, name: str, x_label: str, settings: Iterator[Setting], *, log_x: bool = True) -> Plot:
    points = {f"{name} {setting.x:g}, {setting.curve}": setting for setting in settings}
    with bench.warm_service() as service:
        tested = [_system(label, service, setting) for label, setting in points.items()]
        rounds = take_turns(tested, bench.options.rounds, bench.width, bench.say)
    curves: dict[str, list[Point]] = {}
    for label, setting in points.items():
        cost = 1000 / summarize(label, rounds[label]).tokens_per_second
        curves.setdefault(setting.curve, []).append((setting.x, cost))
    return Plot(name, x_label, "ms per prompt token", curves, log_x)


def _system(label: str, service: systems.Server, setting: Setting) -> System:
    return systems.strata(label, service, setting.workload, saves=setting.curve == SAVING)


def _disk(bench: Bench) -> Plot:
    """Over the number of other writers on the same disk, which take processor time too; what they leave of the disk is told each time."""
    workload = _workload(prose(16, 256), concurrency=8)
    first_tokens = count(FIRST_TOKEN)
    found: dict[tuple[str, int], list[float]] = {}
    with bench.warm_service() as service:
        for _, others in in_turn(OTHERS[: bench.options.limit], bench.options.rounds):
            with other_writers(bench.directory, others):
                rate = machine.disk_rate(bench.directory)
                for curve in (SAVING, NOT_SAVING):
                    system = _system(f"{others} other writers, {curve}", service, Setting(others, workload, curve))
                    measured = system.measure(with_first_token(workload.prompts, next(first_tokens)), bench.width)
                    found.setdefault((curve, others), []).append(1000 / measured.tokens_per_second)
            bench.say(f"{others} other writers leave {rate / 1e6:.0f} MB/s")
    curves: dict[str, list[Point]] = {}
    for (curve, others), costs in sorted(found.items()):
        curves.setdefault(curve, []).append((others, statistics.median(costs)))
    return Plot("disk", "other writers on the same disk", "ms per prompt token", curves, log_x=False)


@contextmanager
def other_writers(directory: Path, number: int) -> Iterator[None]:
    """Threads that write and sync without a pause, each over its own file again and again."""
    stopped = threading.Event()
    paths = [directory / f"other-{index}" for index in range(number)]
    threads = [threading.Thread(target=_write_on, args=(path, stopped)) for path in paths]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        stopped.set()
        for thread, path in zip(threads, paths, strict=True):
            thread.join()
            path.unlink()


def _write_on(path: Path, stopped: threading.Event) -> None:
    piece = os.urandom(PIECE_BYTES)
    with path.open("wb", buffering=0) as file:
        for number in count():
            if stopped.is_set():
                return
            os.pwrite(file.fileno(), piece, number * PIECE_BYTES % FILE_BYTES)
            os.fdatasync(file.fileno())
