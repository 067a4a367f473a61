"""Lock files beside saves: `<name>.lock`, held by an exclusive `flock` while the save is being written.

Clients of vLLM's connector wait for that lock and remove the file themselves, so it is left in place after a save that worked.

A lock file that is made here carries the mark of its owner from the moment on that it has its name. The mark says whether the lock is
held or was released: one that is marked as held and not locked was left by a crash, one that is marked as released was left for a client
to remove. Its owner knows both by the mark. Lock files that others have made are never written to, and neither is a file that has a
second name (a hard link): its content belongs to someone else.
"""

import contextlib
import errno
import fcntl
import os
import secrets
import stat
from dataclasses import dataclass

from engine.errors import ConfigError, EngineError
from engine.saves.publish import remove_if_present

LOCK_SUFFIX = ".lock"
ATTEMPTS = 16
MAX_MARK_BYTES = 256
_NO_MODES = (errno.EPERM, errno.EACCES, errno.ENOSYS, errno.EOPNOTSUPP)
_NO_UNNAMED_FILES = (errno.EOPNOTSUPP, errno.EISDIR, errno.EINVAL, errno.ENOSYS, errno.ENOENT, errno.EXDEV, errno.EPERM, errno.EACCES)
"""What is answered to `O_TMPFILE`, or to giving such a file a name, where there is no such thing (or no `/proc`)."""
_OPEN_FLAGS = os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK


class LockBusy(EngineError):
    """Another process holds the lock, or something that is not a regular file stands in its place."""


def create_file(directory_fd: int, name: str, umask: int) -> int:
    """Opens a new file of mode `0666 & ~umask`; raises `FileExistsError` for a name that is taken, by a symlink too."""
    mode = 0o666 & ~umask
    fd = os.open(name, _OPEN_FLAGS | os.O_CREAT | os.O_EXCL, mode, dir_fd=directory_fd)
    try:
        _set_mode(fd, mode)
    except OSError:
        os.close(fd)
        os.unlink(name, dir_fd=directory_fd)
        raise
    return fd


def _set_mode(fd: int, mode: int) -> None:
    """The process's own umask may have cut it. Some file systems keep no modes and refuse to set one."""
    try:
        os.fchmod(fd, mode)
    except OSError as error:
        if error.errno not in _NO_MODES:
            raise


def names_file(directory_fd: int, name: str, fd: int) -> bool:
    """Whether `name` still stands for the very file that `fd` has open."""
    try:
        named = os.stat(name, dir_fd=directory_fd, follow_symlinks=False)
    except FileNotFoundError:
        return False
    opened = os.fstat(fd)
    return (named.st_dev, named.st_ino) == (opened.st_dev, opened.st_ino)


@dataclass
class LockFile:
    """A lock file that is held. The directory's descriptor stays the caller's and must outlive the lock."""

    directory_fd: int
    name: str
    fd: int
    owner: str = ""

    @classmethod
    def acquire(cls, directory_fd: int, name: str, umask: int, owner: str = "") -> "LockFile":
        """Creates or opens `<name>.lock` and locks it, without waiting. With an `owner` one that is created carries its mark.

        A client may remove the file between our open and our lock, and we would then hold a lock that nobody else can see; so
        the name is compared with the locked file afterwards, and all is tried again where they differ.

        Raises `LockBusy`, or `OSError` where the file can't be opened or the file system has no `flock`.
        """
        lock_name = name + LOCK_SUFFIX
        for _ in range(ATTEMPTS):
            fd, made = _open(directory_fd, lock_name, umask, owner)
            try:
                if fd is not None and _lock_is_ours(directory_fd, lock_name, fd):
                    return cls(directory_fd, lock_name, fd, owner)
            except OSError:
                if made:
                    with contextlib.suppress(OSError):
                        remove_if_present(directory_fd, lock_name)
                raise
        raise LockBusy(f"{lock_name} keeps being replaced by another process")

    def release(self) -> None:
        """Unlocks; the file stays, and where it was made by this owner it says that it was released. Idempotent."""
        if self.fd >= 0:
            with contextlib.suppress(OSError):
                _mark_as_released(self.fd, self.owner)
        self._unlock()

    def _unlock(self) -> None:
        if self.fd < 0:
            return
        fd, self.fd = self.fd, -1
        try:
            # Closing alone would leave the lock with a forked child that has inherited the descriptor.
            fcntl.flock(fd, fcntl.LOCK_UN)
        finally:
            os.close(fd)

    def remove(self) -> None:
        """Removes the file while it is still locked, unless another has replaced it. Idempotent."""
        if self.fd < 0:
            return
        try:
            if names_file(self.directory_fd, self.name, self.fd):
                remove_if_present(self.directory_fd, self.name)
        finally:
            self._unlock()


def is_marked(fd: int, owner: str) -> bool:
    """Whether the lock file was made by `owner` and has not been released since. Raises `OSError`."""
    return _says(fd, _mark(owner))


def was_left_by(fd: int, owner: str) -> bool:
    """Whether the lock file was made by `owner`, released or not. Raises `OSError`."""
    return is_marked(fd, owner) or _says(fd, _released_mark(owner))


