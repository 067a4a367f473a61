"""Refusals that end as an HTTP error body. Whoever answers a request maps them by their fields, not by their class."""

import errno
from typing import ClassVar


class ServiceError(Exception):
    """An answer other than 2xx. Messages are for clients: they hold no path and no stack."""

    status: ClassVar[int] = 500
    default_code: ClassVar[str] = "internal_error"
    type: ClassVar[str] = "server_error"

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.code = code or self.default_code


class BadPath(ServiceError):
    """A path that is malformed, or names something that can't be a file of ours."""

    status = 400
    default_code = "invalid_path"
    type = "invalid_request_error"


class ForbiddenPath(ServiceError):
    """A path outside the allowed roots, or one that would leave them by `..` or a symbolic link."""

    status = 403
    default_code = "path_forbidden"
    type = "invalid_request_error"


class NotFound(ServiceError):
    status = 404
    default_code = "not_found"
    type = "invalid_request_error"


class Conflict(ServiceError):
    status = 409
    default_code = "conflict"
    type = "invalid_request_error"


class PathConflict(Conflict):
    """The target exists, or a save of the same file is in flight."""

    default_code = "path_conflict"


class DirectoryVanished(PathConflict):
    """Somebody removed the target's directory while it was being opened; another attempt may work."""

    default_code = "directory_vanished"


class Gone(ServiceError):
    """A file that was there and was removed."""

    status = 410
    default_code = "gone"
    type = "invalid_request_error"


class Unavailable(ServiceError):
    """The service is closing."""

    status = 503
    default_code = "unavailable"


class DiskFull(ServiceError):
    status = 507
    default_code = "no_space"


_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EMLINK)
_IMPOSSIBLE_NAME = (errno.ENAMETOOLONG, errno.EILSEQ, errno.EINVAL)
_VANISHED = (errno.ENOENT, errno.ESTALE)
_NOT_WRITABLE = (errno.EACCES, errno.EPERM, errno.EROFS)


def from_os_error(error: OSError, param: str | None = None) -> ServiceError:
    """What a client is told of a failed call to the file system; the text of the error, which may hold a path, is not passed on."""
    if error.errno in _FULL:
        return DiskFull("the disk of the save root is full", param=param)
    if error.errno in _IMPOSSIBLE_NAME:
        return BadPath("the file system of the save root can't hold such a name", param=param)
    if error.errno in _VANISHED:
        return DirectoryVanished("a directory of the path was removed by somebody else meanwhile", param=param)
    if error.errno in _NOT_WRITABLE:
        return ForbiddenPath("the server may not write at this place of the save root", param=param)
    name = errno.errorcode.get(error.errno or 0, "unknown")
    return ServiceError(f"the save root can't be used ({name})", param=param, code="io_error")
