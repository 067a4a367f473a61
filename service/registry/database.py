"""Opening the state directory and the SQLite file in it."""

import fcntl
import os
import sqlite3
from pathlib import Path

from engine.errors import ConfigError

DATABASE = "registry.sqlite3"
LOCK = "registry.lock"

# Entry n brings a file of `user_version` n to n + 1. Entries are never changed once released, only added.
MIGRATIONS: tuple[tuple[str, ...], ...] = (
    (
        """CREATE TABLE saves (
            sequence INTEGER PRIMARY KEY AUTOINCREMENT,
            id TEXT NOT NULL UNIQUE,
            status TEXT NOT NULL,
            hidden_states_path TEXT NOT NULL,
            request_id TEXT NOT NULL,
            model TEXT NOT NULL,
            layers TEXT NOT NULL,
            dtype TEXT NOT NULL,
            shape TEXT,
            num_tokens INTEGER,
            bytes INTEGER,
            checksum TEXT,
            created REAL NOT NULL,
            finished REAL,
            ttl_seconds REAL,
            expires REAL,
            error_code TEXT,
            error_message TEXT,
            device TEXT,
            inode TEXT,
            owner TEXT,
            idempotency_key TEXT,
            body_hash TEXT,
            choice INTEGER NOT NULL,
            output TEXT
        )""",
        "CREATE INDEX saves_by_status ON saves (status, sequence)",
        "CREATE INDEX saves_by_request ON saves (request_id, sequence)",
        "CREATE INDEX saves_by_path ON saves (hidden_states_path)",
        "CREATE INDEX saves_by_finish ON saves (finished)",
        """CREATE UNIQUE INDEX saves_by_key ON saves (coalesce(owner, ''), idempotency_key, choice)
            WHERE idempotency_key IS NOT NULL""",
        # Where deleted records stood in the list: a client that deletes what it has read can still ask for the next page.
        "CREATE TABLE deleted (id TEXT PRIMARY KEY, sequence INTEGER NOT NULL, at REAL NOT NULL) WITHOUT ROWID",
    ),
    (
        "ALTER TABLE saves ADD COLUMN gone REAL",
        "CREATE INDEX saves_by_expiry ON saves (expires, sequence) WHERE status = 'completed' AND expires IS NOT NULL",
        # The bytes of all files that are there: kept up to date by triggers, so that it is right whatever changes a record.
        "CREATE TABLE usage (bytes INTEGER NOT NULL)",
        "INSERT INTO usage SELECT coalesce(sum(bytes), 0) FROM saves WHERE status = 'completed'",
        """CREATE TRIGGER saves_inserted AFTER INSERT ON saves WHEN new.status = 'completed' AND new.gone IS NULL
            BEGIN UPDATE usage SET bytes = bytes + coalesce(new.bytes, 0); END""",
        """CREATE TRIGGER saves_deleted AFTER DELETE ON saves WHEN old.status = 'completed' AND old.gone IS NULL
            BEGIN UPDATE usage SET bytes = bytes - coalesce(old.bytes, 0); END""",
        """CREATE TRIGGER saves_updated AFTER UPDATE OF status, bytes, gone ON saves
            WHEN new.status IS NOT old.status OR new.bytes IS NOT old.bytes OR new.gone IS NOT old.gone
            BEGIN UPDATE usage SET bytes = bytes
                + CASE WHEN new.status = 'completed' AND new.gone IS NULL THEN coalesce(new.bytes, 0) ELSE 0 END
                - CASE WHEN old.status = 'completed' AND old.gone IS NULL THEN coalesce(old.bytes, 0) ELSE 0 END; END""",
    ),
    (
        # Whose state this is, for marks on files that services share.
        "CREATE TABLE service (id TEXT NOT NULL)",
        "INSERT INTO service VALUES (lower(hex(randomblob(16))))",
    ),
    (
        # Outputs count as files do, for as long as their record stands.
        "UPDATE usage SET bytes = bytes + (SELECT coalesce(sum(length(CAST(output AS BLOB))), 0) FROM saves)",
        """CREATE TRIGGER outputs_inserted AFTER INSERT ON saves WHEN new.output IS NOT NULL
            BEGIN UPDATE usage SET bytes = bytes + length(CAST(new.output AS BLOB)); END""",
        """CREATE TRIGGER outputs_deleted AFTER DELETE ON saves WHEN old.output IS NOT NULL
            BEGIN UPDATE usage SET bytes = bytes - length(CAST(old.output AS BLOB)); END""",
        """CREATE TRIGGER outputs_updated AFTER UPDATE OF output ON saves WHEN new.output IS NOT old.output
            BEGIN UPDATE usage SET bytes = bytes
                + coalesce(length(CAST(new.output AS BLOB)), 0) - coalesce(length(CAST(old.output AS BLOB)), 0); END""",
    ),
    (
        # The saves of one request, and its idempotency key. Of older requests only those with a key are known to belong together, and
        # whether their saves were to complete together isn't.
        """CREATE TABLE groups (
            id TEXT PRIMARY KEY,
            size INTEGER NOT NULL,
            mode TEXT NOT NULL,
            owner TEXT,
            idempotency_key TEXT,
            body_hash TEXT
        ) WITHOUT ROWID""",
        "ALTER TABLE saves ADD COLUMN group_id TEXT",
        "ALTER TABLE saves ADD COLUMN cached_tokens INTEGER",
        """UPDATE saves SET group_id = CASE WHEN idempotency_key IS NULL THEN id ELSE (
            SELECT first.id FROM saves AS first WHERE coalesce(first.owner, '') = coalesce(saves.owner, '')
            AND first.idempotency_key = saves.idempotency_key ORDER BY first.choice LIMIT 1) END""",
        """INSERT INTO groups SELECT group_id, max(choice) + 1, 'independent', max(owner), max(idempotency_key), max(body_hash)
            FROM saves WHERE idempotency_key IS NOT NULL GROUP BY group_id""",
        "INSERT INTO groups SELECT group_id, 1, 'independent', owner, NULL, NULL FROM saves WHERE idempotency_key IS NULL",
        "CREATE UNIQUE INDEX groups_by_key ON groups (coalesce(owner, ''), idempotency_key) WHERE idempotency_key IS NOT NULL",
        "CREATE INDEX saves_by_group ON saves (group_id, choice)",
        """CREATE TRIGGER group_emptied AFTER DELETE ON saves WHEN NOT EXISTS (SELECT 1 FROM saves WHERE group_id = old.group_id)
            BEGIN DELETE FROM groups WHERE id = old.group_id; END""",
        "DROP INDEX saves_by_key",
        "ALTER TABLE saves DROP COLUMN idempotency_key",
        "ALTER TABLE saves DROP COLUMN body_hash",
    ),
)


