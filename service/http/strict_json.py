"""JSON bodies without the latitude that Python's parser gives: each has one meaning, and everything in it can be written down again.

Large bodies are counted before anything is made of them, then parsed and checked on a thread by Python's own scanner: the one in C holds
Python's lock from a body's first byte to its last, and with it the event loop and the engine.
"""

import json
import math
import re
from collections import Counter
from collections.abc import Callable, Coroutine
from json.decoder import scanstring  # type: ignore[attr-defined]  # JSONDecoder's own, which typeshed leaves out
from json.scanner import py_make_scanner  # type: ignore[attr-defined]  # the same for all implementations of Python
from typing import Any, cast

from fastapi import Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from pydantic import BaseModel, ValidationError
from starlette.exceptions import HTTPException

from service.errors import BadRequest
from service.http.body_bounds import BodyBounds, check_counts
from service.http.limits import DEFAULT_LIMITS
from service.runtime import Runtime
from service.schemas.fields import shown

INLINE_BYTES = 2**17
"""A larger body goes to a thread. What C makes of this much takes a few milliseconds, of the worst of it 50."""


class StrictRequest(Request):
    """A request whose `json` is its body as an object of the route's model.

    Refuses what RFC 8259 calls unpredictable: names that stand twice, NaN, numbers beyond all floats, other encodings.
    """

    def __init__(self, request: Request, model: type[BaseModel]) -> None:
        super().__init__(request.scope, request.receive)
        self._model = model

    async def json(self) -> BaseModel:
        """Raises `json.JSONDecodeError`, which FastAPI turns into a validation error, and `_Refusal`."""
        body = await self.body()
        runtime: Runtime = self.app.state.runtime
        bounds = BodyBounds.of_context(runtime.context_length)
        try:
            if len(body) <= INLINE_BYTES:
                self._value, made = read(body, self._model, bounds)
            else:
                owner = self.state.owner
                self._value, made = await runtime.threads.bodies.run(owner, read, body, self._model, bounds, parse_slowly)
        except json.JSONDecodeError:
            raise
        except ValidationError as error:
            details = [{**detail, "loc": ("body", *detail["loc"])} for detail in error.errors(include_url=False)]
            raise _Refusal(RequestValidationError(details)) from None
        except Exception as error:
            raise _Refusal(error) from None
        return made

    @staticmethod
    def value_of(request: Request) -> Any:  # noqa: ANN401 - any JSON value
        """The body as it was sent; for requests of a `StrictRoute` that have been read."""
        return cast(StrictRequest, request)._value


class StrictRoute(APIRoute):
    """A route whose body, if it takes one, is read by `StrictRequest`."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handler = super().get_route_handler()
        if self.body_field is None:
            return handler
        model = cast(type[BaseModel], self.body_field.field_info.annotation)

        async def handle(request: Request) -> Response:
            try:
                return await handler(StrictRequest(request, model))
            except _Refusal as refusal:
                raise refusal.error from None

        return handle


class _Refusal(HTTPException):
    """An error on its way through FastAPI, which would take any of another class for a body that can't be parsed."""

    def __init__(self, error: Exception) -> None:
        super().__init__(400)
        self.error = error


Parser = Callable[[str], Any]


def parse_quickly(text: str) -> Any:  # noqa: ANN401 - any JSON value
    """Holds Python's lock all the time."""
    return json.loads(text, **_HOOKS)


def parse_slowly(text: str) -> Any:  # noqa: ANN401 - any JSON value
    """Takes several times as long, and lets go of Python's lock whenever another thread wants it."""
    return _SlowDecoder(**_HOOKS).decode(text)


def read(body: bytes, model: type[BaseModel], bounds: BodyBounds, parser: Parser = parse_quickly) -> tuple[Any, BaseModel]:
    """The value of a body, and the model made of it.

    Raises `json.JSONDecodeError`, `BadRequest` for a body that holds too much, pydantic's `ValidationError` and what the model raises.
    """
    check_counts(body, bounds)
    value = parse(body, parser=parser)
    made = model.model_validate(value)
    check_text(body, value)
    return value, made


def parse(body: bytes, max_depth: int = DEFAULT_LIMITS.json_depth, parser: Parser = parse_quickly) -> Any:  # noqa: ANN401 - any JSON value
    """The value of a body. Raises `json.JSONDecodeError`."""
    text = _decoded(body)
    try:
        value = parser(text)
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
    if b"\\ud" not in body and b"\\uD" not in body:
        return
    rest = [value]
    while rest:
        item = rest.pop()
        if isinstance(item, dict):
            rest.extend(item)
            rest.extend(item.values())
        elif isinstance(item, list):
            rest.extend(item)
        elif isinstance(item, str) and _has_no_utf8(item):
            raise BadRequest("the body holds half of a surrogate pair, which is not valid Unicode", code="invalid_json")


def _has_no_utf8(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return True
    return False


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


def _finite(digits: str) -> float:
    number = float(digits)
    if math.isinf(number):
        raise _Refused(f"{shown(digits)} is beyond all numbers of 64 bits")
    return number


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) < len(pairs):
        count = Counter(name for name, _ in pairs)
        raise _Refused(f"the name {shown(count.most_common(1)[0][0])} stands twice in one object")
    return made


_PIECE_CHARACTERS = 2**16
_UNITS = re.compile(r'(?:([^"\\]+)|(\\u[dD][89abAB][0-9a-fA-F]{2})|(\\u[0-9a-fA-F]{4})|(\\[^u]))*', re.DOTALL)
"""What a string is made of: text, the first half of a surrogate pair, other escapes."""


def _scan_string(text: str, begin: int, strict: bool = True) -> tuple[str, int]:
    """The string that begins behind a quote, and where it ends: the library's function in C, for a piece at a time."""
    pieces, quote = list[str](), begin - 1
    while (units := _UNITS.match(text, begin, begin + _PIECE_CHARACTERS)) is not None:
        # A pair is decoded as one.
        end = units.start(2) if units.lastindex == 2 else units.end()
        if end == begin:
            break
        try:
            pieces.append(scanstring(f'{text[begin:end]}"', 0, strict)[0])
        except json.JSONDecodeError as error:
            raise json.JSONDecodeError(error.msg, text, begin + error.pos) from None
        begin = end
    try:
        rest, end = scanstring(text, begin, strict)
    except json.JSONDecodeError as error:
        raise json.JSONDecodeError(error.msg, text, quote if error.pos == begin - 1 else error.pos) from None
    return "".join([*pieces, rest]), end


class _SlowDecoder(json.JSONDecoder):
    """The library's decoder without its part in C, but for short pieces of strings."""

    def __init__(self, **hooks: Any) -> None:  # noqa: ANN401 - JSONDecoder's
        super().__init__(**hooks)
        self.parse_string = _scan_string
        self.scan_once = py_make_scanner(self)


_HOOKS: dict[str, Any] = {"parse_constant": _refuse_constant, "parse_float": _finite, "object_pairs_hook": _unique}


def _depth_exceeds(value: Any, body: bytes, max_depth: int) -> bool:  # noqa: ANN401 - any JSON value
    if body.count(b"[") + body.count(b"{") <= max_depth:
        return False  # what most bodies end with: nothing has to be walked
    level = [value] if isinstance(value, dict | list) else []
    for _ in range(max_depth):
        level = [item for parent in level for item in _children(parent) if isinstance(item, dict | list)]
        if not level:
            return False
    return True


def _children(value: dict[str, Any] | list[Any]) -> Any:  # noqa: ANN401 - an iterable of JSON values
    return value.values() if isinstance(value, dict) else value
