"""W9: how throughput and the time that Python takes per step grow with the number of requests that run.

The model's own execution is timed apart. What Python does inside of it (planning attention, calling operators) shows with a model of one
layer and width 64, whose products cost next to nothing: the whole step is then an upper bound on Python's time.
"""

import shutil
import statistics
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from benchmarks.bench import Bench, Result
from benchmarks.edge_model import write_small_model
from benchmarks.results import Answer
from benchmarks.rounds import FIRST_TOKEN, in_turn
from benchmarks.stepping import SteppedEngine, Steps
from benchmarks.targets import Row, at_most
from benchmarks.verify import check_and_remove
from benchmarks.workload import Prompts, Workload, random_prompt
from engine.config import EngineConfig
from engine.layers import LayerId, default_layers

NAME = "W9"
CONCURRENCIES = (1, 4, 16, 64, 256)
PROMPT_TOKENS, MAX_TOKENS = 16, 20
"""Tokens enough that the first of 256 requests still generates when the last one begins, since steps aren't held short for its sake."""
TRIVIAL_VOCABULARY, TRIVIAL_WIDTH, TRIVIAL_LAYERS = 512, 64, 1
PYTHON_MS = 3.0


@dataclass(frozen=True)
class Way:
    """A model, and whether what it generates is saved."""

    label: str
    trivial: bool
    saves: bool


WAYS = (
    Way("the model", trivial=False, saves=False),
    Way("the model, saving", trivial=False, saves=True),
    Way("trivial model", trivial=True, saves=False),
    Way("trivial model, saving", trivial=True, saves=True),
)
Found = Mapping[tuple[Way, int], list[Steps]]


def run(bench: Bench) -> Result:
    """The engine's core in this process, without HTTP."""
    counts = [count for count in CONCURRENCIES if bench.options.limit is None or count <= bench.options.limit]
    trivial = bench.directory / "trivial-model"
    write_small_model(trivial, TRIVIAL_VOCABULARY, bench.model, TRIVIAL_WIDTH, TRIVIAL_LAYERS)
    found: dict[tuple[Way, int], list[Steps]] = {}
    engines = {False: SteppedEngine(_config(bench, bench.model)), True: SteppedEngine(_config(bench, trivial))}
    first_token = FIRST_TOKEN
    for number, way in in_turn(WAYS, bench.options.rounds + 1):
        for count in counts if number else counts[:1]:  # the first round warms up
            first_token += 1
            steps = _decode(bench, engines[way.trivial], way, count, first_token)
            if number:
                found.setdefault((way, count), []).append(steps)
        bench.say(f"Round {number} of {bench.options.rounds}, {way.label}")
    for engine in engines.values():
        engine.close()
    measured = {f"{way.label}, {count}": [vars(steps) for steps in each] for (way, count), each in found.items()}
    return Result(list(_lines(found)), list(_rows(found, counts[-1])), measured)


def _config(bench: Bench, model: Path) -> EngineConfig:
    tokens = CONCURRENCIES[-1] * (PROMPT_TOKENS + MAX_TOKENS + 32)
    return EngineConfig(
        str(model),
        device="cpu",
        dtype=bench.options.dtype,
        max_model_len=1024,
        kv_cache_tokens=tokens,
        state_cache_memory=256 << 20,
        inter_token_ms=0.0,
    )


def _decode(bench: Bench, engine: SteppedEngine, way: Way, count: int, seed: int) -> Steps:
    vocabulary = TRIVIAL_VOCABULARY if way.trivial else bench.vocab_size
    prompts = [random_prompt(PROMPT_TOKENS, vocabulary, seed * CONCURRENCIES[-1] + index) for index in range(count)]
    if not way.saves:
        return engine.decode(prompts, MAX_TOKENS)
    folder = bench.directory / "scale"
    folder.mkdir()
    layers = default_layers(TRIVIAL_LAYERS if way.trivial else bench.num_layers)
    steps = engine.decode(prompts, MAX_TOKENS, (folder, layers))
    _check(folder, prompts, layers, TRIVIAL_WIDTH if way.trivial else bench.width)
    shutil.rmtree(folder)
    return steps


def _check(folder: Path, prompts: Prompts, layers: tuple[LayerId, ...], width: int) -> None:
    """Files are named by number, so by age they are in the order of the prompts."""
    paths = sorted(folder.iterdir(), key=lambda path: int(path.stem))
    numbers = tuple(layer for layer in layers if isinstance(layer, int))
    workload = Workload("scale", prompts, numbers, MAX_TOKENS, concurrency=1, include_output_tokens=True)
    check_and_remove([Answer(0.0, path) for path in paths], prompts, workload, width)


def _lines(found: Found) -> Iterator[str]:
    yield f"  {'':<24}{'at once':>8}{'tokens/s':>11}{'step ms':>10}{'outside the model ms':>22}"
    for (way, count), each in found.items():
        rate, step, outside = (_median(each, figure) for figure in (_rate, _whole, _outside))
        yield f"  {way.label:<24}{count:>8}{rate:>11,.0f}{1000 * step:>10.2f}{1000 * outside:>22.3f}"


def _rows(found: Found, count: int) -> Iterator[Row]:
    for way in WAYS:
        figure, what = (_whole, "whole step") if way.trivial else (_outside, "step outside the model's execution")
        milliseconds = 1000 * _median(found[way, count], figure)
        yield Row(NAME, f"{count} running, {way.label}: {what}", milliseconds, at_most(PYTHON_MS), "ms")


def _median(each: list[Steps], figure: Callable[[Steps], float]) -> float:
    return statistics.median(figure(steps) for steps in each)


def _rate(steps: Steps) -> float:
    return steps.tokens_per_second


def _whole(steps: Steps) -> float:
    return steps.seconds


def _outside(steps: Steps) -> float:
    return steps.outside_seconds
