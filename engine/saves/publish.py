"""Giving a finished file its name, in one step and without ever overwriting another unasked."""

import contextlib
import errno
import os
import secrets
from enum import Enum

from engine.errors import ConfigError, SaveError
from engine.saves import libc

# What file systems and kernels answer that don't know a call or its flag.
_UNSUPPORTED = frozenset({errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOTSUP, errno.EPERM})


REMOVE_ATTEMPTS = 3


class PublishMethod(Enum):
    """How a file gets a name that must not exist yet."""

    RENAME_NOREPLACE = "renameat2"
    LINK = "link"


def publish_file(directory_fd: int, temporary: str, name: str, *, replace: bool) -> None:
    """Renames `temporary` to `name` in one directory.

    Raises `SaveError` "conflict" where the name exists (with `replace`: where it is a directory), and `OSError` for everything
    else; the temporary file is left then.
    """
    try:
        if replace:
            os.rename(temporary, name, src_dir_fd=directory_fd, dst_dir_fd=directory_fd)
        else:
            _publish_new(directory_fd, temporary, name)
    except (FileExistsError, IsADirectoryError) as error:
        what = "is a directory" if isinstance(error, IsADirectoryError) else "exists already"
        raise SaveError("conflict", f"{name} {what}; nothing was replaced") from error


def probe_publishing(directory_fd: int) -> PublishMethod:
    """Tries what the directory's file system offers, with a file of its own.

    Raises `ConfigError` where neither way works: a save could overwrite a file, or be seen half written.
    """
    temporary, name = (f".probe-{secrets.token_hex(8)}.part" for _ in range(2))
    try:
        os.close(os.open(temporary, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600, dir_fd=directory_fd))
        return _publish_new(directory_fd, temporary, name)
    except OSError as error:
        raise ConfigError(f"the save root's file system can't publish a file: {error.strerror}") from error
    finally:
        for leftover in (temporary, name):
            remove_if_present(directory_fd, leftover)


def remove_if_present(directory_fd: int, name: str) -> None:
    """Tried again where it fails for a moment: nobody else would remove the file soon. Raises the last `OSError`."""
    for attempts_left in range(REMOVE_ATTEMPTS - 1, -1, -1):
        try:
            os.unlink(name, dir_fd=directory_fd)
        except FileNotFoundError:
            return
        except OSError as error:
            if error.errno not in (errno.EINTR, errno.EAGAIN, errno.EIO) or not attempts_left:
                raise
        else:
            return


def _publish_new(directory_fd: int, temporary: str, name: str) -> PublishMethod:
    if _rename_noreplace(directory_fd, temporary, name):
        return PublishMethod.RENAME_NOREPLACE
    _link(directory_fd, temporary, name)
    return PublishMethod.LINK


def _rename_noreplace(directory_fd: int, temporary: str, name: str) -> bool:
    """False where this is not supported here."""
    if libc.renameat2 is None:
        return False
    try:
        libc.renameat2(directory_fd, os.fsencode(temporary), directory_fd, os.fsencode(name), libc.RENAME_NOREPLACE)
    except OSError as error:
        if error.errno in _UNSUPPORTED:
            return False
        raise
    return True


def _link(directory_fd: int, temporary: str, name: str) -> None:
    try:
        os.link(temporary, name, src_dir_fd=directory_fd, dst_dir_fd=directory_fd, follow_symlinks=False)
    except FileExistsError:
        # NFS repeats a request whose answer was lost, and the second one then finds the name that the first has made.
        if not _same_file(directory_fd, temporary, name):
            raise
    # Where this fails the file stands under its name all the same; a second name that nobody has locked goes with the next cleaning.
    with contextlib.suppress(OSError):
        remove_if_present(directory_fd, temporary)


def _same_file(directory_fd: int, one: str, other: str) -> bool:
    first = os.stat(one, dir_fd=directory_fd, follow_symlinks=False)
    second = os.stat(other, dir_fd=directory_fd, follow_symlinks=False)
    return (first.st_dev, first.st_ino) == (second.st_dev, second.st_ino)
