"""Claims on target files: at most one save of a file is in flight, in this service and, by lock files, among services and clients."""

import contextlib
import logging
import os
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from engine.saves.lock import LOCK_SUFFIX, LockBusy, LockFile
from service.errors import DirectoryVanished, PathConflict, from_os_error
from service.observe.logs import request_fields
from service.registry.records import SaveRecord
from service.registry.registry import Registry
from service.saves.files import is_saved_file
from service.saves.paths.directories import status_of
from service.saves.paths.names import PARAM
from service.saves.paths.roots import OpenTarget, SaveRoots
from service.saves.published import read_published

log = logging.getLogger(__name__)

_ATTEMPTS = 4
"""Clients tidy up their empty directories, possibly just when one is about to be used again."""

FileKey = tuple[int, int, str]
"""Device and inode of the directory, and the name: the same file under every path that leads to it."""


@dataclass
class ClaimedTarget:
    """A claim on one file; implements `engine.saves.spec.SaveTarget`. Whichever of `published` and `abandoned` comes first counts."""

    directory_fd: int
    name: str
    path: str
    replace: bool
    lock: LockFile | None
    keep_lock_file: bool
    """The lock file belongs to the file that was to be replaced: it stays for that file's client."""
    on_end: Callable[[], None]
    log_fields: Mapping[str, str] = field(default_factory=dict)
    """What log lines about it say."""
    _ended: bool = False
    _ending: threading.Lock = field(default_factory=threading.Lock)

    def published(self) -> None:
        self._end(LockFile.release)

    def abandoned(self) -> None:
        self._end(LockFile.release if self.keep_lock_file else LockFile.remove)

    def _end(self, unlock: Callable[[LockFile], None]) -> None:
        with self._ending:
            if self._ended:
                return
            self._ended = True
        try:
            if self.lock is not None:
                unlock(self.lock)
        except OSError:
            log.warning("the lock file of %s could not be removed", self.path, exc_info=True, extra={"fields": self.log_fields})
        finally:
            os.close(self.directory_fd)
            self.on_end()


class Targets:
    """Who writes which file just now. Methods may be called from any thread; they wait for the disk."""

    def __init__(
        self, roots: SaveRoots, registry: Registry | None = None, *, lock_files: bool = True, umask: int = 0o022, owner: str = ""
    ) -> None:
        """`registry`: says whose the files are; without one they are nobody's. `owner`: what lock files are marked with while they are
        held, so that a start after a crash finds them.
        """
        self._roots = roots
        self._registry = registry
        self._owner = owner
        self._lock_files = lock_files
        self._umask = umask
        self._in_flight: set[FileKey] = set()
        self._mutex = threading.Lock()

    def claim(
        self, path: str | None, save_id: str, *, replace: bool, directory_only: bool = False, client: str | None = None
    ) -> ClaimedTarget:
        """Resolves a client's path (`SaveRoots.resolve`) and claims the file until the target is published or abandoned.

        `client` is whom the request's API key stands for. Raises `BadPath`, `ForbiddenPath`, `DiskFull`; `PathConflict` for a file that is
        being written or locked, for one that exists unless it is to be replaced, and for one of another client even then.
        """
        for _ in range(_ATTEMPTS):
            with contextlib.suppress(DirectoryVanished):
                return self._claim_once(path, save_id, replace, directory_only, client)
        return self._claim_once(path, save_id, replace, directory_only, client)

    def _claim_once(self, path: str | None, save_id: str, replace: bool, directory_only: bool, client: str | None) -> ClaimedTarget:
        claimed = self._claim(self._roots.resolve(path, save_id, directory_only=directory_only), replace)
        try:
            if replace:
                self._check_owner(claimed, client)
        except BaseException:
            claimed.abandoned()
            raise
        claimed.log_fields = {**request_fields(), "save_id": save_id}
        return claimed

    def _check_owner(self, claimed: ClaimedTarget, client: str | None) -> None:
        """Raises `PathConflict` where the file that is to be replaced is another client's, or its save has not ended yet.

        A file is known by the save's id in its header, and by what its record says of it: whatever path leads to it.
        """
        try:
            owned = None if self._registry is None else _record_of(claimed, self._registry)
        except OSError as error:
            raise from_os_error(error, PARAM) from error
        if owned is None:
            return
        if not owned.ended:
            raise PathConflict("the file is being written by another request", param=PARAM)
        if client is not None and owned.owner != client:
            raise PathConflict("the file exists and was saved with another API key", param=PARAM)

    def _claim(self, target: OpenTarget, replace: bool) -> ClaimedTarget:
        """Takes the target's descriptor over, also when it raises."""
        try:
            return self._unclaimed(target, replace)
        except BaseException as error:
            os.close(target.directory_fd)
            if isinstance(error, OSError):
                raise from_os_error(error, PARAM) from error
            raise

    def _unclaimed(self, target: OpenTarget, replace: bool) -> ClaimedTarget:
        status = os.fstat(target.directory_fd)
        key = (status.st_dev, status.st_ino, target.name)
        with self._mutex:
            if key in self._in_flight:
                raise PathConflict("the file is being written by another request", param=PARAM)
            self._in_flight.add(key)
        try:
            return self._locked(target, replace, key)
        except BaseException:
            self._forget(key)
            raise

    def _locked(self, target: OpenTarget, replace: bool, key: FileKey) -> ClaimedTarget:
        directory_fd, name = target.directory_fd, target.name
        _check_absent(directory_fd, name, replace)
        keep = replace and _exists(directory_fd, name) and _exists(directory_fd, name + LOCK_SUFFIX)
        lock = self._acquire(target)
        try:
            # Again: another service may have published the file before it let the lock go.
            _check_absent(directory_fd, name, replace)
        except BaseException:
            if lock is not None:
                lock.release()  # Not removed: it is for the client of the file that stands there now.
            raise
        return ClaimedTarget(directory_fd, name, target.path, replace, lock, keep, lambda: self._forget(key))

    def _acquire(self, target: OpenTarget) -> LockFile | None:
        if not self._lock_files:
            return None
        try:
            return LockFile.acquire(target.directory_fd, target.name, self._umask, self._owner)
        except LockBusy as error:
            raise PathConflict("the file is locked by another process", param=PARAM) from error

    def _forget(self, key: FileKey) -> None:
        with self._mutex:
            self._in_flight.discard(key)


def _record_of(target: ClaimedTarget, registry: Registry) -> SaveRecord | None:
    """The record that a file belongs to; None where there is no file or it is none of the registry's. Raises `OSError`."""
    try:
        fd = os.open(target.name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=target.directory_fd)
    except (FileNotFoundError, PermissionError):
        return None  # Our own files can be read.
    try:
        status, published = os.fstat(fd), read_published(fd)
    finally:
        os.close(fd)
    record = None if published is None else registry.get(published.save_id).result()
    return record if record is not None and (not record.ended or is_saved_file(status, record)) else None


def _check_absent(directory_fd: int, name: str, replace: bool) -> None:
    if not replace and _exists(directory_fd, name):
        raise PathConflict("the file exists; on_conflict 'replace' would replace it", param=PARAM)


def _exists(directory_fd: int, name: str) -> bool:
    return status_of(directory_fd, name) is not None
