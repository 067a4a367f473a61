"""The registry's statements. They run on its thread, inside its transaction."""

import sqlite3
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from service.errors import NotFound
from service.registry.records import (
    FIELDS,
    GROUP_FIELDS,
    PREDECESSORS,
    GroupRecord,
    IdempotencyKeyTaken,
    SaveRecord,
    SaveStatus,
    StoredGroup,
    from_row,
    group_from_row,
    to_column,
)

CHANGEABLE = frozenset(FIELDS) - {"id", "created", "owner", "choice"}
_CHANGEABLE = tuple(sorted(CHANGEABLE))
_COLUMNS = ", ".join(FIELDS)
_SUMMARY = tuple(name for name in FIELDS if name != "output")
"""Of lists, and of looks at many files: texts with their log-probabilities can be large."""
_SUMMARY_COLUMNS = ", ".join(_SUMMARY)
_INSERT = f"INSERT INTO saves ({_COLUMNS}, group_id) VALUES ({', '.join('?' * (len(FIELDS) + 1))})"
_INSERT_GROUP = f"INSERT INTO groups ({', '.join(GROUP_FIELDS)}) VALUES ({', '.join('?' * len(GROUP_FIELDS))})"
_UPDATE = f"UPDATE saves SET {', '.join(f'{name} = ?' for name in _CHANGEABLE)} WHERE id = ?"
_LIVE = "status IN ('queued', 'running', 'writing')"


@dataclass(frozen=True)
class Page:
    """Which records are listed. None: any."""

    status: SaveStatus | None
    request_id: str | None
    prefix: str | None
    owner: str | None
    after: str | None
    limit: int


def insert(database: sqlite3.Connection, group: GroupRecord, records: Sequence[SaveRecord]) -> None:
    if group.idempotency_key is not None and find_group(database, group.owner, group.idempotency_key) is not None:
        raise IdempotencyKeyTaken()
    database.execute(_INSERT_GROUP, [getattr(group, name) for name in GROUP_FIELDS])
    for record in records:
        database.execute(_INSERT, [*(to_column(name, getattr(record, name)) for name in FIELDS), group.id])


def update(database: sqlite3.Connection, save_id: str, changes: Mapping[str, Any]) -> SaveRecord | None:
    """None where the record is missing or its status has passed the new one. What ends gets its time, and what expires its date."""
    record = get(database, save_id)
    if record is None or ("status" in changes and record.status not in PREDECESSORS[changes["status"]]):
        return None
    values: dict[str, Any] = {name: tuple(value) if isinstance(value, list) else value for name, value in changes.items()}
    changed = replace(record, **values)
    if changed.ended and changed.finished is None:
        changed = replace(changed, finished=time.time())
    if changed.status == "completed" and changed.ttl_seconds is not None and changed.expires is None:
        assert changed.finished is not None
        changed = replace(changed, expires=changed.finished + changed.ttl_seconds)
    database.execute(_UPDATE, [*(to_column(name, getattr(changed, name)) for name in _CHANGEABLE), save_id])
    return changed


def get(database: sqlite3.Connection, save_id: str) -> SaveRecord | None:
    row = database.execute(f"SELECT {_COLUMNS} FROM saves WHERE id = ?", [save_id]).fetchone()
    return None if row is None else from_row(row)


def delete(database: sqlite3.Connection, save_id: str) -> bool:
    database.execute("INSERT OR IGNORE INTO deleted SELECT id, sequence, ? FROM saves WHERE id = ?", [time.time(), save_id])
    return database.execute("DELETE FROM saves WHERE id = ?", [save_id]).rowcount > 0


def select(database: sqlite3.Connection, page: Page) -> list[SaveRecord]:
    """Newest first, without outputs. Raises `NotFound` for an `after` that was never a record."""
    conditions: list[str] = []
    values: list[Any] = []
    for column in ("status", "request_id", "owner"):
        if getattr(page, column) is not None:
            conditions.append(f"{column} = ?")
            values.append(getattr(page, column))
    if page.prefix:
        # A range instead of LIKE: exact case, no wildcards, and the index serves it. No text sorts after U+10FFFF.
        conditions.append("hidden_states_path >= ? AND hidden_states_path < ?")
        values += [page.prefix, page.prefix + "\U0010ffff"]
    if page.after is not None:
        conditions.append("sequence < ?")
        values.append(_sequence(database, page.after))
    where = f"WHERE {' AND '.join(conditions)}" if conditions else ""
    values.append(page.limit)
    rows = database.execute(f"SELECT {_SUMMARY_COLUMNS} FROM saves {where} ORDER BY sequence DESC LIMIT ?", values)
    return [from_row(row, _SUMMARY) for row in rows]


