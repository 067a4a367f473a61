"""API keys: the file that holds their hashes, and who a request comes from.

A line of the file is `sha256$HEX` or `NAME:sha256$HEX`, as `strata hash-key` prints it; empty lines and lines that begin with `#` are
skipped. The name says whose saves are made with the key: two keys of one name see the same saves, so that a key can be exchanged
for another. Keys without a name are owners of their own.

A key is random and long (`new_key` takes 256 bits), so nobody can guess it from its hash however fast hashing is, and a slow hash
would only let clients with wrong keys keep the server busy. That is why short keys are refused.
"""

import hashlib
import hmac
import logging
import re
import secrets
from dataclasses import dataclass
from pathlib import Path

from engine.errors import ConfigError

log = logging.getLogger(__name__)

KEY_PREFIX = "sk-strata-"
KEY_BYTES = 32
MIN_KEY_LENGTH = 32
OWNER_DIGITS = 16
NAME_PATTERN = r"[A-Za-z0-9_.@-]{1,64}"
_LINE = re.compile(rf"(?:(?P<name>{NAME_PATTERN}):)?sha256\$(?P<digest>[0-9a-f]{{64}})")
_SCHEME = re.compile(rb"bearer +([\x21-\x7e]+)", re.IGNORECASE)


@dataclass(frozen=True)
class ApiKey:
    """What is known of a key: its hash, and whom it stands for."""

    owner: str
    digest: bytes


def new_key() -> str:
    return KEY_PREFIX + secrets.token_urlsafe(KEY_BYTES)


def hashed_line(key: str, name: str | None = None) -> str:
    """The line for the keys file. Raises `ConfigError` for a key that could be guessed from it, or that can't stand in a header."""
    if len(key) < MIN_KEY_LENGTH or not re.fullmatch(r"[\x21-\x7e]+", key):
        raise ConfigError(f"a key must be at least {MIN_KEY_LENGTH} printable ASCII characters without spaces")
    if name is not None and not re.fullmatch(NAME_PATTERN, name):
        raise ConfigError(f"the name {name!r} must be 1 to 64 letters, digits and any of _ . @ -")
    return ("" if name is None else f"{name}:") + "sha256$" + hashlib.sha256(key.encode()).hexdigest()


def read_keys(path: Path) -> tuple[ApiKey, ...]:
    """The keys of a file. Raises `ConfigError` with one line that never shows what it read: it may be a key."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        raise ConfigError(f"--api-keys-file {path}: {reason}") from error
    keys = [_parse(path, number, line.strip()) for number, line in enumerate(lines, 1) if line.strip() and not line.strip().startswith("#")]
    if not keys:
        raise ConfigError(f"--api-keys-file {path}: it holds no key; make one with `strata hash-key`")
    if len({key.digest for key in keys}) < len(keys):
        raise ConfigError(f"--api-keys-file {path}: it holds a key twice")
    return tuple(keys)


def _parse(path: Path, number: int, line: str) -> ApiKey:
    found = _LINE.fullmatch(line)
    if found is None:
        reason = "is not [NAME:]sha256$HEX; keys are not kept in plain text, `strata hash-key` makes the line"
        raise ConfigError(f"--api-keys-file {path}: line {number} {reason}")
    digest = found["digest"]
    # A name can't hold a $, so no name is ever another key's owner.
    return ApiKey(found["name"] or f"sha256${digest[:OWNER_DIGITS]}", bytes.fromhex(digest))


def key_name(owner: str | None) -> str | None:
    """The name that a request's key has in the file; None for a key without one, and without a key."""
    return None if owner is None or "$" in owner else owner


class ApiKeys:
    """The keys that are valid now."""

    def __init__(self, path: Path) -> None:
        """Raises `ConfigError` for a file that can't be used."""
        self._path = path
        self._keys = read_keys(path)

    def reload(self) -> None:
        """Reads the file again; where it can't be used, the keys stay as they are and the log says why."""
        try:
            self._keys = read_keys(self._path)
        except ConfigError as error:
            log.error("%s; the keys stay as they were", error)
        else:
            log.info("%d API keys were read", len(self._keys))

    @property
    def num_owners(self) -> int:
        return len({key.owner for key in self._keys})

    def owner(self, authorization: bytes) -> str | None:
        """Whom a header `Authorization: Bearer KEY` stands for; None for anything else. Takes the same time for every key."""
        found = _SCHEME.fullmatch(authorization.strip())
        digest = hashlib.sha256(found[1] if found else b"").digest()
        owner = None
        for key in self._keys:
            if hmac.compare_digest(key.digest, digest):
                owner = key.owner
        return owner if found else None