def _says(fd: int, mark: bytes) -> bool:
    return os.fstat(fd).st_nlink <= 1 and os.pread(fd, MAX_MARK_BYTES, 0) == mark


def _mark(owner: str) -> bytes:
    return b"strata %s\n" % owner.encode()


def _released_mark(owner: str) -> bytes:
    return b"strata %s released\n" % owner.encode()


def _mark_as_released(fd: int, owner: str) -> None:
    """Only the very mark of this owner: anything else, a mark of another service included, is not ours to change."""
    if owner and is_marked(fd, owner):
        os.pwrite(fd, _released_mark(owner), 0)


def _open(directory_fd: int, lock_name: str, umask: int, owner: str) -> tuple[int | None, bool]:
    """The descriptor, None where the file came or went between two looks; and whether the file was made here."""
    existing = _open_existing(directory_fd, lock_name)
    if existing is not None:
        return existing, False
    try:
        return _make(directory_fd, lock_name, umask, owner), True
    except FileExistsError:
        return None, False


def _make(directory_fd: int, lock_name: str, umask: int, owner: str) -> int:
    """A new lock file that is marked and locked before it has its name, so that a crash at any moment leaves a marked one or none.

    Where the file system has no unnamed files it is made by its name, and a crash in the same moment leaves it without a mark.
    """
    try:
        fd = os.open(".", _OPEN_FLAGS | os.O_TMPFILE, 0o666 & ~umask, dir_fd=directory_fd)
    except OSError as error:
        if error.errno not in _NO_UNNAMED_FILES:
            raise
        return _make_by_name(directory_fd, lock_name, umask, owner)
    try:
        _set_mode(fd, 0o666 & ~umask)
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        _write_mark(fd, owner)
        os.link(f"/proc/self/fd/{fd}", lock_name, dst_dir_fd=directory_fd, follow_symlinks=True)
    except OSError as error:
        os.close(fd)
        if error.errno not in _NO_UNNAMED_FILES:
            raise
        return _make_by_name(directory_fd, lock_name, umask, owner)
    return fd


def _make_by_name(directory_fd: int, lock_name: str, umask: int, owner: str) -> int:
    fd = create_file(directory_fd, lock_name, umask)
    _write_mark(fd, owner)
    return fd


def _write_mark(fd: int, owner: str) -> None:
    """Where there is no room for it, the lock works all the same."""
    if owner:
        with contextlib.suppress(OSError):
            os.pwrite(fd, _mark(owner), 0)


def _open_existing(directory_fd: int, lock_name: str) -> int | None:
    try:
        fd = os.open(lock_name, _OPEN_FLAGS, dir_fd=directory_fd)
    except FileNotFoundError:
        return None
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.EISDIR, errno.ENXIO):
            raise LockBusy(f"{lock_name} is not a regular file") from error
        raise
    try:
        _check_plain(fd, lock_name)
    except BaseException:
        os.close(fd)
        raise
    return fd


def _check_plain(fd: int, lock_name: str) -> None:
    """Raises `LockBusy` for what isn't a regular file, and for one that has another name too: it is more than a lock file to somebody."""
    status = os.fstat(fd)
    if not stat.S_ISREG(status.st_mode):
        raise LockBusy(f"{lock_name} is not a regular file")
    if status.st_nlink > 1:
        raise LockBusy(f"{lock_name} is a hard link to another file")


def _lock_is_ours(directory_fd: int, lock_name: str, fd: int) -> bool:
    """Locks; False, and closed, where the name has come to stand for another file. Raises `LockBusy`, `OSError`; closed then too."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if names_file(directory_fd, lock_name, fd):
            return True
    except BlockingIOError as error:
        os.close(fd)
        raise LockBusy(f"{lock_name} is locked by another process") from error
    except OSError:
        os.close(fd)
        raise
    os.close(fd)
    return False


def probe_flock(directory_fd: int) -> None:
    """Raises `ConfigError` where the directory's file system has no working `flock`: none, or one that keeps nobody out."""
    name = f".probe-{secrets.token_hex(8)}.part"
    try:
        first = os.open(name, _OPEN_FLAGS | os.O_CREAT | os.O_EXCL, 0o600, dir_fd=directory_fd)
    except OSError as error:
        raise ConfigError(f"can't create a file in the save root: {error.strerror}") from error
    try:
        fcntl.flock(first, fcntl.LOCK_EX | fcntl.LOCK_NB)
        excludes = _second_lock_fails(directory_fd, name)
    except OSError as error:
        raise ConfigError(f"the save root's file system has no flock ({error.strerror}); --no-lock-files does without") from error
    finally:
        os.unlink(name, dir_fd=directory_fd)
        os.close(first)
    if not excludes:
        raise ConfigError("flock on the save root's file system doesn't keep a second one out; --no-lock-files does without")


def _second_lock_fails(directory_fd: int, name: str) -> bool:
    second = os.open(name, _OPEN_FLAGS, dir_fd=directory_fd)
    try:
        fcntl.flock(second, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(second)
    return False