def end(database: sqlite3.Connection, changes: Mapping[str, Mapping[str, Any]]) -> list[SaveRecord] | None:
    """Ends several records, all or none; None, and nothing is changed, where one is missing or has ended otherwise.

    One that has that status already stays as it is: the caller may not have heard of an earlier commit.
    """
    records = [get(database, save_id) for save_id in changes]
    for record, wanted in zip(records, changes.values(), strict=True):
        if record is None or (record.ended and record.status != wanted["status"]):
            return None
    return [update(database, save_id, wanted) or _existing(database, save_id) for save_id, wanted in changes.items()]


def _existing(database: sqlite3.Connection, save_id: str) -> SaveRecord:
    record = get(database, save_id)
    assert record is not None
    return record


def find_group(database: sqlite3.Connection, owner: str | None, key: str) -> StoredGroup | None:
    """The group of an idempotency key."""
    return _group(database, "coalesce(owner, '') = ? AND idempotency_key = ?", [owner or "", key])


def group_of(database: sqlite3.Connection, save_id: str) -> StoredGroup | None:
    """The group that a save belongs to."""
    return _group(database, "id = (SELECT group_id FROM saves WHERE id = ?)", [save_id])


def get_group(database: sqlite3.Connection, group_id: str) -> StoredGroup | None:
    return _group(database, "id = ?", [group_id])


def release_key(database: sqlite3.Connection, group_id: str) -> None:
    database.execute("UPDATE groups SET idempotency_key = NULL WHERE id = ?", [group_id])


def unfinished_groups(database: sqlite3.Connection) -> list[str]:
    """The groups of records that have not ended, oldest first."""
    rows = database.execute(f"SELECT group_id FROM saves WHERE {_LIVE} GROUP BY group_id ORDER BY min(sequence)")
    return [row["group_id"] for row in rows]


def _group(database: sqlite3.Connection, condition: str, values: Sequence[str]) -> StoredGroup | None:
    row = database.execute(f"SELECT {', '.join(GROUP_FIELDS)} FROM groups WHERE {condition}", values).fetchone()
    if row is None:
        return None
    group = group_from_row(row)
    rows = database.execute(f"SELECT {_COLUMNS} FROM saves WHERE group_id = ? ORDER BY choice", [group.id])
    return StoredGroup(group, tuple(from_row(row) for row in rows))


def unfinished(database: sqlite3.Connection) -> list[SaveRecord]:
    return [from_row(row) for row in database.execute(f"SELECT {_COLUMNS} FROM saves WHERE {_LIVE} ORDER BY sequence")]


def used_bytes(database: sqlite3.Connection) -> int:
    return int(database.execute("SELECT bytes FROM usage").fetchone()[0])


def expired(database: sqlite3.Connection, now: float, skip: int, limit: int) -> list[SaveRecord]:
    """Completed saves whose time is over, the longest expired first, without the first `skip` of them; no outputs."""
    query = f"SELECT {_SUMMARY_COLUMNS} FROM saves WHERE status = 'completed' AND expires <= ? ORDER BY expires, sequence LIMIT ? OFFSET ?"
    return [from_row(row, _SUMMARY) for row in database.execute(query, [now, limit, skip])]


def completed(database: sqlite3.Connection, after: int, limit: int) -> tuple[list[SaveRecord], int]:
    """Completed saves, oldest first, and where the next ones begin: give that as `after`, 0 at first. No outputs."""
    query = f"SELECT sequence, {_SUMMARY_COLUMNS} FROM saves WHERE status = 'completed' AND sequence > ? ORDER BY sequence LIMIT ?"
    rows = database.execute(query, [after, limit]).fetchall()
    return [from_row(row, _SUMMARY) for row in rows], rows[-1]["sequence"] if rows else after


def purge(database: sqlite3.Connection, ended_before: float, keep_count: int, limit: int) -> int:
    """Removes the oldest ended records beyond `keep_count`, and those that ended before a time.

    A completed file that has still to expire keeps its record, without which nobody would remove it.
    """
    excess = database.execute("SELECT count(*) FROM saves").fetchone()[0] - keep_count
    removable = f"NOT {_LIVE} AND NOT (status = 'completed' AND expires IS NOT NULL)"
    old = f"SELECT sequence FROM saves WHERE finished < ? AND {removable} ORDER BY finished LIMIT ?"
    removed = database.execute(f"DELETE FROM saves WHERE sequence IN ({old})", [ended_before, limit]).rowcount
    surplus = min(max(0, excess - removed), limit - removed)
    oldest = f"SELECT sequence FROM saves WHERE {removable} ORDER BY sequence LIMIT ?"
    removed += database.execute(f"DELETE FROM saves WHERE sequence IN ({oldest})", [surplus]).rowcount
    database.execute("DELETE FROM deleted WHERE at < ?", [ended_before])
    return removed


def _sequence(database: sqlite3.Connection, save_id: str) -> int:
    query = "SELECT sequence FROM saves WHERE id = ? UNION SELECT sequence FROM deleted WHERE id = ?"
    row = database.execute(query, [save_id, save_id]).fetchone()
    if row is None:
        raise NotFound("after names no save", param="after")
    return int(row[0])
