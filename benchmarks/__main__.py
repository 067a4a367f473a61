"""`make bench`: Strata against a transformers script, vLLM, and what the machine could do at best, side by side in one run."""

import argparse
import json
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict
from itertools import takewhile
from pathlib import Path
from typing import Any

import torch

from benchmarks import machine, report
from benchmarks.bench import Bench, Options, Result, open_bench
from benchmarks.cases import (
    extraction,
    generation,
    half_depth,
    large_bodies,
    loading,
    long_prompts,
    neighbours,
    prefixes,
    scale,
    start_up,
    writing,
)
from benchmarks.client import BenchmarkError
from benchmarks.targets import Row, target_lines
from engine.device.host import usable_cpus
from engine.errors import ModelError
from service.cli.launcher import LaunchError

CASES = (extraction, generation, half_depth, prefixes, long_prompts, neighbours, start_up, writing, scale, large_bodies, loading)
RUNS: dict[str, Callable[[Bench], Result]] = {case.NAME: case.run for case in CASES}
TITLES = {case.NAME: (case.__doc__ or "").splitlines()[0].partition(": ")[2].rstrip(".") for case in CASES}
ALL = "all"
ROUNDS, ROUNDS_OF_MANY = 3, 2


def main(argv: Sequence[str]) -> int:
    """Runs the benchmark; 1 when a system failed or a file was wrong."""
    names = list(takewhile(lambda argument: argument in (*RUNS, ALL), argv))
    options, serve_arguments = _parse(argv[len(names) :])
    wanted = list(RUNS) if ALL in names else names or [extraction.NAME]
    try:
        _benchmark(wanted, options, tuple(serve_arguments))
    except (BenchmarkError, LaunchError, ModelError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    return 0


def _parse(argv: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks",
        usage="%(prog)s [all | WORKLOAD ...] [OPTION ...]",
        description=__doc__,
        epilog="\n".join(_epilog()),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--model", help="model folder or hub id (default: the embedded model)")
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"], help="compute dtype of all (default: %(default)s)")
    parser.add_argument("--rounds", type=int, help=f"default: {ROUNDS}, of several workloads {ROUNDS_OF_MANY}")
    parser.add_argument("--concurrency", type=int, default=16, help="requests at once over HTTP (default: %(default)s)")
    parser.add_argument("--limit", type=int, help="only the first so many prompts (W5: lengths, W9: requests at once), for a quick try")
    parser.add_argument("--no-reference", action="store_true", help="leave the transformers script out of W1")
    parser.add_argument("--vllm", action="store_true", help="W1 and W2 against vLLM too; makes its environment the first time")
    parser.add_argument("--directory", type=Path, default=Path("saves/bench"), help="where files go for the while (default: %(default)s)")
    parser.add_argument("--json", type=Path, help="also write everything that was measured to this file")
    return parser.parse_known_args(argv)


def _epilog() -> Iterator[str]:
    yield "workloads (W1 unless some are named):"
    yield from (f"  {name}  {title}" for name, title in TITLES.items())
    yield "\nAny other option is passed on to `strata serve`. Plots are drawn by `python -m benchmarks.plots`."


def _benchmark(wanted: Sequence[str], arguments: argparse.Namespace, serve_arguments: tuple[str, ...]) -> None:
    options = Options(
        dtype=arguments.dtype,
        rounds=arguments.rounds or (ROUNDS if len(wanted) == 1 else ROUNDS_OF_MANY),
        concurrency=arguments.concurrency,
        limit=arguments.limit,
        reference=not arguments.no_reference,
        vllm=arguments.vllm,
        serve_arguments=serve_arguments,
    )
    torch.set_num_threads(usable_cpus())  # as the service does: the machine's rates are measured in this process
    with open_bench(options, arguments.model, arguments.directory) as bench:
        results = {name: _run(bench, name) for name in wanted}
        facts = bench.facts
    after = machine.matrix_gflops()
    rows = [row for result in results.values() for row in result.rows]
    _print(report.machine_lines(facts, after))
    for name, result in results.items():
        _print([f"{name}: {TITLES[name]}", *result.lines])
    _print(target_lines(rows))
    if arguments.json:
        document = {"machine": {**asdict(facts), "matrix_gflops_after": after}, "options": asdict(options), "figures": _figures(rows)}
        measured = {"workloads": {name: result.measured for name, result in results.items()}}
        arguments.json.write_text(json.dumps(document | measured, indent=2, default=vars) + "\n")


def _run(bench: Bench, name: str) -> Result:
    _say(f"{name}: {TITLES[name]}")
    return RUNS[name](bench)


def _figures(rows: Iterable[Row]) -> list[dict[str, Any]]:
    return [{**asdict(row), "verdict": row.verdict} for row in rows]


def _print(lines: Iterable[str]) -> None:
    _say("")
    for line in lines:
        _say(line)


def _say(line: str) -> None:
    print(line, flush=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
