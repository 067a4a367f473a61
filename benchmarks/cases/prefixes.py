"""W4: eight system prompts of 512 tokens, each gone on with in 16 ways, with the prefix cache and without."""

from benchmarks import report, systems
from benchmarks.bench import Bench, Result
from benchmarks.results import summarize
from benchmarks.rounds import paired_ratio, take_turns
from benchmarks.targets import Row, at_least
from benchmarks.workload import shared_prefixes

NAME = "W4"
ON, OFF = "prefix cache on", "prefix cache off"


def run(bench: Bench) -> Result:
    """Every round has prefixes of its own, so each begins with nothing of them in the cache. One round fewer: it takes longest."""
    num_rounds = max(1, bench.options.rounds - 1)
    workload = shared_prefixes(bench.options.concurrency).limited(bench.options.limit)
    with bench.warm_service() as on, bench.warm_service("--no-prefix-cache") as off:
        tested = [systems.strata(ON, on, workload, saves=True), systems.strata(OFF, off, workload, saves=True)]
        rounds = take_turns(tested, num_rounds, bench.width, bench.say)
    ratio = paired_ratio(rounds[ON], rounds[OFF], lambda one: one.tokens_per_second)
    lines = [
        *report.workload_lines(workload, bench.options.dtype, num_rounds),
        *report.table_lines([summarize(label, each) for label, each in rounds.items()]),
    ]
    row = Row(NAME, "prefix cache on / off, prompt tokens per second", ratio, at_least(3.0))
    return Result(lines, [row], {"workload": report.workload_facts(workload), "systems": report.rounds_facts(rounds)})
