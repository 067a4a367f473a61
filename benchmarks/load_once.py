"""Loads a model once and prints what that took, for a process of its own: `python -m benchmarks.load_once strata FOLDER bfloat16`."""

import json
import sys
import time
from pathlib import Path

import torch

from engine.models.loader import load_model


def _memory(field: str) -> int:
    """Bytes of memory that belongs to this process alone."""
    [line] = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(f"{field}:")]
    return int(line.split()[1]) << 10


def main(system: str, folder: str, dtype_name: str) -> None:
    dtype: torch.dtype = getattr(torch, dtype_name)
    torch.set_num_threads(1)
    if system == "transformers":
        from transformers import AutoModelForCausalLM  # importing it isn't loading

    def load() -> object:
        if system == "transformers":
            return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
        return load_model(Path(folder), device=torch.device("cpu"), dtype=dtype)

    before, started = _memory("VmRSS"), time.perf_counter()
    model = load()
    seconds = time.perf_counter() - started
    print(json.dumps({"seconds": seconds, "peak": _memory("VmHWM") - before, "kept": _memory("VmRSS") - before}))
    del model


if __name__ == "__main__":
    main(*sys.argv[1:])
