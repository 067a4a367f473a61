"""W1: 64 prompts of which nothing but the states of four layers is wanted."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace

from benchmarks import report, systems
from benchmarks.bench import UNTRIMMED, Bench, Result
from benchmarks.metrics import scrape, step_sizes
from benchmarks.reference import VARIANTS, Reference
from benchmarks.results import Round, summarize
from benchmarks.rounds import paired_ratio, take_turns
from benchmarks.systems import System
from benchmarks.targets import Row, Target, at_least, at_most
from benchmarks.workload import Workload, extraction

NAME = "W1"
SAVING, NOT_SAVING = "strata, saving", "strata, not saving"
UNTRIMMED_SAVING, UNTRIMMED_NOT_SAVING = "strata untrimmed, saving", "strata untrimmed, not saving"
SAVING_FLOAT32, VLLM = "strata, saving float32", "vLLM, saving float32"
LIMIT_ROWS = (128, 256, 512, 1024, 2048)
"""Tried for the limit in any case, with whatever numbers of rows occur beside them."""
Rounds = Mapping[str, Sequence[Round]]


def run(bench: Bench) -> Result:
    """Saving and not saving, the transformers script in three variants and, where asked for, vLLM."""
    workload = extraction(bench.options.concurrency).limited(bench.options.limit)
    with ExitStack() as stack:
        shipped = stack.enter_context(bench.warm_service())
        tested = list(_systems(stack, bench, shipped, workload))
        before = scrape(shipped.url)
        rounds = take_turns(
            tested, bench.options.rounds, bench.width, bench.say, lambda: bench.clock.measure(bench.shape.layers, LIMIT_ROWS)
        )
        occurred = step_sizes(before, scrape(shipped.url))
    bench.clock.measure(bench.shape.layers, sorted({*LIMIT_ROWS, *occurred}))
    lines = [
        *report.workload_lines(workload, bench.options.dtype, bench.options.rounds),
        *report.table_lines([summarize(label, each) for label, each in rounds.items()]),
        *bench.clock.lines(bench.shape, LIMIT_ROWS),
        f"  limit of the layers' products: {bench.clock.prefill_limit(bench.shape):,.0f} tokens/s "
        f"at {bench.clock.prefill_gflops(bench.shape):.0f} GFLOP/s",
    ]
    measured = {"workload": report.workload_facts(workload), "systems": report.rounds_facts(rounds), "rows_of_steps": occurred}
    return Result(lines, list(_rows(bench, rounds)), measured | {"limit_tokens_per_second": bench.clock.prefill_limit(bench.shape)})


def _systems(stack: ExitStack, bench: Bench, shipped: systems.Server, workload: Workload) -> Iterator[System]:
    yield systems.strata(SAVING, shipped, workload, saves=True)
    yield systems.strata(NOT_SAVING, shipped, workload, saves=False)
    if bench.can_leave_untrimmed:
        untrimmed = stack.enter_context(bench.warm_service(UNTRIMMED))
        yield systems.strata(UNTRIMMED_SAVING, untrimmed, workload, saves=True)
        yield systems.strata(UNTRIMMED_NOT_SAVING, untrimmed, workload, saves=False)
    if bench.options.vllm:
        wide = replace(workload, save_dtype=bench.options.dtype)
        yield systems.strata(SAVING_FLOAT32, shipped, wide, saves=True)
        yield systems.vllm(VLLM, bench.vllm, wide)
    if bench.options.reference:
        bench.say("Starting the transformers script")
        script = stack.enter_context(Reference(str(bench.model), workload.layers, bench.options.dtype))
        for variant in VARIANTS:
            yield systems.reference(f"transformers, {variant}", script, variant, workload, bench.directory)


def _rows(bench: Bench, rounds: Rounds) -> Iterator[Row]:
    def ratio(what: str, above: str, below: str, target: Target | None, figure: Callable[[Round], float]) -> Iterator[Row]:
        if above in rounds and below in rounds:
            yield Row(NAME, what, paired_ratio(rounds[above], rounds[below], figure), target)

    def rate(one: Round) -> float:
        return one.tokens_per_second

    yield from ratio("strata / vLLM, tokens per second, both saving float32", SAVING_FLOAT32, VLLM, at_least(1.05), rate)
    yield from ratio("strata / vLLM, p95 of latency", SAVING_FLOAT32, VLLM, at_most(0.8), lambda one: one.latency(0.95))
    aims = {"full head": at_least(1.6), "base model": at_least(1.3)}
    for variant in VARIANTS:
        yield from ratio(f"strata / transformers, {variant}", SAVING, f"transformers, {variant}", aims.get(variant), rate)
    share = summarize(SAVING, rounds[SAVING]).tokens_per_second / bench.clock.prefill_limit(bench.shape)
    yield Row(NAME, "share of the limit of the layers' matrix products", share, at_least(0.85), "percent")
    if bench.can_leave_untrimmed:
        what = "saving / not saving, last layer untrimmed in both"
        yield from ratio(what, UNTRIMMED_SAVING, UNTRIMMED_NOT_SAVING, at_least(0.97), rate)
    else:
        yield from ratio("saving / not saving, no trimming in this version", SAVING, NOT_SAVING, at_least(0.97), rate)
    yield from ratio("saving / not saving, as it ships", SAVING, NOT_SAVING, at_least(0.94), rate)
