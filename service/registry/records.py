"""What is known of a save from its admission until its record is purged."""

import json
import sqlite3
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Literal

from engine.layers import LayerId
from service.errors import Conflict

SaveStatus = Literal["queued", "running", "writing", "completed", "failed", "cancelled", "expired"]

GroupMode = Literal["all_or_nothing", "independent"]
"""Whether the saves of a request complete together or each alone."""

ENDED: frozenset[SaveStatus] = frozenset({"completed", "failed", "cancelled", "expired"})

PREDECESSORS: Mapping[SaveStatus, tuple[SaveStatus, ...]] = {
    "queued": (),
    "running": ("queued",),
    "writing": ("queued", "running"),
    "completed": ("queued", "running", "writing"),
    "failed": ("queued", "running", "writing"),
    "cancelled": ("queued", "running", "writing"),
    "expired": ("queued", "running", "writing", "completed"),
}
"""From where a status can be reached. Whatever else arrives is late and is ignored."""


@dataclass(frozen=True)
class SaveRecord:
    """One save. Times are seconds since 1970, sizes are bytes."""

    id: str
    hidden_states_path: str
    """Absolute, as the server sees it. The temporary file and the lock file stand beside it."""
    request_id: str
    model: str
    layers: tuple[LayerId, ...]
    dtype: str
    created: float
    status: SaveStatus = "queued"
    shape: tuple[int, ...] | None = None
    num_tokens: int | None = None
    bytes: int | None = None
    checksum: str | None = None
    """`sha256:…` or `xxh3:…`."""
    finished: float | None = None
    ttl_seconds: float | None = None
    """Counted from the end of the save."""
    expires: float | None = None
    error_code: str | None = None
    error_message: str | None = None
    device: int | None = None
    inode: int | None = None
    owner: str | None = None
    """Which API key it was made with; None without keys."""
    choice: int = 0
    """Index among the saves of its group."""
    output: Mapping[str, Any] | None = None
    """Text, token ids and finish reason, kept for clients that didn't wait for them; empty until the text is done."""
    cached_tokens: int | None = None
    """Tokens of the prompt that came out of the prefix cache, where the record keeps a text."""
    gone: float | None = None
    """When the file of a completed save was found to have been moved, deleted or replaced: its bytes don't count any more."""

    @property
    def awaits_output(self) -> bool:
        """The save is worth nothing without its text, and that isn't known yet."""
        return self.output is not None and not self.output

    @property
    def log_fields(self) -> dict[str, str]:
        """What log lines about the save say of it."""
        return {"request_id": self.request_id, "save_id": self.id}

    @property
    def ended(self) -> bool:
        return self.status in ENDED


@dataclass(frozen=True)
class GroupRecord:
    """The saves of one request. It lives as long as one of their records does."""

    id: str
    size: int
    """How many saves were made; some of their records may have been deleted."""
    mode: GroupMode = "independent"
    owner: str | None = None
    idempotency_key: str | None = None
    body_hash: str | None = None
    """Of the request's body, where it has a key."""


@dataclass(frozen=True)
class StoredGroup:
    """A group and the records of its saves that there are, by choice."""

    group: GroupRecord
    saves: tuple[SaveRecord, ...]

    @property
    def whole(self) -> bool:
        """No record of it has been deleted."""
        return len(self.saves) == self.group.size


FIELDS = tuple(field.name for field in fields(SaveRecord))
GROUP_FIELDS = tuple(field.name for field in fields(GroupRecord))
_AS_TEXT = frozenset({"device", "inode"})
"""Unsigned 64-bit numbers, too large for SQLite's integers."""
_AS_JSON = frozenset({"layers", "shape", "output"})


def to_column(name: str, value: Any) -> Any:  # noqa: ANN401 - whatever the field holds
    """A field's value as SQLite keeps it."""
    if value is None:
        return None
    if name in _AS_JSON:
        return json.dumps(value, separators=(",", ":"))
    return str(value) if name in _AS_TEXT else value


def from_row(row: sqlite3.Row, names: Sequence[str] = FIELDS) -> SaveRecord:
    """The record of a row that has these columns."""
    return SaveRecord(**{name: _from_column(name, row[name]) for name in names})


def group_from_row(row: sqlite3.Row) -> GroupRecord:
    """The group of a row that has the columns `GROUP_FIELDS`."""
    return GroupRecord(**{name: row[name] for name in GROUP_FIELDS})


def _from_column(name: str, value: Any) -> Any:  # noqa: ANN401 - whatever the field holds
    if value is None:
        return None
    if name in _AS_TEXT:
        return int(value)
    if name not in _AS_JSON:
        return value
    decoded = json.loads(value)
    return tuple(decoded) if isinstance(decoded, list) else decoded


class IdempotencyKeyTaken(Conflict):
    """Another request came first with the key."""

    default_code = "idempotency_key_taken"

    def __init__(self) -> None:
        super().__init__("the idempotency key is in use", param="kv_transfer_params.idempotency_key")
