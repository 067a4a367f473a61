"""W3: the prompts of W1 with the layers up to the middle only, so that the upper half needn't run."""

from benchmarks import report, systems
from benchmarks.bench import Bench, Result
from benchmarks.results import summarize
from benchmarks.rounds import paired_ratio, take_turns
from benchmarks.targets import Row, at_least
from benchmarks.workload import extraction, up_to_the_middle

NAME = "W3"
WHOLE, HALF = "all layers", "up to the middle"


def run(bench: Bench) -> Result:
    """The same service with both, in turn."""
    whole = extraction(bench.options.concurrency).limited(bench.options.limit)
    half = up_to_the_middle(whole, bench.num_layers)
    with bench.warm_service() as service:
        tested = [systems.strata(WHOLE, service, whole, saves=True), systems.strata(HALF, service, half, saves=True)]
        rounds = take_turns(tested, bench.options.rounds, bench.width, bench.say)
    ratio = paired_ratio(rounds[HALF], rounds[WHOLE], lambda one: one.tokens_per_second)
    lines = [
        *report.workload_lines(half, bench.options.dtype, bench.options.rounds),
        *report.table_lines([summarize(label, each) for label, each in rounds.items()]),
    ]
    row = Row(NAME, "layers up to the middle / all layers, tokens per second", ratio, at_least(1.75))
    return Result(lines, [row], {"workload": report.workload_facts(half), "systems": report.rounds_facts(rounds)})
