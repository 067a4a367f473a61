"""The temporary file of one save: written at offsets, locked by its writer, gone unless it is published."""

import errno
import fcntl
import os
import time
from dataclasses import dataclass, field
from functools import partial

from engine.errors import SaveError
from engine.saves import libc
from engine.saves.digest import RunningDigest
from engine.saves.lock import create_file, names_file
from engine.saves.publish import remove_if_present
from engine.saves.retry import DISK_FULL, RetryPolicy

COPY_BYTES = 1 << 20
WRITE_BACK_BYTES = 2 << 20
CREATE_ATTEMPTS = 16

_NO_FLOCK = (errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOTSUP, errno.ENOLCK, errno.EINVAL)


def disk_error(error: OSError) -> SaveError:
    """What a failed system call means for the client, who may know the file by another path than the server's: it is not named."""
    code = error.errno
    return SaveError("no_space" if code in DISK_FULL else "io_error", f"writing the file failed: {os.strerror(code or errno.EIO)}")


@dataclass
class PartFile:
    """An open `.part` file. Only the thread that works on the save calls the methods.

    They raise `OSError`, and `RetryLater` where another attempt may work: the same call with the same arguments then goes on.
    """

    directory_fd: int
    name: str
    fd: int
    retry: RetryPolicy
    write_back: bool
    digest: RunningDigest | None = None
    bytes_written: int = 0
    write_seconds: float = 0.0
    _written_back: int = field(default=0, init=False)
    _unmoved_end: int | None = field(default=None, init=False)
    _moving: bytes | None = field(default=None, init=False)

    @classmethod
    def create(
        cls, directory_fd: int, name: str, umask: int, retry: RetryPolicy, *, write_back: bool, digest: RunningDigest | None = None
    ) -> "PartFile":
        """Creates and locks it. A cleaner may take it between the two, for one that nobody holds: then there is a next try."""
        for _ in range(CREATE_ATTEMPTS):
            fd = retry.run(partial(create_file, directory_fd, name, umask))
            try:
                ours = _lock(fd) and names_file(directory_fd, name, fd)
            except BaseException:
                _drop(directory_fd, name, fd)
                raise
            if ours:
                return cls(directory_fd, name, fd, retry, write_back, digest)
            _drop(directory_fd, name, fd)
        raise OSError(errno.EBUSY, os.strerror(errno.EBUSY))

    def write_at(self, data: memoryview, offset: int) -> None:
        """Writes all of `data` (bytes), however many calls it takes. Another attempt writes it again from its first byte on."""
        started, left, end = time.monotonic(), data, offset
        try:
            while left:
                written = self.retry.run(partial(_write_some, self.fd, left, end))
                left, end = left[written:], end + written
        finally:
            self.write_seconds += time.monotonic() - started
        self.bytes_written += len(data)
        self._start_write_back(end)
        if self.digest is not None:
            self.digest.update(data, offset)

    def read_at(self, size: int, offset: int) -> bytes:
        """Exactly `size` bytes that were written before."""
        pieces = []
        while size:
            piece = self.retry.run(partial(os.pread, self.fd, size, offset))
            if not piece:
                raise OSError(errno.EIO, "the file is shorter than what was written")
            pieces.append(piece)
            size, offset = size - len(piece), offset + len(piece)
        return b"".join(pieces)

    def move(self, start: int, size: int, by: int) -> None:
        """Moves `size` bytes up by `by`, from the end on, so that nothing is overwritten that is still to be moved.

        A piece that was written in part has spoilt its own source, so what was read of it is kept until it is written whole.
        """
        end = start + size if self._unmoved_end is None else self._unmoved_end
        while end > start:
            begin = max(start, end - COPY_BYTES)
            self._moving = self._moving or self.read_at(end - begin, begin)
            self.write_at(memoryview(self._moving), begin + by)
            self._moving, self._unmoved_end = None, begin
            end = begin
        self._unmoved_end = None

    def _start_write_back(self, end: int) -> None:
        """Has the kernel begin to write what is new, so that the last fsync has little left to do. A hint: failures are left to fsync."""
        if not self.write_back or libc.sync_file_range is None or end - self._written_back < WRITE_BACK_BYTES:
            return
        try:
            libc.sync_file_range(self.fd, self._written_back, end - self._written_back, libc.SYNC_FILE_RANGE_WRITE)
        except OSError:
            self.write_back = False
        self._written_back = end

    def sync(self) -> None:
        """Not repeated on failure: after a failed fsync Linux takes the pages for clean, and a second one would lie."""
        started = time.monotonic()
        try:
            os.fsync(self.fd)
        finally:
            self.write_seconds += time.monotonic() - started

    def flush(self) -> None:
        """What a network file system would only say when the file is closed: that there was no room for what it took before.

        Closing a second descriptor has the same effect and keeps the lock.
        """
        os.close(os.dup(self.fd))

    def digest_up_to(self, end: int) -> None:
        """Reads back what was written before its turn in the digest had come: rows whose header wasn't known then.

        Another attempt goes on where this one stopped.
        """
        while self.digest is not None and self.digest.end < end:
            start = self.digest.end
            self.digest.update(self.read_at(min(COPY_BYTES, end - start), start), start)

    def close(self) -> None:
        if self.fd >= 0:
            fd, self.fd = self.fd, -1
            os.close(fd)

    def discard(self) -> None:
        """Removes the file and closes it. Idempotent."""
        if self.fd < 0:
            return
        try:
            remove_if_present(self.directory_fd, self.name)
        finally:
            self.close()


def _lock(fd: int) -> bool:
    """False where another process holds it. Without `flock` (allowed by --no-lock-files) the file stays unlocked."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno not in _NO_FLOCK:
            raise
    return True


def _drop(directory_fd: int, name: str, fd: int) -> None:
    try:
        remove_if_present(directory_fd, name)
    finally:
        os.close(fd)


def _write_some(fd: int, data: memoryview, offset: int) -> int:
    written = os.pwrite(fd, data, offset)
    if written == 0:
        # Must not happen with a regular file, and must not become an endless loop.
        raise OSError(errno.EIO, "nothing was written")
    return written
