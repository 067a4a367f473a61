"""Crash recovery: every save that was in progress is completed or failed, and its temporary file is removed."""

import contextlib
import logging
import os
import stat
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from engine.saves.lock import LOCK_SUFFIX, names_file
from service.errors import ServiceError
from service.registry.records import SaveRecord, StoredGroup
from service.registry.registry import Registry
from service.saves.orphans import part_name, remove_own_lock, remove_unlocked
from service.saves.paths.roots import OpenTarget, SaveRoots
from service.saves.published import PublishedFile, file_fields, read_published

log = logging.getLogger(__name__)

_OPEN_FILE = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


@dataclass(frozen=True)
class RecoveryResult:
    """How the interrupted saves ended."""

    completed: int
    failed: int
    unreachable: int = 0
    """Saves that stay open: their files lie below a folder that is no save root now."""


def recover(registry: Registry, roots: SaveRoots) -> RecoveryResult:
    """Ends every record that a crash has left open; to be called before the first request is taken. Raises `ServiceError`."""
    outcomes = [recover_group(registry, roots, group_id) for group_id in registry.unfinished_groups().result()]
    counts = [(outcome.completed, outcome.failed, outcome.unreachable) for outcome in outcomes]
    return RecoveryResult(*map(sum, zip(*counts, strict=True))) if counts else RecoveryResult(0, 0)


def recover_group(registry: Registry, roots: SaveRoots, group_id: str) -> RecoveryResult:
    """Ends the records of a group that nobody owns any more, in one commit.

    A save whose file stands under its name, known by the `save_id` in its metadata, can be completed: it was published and only the
    commit was missing. It can't where its record was to carry the text and doesn't: no client has its response, and a repeated request
    must not find half of one. All or nothing, the saves are completed only where all of them can be. Any other save is failed with the code
    `interrupted`, and its file, its temporary file and its lock file are removed. The file system comes first and the records last, so that
    a crash in here is recovered from as well. A group with files below a folder that is no save root now stays as it is: what can't be
    looked at may be there. Waits for the disk. Raises `ServiceError`.
    """
    stored = registry.get_group(group_id).result()
    unfinished = [] if stored is None else [record for record in stored.saves if not record.ended]
    if stored is None or not unfinished:
        return RecoveryResult(0, 0)
    if any(roots.device_at(record.hidden_states_path) is None for record in unfinished):
        return RecoveryResult(0, 0, unreachable=len(unfinished))
    files = {record.id: file for record in unfinished if (file := _completable_file(roots, record)) is not None}
    if stored.group.mode == "all_or_nothing" and not _all_published(stored, files):
        files = {}
    for record in unfinished:
        _clean_up_files(roots, record, registry.service_id, keep=record.id in files)
    registry.end({record.id: _outcome(files.get(record.id)) for record in unfinished}).result()
    return RecoveryResult(completed=len(files), failed=len(unfinished) - len(files))


def _all_published(stored: StoredGroup, files: Mapping[str, PublishedFile]) -> bool:
    return stored.whole and all(record.id in files or record.status == "completed" for record in stored.saves)


def _outcome(file: PublishedFile | None) -> dict[str, Any]:
    if file is not None:
        return file_fields(file) | {"status": "completed"}
    return {"status": "failed", "error_code": "interrupted", "error_message": "the service ended before the file was published"}


def _completable_file(roots: SaveRoots, record: SaveRecord) -> PublishedFile | None:
    """The published file of a save that can be completed. Changes nothing."""
    with _located(roots, record) as target:
        fd = None if target is None else _open(target)
        if fd is None:
            return None
        try:
            file = _own_file(fd, record)
        finally:
            os.close(fd)
    return None if file is None or not file.whole or record.awaits_output else file


def _clean_up_files(roots: SaveRoots, record: SaveRecord, service_id: str, *, keep: bool) -> None:
    """Removes what a save has left, its published file too unless that is to be kept."""
    with _located(roots, record) as target:
        if target is None:
            return
        if not keep:
            _remove_published(target, record)
        remove_unlocked(target.directory_fd, part_name(record.id))
        # Where a file stands under the name, the lock file is for its client to remove, and so is one that others have made.
        remove_own_lock(target.directory_fd, target.name, service_id)


@contextlib.contextmanager
def _located(roots: SaveRoots, record: SaveRecord) -> Iterator[OpenTarget | None]:
    """The directory of a save's file, open; None where it can't be opened."""
    try:
        target = roots.locate(record.hidden_states_path)
    except ServiceError as error:
        log.warning("the directory of a save's file can't be opened: %s", error.message, extra={"fields": record.log_fields})
        yield None
        return
    try:
        yield target
    finally:
        os.close(target.directory_fd)


def _open(target: OpenTarget) -> int | None:
    try:
        return os.open(target.name, _OPEN_FILE, dir_fd=target.directory_fd)
    except OSError:
        return None


def _own_file(fd: int, record: SaveRecord) -> PublishedFile | None:
    """None where the open file isn't the save's, or can't be read."""
    try:
        file = read_published(fd) if stat.S_ISREG(os.fstat(fd).st_mode) else None
    except OSError as error:
        log.warning("the file of a save can't be read: %s", error.strerror, extra={"fields": record.log_fields})
        return None
    return file if file is not None and file.save_id == record.id else None


def _remove_published(target: OpenTarget, record: SaveRecord) -> None:
    """Of three kinds of files: one that a power cut has shortened, which was published without being synced and which nobody may take for
    a whole one; one whose text was lost in the crash, which the next request with its key computes again; and one whose group is not
    complete. The lock file that was left for its client goes with it: it bears no mark any more.
    """
    fd = _open(target)
    if fd is None:
        return
    try:
        file = _own_file(fd, record)
        if file is not None and not file.whole:
            log.error("the disk has lost a part of a save's file, which is removed", extra={"fields": record.log_fields})
        if file is not None and names_file(target.directory_fd, target.name, fd):
            os.unlink(target.name, dir_fd=target.directory_fd)
            remove_unlocked(target.directory_fd, target.name + LOCK_SUFFIX)
    except OSError as error:
        log.warning("the file of a save can't be removed: %s", error.strerror, extra={"fields": record.log_fields})
    finally:
        os.close(fd)
