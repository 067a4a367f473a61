"""Walking down directories by descriptor, never through a symbolic link."""

import contextlib
import errno
import os
import stat
from collections.abc import Sequence
from typing import Self

from service.errors import DirectoryVanished, ServiceError, from_os_error
from service.saves.paths.names import PARAM, Parts, bad_path, forbidden

OPEN_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_ATTEMPTS = 16
"""How often a directory that others keep removing is made again."""


def status_of(directory_fd: int, name: str) -> os.stat_result | None:
    """The entry itself, not what a link points to; None where there is none. Raises `OSError`."""
    try:
        return os.stat(name, dir_fd=directory_fd, follow_symlinks=False)
    except FileNotFoundError:
        return None


class DirectoryCursor:
    """A directory descriptor that moves down from a root. As a context manager it closes what it still holds.

    Between two calls anybody may replace what stands in a directory; every step opens one component relative to the descriptor
    of its parent with `O_NOFOLLOW`, so a link that appears is refused and nothing outside the root can be reached.
    """

    def __init__(self, root_fd: int, umask: int | None) -> None:
        self.fd = os.dup(root_fd)
        self._umask = umask
        self._made: list[tuple[int, str]] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None:
            self._remove_made()
        for parent, _name in self._made:
            os.close(parent)
        if self.fd >= 0:
            os.close(self.fd)

    def take(self) -> int:
        """The descriptor, which is the caller's from now on."""
        fd, self.fd = self.fd, -1
        return fd

    def enter(self, parts: Sequence[str]) -> Parts:
        """Goes down as far as there are directories and returns the parts that don't exist.

        Raises `ForbiddenPath` at a symbolic link, `BadPath` at anything else that is no directory.
        """
        for index, name in enumerate(parts):
            child = self._open(name)
            if child is None:
                return tuple(parts[index:])
            os.close(self.fd)
            self.fd = child
        return ()

    def make(self, parts: Sequence[str]) -> None:
        """Makes the directories that are missing and goes down; what it made is removed again if the walk fails."""
        for name in parts:
            child = self._make_and_open(name)
            os.close(self.fd)
            self.fd = child

    def status(self, name: str) -> os.stat_result | None:
        """The entry of that name, links not followed."""
        try:
            return status_of(self.fd, name)
        except OSError as error:
            raise from_os_error(error, PARAM) from error

    def is_directory(self, name: str) -> bool:
        status = self.status(name)
        return status is not None and stat.S_ISDIR(status.st_mode)

    def check_file(self, name: str) -> None:
        """Raises where the name is taken by anything but a regular file."""
        status = self.status(name)
        if status is None or stat.S_ISREG(status.st_mode):
            return
        raise forbidden() if stat.S_ISLNK(status.st_mode) else bad_path("names something that is not a regular file")

    def _open(self, name: str) -> int | None:
        try:
            return os.open(name, OPEN_DIRECTORY, dir_fd=self.fd)
        except FileNotFoundError:
            return None
        except OSError as error:
            raise self._refusal(name, error) from error

    def _refusal(self, name: str, error: OSError) -> ServiceError:
        status = self.status(name)
        if status is not None and not stat.S_ISLNK(status.st_mode) and not stat.S_ISDIR(status.st_mode):
            return bad_path("has a directory component that is not a directory")
        if error.errno in (errno.ELOOP, errno.ENOTDIR):
            return forbidden()  # A link, now or a moment ago.
        return from_os_error(error, PARAM)

    def _make_and_open(self, name: str) -> int:
        for _ in range(_ATTEMPTS):
            made = self._make(name)
            child = self._open(name)
            if child is not None:
                if made:
                    self._set_mode(child)
                return child
        raise DirectoryVanished("a directory of the path keeps being removed by another process", param=PARAM)

    def _make(self, name: str) -> bool:
        try:
            os.mkdir(name, 0o777, dir_fd=self.fd)
        except FileExistsError:
            return False
        except OSError as error:
            raise from_os_error(error, PARAM) from error
        self._made.append((os.dup(self.fd), name))
        return True

    def _set_mode(self, fd: int) -> None:
        if self._umask is None:
            return  # mkdir has applied the process's umask, or the directory's default ACL.
        mode = stat.S_IMODE(os.fstat(fd).st_mode)
        wanted = (mode & ~0o777) | (0o777 & ~self._umask)  # The set-group-id bit is inherited and stays.
        if mode == wanted:
            return
        try:
            os.fchmod(fd, wanted)
        except OSError as error:
            raise from_os_error(error, PARAM) from error

    def _remove_made(self) -> None:
        for parent, name in reversed(self._made):
            with contextlib.suppress(OSError):  # Where somebody has put something in it, it is theirs now.
                os.rmdir(name, dir_fd=parent)
