"""The yardstick: what a person writes who wants the states and has transformers. Three ways of writing it:

- `full head`: the model as it comes, one prompt at a time, so the head computes logits of every position.
- `base model`: one prompt at a time, the decoder only, no head.
- `padded batches`: the decoder only, prompts sorted by length, eight at a time, the shorter ones padded.

It runs as a process of its own (`python -m benchmarks.reference MODEL LAYERS DTYPE`), so that its memory can be told from ours. Each line
on its standard input is a JSON object with `variant`, `prompts` and `directory`; it answers each with one line of JSON.
"""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self

import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM

from benchmarks.client import BenchmarkError
from benchmarks.results import Answer, Round
from benchmarks.workload import Prompts
from engine.device.host import usable_cpus

Variant = Literal["full head", "base model", "padded batches"]
VARIANTS: tuple[Variant, ...] = ("full head", "base model", "padded batches")
BATCH = 8


class Reference:
    """The reference process, seen from the harness."""

    def __init__(self, model: str, layers: tuple[int, ...], dtype: str) -> None:
        command = [sys.executable, "-m", "benchmarks.reference", model, ",".join(str(layer) for layer in layers), dtype]
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

    def run_round(self, variant: Variant, prompts: Prompts, directory: Path) -> Round:
        """Has all prompts computed and saved into `directory`."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps({"variant": variant, "prompts": prompts, "directory": str(directory)}) + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        if not line:
            raise BenchmarkError("the transformers script ended; its own message is above")
        result = json.loads(line)
        answers = [Answer(seconds, Path(path)) for seconds, path in zip(result["seconds"], result["paths"], strict=True)]
        return Round(sum(len(prompt) for prompt in prompts), result["wall_seconds"], answers, None, len(prompts))


class Script:
    """The script itself."""

    def __init__(self, model: str, layers: list[int], dtype: str) -> None:
        torch.set_num_threads(usable_cpus())
        self._layers = layers
        self._model = AutoModelForCausalLM.from_pretrained(model, dtype=getattr(torch, dtype))
        self._last = self._model.config.num_hidden_layers
        self._before_norm: torch.Tensor | None = None
        # transformers norms the last of its hidden states; what goes into the norm is what is wanted.
        self._model.model.norm.register_forward_pre_hook(self._keep_input)

    def _keep_input(self, module: torch.nn.Module, arguments: tuple[torch.Tensor, ...]) -> None:
        self._before_norm = arguments[0]

    @torch.inference_mode()
    def one_by_one(self, model: torch.nn.Module, prompts: Prompts, paths: list[Path]) -> Iterator[int]:
        for prompt, path in zip(prompts, paths, strict=True):
            output = model(torch.tensor([prompt]), output_hidden_states=True, use_cache=False)
            if "logits" in output:
                int(output.logits[0, -1].argmax())  # what a completion of one token would be
            self._save(output.hidden_states, 0, prompt, path)
            yield 1

    @torch.inference_mode()
    def padded(self, prompts: Prompts, paths: list[Path]) -> Iterator[int]:
        ordered = sorted(zip(prompts, paths, strict=True), key=lambda pair: len(pair[0]))
        for start in range(0, len(ordered), BATCH):
            batch = ordered[start : start + BATCH]
            lengths = torch.tensor([len(prompt) for prompt, _ in batch])
            token_ids = torch.nn.utils.rnn.pad_sequence([torch.tensor(prompt) for prompt, _ in batch], batch_first=True)
            mask = (torch.arange(token_ids.shape[1]) < lengths[:, None]).long()
            output = self._model.model(token_ids, attention_mask=mask, output_hidden_states=True, use_cache=False)
            for row, (prompt, path) in enumerate(batch):
                self._save(output.hidden_states, row, prompt, path)
            yield len(batch)

    def _save(self, hidden_states: tuple[torch.Tensor, ...], row: int, prompt: list[int], path: Path) -> None:
        assert self._before_norm is not None
        states = [self._before_norm if layer == self._last else hidden_states[layer] for layer in self._layers]
        rows = torch.stack([state[row, : len(prompt)] for state in states], dim=1).to(torch.bfloat16)  # [tokens, layers, width]
        save_file({"hidden_states": rows, "token_ids": torch.tensor(prompt)}, path)

    def run(self, variant: Variant, prompts: Prompts, directory: Path) -> dict[str, Any]:
        """All prompts; a prompt's time is its batch's."""
        paths = [directory / f"reference-{index}.safetensors" for index in range(len(prompts))]
        ways: dict[Variant, Callable[[], Iterator[int]]] = {
            "full head": lambda: self.one_by_one(self._model, prompts, paths),
            "base model": lambda: self.one_by_one(self._model.model, prompts, paths),
            "padded batches": lambda: self.padded(prompts, paths),
        }
        seconds: list[float] = []
        before = started = time.perf_counter()
        for count in ways[variant]():
            now = time.perf_counter()
            seconds += [now - before] * count
            before = now
        return {"wall_seconds": before - started, "seconds": seconds, "paths": [str(path) for path in paths]}


def main(model: str, layers: str, dtype: str) -> None:
    """Answers on standard output; whatever libraries print goes to standard error."""
    answers, sys.stdout = sys.stdout, sys.stderr
    script = Script(model, [int(layer) for layer in layers.split(",")], dtype)
    for line in sys.stdin:
        order = json.loads(line)
        result = script.run(order["variant"], order["prompts"], Path(order["directory"]))
        print(json.dumps(result), file=answers, flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
