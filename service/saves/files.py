"""The published file of a record: opened and removed only if it is that very file.

Clients may move, delete and replace files under a save root at any moment, also by symbolic links. So a file is opened by the
descriptor of its directory, never through a link, and has to be the one that was published: same device and inode, same size, and the
save's id in its header, since file systems give the inode of a deleted file to the next one.
"""

import contextlib
import errno
import logging
import os
import secrets
import stat

from engine.errors import SaveError
from engine.saves.lock import LOCK_SUFFIX
from engine.saves.publish import publish_file
from service.errors import Gone, ServiceError, from_os_error
from service.registry.records import SaveRecord
from service.saves.orphans import part_name, remove_unlocked
from service.saves.paths.directories import status_of
from service.saves.paths.roots import OpenTarget, SaveRoots
from service.saves.published import read_published

log = logging.getLogger(__name__)

_OPEN_FILE = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_NO_ACCESS = (errno.EACCES, errno.EPERM)


def open_saved(roots: SaveRoots, record: SaveRecord) -> int:
    """A descriptor of the record's file, the caller's. Raises `Gone` where it has been moved, deleted or replaced, and `ServiceError`."""
    target = _locate(roots, record)
    try:
        fd = None if target is None else _open(target, record)
    except OSError as error:
        raise from_os_error(error) from error
    finally:
        if target is not None:
            os.close(target.directory_fd)
    if fd is None:
        raise Gone("the file of this save was removed", param="save_id")
    return fd


def remove_saved(roots: SaveRoots, record: SaveRecord, *, lock_files: bool) -> bool:
    """Removes the record's file, if it is still there, and the lock file beside it; True where there was a file.

    A lock file stays where somebody holds it, and where another file stands under the name. Raises `OSError` and `ServiceError`.
    """
    target = _locate(roots, record)
    if target is None:
        return False
    try:
        removed = _remove_file(target, record)
        if lock_files and status_of(target.directory_fd, target.name) is None:
            remove_unlocked(target.directory_fd, target.name + LOCK_SUFFIX)
        return removed
    finally:
        os.close(target.directory_fd)


def is_saved_file(status: os.stat_result | None, record: SaveRecord) -> bool:
    """Whether an entry can be the record's file, as far as its status tells."""
    if status is None or not stat.S_ISREG(status.st_mode):
        return False
    return (status.st_dev, status.st_ino, status.st_size) == (record.device, record.inode, record.bytes)


def open_directory(roots: SaveRoots, record: SaveRecord) -> int | None:
    """A descriptor of the directory that the record's file was put in, the caller's; None where that has gone. Raises `ServiceError`."""
    target = _locate(roots, record)
    return None if target is None else target.directory_fd


def _locate(roots: SaveRoots, record: SaveRecord) -> OpenTarget | None:
    try:
        return roots.locate(record.hidden_states_path)
    except ServiceError as error:
        if error.status >= 500 or getattr(error.__cause__, "errno", None) in _NO_ACCESS:
            raise
        return None  # The directory has gone or become something else: nothing of ours is there.


def _open(target: OpenTarget, record: SaveRecord) -> int | None:
    """None where the name doesn't stand for the record's file."""
    if not is_saved_file(status_of(target.directory_fd, target.name), record):
        return None
    try:
        fd = os.open(target.name, _OPEN_FILE, dir_fd=target.directory_fd)
    except OSError:
        if is_saved_file(status_of(target.directory_fd, target.name), record):
            raise
        return None  # It was replaced between the two.
    try:
        if _is_saves_own(fd, record):
            return fd
    except BaseException:
        os.close(fd)
        raise
    os.close(fd)
    return None


def _is_saves_own(fd: int, record: SaveRecord) -> bool:
    if not is_saved_file(os.fstat(fd), record):
        return False
    published = read_published(fd)
    return published is not None and published.save_id == record.id


def _remove_file(target: OpenTarget, record: SaveRecord) -> bool:
    """Takes the file out of its name first and looks once more then: a name can come to stand for another file at any moment."""
    fd = _open(target, record)
    if fd is None:
        return False
    try:
        aside = part_name(secrets.token_hex(16))
        try:
            os.rename(target.name, aside, src_dir_fd=target.directory_fd, dst_dir_fd=target.directory_fd)
        except FileNotFoundError:
            return False
        if is_saved_file(status_of(target.directory_fd, aside), record):
            os.unlink(aside, dir_fd=target.directory_fd)
            return True
        _put_back(target, aside)
        return False
    finally:
        os.close(fd)


def _put_back(target: OpenTarget, aside: str) -> None:
    """Somebody else's file was caught instead: it gets its name again, or another visible one where that has been taken."""
    for name in (target.name, f"{target.name}.{secrets.token_hex(4)}"):
        with contextlib.suppress(SaveError):
            publish_file(target.directory_fd, aside, name, replace=False)
            if name != target.name:
                log.warning("a file that replaced %s while that was removed, and was replaced itself, is kept as %s", target.path, name)
            return
