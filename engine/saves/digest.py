"""Checksums of files, computed while they are written."""

import hashlib
import importlib
from typing import Any

from engine.config import Checksum
from engine.errors import ConfigError


class RunningDigest:
    """The checksum of a file's bytes from the first to `end`, which moves up with every write that stands there."""

    def __init__(self, algorithm: Checksum) -> None:
        """Raises `ConfigError` for `xxh3` where the package xxhash is missing."""
        self._algorithm = algorithm
        self._digest = new_digest(algorithm)
        self.end = 0

    def update(self, data: bytes | memoryview, offset: int) -> None:
        """`data` stands in the file. Beyond `end` it is left for later; before `end` it was written again and has been counted."""
        if offset == self.end:
            self._digest.update(data)
            self.end += len(data)
        assert offset >= self.end or offset + len(data) <= self.end, "what has been counted isn't written over in part"

    def __str__(self) -> str:
        """`algorithm:hex`."""
        return f"{self._algorithm}:{self._digest.hexdigest()}"


def new_digest(algorithm: Checksum) -> Any:  # noqa: ANN401 — hashlib and xxhash share no type
    """Raises `ConfigError` for `xxh3` where the package xxhash is missing."""
    if algorithm == "sha256":
        return hashlib.sha256()
    try:
        return importlib.import_module("xxhash").xxh3_64()
    except ImportError as error:
        raise ConfigError("checksum xxh3 needs the package xxhash, which is not installed; sha256 needs nothing") from error
