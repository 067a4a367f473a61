"""`make bench`: Strata over HTTP, saving and not saving, and a transformers script, in turn, in one run."""

import argparse
import itertools
import json
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path

from benchmarks import machine, report, systems
from benchmarks.client import BenchmarkError
from benchmarks.reference import Reference
from benchmarks.results import Round, summarize
from benchmarks.workload import Workload, prefill, with_first_token
from engine.errors import ModelError
from engine.models.source import default_cache, resolve_model
from service.launcher import LaunchError, ServiceProcess

FIRST_TOKEN = 1000
WARM_UP_PROMPTS = 4


def main(argv: Sequence[str]) -> int:
    """Runs the benchmark; 1 when a system failed or a file was wrong."""
    options, serve_arguments = _parse(argv)
    options.directory.mkdir(parents=True, exist_ok=True)
    try:
        with tempfile.TemporaryDirectory(prefix="run-", dir=options.directory) as directory:
            _benchmark(options, serve_arguments, Path(directory).resolve())
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
        description=__doc__,
        epilog="Any other option is passed on to `strata serve`.",
        allow_abbrev=False,
    )
    parser.add_argument("--model", help="model folder or hub id (default: the embedded model)")
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"], help="compute dtype of both (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=3, help="default: %(default)s")
    parser.add_argument("--concurrency", type=int, default=16, help="requests at once over HTTP (default: %(default)s)")
    parser.add_argument("--limit", type=int, help="only the first so many prompts, for a quick try")
    parser.add_argument("--no-reference", action="store_true", help="leave the transformers script out")
    parser.add_argument("--directory", type=Path, default=Path("saves/bench"), help="where files go for the while (default: %(default)s)")
    parser.add_argument("--json", type=Path, help="also write everything that was measured to this file")
    return parser.parse_known_args(argv)


def _benchmark(options: argparse.Namespace, serve_arguments: Sequence[str], directory: Path) -> None:
    workload = prefill(options.concurrency).limited(options.limit)
    model = resolve_model(options.model, cache=default_cache(), progress=_say).folder
    facts = machine.look(directory)
    with ExitStack() as stack:
        tested = list(_systems(stack, options, serve_arguments, model, workload, directory))
        rounds = _rounds(tested, workload, options.rounds, _width(model))
    after = machine.matrix_gflops()
    _print_report(facts, after, workload, options, rounds)
    if options.json:
        report.write_json(options.json, facts, after, workload, rounds)


def _systems(
    stack: ExitStack, options: argparse.Namespace, serve_arguments: Sequence[str], model: Path, workload: Workload, directory: Path
) -> Iterator[systems.System]:
    state_dir = stack.enter_context(tempfile.TemporaryDirectory(prefix="strata-bench-"))
    arguments = ["--model", str(model), "--dtype", options.dtype, "--port", "0", "--save-root", str(directory), "--state-dir", state_dir]
    _say("Starting the service")
    service = stack.enter_context(ServiceProcess([*arguments, *serve_arguments]))
    stack.callback(service.stop)
    yield systems.strata(report.STRATA, service, workload, saves=True)
    yield systems.strata(report.STRATA_WITHOUT, service, workload, saves=False)
    if not options.no_reference:
        _say("Starting the transformers script")
        script = stack.enter_context(Reference(str(model), workload, options.dtype))
        yield systems.reference(report.REFERENCE, script, directory)


def _rounds(tested: Sequence[systems.System], workload: Workload, count: int, width: int) -> dict[str, list[Round]]:
    """Rounds in turn, another system first each time, so that a machine that slows down slows all of them."""
    first_tokens = itertools.count(FIRST_TOKEN)
    for system in tested:
        _say(f"Warming up: {system.label}")
        system.measure(workload, with_first_token(workload.prompts[:WARM_UP_PROMPTS], next(first_tokens)), width)
    rounds: dict[str, list[Round]] = {system.label: [] for system in tested}
    for number in range(count):
        shift = number % len(tested)
        for system in (*tested[shift:], *tested[:shift]):
            measured = system.measure(workload, with_first_token(workload.prompts, next(first_tokens)), width)
            rounds[system.label].append(measured)
            _say(f"Round {number + 1} of {count}, {system.label}: {measured.tokens_per_second:,.0f} tokens/s")
    return rounds


def _print_report(
    facts: machine.Machine, matrix_after: float, workload: Workload, options: argparse.Namespace, rounds: dict[str, list[Round]]
) -> None:
    summaries = [summarize(label, each) for label, each in rounds.items()]
    parts = (
        report.machine_lines(facts, matrix_after),
        report.workload_lines(workload, options.dtype, options.rounds),
        report.table_lines(summaries),
        report.ratio_lines(summaries),
    )
    for part in parts:
        _say("")
        for line in part:
            _say(line)


def _width(model: Path) -> int:
    return int(json.loads((model / "config.json").read_text())["hidden_size"])


def _say(line: str) -> None:
    print(line, flush=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
