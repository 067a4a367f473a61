"""Every failure ends as OpenAI's error body: which error becomes which status and code."""

import logging
from collections.abc import Mapping, Sequence
from typing import Any, cast

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from engine.errors import EngineError
from service.errors import BadRequest, Busy, ComputationError, ServiceError, Unauthorized, as_service_error
from service.http.disconnect import CLIENT_CLOSED_REQUEST, ClientDisconnected
from service.schemas.fields import shown

log = logging.getLogger(__name__)

RETRY_AFTER_SECONDS = 1
NON_RETRYABLE_CODES = frozenset({"path_conflict", "idempotency_key_reused", "non_finite", "out_of_range"})
"""Of errors that the same request would meet again."""
HTTP_CODES = {
    400: "invalid_json",
    404: "not_found",
    405: "method_not_allowed",
    408: "too_slow",
    413: "body_too_large",
    429: "too_many_requests",
}


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
    headers: dict[str, str] = {}
    if isinstance(error, Busy):
        headers = {"Retry-After": str(RETRY_AFTER_SECONDS)}
    elif isinstance(error, Unauthorized):
        headers = {"WWW-Authenticate": "Bearer"}
    if error.code in NON_RETRYABLE_CODES:  # OpenAI's clients send a 409 and a 500 again unless told not to
        headers["x-should-retry"] = "false"
    return JSONResponse(error_body(error), error.status, headers)


def install_handlers(app: FastAPI) -> None:
    """Replaces FastAPI's own error bodies, those of unknown routes and wrong methods included."""

    async def on_error(request: Request, error: Exception) -> JSONResponse:
        return error_response(as_service_error(error))

    async def on_validation(request: Request, error: Exception) -> JSONResponse:
        return error_response(from_validation(cast(RequestValidationError, error).errors()))

    async def on_http(request: Request, error: Exception) -> JSONResponse:
        return http_response(cast(HTTPException, error))

    async def on_disconnect(request: Request, error: Exception) -> Response:
        return Response(status_code=CLIENT_CLOSED_REQUEST)

    app.add_exception_handler(ClientDisconnected, on_disconnect)
    app.add_exception_handler(RequestValidationError, on_validation)
    app.add_exception_handler(HTTPException, on_http)
    app.add_exception_handler(ServiceError, on_error)
    app.add_exception_handler(EngineError, on_error)


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
