"""All errors that end as an HTTP error body. They are mapped by their fields, not by their class (`service/http/errors.py`)."""

import errno
import logging
from typing import ClassVar

from engine.errors import EngineError, EngineUnavailable, InvalidRequest, QueueFull, RequestAborted, SaveError

log = logging.getLogger(__name__)

SAVE_STATUS = {"no_space": 507, "conflict": 409, "cancelled": 503}


class ServiceError(Exception):
    """An answer other than 2xx. Messages are for clients: they hold no path and no stack."""

    status: int = 500
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


class StorageUnavailable(ServiceError):
    """The file system that holds a file isn't there now, or none of the save roots is the one that it was put in."""

    status = 503
    default_code = "storage_unavailable"


class DiskFull(ServiceError):
    status = 507
    default_code = "no_space"


class BadRequest(ServiceError):
    """A value that the client must change."""

    status = 400
    default_code = "invalid_value"
    type = "invalid_request_error"


class ModelNotFound(ServiceError):
    status = 404
    default_code = "model_not_found"
    type = "invalid_request_error"


class PreconditionFailed(ServiceError):
    """What the request's If-Match or If-Unmodified-Since asks for is not so."""

    status = 412
    default_code = "precondition_failed"
    type = "invalid_request_error"


class RangeNotSatisfiable(ServiceError):
    """A range that begins behind the end of the file."""

    status = 416
    default_code = "range_not_satisfiable"
    type = "invalid_request_error"


class Busy(ServiceError):
    """The queue is full; the same request may work a moment later."""

    status = 429
    default_code = "queue_full"
    type = "rate_limit_error"


class Unauthorized(ServiceError):
    """No API key, or one that isn't known."""

    status = 401
    default_code = "invalid_api_key"
    type = "authentication_error"


class UnknownHost(ServiceError):
    """A Host header that names none of the hosts that the service answers to."""

    status = 421
    default_code = "unknown_host"
    type = "invalid_request_error"

    def __init__(self) -> None:
        super().__init__("the Host header names a host that this service doesn't answer to; --allowed-host adds one")


class MalformedRequest(ServiceError):
    """Bytes that are not HTTP."""

    status = 400
    default_code = "invalid_http"
    type = "invalid_request_error"


class TooSlow(ServiceError):
    """A client that takes too long to send what it has begun."""

    status = 408
    default_code = "too_slow"
    type = "invalid_request_error"


class HeadTooLarge(ServiceError):
    """More headers than any client of ours needs."""

    status = 431
    default_code = "headers_too_large"
    type = "invalid_request_error"


class ComputationError(ServiceError):
    """A request that was not completed; `save_id` names the save that has gone with it."""

    save_id: str | None = None


class NotServing(ComputationError):
    """Starting, draining or dead."""

    status = 503
    default_code = "unavailable"


class GenerationFailed(ComputationError):
    """The engine failed while this request ran."""

    default_code = "engine_error"


class SaveFailed(ComputationError):
    """A save of this request failed; the record says the same."""

    def __init__(self, save_id: str | None, error: SaveError) -> None:
        super().__init__(f"the hidden states could not be saved: {error}", param="kv_transfer_params", code=error.code)
        self.save_id = save_id
        self.status = SAVE_STATUS.get(error.code, 500)


def as_service_error(error: BaseException) -> ServiceError:
    """Any exception as what a client may hear of it; an unexpected one is logged and told nothing of."""
    if isinstance(error, ServiceError):
        return error
    if isinstance(error, InvalidRequest):
        return BadRequest(str(error), param=error.param)
    if isinstance(error, QueueFull):
        return Busy(str(error) or "too many requests are waiting")
    if isinstance(error, EngineUnavailable | RequestAborted):
        return NotServing(str(error) or "the engine takes no requests")
    if isinstance(error, EngineError):
        log.error("the engine failed a request: %s", error)
        return GenerationFailed("the engine failed while the request ran; the server's log has the details")
    log.error("a request failed", exc_info=error)
    return ServiceError("the server failed to answer; its log has the details")


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
