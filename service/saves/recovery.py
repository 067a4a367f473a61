"""What a start makes of a crash: every save that was under way is completed or failed, and its temporary file is gone."""

import logging
import os
import stat
from dataclasses import dataclass

from engine.saves.lock import LOCK_SUFFIX, names_file
from service.errors import ServiceError
from service.registry.records import SaveRecord
from service.registry.registry import Registry
from service.saves.orphans import part_name, remove_own_lock, remove_unlocked
from service.saves.paths.roots import OpenTarget, SaveRoots
from service.saves.published import PublishedFile, completion, read_published

log = logging.getLogger(__name__)

_OPEN_FILE = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


@dataclass(frozen=True)
class Recovered:
    """How the interrupted saves ended."""

    completed: int
    failed: int


def recover(registry: Registry, roots: SaveRoots) -> Recovered:
    """Ends every record that a crash has left open; to be called before the first request is taken.

    A save whose file stands under its name, known by the `save_id` in its metadata, is completed: it was published and only the commit
    was missing. Any other is failed with the code `interrupted`; its temporary file and its lock file are removed. So is a file whose
    record was to carry the text and doesn't: nobody was told of it, and a repeated request must not find half of an answer. The file
    system comes first and the record last, so that a crash in here is recovered from as well.
    """
    completed = failed = 0
    for record in registry.unfinished().result():
        file = _settle_files(roots, record, registry.service_id)
        if file is not None:
            registry.update(record.id, **completion(file)).result()
            completed += 1
            continue
        message = "the service ended before the file was published"
        registry.update(record.id, status="failed", error_code="interrupted", error_message=message).result()
        failed += 1
    return Recovered(completed, failed)


def _settle_files(roots: SaveRoots, record: SaveRecord, service_id: str) -> PublishedFile | None:
    """The published file of a save, if there is one; what else the save has left is removed."""
    try:
        target = roots.locate(record.hidden_states_path)
    except ServiceError as error:
        log.warning("the directory of a save's file can't be opened: %s", error.message, extra={"fields": record.log_fields})
        return None
    try:
        file = _find_published(target, record)
        remove_unlocked(target.directory_fd, part_name(record.id))
        # Where a file stands under the name, the lock file is for its client to remove, and so is one that others have made.
        remove_own_lock(target.directory_fd, target.name, service_id)
        return file
    finally:
        os.close(target.directory_fd)


def _find_published(target: OpenTarget, record: SaveRecord) -> PublishedFile | None:
    try:
        fd = os.open(target.name, _OPEN_FILE, dir_fd=target.directory_fd)
    except OSError:
        return None
    try:
        file = read_published(fd) if stat.S_ISREG(os.fstat(fd).st_mode) else None
        if file is None or file.save_id != record.id:
            return None
        if not file.whole:
            log.error("the disk has lost a part of a save's file, which is removed", extra={"fields": record.log_fields})
        if not file.whole or record.awaits_output:
            _take_back(target, fd)
            return None
        return file
    except OSError as error:
        log.warning("the file of a save can't be read: %s", error.strerror, extra={"fields": record.log_fields})
        return None
    finally:
        os.close(fd)


def _take_back(target: OpenTarget, fd: int) -> None:
    """Of two kinds of files: one that a power cut has shortened, which was published without being synced and which nobody may take for
    a whole one; and one whose text was lost in the crash, which the next request with its key computes again. The lock file that was left
    for its client goes with it: it bears no mark any more.
    """
    if names_file(target.directory_fd, target.name, fd):
        os.unlink(target.name, dir_fd=target.directory_fd)
        remove_unlocked(target.directory_fd, target.name + LOCK_SUFFIX)
