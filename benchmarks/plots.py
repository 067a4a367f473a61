"""`python -m benchmarks.plots`: what extraction costs as one thing changes, as pictures."""

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from benchmarks import report
from benchmarks.bench import Options, open_bench
from benchmarks.client import BenchmarkError
from benchmarks.machine import Machine, matrix_gflops
from benchmarks.sweeps import Plot, all_plots
from engine.errors import ModelError
from service.cli.launcher import LaunchError

SIZE_INCHES = (7.0, 4.2)
DPI = 120


def main(argv: Sequence[str]) -> int:
    """Measures, draws and says where; 1 when a system failed or a file was wrong."""
    options = _parse(argv)
    try:
        with open_bench(Options(rounds=options.rounds, limit=options.limit), options.model, options.directory) as bench:
            options.folder.mkdir(parents=True, exist_ok=True)
            plots = []
            for plot in all_plots(bench):
                path = draw(plot, bench.facts, options.folder)
                plots.append(plot)
                bench.say(f"Drawn: {path}")
            for line in report.machine_lines(bench.facts, matrix_gflops()):
                bench.say(line)
            data = {"machine": asdict(bench.facts), "plots": [asdict(plot) for plot in plots]}
            (options.folder / "plots.json").write_text(json.dumps(data, indent=2) + "\n")
    except (BenchmarkError, LaunchError, ModelError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.plots", description=__doc__, allow_abbrev=False)
    parser.add_argument("--model", help="model folder or hub id (default: the embedded model)")
    parser.add_argument("--rounds", type=int, default=3, help="default: %(default)s")
    parser.add_argument("--limit", type=int, help="only the first so many points of each curve, for a quick try")
    parser.add_argument("--folder", type=Path, default=Path("docs/plots"), help="where pictures go (default: %(default)s)")
    parser.add_argument("--directory", type=Path, default=Path("saves/bench"), help="where files go for the while (default: %(default)s)")
    return parser.parse_args(argv)


def draw(plot: Plot, facts: Machine, folder: Path) -> Path:
    """One picture. Needs matplotlib (`pip install 'strata-server[bench]'`)."""
    from matplotlib.figure import Figure  # here: measuring and the other benchmarks don't need it

    figure = Figure(figsize=SIZE_INCHES, layout="constrained")
    axes = figure.subplots()
    for (label, points), marker in zip(plot.curves.items(), "os^D", strict=False):
        axes.plot([x for x, _ in points], [y for _, y in points], marker=marker, label=label)
    if plot.log_x:
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_formatter("{x:g}")
    axes.set_xlabel(plot.x_label)
    axes.set_ylabel(plot.y_label)
    axes.set_ylim(bottom=0)
    axes.set_title(f"{facts.processor}, {facts.cores} cores", fontsize="small")
    axes.grid(visible=True, alpha=0.3)
    axes.legend()
    path = folder / f"{plot.name}.png"
    figure.savefig(path, dpi=DPI)
    return path


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
