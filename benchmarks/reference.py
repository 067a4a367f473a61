"""The yardstick: what a person writes who wants the states and has transformers. One prompt at a time, all layers, the full head.

It runs as a process of its own (`python -m benchmarks.reference MODEL LAYERS DTYPE`), so that its memory can be told from ours. Each line
on its standard input is a JSON object with `prompts` and `directory`; it answers each with one line of JSON.
"""

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM

from benchmarks.client import BenchmarkError
from benchmarks.results import Answer, Round
from benchmarks.workload import Prompts, Workload


class Reference:
    """The reference process, seen from the harness."""

    def __init__(self, model: str, workload: Workload, dtype: str) -> None:
        layers = ",".join(str(layer) for layer in workload.layers)
        command = [sys.executable, "-m", "benchmarks.reference", model, layers, dtype]
        environment = {**os.environ, "HF_HUB_DISABLE_PROGRESS_BARS": "1"}
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._process.kill()
        self._process.communicate()

    @property
    def pid(self) -> int:
        return self._process.pid

    def run_round(self, prompts: Prompts, directory: Path) -> Round:
        """Has all prompts computed and saved into `directory`."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps({"prompts": prompts, "directory": str(directory)}) + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        if not line:
            raise BenchmarkError("the transformers script ended; its own message is above")
        result = json.loads(line)
        answers = [Answer(seconds, Path(path)) for seconds, path in zip(result["seconds"], result["paths"], strict=True)]
        return Round(sum(len(prompt) for prompt in prompts), result["wall_seconds"], answers, peak_rss_bytes=None)


class Script:
    """The script itself."""

    def __init__(self, model: str, layers: list[int], dtype: str) -> None:
        self._layers = layers
        self._model = AutoModelForCausalLM.from_pretrained(model, dtype=getattr(torch, dtype))
        self._last = self._model.config.num_hidden_layers
        self._before_norm: torch.Tensor | None = None
        # transformers norms the last of its hidden states; what goes into the norm is what is wanted.
        self._model.model.norm.register_forward_pre_hook(self._keep_input)

    def _keep_input(self, module: torch.nn.Module, arguments: tuple[torch.Tensor, ...]) -> None:
        self._before_norm = arguments[0]

    @torch.inference_mode()
    def save_states(self, prompt: list[int], path: Path) -> int:
        """One prompt to one file; returns the next token, which a completion of one token would be."""
        output = self._model(torch.tensor([prompt]), output_hidden_states=True, use_cache=False)
        assert self._before_norm is not None
        states = [self._before_norm if layer == self._last else output.hidden_states[layer] for layer in self._layers]
        rows = torch.stack([state[0] for state in states], dim=1).to(torch.bfloat16)  # [tokens, layers, width]
        save_file({"hidden_states": rows, "token_ids": torch.tensor(prompt)}, path)
        return int(output.logits[0, -1].argmax())

    def run(self, prompts: Prompts, directory: Path) -> dict[str, Any]:
        """All prompts, one after the other."""
        paths = [directory / f"reference-{index}.safetensors" for index in range(len(prompts))]
        seconds: list[float] = []
        started = time.perf_counter()
        for prompt, path in zip(prompts, paths, strict=True):
            before = time.perf_counter()
            self.save_states(prompt, path)
            seconds.append(time.perf_counter() - before)
        return {"wall_seconds": time.perf_counter() - started, "seconds": seconds, "paths": [str(path) for path in paths]}


def main(model: str, layers: str, dtype: str) -> None:
    """Answers on standard output; whatever libraries print goes to standard error."""
    answers, sys.stdout = sys.stdout, sys.stderr
    script = Script(model, [int(layer) for layer in layers.split(",")], dtype)
    for line in sys.stdin:
        order = json.loads(line)
        print(json.dumps(script.run(order["prompts"], Path(order["directory"]))), file=answers, flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
