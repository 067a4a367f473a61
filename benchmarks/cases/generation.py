"""W2: 16 prompts that are gone on with for 128 tokens, the states of what is generated saved too."""

import statistics
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace

from benchmarks import machine, report, systems
from benchmarks.bench import Bench, Result
from benchmarks.results import Round, summarize
from benchmarks.rounds import paired_ratio, take_turns
from benchmarks.systems import System
from benchmarks.targets import Row, at_least
from benchmarks.workload import Workload, generation

NAME = "W2"
WHOLE, STREAMED, VLLM = "strata", "strata, streamed", "vLLM"


def run(bench: Bench) -> Result:
    """Strata and, where asked for, vLLM. Streams of the same requests tell how long a step takes."""
    workload = generation(bench.options.concurrency).limited(bench.options.limit)
    if bench.options.vllm:
        workload = replace(workload, save_dtype=bench.options.dtype)  # the only one that vLLM saves
    rows = min(workload.concurrency, len(workload.prompts))
    products = (*bench.shape.layers, bench.shape.head)
    with ExitStack() as stack:
        tested = list(_systems(stack, bench, workload))
        rounds = take_turns(tested, bench.options.rounds, bench.width, bench.say, lambda: bench.clock.measure(products, [rows]))
    step = statistics.median(one.decode_step_seconds for one in rounds[STREAMED])
    reading = max(bench.facts.memory_bytes_per_second, machine.memory_rate())
    limit = bench.clock.decode_step_limit(bench.shape, rows, reading)
    lines = [
        *report.workload_lines(workload, bench.options.dtype, bench.options.rounds),
        *report.table_lines([summarize(label, each) for label, each in rounds.items()]),
        f"  a step of {rows} requests takes {1000 * step:.1f} ms; weights read once and products computed: {1000 * limit:.1f} ms",
    ]
    measured = {"workload": report.workload_facts(workload), "systems": report.rounds_facts(rounds)}
    return Result(lines, list(_rows(rounds, limit / step)), measured | {"step_seconds": step, "limit_seconds": limit})


def _systems(stack: ExitStack, bench: Bench, workload: Workload) -> Iterator[System]:
    service = stack.enter_context(bench.warm_service())
    yield systems.strata(WHOLE, service, workload, saves=True)
    yield systems.strata(STREAMED, service, workload, saves=True, stream=True)
    if bench.options.vllm:
        yield systems.vllm(VLLM, bench.vllm, workload)


def _rows(rounds: Mapping[str, Sequence[Round]], share: float) -> Iterator[Row]:
    if VLLM in rounds:
        ratio = paired_ratio(rounds[WHOLE], rounds[VLLM], lambda one: one.output_tokens_per_second)
        yield Row(NAME, "strata / vLLM, output tokens per second, both saving float32", ratio, at_least(4.0))
    yield Row(NAME, "limit / step, all requests generating", share, at_least(0.6), "percent")
