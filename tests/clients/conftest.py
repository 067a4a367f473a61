"""Services with the embedded default model, and the virtual environments of clients that are tested as they are released."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from service.cli.launcher import ServiceProcess

ROOT = Path(__file__).parents[2]
ClientPython = Callable[[str], Path]
HERE = Path(__file__).parent


def client_output(python: Path, *arguments: str | Path, cwd: Path = HERE, settings: Mapping[str, str] | None = None) -> str:
    """What a client's own Python prints, with nothing of ours on the path of its imports and no proxy between it and the service."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH" and not name.lower().endswith("_proxy")}
    command = [python, *arguments]
    done = subprocess.run(command, env=environment | dict(settings or {}), cwd=cwd, capture_output=True, text=True, check=False)
    assert done.returncode == 0, (done.stdout + done.stderr)[-6000:]
    return done.stdout


def client_json(python: Path, *arguments: str | Path, settings: Mapping[str, str] | None = None) -> Any:  # noqa: ANN401 - any JSON value
    """What a script with calls of a client prints as its last line."""
    return json.loads(client_output(python, *arguments, settings=settings).splitlines()[-1])


@pytest.fixture(scope="session")
def client_python(pytestconfig: pytest.Config) -> ClientPython:
    """The Python of a client's environment, which `scripts/clients` makes the first time. That takes minutes, so its lines are shown."""
    capture = pytestconfig.pluginmanager.getplugin("capturemanager")

    def python_of(name: str) -> Path:
        with capture.global_and_fixture_disabled():
            made = subprocess.run([ROOT / "scripts" / "clients", name], stdout=subprocess.PIPE, text=True, check=False)
        if made.returncode != 0:
            pytest.fail(f"the environment of the client {name!r} could not be made; scripts/clients {name} says why", pytrace=False)
        return Path(made.stdout.splitlines()[-1]) / "bin" / "python"

    return python_of


def service_arguments(model: Path, directory: Path, *changes: str) -> list[str]:
    known = ["--port", "0", "--model", str(model), "--save-root", str(directory / "saves"), "--state-dir", str(directory / "state")]
    return [*known, "--kv-cache-tokens", "16384", "--state-cache-memory", "256MiB", "--threads", "1", *changes]


@pytest.fixture(scope="session")
def service(smollm2_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServiceProcess]:
    """A service as `strata serve` starts it, with the embedded model."""
    directory = tmp_path_factory.mktemp("service")
    with ServiceProcess(service_arguments(smollm2_folder, directory), cwd=directory) as running:
        yield running


@pytest.fixture(scope="session")
def extracting_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where `extracting_service` runs; its save root is `saves` in it."""
    return tmp_path_factory.mktemp("extracting")


@pytest.fixture(scope="session")
def extracting_service(smollm2_folder: Path, extracting_directory: Path) -> Iterator[ServiceProcess]:
    """A service for clients that don't say what they want: it saves the states of every request, of layers that it was told."""
    directory = extracting_directory
    arguments = service_arguments(smollm2_folder, directory, "--extract-by-default", "--layers", "2,15,27,30")
    with ServiceProcess(arguments, cwd=directory) as running:
        yield running


@pytest.fixture(scope="session")
def model_id(smollm2_folder: Path) -> str:
    """What both services call their model: the string that they were started with."""
    return str(smollm2_folder)
