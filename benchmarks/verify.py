"""Every file of every round is checked, after the clock has stopped."""

from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors.torch import load_file

from benchmarks.client import BenchmarkError
from benchmarks.results import Answer
from benchmarks.workload import Prompts, Workload


def check_and_remove(answers: Sequence[Answer], prompts: Prompts, workload: Workload, width: int) -> None:
    """Raises `BenchmarkError` for a file that isn't what was asked for; the good ones are removed."""
    if len(answers) != len(prompts):
        raise BenchmarkError(f"{len(prompts)} prompts, {len(answers)} answers")
    for answer, prompt in zip(answers, prompts, strict=True):
        if answer.path is None:
            raise BenchmarkError("an answer names no file")
        _check(answer.path, prompt, workload, width)
        answer.path.unlink()
        answer.path.with_name(answer.path.name + ".lock").unlink(missing_ok=True)


def _check(path: Path, prompt: list[int], workload: Workload, width: int) -> None:
    tensors = load_file(path)
    states, token_ids = tensors["hidden_states"], tensors["token_ids"].tolist()  # [tokens, layers, width]
    shape = (workload.rows_of(prompt), len(workload.layers), width)
    if tuple(states.shape) != shape:
        raise BenchmarkError(f"{path}: shape {tuple(states.shape)}, expected {shape}")
    if str(states.dtype) != f"torch.{workload.save_dtype}":
        raise BenchmarkError(f"{path}: {states.dtype}, expected {workload.save_dtype}")
    if token_ids[: len(prompt)] != prompt or len(token_ids) != len(states):
        raise BenchmarkError(f"{path}: the token ids are not the prompt's")
    if not torch.isfinite(states).all():
        raise BenchmarkError(f"{path}: values that are not finite")
    if not states.any(dim=-1).all():
        raise BenchmarkError(f"{path}: rows of zeros")