class StateDirectory:
    """A state directory that belongs to this process: no second service gets it until this one has closed it or has ended."""

    def __init__(self, path: Path) -> None:
        """Makes the directory (for its owner only: it may hold generated text). Raises `ConfigError`."""
        self.path = path
        try:
            path.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._fd = os.open(path / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        except OSError as error:
            raise ConfigError(f"--state-dir {path}: {error.strerror}") from error
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(self._fd)
            busy = isinstance(error, BlockingIOError)
            reason = "is in use by another service" if busy else f"can't be locked: {error.strerror}"
            raise ConfigError(f"--state-dir {path}: {reason}") from error

    def close(self) -> None:
        """Lets go of the directory. Idempotent."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def open_database(directory: Path, *, sync_commits: bool, busy_seconds: float) -> sqlite3.Connection:
    """The registry's file, checked and of the current schema; made if missing. Raises `ConfigError` with one line.

    With `sync_commits` a commit survives a power cut, else only the end of the process: that is SQLite's NORMAL in WAL mode, in
    which a power cut may take the last commits back but leaves the file sound.
    """
    path = directory / DATABASE
    try:
        database = sqlite3.connect(path, timeout=busy_seconds, isolation_level=None, check_same_thread=False)
    except sqlite3.Error as error:
        raise ConfigError(f"the registry {path} can't be opened: {error}") from error
    try:
        _prepare(database, sync_commits)
    except sqlite3.Error as error:
        database.close()
        raise ConfigError(f"the registry {path} can't be used: {_reason(error)}") from error
    except ConfigError as error:
        database.close()
        raise ConfigError(f"the registry {path} {error}") from error
    return database


def _prepare(database: sqlite3.Connection, sync_commits: bool) -> None:
    database.row_factory = sqlite3.Row
    # Fails at once on a file that isn't SQLite's, and on one that another process has locked.
    database.execute("BEGIN IMMEDIATE")
    database.execute("ROLLBACK")
    version = database.execute("PRAGMA user_version").fetchone()[0]
    if version > len(MIGRATIONS):
        raise ConfigError(f"was made by a newer version (schema {version}, this one knows {len(MIGRATIONS)})")
    if database.execute("PRAGMA journal_mode = WAL").fetchone()[0] != "wal":
        raise ConfigError("lies on a file system without shared memory, which its write-ahead log needs")
    database.execute(f"PRAGMA synchronous = {'FULL' if sync_commits else 'NORMAL'}")
    problem = database.execute("PRAGMA quick_check(1)").fetchone()[0]
    if problem != "ok":
        raise ConfigError(f"is damaged: {' '.join(problem.split())}")
    for number in range(version, len(MIGRATIONS)):
        _migrate(database, number)


def _migrate(database: sqlite3.Connection, number: int) -> None:
    database.execute("BEGIN IMMEDIATE")
    try:
        for statement in MIGRATIONS[number]:
            database.execute(statement)
        database.execute(f"PRAGMA user_version = {number + 1}")
        database.execute("COMMIT")
    except BaseException:
        if database.in_transaction:
            database.execute("ROLLBACK")
        raise


def _reason(error: sqlite3.Error) -> str:
    code = getattr(error, "sqlite_errorcode", sqlite3.SQLITE_ERROR) & 0xFF
    if code in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED):
        return "it is locked by another process"
    if code in (sqlite3.SQLITE_NOTADB, sqlite3.SQLITE_CORRUPT):
        return f"it is damaged ({error})"
    return str(error)
