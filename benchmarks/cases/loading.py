"""W11: reading a checkpoint's weights, time and memory, beside transformers: each load in a process of its own."""

import json
import math
import statistics
import subprocess
import sys
from typing import Any

from benchmarks.bench import Bench, Result
from benchmarks.client import BenchmarkError
from benchmarks.rounds import in_turn
from benchmarks.targets import Row, at_most
from engine.models.checkpoints.checkpoint import read_headers

NAME = "W11"
STRATA, TRANSFORMERS = "strata", "transformers"
MOST_MEMORY, MOST_TIME = 1.15, 1.0


def run(bench: Bench) -> Result:
    """One load of each first brings the file into the system's cache and isn't counted."""
    loads: dict[str, list[dict[str, Any]]] = {STRATA: [], TRANSFORMERS: []}
    for number, label in in_turn([STRATA, TRANSFORMERS], bench.options.rounds + 1):
        load = _load(bench, label)
        bench.say(f"Load {number} of {bench.options.rounds}, {label}: {load['seconds']:.2f} s, {load['peak'] / 2**20:,.0f} MiB at most")
        if number:
            loads[label].append(load)
    size = sum(math.prod(tensor.shape) for tensor in read_headers(bench.model).values()) * bench.dtype.itemsize
    peak = statistics.median(load["peak"] for load in loads[STRATA]) / size
    pairs = zip(loads[STRATA], loads[TRANSFORMERS], strict=True)
    ratio = statistics.median(ours["seconds"] / theirs["seconds"] for ours, theirs in pairs)
    rows = [
        Row(NAME, "peak of memory while loading / size of the weights in the compute dtype", peak, at_most(MOST_MEMORY)),
        Row(NAME, "time to load, strata / transformers", ratio, at_most(MOST_TIME)),
    ]
    return Result([], rows, {"size": size, "loads": loads})


def _load(bench: Bench, label: str) -> dict[str, Any]:
    command = [sys.executable, "-m", "benchmarks.load_once", label, str(bench.model), bench.options.dtype]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise BenchmarkError(f"loading with {label} failed: {done.stderr}")
    load: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return load
