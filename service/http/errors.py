"""Every failure ends as OpenAI's error body: which error becomes which status and code."""

import logging
from collections.abc import Mapping, Sequence
from typing import Any, cast

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from engine.errors import EngineError, EngineUnavailable, InvalidRequest, QueueFull, RequestAborted, SaveError
from service.errors import ServiceError
from service.observe.metrics import Metrics
from service.schemas.fields import shown

log = logging.getLogger(__name__)

RETRY_AFTER_SECONDS = 1
HTTP_CODES = {
    400: "invalid_json",
    404: "not_found",
    405: "method_not_allowed",
    408: "too_slow",
    413: "body_too_large",
    429: "too_many_requests",
}
SAVE_STATUS = {"no_space": 507, "conflict": 409, "cancelled": 503}


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
        self.http_status = SAVE_STATUS.get(error.code, 500)


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


def status_of(error: ServiceError) -> int:
    return error.http_status if isinstance(error, SaveFailed) else error.status


def error_body(error: ServiceError) -> dict[str, Any]:
    """`{"error": {message, type, param, code}}`, with the save's id where one failed."""
    param = None if error.param is None else _writable(error.param)
    body: dict[str, Any] = {"message": _writable(error.message), "type": error.type, "param": param, "code": error.code}
    if isinstance(error, ComputationError) and error.save_id is not None:
        body["save_id"] = error.save_id
    return {"error": body}


def _writable(text: str) -> str:
    """A message may repeat what a client sent, names of unknown fields for example, and that may have no UTF-8 form."""
    return text.encode("utf-8", "backslashreplace").decode()


def error_response(error: ServiceError) -> JSONResponse:
    headers = None
    if isinstance(error, Busy):
        headers = {"Retry-After": str(RETRY_AFTER_SECONDS)}
    elif isinstance(error, Unauthorized):
        headers = {"WWW-Authenticate": "Bearer"}
    return JSONResponse(error_body(error), status_of(error), headers)


def install_handlers(app: FastAPI) -> None:
    """Replaces FastAPI's own error bodies, those of unknown routes and wrong methods included."""

    async def on_error(request: Request, error: Exception) -> JSONResponse:
        _count_refusal(request)
        return error_response(as_service_error(error))

    async def on_validation(request: Request, error: Exception) -> JSONResponse:
        _count_refusal(request)
        return error_response(from_validation(cast(RequestValidationError, error).errors()))

    async def on_http(request: Request, error: Exception) -> JSONResponse:
        return http_response(cast(HTTPException, error))

    app.add_exception_handler(RequestValidationError, on_validation)
    app.add_exception_handler(HTTPException, on_http)
    app.add_exception_handler(ServiceError, on_error)
    app.add_exception_handler(EngineError, on_error)


def _count_refusal(request: Request) -> None:
    """Of a request to compute something that ended before it was admitted; whatever was admitted is counted when it ends."""
    if request.method == "POST" and not getattr(request.state, "admitted", False):
        cast(Metrics, request.app.state.runtime.metrics).request_ended("rejected")


def from_validation(errors: Sequence[Any]) -> BadRequest:
    """The first problem, with the name of the field as the client wrote it and the bound."""
    detail: Mapping[str, Any] = errors[0]
    if detail["type"] == "json_invalid":
        return BadRequest(f"the body is not valid JSON: {detail['ctx']['error']} at character {detail['loc'][-1]}", code="invalid_json")
    place = [str(part) for part in detail["loc"][1:]]
    if not place:
        return BadRequest("the body must be a JSON object, sent as application/json", code="invalid_json")
    param = ".".join(place)
    if detail["type"] == "extra_forbidden":
        return BadRequest(f"{param} is not a known field", param=param, code="unknown_field")
    if detail["type"] == "missing":
        return BadRequest(f"{param} is missing", param=param)
    message = _plain(detail["msg"])
    return BadRequest(f"{param}: {message}, got {shown(detail['input'])}", param=param)


def _plain(message: str) -> str:
    message = message.removeprefix("Value error, ")
    message = message.replace("Input should be", "must be").replace("String should", "must").replace("List should", "must")
    return message.replace("a valid dictionary or instance of", "an object, a")


def http_response(error: HTTPException) -> JSONResponse:
    """Of what the framework refuses by itself."""
    code = HTTP_CODES.get(error.status_code, "http_error")
    messages = {404: "there is no such route", 405: "this route has no such method"}
    message = messages.get(error.status_code, str(error.detail))
    kind = Busy.type if error.status_code == Busy.status else "invalid_request_error" if error.status_code < 500 else "server_error"
    body = {"error": {"message": message, "type": kind, "param": None, "code": code}}
    return JSONResponse(body, error.status_code, error.headers)
