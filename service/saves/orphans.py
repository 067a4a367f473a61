"""Removing what a crash has left beside saves, without touching what anybody still writes."""

import fcntl
import logging
import os
import re
import stat
import time
from collections.abc import Callable, Iterator

from engine.saves.lock import LOCK_SUFFIX, is_marked, names_file, was_left_by
from service.saves.paths.directories import status_of
from service.saves.paths.roots import Root, SaveRoots

log = logging.getLogger(__name__)

MIN_PART_AGE_SECONDS = 60.0
"""A temporary file is created a moment before it is locked; younger ones are left alone."""
STALE_LOCK_SECONDS = 86400.0
"""A lock file that was released is for the client of its file to remove. This long after that, the client has forgotten it."""
_PART = re.compile(r"\.(?:[0-9a-f]{32}|probe-[0-9a-f]{16})\.part")
_OPEN_FILE = os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


def part_name(save_id: str) -> str:
    """The temporary file of a save, in the directory of its target."""
    return f".{save_id}.part"


def remove_orphaned_files(
    roots: SaveRoots,
    *,
    now: float | None = None,
    min_age_seconds: float = MIN_PART_AGE_SECONDS,
    owner: str | None = None,
    stop: Callable[[], bool] = lambda: False,
) -> int:
    """Removes temporary files that nobody has locked and that are older than a minute, and, with an `owner`, lock files that it has made
    and that have no file: those that a crash has left, and those that were released more than a day ago. Returns how many. Ends early
    on `stop`.

    Services can share a root: a file that is being written is locked by its writer, in whatever process. May run while saves go on.
    """
    now = time.time() if now is None else now
    removed = 0
    for root in _outermost(roots.roots):
        for directory_fd, name in _orphans_below(root, stop):
            if not name.endswith(LOCK_SUFFIX):
                removed += remove_unlocked(directory_fd, name, changed_before=now - min_age_seconds)
            elif owner is not None:
                removed += _remove_lock(directory_fd, name.removesuffix(LOCK_SUFFIX), owner, now - STALE_LOCK_SECONDS)
    return removed


def _remove_lock(directory_fd: int, name: str, owner: str, stale_before: float) -> bool:
    def is_stale(fd: int) -> bool:
        return was_left_by(fd, owner) and status_of(directory_fd, name) is None

    return remove_own_lock(directory_fd, name, owner) or remove_unlocked(
        directory_fd, name + LOCK_SUFFIX, changed_before=stale_before, only_if=is_stale
    )


def remove_own_lock(directory_fd: int, name: str, owner: str) -> bool:
    """Removes the lock file of a file that isn't there, if `owner` has made it and a crash has kept it from being released."""
    return remove_unlocked(
        directory_fd, name + LOCK_SUFFIX, only_if=lambda fd: is_marked(fd, owner) and status_of(directory_fd, name) is None
    )


def _always(_fd: int) -> bool:
    return True


def remove_unlocked(directory_fd: int, name: str, *, changed_before: float | None = None, only_if: Callable[[int], bool] = _always) -> bool:
    """Removes a regular file if nobody holds a `flock` on it; True where it did.

    It is removed under its own lock and only while the name stands for it: whoever opened it meanwhile finds that out after locking.
    With `changed_before` it may be anybody's and must be older than that; without, it is one of ours, whose writer has ended, and goes
    also where the file system has no locks. `only_if` is asked about the open file before it is locked and again once it is: one that it
    refuses isn't locked even for a moment.
    """
    try:
        fd = os.open(name, _OPEN_FILE, dir_fd=directory_fd)
    except OSError:
        return False  # Gone, a link, or not ours to write.
    try:
        status = os.fstat(fd)
        young = changed_before is not None and max(status.st_mtime, status.st_ctime) > changed_before
        if not stat.S_ISREG(status.st_mode) or young or not only_if(fd):
            return False
        return _is_free(fd, name, without_locks=changed_before is None) and only_if(fd) and _remove(directory_fd, name, fd)
    except OSError as error:
        log.warning("the orphaned file %s can't be inspected and is kept: %s", name, error.strerror)
        return False
    finally:
        os.close(fd)


def _is_free(fd: int, name: str, *, without_locks: bool) -> bool:
    """Takes the file's lock, which closing it lets go."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if not without_locks:
            log.warning("the orphaned file %s can't be locked and is kept: %s", name, error.strerror)
        return without_locks
    return True


def _remove(directory_fd: int, name: str, fd: int) -> bool:
    try:
        if not names_file(directory_fd, name, fd):
            return False
        os.unlink(name, dir_fd=directory_fd)
    except OSError as error:
        log.warning("the orphaned file %s could not be removed: %s", name, error.strerror)
        return False
    return True


def _outermost(roots: tuple[Root, ...]) -> Iterator[Root]:
    """Roots that don't lie in another one, whose walk would come to them anyway."""
    for root in roots:
        if not any(root is not other and root.path.startswith(other.path.rstrip("/") + "/") for other in roots):
            yield root


def _orphans_below(root: Root, stop: Callable[[], bool]) -> Iterator[tuple[int, str]]:
    """Temporary files, and lock files without a file beside them, with the descriptors of their directories, which hold until the next
    one is asked for.
    """
    for _path, directories, files, directory_fd in os.fwalk(".", dir_fd=root.fd, follow_symlinks=False):
        if stop():
            return
        directories[:] = [name for name in directories if not name.startswith(".")]  # No target lies in a hidden one.
        others = set(files).union(directories)
        for name in files:
            if _PART.fullmatch(name) or (name.endswith(LOCK_SUFFIX) and name.removesuffix(LOCK_SUFFIX) not in others):
                yield directory_fd, name
                if stop():
                    return
