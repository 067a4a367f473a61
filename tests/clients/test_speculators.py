"""speculators and hs-connectors as released, against a service that saves by default: data prepared, states generated, a draft trained."""

from __future__ import annotations

import json
import os
import re
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from engine.saves.inspect import inspect_file
from service.cli.launcher import ServiceProcess
from tests.clients.conftest import ClientPython

HERE = Path(__file__).parent
CONVERSATIONS = 40
TWO_TURNS = 8
ROWS = CONVERSATIONS + TWO_TURNS
Speculators = Callable[..., str]


@dataclass(frozen=True)
class Generated:
    """What the client has made."""

    dataset: Path
    files: Path
    log: str

    def file(self, index: int) -> Path:
        return self.files / f"hs_{index}.safetensors"


def left_in(directory: Path) -> list[str]:
    """Files of any kind in the save root of the service that runs there."""
    return [path.name for path in (directory / "saves").rglob("*") if path.is_file()]


def conversation(number: int) -> list[dict[str, str]]:
    """A sum, asked and answered; some go on with a second turn."""
    one, other = number % 7 + 1, number % 5 + 2
    turns = [
        {"from": "human", "value": f"What is {one} plus {other}?"},
        {"from": "gpt", "value": f"The sum of {one} and {other} is {one + other}."},
    ]
    if number < TWO_TURNS:
        turns += [{"from": "human", "value": "Are you sure?"}, {"from": "gpt", "value": f"Yes, {one} plus {other} is {one + other}."}]
    return turns


@pytest.fixture(scope="module")
def speculators(client_python: ClientPython, tmp_path_factory: pytest.TempPathFactory) -> Speculators:
    """Runs the client's Python with arguments; returns all that it printed."""
    python = client_python("speculators")
    home = tmp_path_factory.mktemp("client-home")
    environment = os.environ | {"HF_HOME": str(home), "HF_HUB_OFFLINE": "1", "COLUMNS": "200", "OMP_NUM_THREADS": "2"}

    def run(*arguments: str | Path) -> str:
        done = subprocess.run([python, *arguments], env=environment, cwd=home, capture_output=True, text=True, check=False)
        output = done.stdout + done.stderr
        assert done.returncode == 0, output[-6000:]
        return output

    return run


