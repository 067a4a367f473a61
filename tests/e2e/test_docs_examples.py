"""The examples of docs/api.md, run against a service with the default model, and the answers that the page shows."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from service.cli.launcher import ServiceProcess

PAGE = (Path(__file__).parents[2] / "docs" / "api.md").read_text()
SHOWN_URL = "http://127.0.0.1:8000"
EXAMPLES = re.findall(r"```(sh|python)\n(.*?)```\n(?:\n```json\n(.*?)```)?", PAGE, flags=re.DOTALL)


@pytest.fixture(scope="module")
def service(smollm2_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServiceProcess]:
    directory = tmp_path_factory.mktemp("docs")
    arguments = ["--model", str(smollm2_folder), "--served-model-name", "SmolLM2-135M-Instruct", "--state-dir", str(directory / "state")]
    arguments += ["--port", "0", "--save-root", str(directory / "saves"), "--threads", "1", "--kv-cache-tokens", "8192"]
    with ServiceProcess([*arguments, "--state-cache-memory", "256MiB"], cwd=directory) as running:
        yield running


def differences(shown: object, answered: object, place: str = "answer") -> list[str]:
    """Where an answer is not what the page shows; `…` in it stands for anything, and fields may be left out."""
    if isinstance(shown, dict) and isinstance(answered, dict):
        missing = [f"{place}.{name} is missing" for name in shown.keys() - answered.keys()]
        return missing + [
            found for name in shown.keys() & answered.keys() for found in differences(shown[name], answered[name], f"{place}.{name}")
        ]
    if isinstance(shown, list) and isinstance(answered, list):
        if "…" in shown:
            shown = shown[: shown.index("…")]
            answered = answered[: len(shown)]
        items = [found for one, other in zip(shown, answered, strict=False) for found in differences(one, other, f"{place}[]")]
        return items + ([f"{place} has {len(answered)} items"] if len(shown) != len(answered) else [])
    if isinstance(shown, str) and "…" in shown:
        begin, _, end = shown.partition("…")
        text = answered if isinstance(answered, str) else json.dumps(answered)
        return [] if text.startswith(begin) and text.endswith(end) else [f"{place} is {text!r}"]
    return [] if shown == answered else [f"{place} is {answered!r}, not {shown!r}"]


def test_the_page_has_examples() -> None:
    assert [kind for kind, _, _ in EXAMPLES].count("sh") >= 5
    assert [kind for kind, _, _ in EXAMPLES].count("python") >= 3


@pytest.mark.parametrize(("kind", "code", "shown"), EXAMPLES, ids=[f"{number}-{kind}" for number, (kind, _, _) in enumerate(EXAMPLES)])
def test_examples_answer_what_the_page_shows(kind: str, code: str, shown: str, service: ServiceProcess) -> None:
    assert SHOWN_URL in code
    command = ["bash", "-euo", "pipefail", "-c"] if kind == "sh" else [sys.executable, "-c"]
    ran = subprocess.run([*command, code.replace(SHOWN_URL, service.url)], capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    if kind == "sh":
        assert differences(json.loads(shown), json.loads(ran.stdout)) == [], ran.stdout
