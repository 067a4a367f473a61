"""W7: from nothing to the first answer with its file, and the same with transformers: both as fresh processes."""

import statistics
import time

from benchmarks.bench import Bench, Result
from benchmarks.client import run_round, saving_body
from benchmarks.reference import Reference
from benchmarks.rounds import FIRST_TOKEN, in_turn
from benchmarks.targets import Row, at_most
from benchmarks.verify import check_and_remove
from benchmarks.workload import Workload, extraction, with_first_token

NAME = "W7"
STRATA, TRANSFORMERS = "strata", "transformers"
Seconds = dict[str, list[float]]


def run(bench: Bench) -> Result:
    """One start of each first brings files into the system's cache and isn't counted."""
    workload = extraction(concurrency=1).limited(1)
    seconds: Seconds = {STRATA: [], TRANSFORMERS: []}
    for number, label in in_turn([STRATA, TRANSFORMERS], bench.options.rounds + 1):
        one = Workload(**vars(workload) | {"prompts": with_first_token(workload.prompts, FIRST_TOKEN + number)})
        took = _strata(bench, one) if label == STRATA else _transformers(bench, one)
        bench.say(f"Start {number} of {bench.options.rounds}, {label}: {took:.2f} s")
        if number:
            seconds[label].append(took)
    ratio = statistics.median(ours / theirs for ours, theirs in zip(seconds[STRATA], seconds[TRANSFORMERS], strict=True))
    lines = [f"  {label:<14}{statistics.median(each):>6.2f} s from start to the first file" for label, each in seconds.items()]
    rows = [Row(NAME, "start to first answer, strata / transformers", ratio, at_most(1.0))]
    return Result(lines, rows, {"seconds": seconds})


def _strata(bench: Bench, workload: Workload) -> float:
    started = time.perf_counter()
    with bench.service() as service:
        measured = run_round(service.url, workload, workload.prompts, saving_body(workload))
        took = time.perf_counter() - started
    check_and_remove(measured.answers, workload.prompts, workload, bench.width)
    return took


def _transformers(bench: Bench, workload: Workload) -> float:
    started = time.perf_counter()
    with Reference(str(bench.model), workload.layers, bench.options.dtype) as script:
        measured = script.run_round("full head", workload.prompts, bench.directory)
        took = time.perf_counter() - started
    check_and_remove(measured.answers, workload.prompts, workload, bench.width)
    return took
