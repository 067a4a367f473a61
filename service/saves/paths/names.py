"""The text of client paths: which strings can name a file at all, before any of them is looked up (contract section 7)."""

import os
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass

from engine.errors import ConfigError
from service.errors import BadPath, ForbiddenPath

PARAM = "kv_transfer_params.hidden_states_path"
MAX_FILE_NAME_BYTES = 250
"""Of the 255 that file systems allow, `.lock` needs five."""
MAX_DIRECTORY_NAME_BYTES = 255
MAX_PATH_BYTES = 4090
"""PATH_MAX without its NUL and `.lock`: a file whose path nobody can open is of no use."""
RESERVED_SUFFIXES = (".lock", ".part")

Parts = tuple[str, ...]


def forbidden() -> ForbiddenPath:
    """One answer for every place that isn't allowed, so that it tells nothing about what exists there."""
    return ForbiddenPath("the path must lie in an allowed save root, without '..' segments and symbolic links", param=PARAM)


def bad_path(reason: str) -> BadPath:
    return BadPath(f"the path {reason}", param=PARAM)


@dataclass(frozen=True)
class ClientPath:
    """A path split at its slashes."""

    absolute: bool
    parts: Parts
    directory: bool
    """It ended with a slash: a file is to be named in it."""


def parse(path: str) -> ClientPath:
    """Splits a path. Raises `BadPath` for characters and empty segments, `ForbiddenPath` for `..` segments."""
    _check_characters(path)
    absolute = path.startswith("/")
    parts = path.split("/")[1 if absolute else 0 :]
    directory = parts[-1] == ""
    if directory:
        parts.pop()
    if ".." in parts:
        raise forbidden()
    if "" in parts:
        raise bad_path("must not have empty segments ('//')")
    return ClientPath(absolute, tuple(parts), directory)


def check_names(parents: Sequence[str], name: str | None) -> None:
    """Raises `BadPath` for a name below a root that is hidden, reserved or too long; `name` is the file's, where it is given."""
    for part in parents:
        _check_name(part, MAX_DIRECTORY_NAME_BYTES)
    if name is not None:
        _check_name(name, MAX_FILE_NAME_BYTES)


def _check_characters(path: str) -> None:
    if not path:
        raise bad_path("must not be empty")
    if "\\" in path:
        raise bad_path("must not have backslashes")
    categories = {unicodedata.category(character) for character in path}
    if "Cc" in categories:
        raise bad_path("must not have NUL or control characters")
    if "Cs" in categories:
        raise bad_path("must not have surrogate characters, which UTF-8 can't express")
    if len(os.fsencode(path)) > MAX_PATH_BYTES:
        raise bad_path(f"must not be longer than {MAX_PATH_BYTES} bytes")


def _check_name(name: str, limit: int) -> None:
    if name.startswith("."):
        raise bad_path("must not have hidden names or '.' segments")
    # Compared without case: some file systems would take `x.LOCK` for the lock of `x`.
    if name.lower().endswith(RESERVED_SUFFIXES):
        raise bad_path(f"must not have names that end in {' or '.join(RESERVED_SUFFIXES)}")
    if len(os.fsencode(name)) > limit:
        raise bad_path(f"has a name of more than {limit} bytes")


class ClientPathMap:
    """Paths as clients in other containers write them (FROM) and as the server does (TO). Whole components, one rewrite, longest first."""

    def __init__(self, pairs: Sequence[tuple[str, str]] = ()) -> None:
        """Raises `ConfigError` for pairs that aren't absolute paths and for a FROM that is given twice."""
        split = [(_setting_parts(client), _setting_parts(os.path.realpath(_absolute(server)))) for client, server in pairs]
        if len({client for client, _ in split}) < len(split):
            raise ConfigError("--client-path-map: the same FROM is given twice")
        self._to_server = sorted(split, key=lambda pair: -len(pair[0]))
        self._to_client = sorted(((server, client) for client, server in split), key=lambda pair: -len(pair[0]))

    def to_server(self, parts: Parts) -> Parts:
        """Rewrites the components of an absolute client path."""
        return _rewrite(parts, self._to_server)

    def to_client(self, path: str) -> str:
        """Rewrites an absolute path of the server for an answer."""
        return "/" + "/".join(_rewrite(_split(path), self._to_client))


def _rewrite(parts: Parts, pairs: Sequence[tuple[Parts, Parts]]) -> Parts:
    for old, new in pairs:
        if parts[: len(old)] == old:
            return new + parts[len(old) :]
    return parts


def _split(path: str) -> Parts:
    return tuple(part for part in path.split("/") if part)


def _absolute(path: str) -> str:
    if not path.startswith("/"):
        raise ConfigError(f"--client-path-map: {path!r} is not an absolute path")
    return path


def _setting_parts(path: str) -> Parts:
    parts = _split(_absolute(path))
    if "." in parts or ".." in parts:
        raise ConfigError(f"--client-path-map: {path!r} must not have '.' or '..' segments")
    return parts
