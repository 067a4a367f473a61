"""The published file of a record: opened and removed only if it is that very file.

Clients may move, delete and replace files under a save root at any moment, also by symbolic links. So a file is opened by the
descriptor of its directory, never through a link, and has to be the one that was published: same inode, same size, and the save's id in
its header, since file systems give the inode of a deleted file to the next one. Its device number is the same, unless the file system was
mounted anew: numbers are given in the order of mounting.

A file that isn't found is gone only where its file system is there. An unmounted volume leaves an empty directory of another file system,
and a root that was taken out of the settings leaves nothing to look at: then nobody knows, and nothing is done.
"""

import contextlib
import errno
import logging
import os
import secrets
import stat

from engine.errors import SaveError
from engine.saves.lock import LOCK_SUFFIX, names_file
from engine.saves.publish import publish_file
from service.errors import Gone, ServiceError, StorageUnavailable, from_os_error
from service.registry.records import SaveRecord
from service.saves.orphans import part_name, remove_unlocked
from service.saves.paths.directories import status_of
from service.saves.paths.roots import OpenTarget, SaveRoots
from service.saves.published import read_published

log = logging.getLogger(__name__)

_OPEN_FILE = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_NO_ACCESS = (errno.EACCES, errno.EPERM)


def open_saved(roots: SaveRoots, record: SaveRecord) -> int:
    """A descriptor of the record's file, the caller's. Raises `Gone` where it has been moved, deleted or replaced, `StorageUnavailable`
    where its file system isn't there, and `ServiceError`.
    """
    target = _locate(roots, record)
    try:
        fd = None if target is None else _open(roots, target, record)
    except OSError as error:
        raise from_os_error(error) from error
    finally:
        if target is not None:
            os.close(target.directory_fd)
    if fd is None:
        check_reachable(roots, record)
        raise Gone("the file of this save was removed", param="save_id")
    return fd


def remove_saved(roots: SaveRoots, record: SaveRecord, *, lock_files: bool) -> bool:
    """Removes the record's file, if it is still there, and the lock file beside it; True where there was a file.

    A lock file stays where somebody holds it, and where another file stands under the name. Raises `StorageUnavailable` where the file's
    file system isn't there, `OSError` and `ServiceError`.
    """
    target = _locate(roots, record)
    if target is None:
        check_reachable(roots, record)
        return False
    try:
        removed = _remove_file(roots, target, record)
        if not removed:
            check_reachable(roots, record)
        if lock_files and status_of(target.directory_fd, target.name) is None:
            remove_unlocked(target.directory_fd, target.name + LOCK_SUFFIX)
        return removed
    finally:
        os.close(target.directory_fd)


def check_reachable(roots: SaveRoots, record: SaveRecord) -> None:
    """Raises `StorageUnavailable` where a file that isn't found may be there all the same, on a file system that isn't mounted now or in a
    folder that is no save root now.
    """
    device = roots.device_at(record.hidden_states_path)
    if device is None:
        raise StorageUnavailable("the file of this save lies below no save root that the service has now", param="save_id")
    if record.device is not None and not roots.is_same_file_system(record.device, device):
        raise StorageUnavailable("the file system that holds the file of this save is not there now", param="save_id")


def is_saved_file(status: os.stat_result | None, record: SaveRecord) -> bool:
    """Whether an entry is the record's file, as far as its status tells."""
    return status is not None and status.st_dev == record.device and _resembles(status, record)


def device_of_saved(roots: SaveRoots, directory_fd: int, record: SaveRecord) -> int | None:
    """The device number that the record's file has now; None where the directory doesn't hold it. Raises `OSError`."""
    name = record.hidden_states_path.rpartition("/")[2]
    status = status_of(directory_fd, name)
    if is_saved_file(status, record):
        return record.device
    fd = _open(roots, OpenTarget(directory_fd, name, record.hidden_states_path), record)
    if fd is None:
        return None
    try:
        return os.fstat(fd).st_dev
    finally:
        os.close(fd)


def _resembles(status: os.stat_result | None, record: SaveRecord) -> bool:
    """On whatever device."""
    return status is not None and stat.S_ISREG(status.st_mode) and (status.st_ino, status.st_size) == (record.inode, record.bytes)


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


def _open(roots: SaveRoots, target: OpenTarget, record: SaveRecord) -> int | None:
    """None where the name doesn't stand for the record's file."""
    if not _resembles(status_of(target.directory_fd, target.name), record):
        return None
    try:
        fd = os.open(target.name, _OPEN_FILE, dir_fd=target.directory_fd)
    except OSError:
        if _resembles(status_of(target.directory_fd, target.name), record):
            raise
        return None  # It was replaced between the two.
    try:
        if _is_saves_own(roots, fd, record):
            return fd
    except BaseException:
        os.close(fd)
        raise
    os.close(fd)
    return None


def _is_saves_own(roots: SaveRoots, fd: int, record: SaveRecord) -> bool:
    status = os.fstat(fd)
    if not _resembles(status, record):
        return False
    published = read_published(fd)
    if published is None or published.save_id != record.id:
        return False
    if record.device is not None:
        roots.recognize(record.device, status.st_dev)
    return True


def _remove_file(roots: SaveRoots, target: OpenTarget, record: SaveRecord) -> bool:
    """Takes the file out of its name first and looks once more then: a name can come to stand for another file at any moment."""
    fd = _open(roots, target, record)
    if fd is None:
        return False
    try:
        aside = part_name(secrets.token_hex(16))
        try:
            os.rename(target.name, aside, src_dir_fd=target.directory_fd, dst_dir_fd=target.directory_fd)
        except FileNotFoundError:
            return False
        if names_file(target.directory_fd, aside, fd):
            os.unlink(aside, dir_fd=target.directory_fd)
            return True
        _restore_name(target, aside)
        return False
    finally:
        os.close(fd)


def _restore_name(target: OpenTarget, aside: str) -> None:
    """It was another file: it gets its name again, or another visible one where that has been taken."""
    for name in (target.name, f"{target.name}.{secrets.token_hex(4)}"):
        with contextlib.suppress(SaveError):
            publish_file(target.directory_fd, aside, name, replace=False)
            if name != target.name:
                log.warning("a file that replaced %s while that was removed, and was replaced itself, is kept as %s", target.path, name)
            return
