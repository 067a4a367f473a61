"""`python -m benchmarks.gpu_check`: what only a GPU can show, in a few minutes on one card and without a network.

Random weights of Llama 8B's shape are made on the device. First attention must equal plain dense attention, else nothing else is run and
the exit code is 1. Then come the rates: prompts with and without extraction, text with and without captured graphs, memory, samples.
`--tiny` runs every part on a processor, with a tiny model, to see that the check itself works.
"""

import argparse
import json
import shutil
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from benchmarks.gpu.driver import CheckFailed
from benchmarks.gpu.model import LLAMA_8B, TINY, ModelShape, random_model
from benchmarks.gpu.parity import Parity, check
from benchmarks.gpu.rates import Sizes, full_sizes, measure, tiny_sizes
from benchmarks.gpu.report import Card, Report
from engine.attention.select import CANDIDATES, needs_of
from engine.cache.spec import LayerKV
from engine.errors import ConfigError

_MEMORY_FILES = Path("/dev/shm")
_LEAST_FREE = 4 << 30
"""Of a file system in memory: as much as is being written at a time."""


@dataclass(frozen=True)
class _Plan:
    """What is run, and on what."""

    device: torch.device
    shape: ModelShape
    sizes: Sizes
    longest: int
    name: str


def main(argv: Sequence[str]) -> int:
    """1 where attention is not right, or where there are no figures; 2 where there is no GPU."""
    arguments = _parse(argv)
    if not arguments.tiny and not torch.cuda.is_available():
        print("there is no GPU here; --tiny tries the check itself on the processor", file=sys.stderr)
        return 2
    plan = _plan(arguments.tiny)
    with tempfile.TemporaryDirectory(prefix="gpu-check-", dir=_folder(arguments.files, plan)) as folder:
        try:
            report = _run(plan, Path(folder))
        except CheckFailed as error:
            print(error, file=sys.stderr)
            return 1
    print("\n".join(report.lines()))
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(report.as_json(), indent=1, default=str))
    return 0 if report.ok else 1


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu_check", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--tiny", action="store_true", help="every part on the processor with a tiny model, in seconds")
    parser.add_argument("--json", type=Path, metavar="FILE", help="writes the figures there too")
    parser.add_argument("--files", type=Path, metavar="FOLDER", help="where hidden states are written (/dev/shm if it has room)")
    return parser.parse_args(argv)


def _plan(tiny: bool) -> _Plan:
    if tiny:
        return _Plan(torch.device("cpu"), TINY, tiny_sizes(), 60, "a tiny random Llama")
    return _Plan(torch.device("cuda", 0), LLAMA_8B, full_sizes(), 3000, "random weights of Llama 3.1 8B's shape, bfloat16")


def _folder(asked: Path | None, plan: _Plan) -> Path | None:
    """None: the system's temporary folder."""
    if asked is not None:
        return asked
    enough = 0 if plan.device.type == "cpu" else _LEAST_FREE
    return _MEMORY_FILES if _MEMORY_FILES.is_dir() and shutil.disk_usage(_MEMORY_FILES).free >= enough else None


def _run(plan: _Plan, folder: Path) -> Report:
    started = time.perf_counter()
    card = Card.of(plan.device, folder.parent)
    _say(f"{card.name}: attention")
    parities, not_run = _parities(plan)
    rates = None
    if parities and all(parity.ok for parity in parities):
        _say("making the model")
        model = random_model(plan.shape, plan.device)
        rates = measure(model, plan.shape, plan.sizes, folder, _say)
    _say(f"took {time.perf_counter() - started:.0f} s")
    return Report(card, plan.name, parities, not_run, rates)


def _parities(plan: _Plan) -> tuple[list[Parity], dict[str, str]]:
    needs = needs_of([LayerKV(plan.shape.kv_heads, plan.shape.head_dim)], plan.device, plan.shape.dtype, None)
    parities, not_run = [], {}
    for candidate in CANDIDATES:
        why_not = candidate.refusal(needs)
        if why_not is None:
            try:
                parities.append(check(candidate.make(plan.device), plan.shape, plan.device, longest=plan.longest))
            except ConfigError as error:
                why_not = str(error)
        if why_not is not None:
            not_run[candidate.name] = why_not
    return parities, not_run


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
