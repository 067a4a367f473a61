"""JSON bodies without the latitude that Python's parser gives: each has one meaning, and everything in it can be written down again."""

import json
import re
from collections import Counter
from collections.abc import Callable, Coroutine
from typing import Any

from fastapi import Request, Response
from fastapi.routing import APIRoute

from service.errors import BadRequest
from service.http.limits import DEFAULT_LIMITS
from service.schemas.fields import shown

_MAYBE_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")


class StrictRequest(Request):
    """A request whose `json` refuses what RFC 8259 calls unpredictable: names that stand twice, NaN, other encodings."""

    async def json(self) -> Any:  # noqa: ANN401 - any JSON value
        """Raises `json.JSONDecodeError`, which FastAPI turns into a validation error."""
        if not hasattr(self, "_strict_json"):
            self._strict_json = parse(await self.body())
        return self._strict_json


class StrictRoute(APIRoute):
    """A route whose body is read by `StrictRequest`."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handler = super().get_route_handler()

        async def handle(request: Request) -> Response:
            return await handler(StrictRequest(request.scope, request.receive))

        return handle


def parse(body: bytes, max_depth: int = DEFAULT_LIMITS.json_depth) -> Any:  # noqa: ANN401 - any JSON value
    """The value of a body. Raises `json.JSONDecodeError`."""
    text = _decoded(body)
    try:
        value = json.loads(text, parse_constant=_refuse_constant, object_pairs_hook=_unique)
    except RecursionError:
        raise _error(f"it is nested more than {max_depth} levels deep") from None
    except json.JSONDecodeError:
        raise
    except ValueError as error:  # ours, and Python's for a number of too many digits
        raise _error(str(error) if isinstance(error, _Refused) else "it holds a number of too many digits") from None
    if _depth_exceeds(value, body, max_depth):
        raise _error(f"it is nested more than {max_depth} levels deep")
    return value


def check_text(body: bytes, value: Any) -> None:  # noqa: ANN401 - any JSON value
    """Raises `BadRequest` for half of a surrogate pair anywhere in a body, fields that are ignored and names included.

    To be asked once the fields are known to be sound: those that hold text name themselves when they refuse one.
    """
    if not _MAYBE_SURROGATE.search(body):
        return
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise BadRequest("the body holds half of a surrogate pair, which is not valid Unicode", code="invalid_json") from None


class _Refused(ValueError):
    """JSON that Python would take; the message is for the client."""


def _error(message: str, position: int = 0) -> json.JSONDecodeError:
    return json.JSONDecodeError(message, "", position)


def _decoded(body: bytes) -> str:
    try:
        return body.decode("utf-8")
    except UnicodeDecodeError as error:
        raise _error("it is not UTF-8", error.start) from None


def _refuse_constant(name: str) -> None:
    raise _Refused(f"{name} is not a JSON value")


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) < len(pairs):
        count = Counter(name for name, _ in pairs)
        raise _Refused(f"the name {shown(count.most_common(1)[0][0])} stands twice in one object")
    return made


def _depth_exceeds(value: Any, body: bytes, max_depth: int) -> bool:  # noqa: ANN401 - any JSON value
    if body.count(b"[") + body.count(b"{") <= max_depth:
        return False  # what most bodies end with: nothing has to be walked
    level = [value]
    for _ in range(max_depth):
        level = [item for parent in level for item in _children(parent) if isinstance(item, dict | list)]
        if not level:
            return False
    return True


def _children(value: dict[str, Any] | list[Any]) -> Any:  # noqa: ANN401 - an iterable of JSON values
    return value.values() if isinstance(value, dict) else value
