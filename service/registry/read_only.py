"""What a registry says of files, read beside a running service: for `strata verify`."""

import sqlite3
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self
from urllib.parse import quote

from engine.errors import ConfigError
from service.registry.database import DATABASE

BUSY_SECONDS = 5.0


@dataclass(frozen=True)
class RecordedFile:
    """What the record of a save says of its file."""

    bytes: int | None
    checksum: str | None
    """`sha256:…` or `xxh3:…`."""


class RecordedFiles:
    """A registry, opened for reading only; the service that owns it may be running."""

    def __init__(self, state_directory: Path) -> None:
        """Raises `ConfigError` where there is no registry that can be read."""
        path = state_directory / DATABASE
        try:
            self._database = sqlite3.connect(f"file:{quote(str(path.absolute()))}?mode=ro", uri=True, timeout=BUSY_SECONDS)
            self._database.execute("SELECT bytes, checksum FROM saves LIMIT 0")
        except sqlite3.Error as error:
            raise ConfigError(f"the registry {path} can't be read: {error}") from error

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._database.close()

    def find(self, save_id: str) -> RecordedFile | None:
        """None where the registry doesn't know the save (any more). Raises `ConfigError`."""
        try:
            with closing(self._database.execute("SELECT bytes, checksum FROM saves WHERE id = ?", [save_id])) as found:
                row = found.fetchone()
        except sqlite3.Error as error:
            raise ConfigError(f"the registry can't be read: {error}") from error
        return None if row is None else RecordedFile(*row)