@pytest.fixture(scope="module")
def dataset(speculators: Speculators, extracting_service: ServiceProcess, model_id: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Conversations turned into tokens and loss masks by `prepare-data`, which asks the service to render them."""
    folder = tmp_path_factory.mktemp("dataset")
    source = folder / "conversations.jsonl"
    source.write_text("".join(json.dumps({"conversations": conversation(number)}) + "\n" for number in range(CONVERSATIONS)))
    output = folder / "prepared"
    where = ["--model", model_id, "--data", source, "--output", output, "--render-endpoint", extracting_service.url]
    options = ["--seq-length", "192", "--num-preprocessing-workers", "2", "--no-skip-token-freq"]
    speculators("-m", "speculators", "prepare-data", *where, *options)
    return output


@pytest.fixture(scope="module")
def generated(
    speculators: Speculators, dataset: Path, extracting_service: ServiceProcess, model_id: str, tmp_path_factory: pytest.TempPathFactory
) -> Generated:
    """The states of the whole dataset, made by `generate-offline-data`."""
    files = tmp_path_factory.mktemp("generated") / "hidden_states"
    where = ["--model", model_id, "--endpoint", f"{extracting_service.url}/v1", "--preprocessed-data", dataset, "--output", files]
    log = speculators("-m", "speculators", "generate-offline-data", *where, "--concurrency", "32", "--validate-outputs", "--fail-on-error")
    return Generated(dataset, files, log)


def test_generate_offline_data_gets_a_valid_file_for_every_row(generated: Generated) -> None:
    summary = [line for line in generated.log.splitlines() if re.search(r"Processing|Timing|Saved|complete", line)]
    print("\n".join(summary))
    assert re.search(rf"Saved {ROWS} new data points", generated.log), generated.log
    assert "Data generation complete!" in generated.log
    assert "Skipped" not in generated.log
    assert sorted(generated.files.iterdir()) == sorted(generated.file(index) for index in range(ROWS))


def test_generated_files_hold_the_layers_that_the_service_was_told(generated: Generated) -> None:
    for index in range(ROWS):
        report = inspect_file(generated.file(index))
        assert report.ok, report.problems
        assert report.header is not None
        states = report.header.find("hidden_states")
        assert states is not None
        assert states.entry.shape[1:] == (4, 576)
        assert report.header.metadata["layers"] == "[2, 15, 27, 30]"


def test_nothing_is_left_at_the_service_once_the_client_has_moved_its_files(generated: Generated, extracting_directory: Path) -> None:
    assert generated.files.is_dir()
    assert left_in(extracting_directory) == []


def test_the_verifiers_own_predictions_come_out_of_the_last_slot(generated: Generated, smollm2_folder: Path) -> None:
    """A trainer takes the last slot, applies the final norm and the head, and teaches the draft what comes out."""
    model = AutoModelForCausalLM.from_pretrained(smollm2_folder, dtype=torch.float32)
    loaded = load_file(generated.file(0))
    with torch.inference_mode():
        last = loaded["hidden_states"][:, -1].float()  # [tokens, width]
        taught = model.lm_head(model.model.norm(last)).log_softmax(-1)
        predicted = model(loaded["token_ids"][None]).logits[0].log_softmax(-1)
    divergence = (predicted.exp() * (predicted - taught)).sum(-1)
    # The service may compute in bfloat16, whose rounding alone gave up to 0.022 at single tokens and 0.0015 on average.
    assert divergence.mean().item() < 0.005
    assert divergence.max().item() < 0.1


def test_states_are_generated_while_training_and_deleted_after_use(
    generated: Generated, speculators: Speculators, extracting_service: ServiceProcess, extracting_directory: Path
) -> None:
    output = speculators(HERE / "speculators_online.py", f"{extracting_service.url}/v1", generated.dataset, generated.files)
    report: dict[str, Any] = json.loads(next(line for line in output.splitlines() if line.startswith("{")))

    assert report["worst_error"] < 1e-2  # bfloat16 files of float32 states that were computed in different batches
    assert report["float8_error"] < 0.05
    assert report["shape"] == [1, 512, 3 * 576]
    assert report["dropped"] == 0
    assert report["tokens"] > 0
    assert report["left"] == 0
    assert left_in(extracting_directory) == []


def test_a_draft_model_learns_from_the_files(generated: Generated, speculators: Speculators, model_id: str, tmp_path: Path) -> None:
    where = ["--verifier-name-or-path", model_id, "--data-path", generated.dataset, "--hidden-states-path", generated.files]
    data = ["--on-missing", "raise", "--total-seq-len", "256", "--num-workers", "0", "--hidden-states-dtype", "float32"]
    draft = ["--speculator-type", "eagle3", "--target-layer-ids", "2", "15", "27", "--draft-vocab-size", "64", "--ttt-steps", "2"]
    cpu = ["--draft-attn-impl", "eager", "--loss-implementation", "eager"]
    # Muon, the default, computes in bfloat16: minutes per step where the processor has no instructions for it.
    course = ["--epochs", "2", "--max-steps", "16", "--optimizer", "adamw", "--lr", "1e-3", "--scheduler-type", "none"]
    output_files = ["--save-path", tmp_path, "--checkpoint-freq", "100"]
    output = speculators(HERE / "speculators_train.py", *where, *data, *draft, *cpu, *course, *output_files)
    losses = json.loads(next(line for line in output.splitlines() if line.startswith("LOSSES")).removeprefix("LOSSES"))

    print("losses:", ", ".join(f"{loss:.3f}" for loss in losses))
    assert len(losses) == 16
    assert mean(losses[-3:]) < 0.5 * mean(losses[:3])


def test_rows_of_a_prepared_dataset_come_back_in_the_files(generated: Generated) -> None:
    lengths = []
    for index in range(ROWS):
        with safe_open(generated.file(index), framework="pt") as file:
            lengths.append(file.get_slice("token_ids").get_shape()[0])
            assert file.get_slice("hidden_states").get_shape()[0] == lengths[-1]
    assert min(lengths) > 20
