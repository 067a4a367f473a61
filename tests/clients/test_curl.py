"""The examples of the README and of the pages about clients, run as they stand but for the address of the service."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from service.cli.launcher import ServiceProcess
from tests.e2e.test_docs_examples import SHOWN_URL, differences

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
PAGES = ("README.md", "docs/examples.md", "docs/clients.md", "docs/migrate-from-vllm.md")
CURL = r"```sh\n(curl .*?)```\n(?:(?!```).)*?```json\n(.*?)```"


def examples_of(kind: str) -> list[Any]:
    """Page and example, for each fenced one of a kind; those of curl with the answer that is shown below."""
    pattern = CURL if kind == "sh" else r"```python\n(.*?)```"
    return [
        pytest.param(match.groups(), id=f"{page}-{number}")
        for page in PAGES
        for number, match in enumerate(re.finditer(pattern, (ROOT / page).read_text(), flags=re.DOTALL))
        if SHOWN_URL in match.group(1)
    ]


def ran(service: ServiceProcess, *command: str) -> str:
    done = subprocess.run([part.replace(SHOWN_URL, service.url) for part in command], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def curled(service: ServiceProcess, example: str) -> dict[str, Any]:
    answer: dict[str, Any] = json.loads(ran(service, "bash", "-euo", "pipefail", "-c", example))
    return answer


@pytest.mark.parametrize("example", examples_of("sh"))
def test_curl_gets_what_the_page_shows(example: tuple[str, str], service: ServiceProcess) -> None:
    command, shown = example
    answer = curled(service, command)
    assert differences(json.loads(shown), answer) == [], answer


@pytest.mark.parametrize("example", examples_of("python"))
def test_python_examples_run_as_they_stand(example: tuple[str], service: ServiceProcess) -> None:
    ran(service, sys.executable, "-c", *example)


def test_the_readme_shows_how_to_read_the_file_that_its_first_example_makes(service: ServiceProcess) -> None:
    names: dict[str, Any] = {}
    command = re.findall(CURL, README, flags=re.DOTALL)[0][0]
    names["path"] = curled(service, command)["kv_transfer_params"]["hidden_states_path"]
    exec(re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)[0], names)
    assert names["states"].shape == (12, 3, 576)


def test_a_file_is_downloaded_whole_and_in_part(service: ServiceProcess, tmp_path: Path) -> None:
    command = re.findall(CURL, README, flags=re.DOTALL)[0][0]
    save = curled(service, command)["kv_transfer_params"]
    whole, part = tmp_path / "whole", tmp_path / "part"
    ran(service, "curl", "-sSf", "-o", str(whole), SHOWN_URL + save["url"])
    ran(service, "curl", "-sSf", "-r", "8-99", "-o", str(part), SHOWN_URL + save["url"])
    assert whole.read_bytes() == Path(save["hidden_states_path"]).read_bytes()
    assert part.read_bytes() == whole.read_bytes()[8:100]
