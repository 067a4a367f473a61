"""The evaluation harness as released, in an environment of its own: multiple choice through `local-completions`, which reads the
log-probabilities of echoed prompts, against transformers."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from service.cli.launcher import ServiceProcess
from tests.clients.conftest import ClientPython, client_output, service_arguments

QUESTIONS = [
    ("The capital of France is", ["Paris", "London", "a kind of cheese"], 0),
    ("Two plus two is", ["five", "four", "green"], 1),
    ("The opposite of hot is", ["warm", "Tuesday", "cold"], 2),
    ("Water is made of hydrogen and", ["oxygen", "iron", "🤷 été"], 0),
]
TASK = """\
task: choices
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{question}}}}"
doc_to_choice: choices
doc_to_target: answer
metric_list: [{{metric: acc, aggregation: mean, higher_is_better: true}}]
"""


@dataclass(frozen=True)
class Choice:
    """The log-probability of a continuation, and whether each of its tokens was the likeliest."""

    logprob: float
    greedy: bool


@pytest.fixture(scope="module")
def exact_service(smollm2_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServiceProcess]:
    directory = tmp_path_factory.mktemp("exact")
    with ServiceProcess(service_arguments(smollm2_folder, directory, "--dtype", "float32"), cwd=directory) as running:
        yield running


@pytest.fixture(scope="module")
def folder(client_python: ClientPython, exact_service: ServiceProcess, model_id: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the harness has written its results and samples."""
    directory = tmp_path_factory.mktemp("lm-eval")
    data = directory / "choices.jsonl"
    documents = [{"question": question, "choices": choices, "answer": answer} for question, choices, answer in QUESTIONS]
    data.write_text("".join(json.dumps(document) + "\n" for document in documents))
    (directory / "choices.yaml").write_text(TASK.format(data=data))
    model = {
        "model": model_id,
        "base_url": f"{exact_service.url}/v1/completions",
        "tokenizer": model_id,
        "tokenizer_backend": "huggingface",
        "num_concurrent": "2",
        "max_retries": "1",
    }
    client_output(
        client_python("lm-eval"),
        *("-m", "lm_eval", "run", "--model", "local-completions", "--tasks", "choices", "--include_path", str(directory)),
        *("--model_args", ",".join(f"{name}={value}" for name, value in model.items())),
        *("--output_path", str(directory / "out"), "--log_samples"),
        cwd=directory,
        settings={"HF_HOME": str(directory / "home"), "HF_HUB_OFFLINE": "1"},
    )
    return directory / "out"


@pytest.fixture(scope="module")
def expected(smollm2_folder: Path) -> list[list[Choice]]:
    """What transformers gives for each choice of each question."""
    tokenizer = AutoTokenizer.from_pretrained(smollm2_folder)
    model = AutoModelForCausalLM.from_pretrained(smollm2_folder, dtype=torch.float32)

    def of(question: str, choice: str) -> Choice:
        context = len(tokenizer(question)["input_ids"])
        ids = torch.tensor(tokenizer(f"{question} {choice}")["input_ids"])
        with torch.inference_mode():
            logprobs = model(ids[None]).logits[0].log_softmax(-1)[context - 1 : -1]
        chosen = logprobs.gather(1, ids[context:, None])
        return Choice(float(chosen.sum()), bool((logprobs.argmax(-1) == ids[context:]).all()))

    return [[of(question, choice) for choice in choices] for question, choices, _ in QUESTIONS]


def test_the_log_probabilities_of_choices_are_those_of_transformers(folder: Path, expected: list[list[Choice]]) -> None:
    [file] = folder.rglob("samples_choices_*.jsonl")
    samples = sorted((json.loads(line) for line in file.read_text().splitlines()), key=lambda sample: sample["doc_id"])
    assert len(samples) == len(QUESTIONS)
    for sample, choices in zip(samples, expected, strict=True):
        answered = [Choice(float(logprob), greedy == "True") for [[logprob, greedy]] in sample["resps"]]
        assert [choice.logprob for choice in answered] == pytest.approx([choice.logprob for choice in choices], abs=1e-3)
        assert [choice.greedy for choice in answered] == [choice.greedy for choice in choices]


def test_the_accuracy_is_that_of_transformers(folder: Path, expected: list[list[Choice]]) -> None:
    [file] = folder.rglob("results_*.json")
    right = [
        max(choices, key=lambda choice: choice.logprob) is choices[answer]
        for choices, (_, _, answer) in zip(expected, QUESTIONS, strict=True)
    ]
    assert json.loads(file.read_text())["results"]["choices"]["acc,none"] == pytest.approx(sum(right) / len(right))
