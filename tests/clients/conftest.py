"""Services with the embedded default model, and the virtual environments of clients that are tested as they are released."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from service.cli.launcher import ServiceProcess

ROOT = Path(__file__).parents[2]
ClientPython = Callable[[str], Path]


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
