"""Log lines on standard error, for people or for machines. Lines that belong to a request or a save say to which.

What a line says of itself stands in its `fields`: `log.info("…", extra={"fields": {"save_id": …}})`. To these come the fields of the
request that is being answered, wherever in its task, or in threads that `asyncio.to_thread` has taken it to, the line is written.
"""

import json
import logging
import re
import sys
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from time import localtime, strftime
from typing import Any, Literal

from structlog.processors import JSONRenderer, format_exc_info
from structlog.stdlib import ProcessorFormatter
from structlog.typing import EventDict, WrappedLogger

from service.wire import rfc3339

LogFormat = Literal["text", "json"]

_REQUEST: ContextVar[MutableMapping[str, Any] | None] = ContextVar("request", default=None)
_IDENTITY = ("request_id", "trace_id")
_SAVES = "save_ids"
_PLAIN = re.compile(r"[^\s\"=\\\x00-\x1f\x7f-\x9f]+")
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029]")
"""What ends a line or moves a terminal's cursor."""


@contextmanager
def lines_of_request(state: MutableMapping[str, Any]) -> Iterator[None]:
    """Lines that are written within belong to the request of this state (ASGI's): its `request_id`, and `trace_id` where there is one."""
    token = _REQUEST.set(state)
    try:
        yield
    finally:
        _REQUEST.reset(token)


def lines_of_saves(save_ids: Sequence[str]) -> None:
    """The lines of the request that is being answered belong to these saves from now on."""
    state = _REQUEST.get()
    if state is not None:
        state[_SAVES] = tuple(save_ids)


def request_fields() -> dict[str, Any]:
    """What lines of the request that is being answered say of it; empty where none is."""
    state = _REQUEST.get()
    if state is None:
        return {}
    fields: dict[str, Any] = {name: state[name] for name in _IDENTITY if name in state}
    save_ids = state.get(_SAVES, ())
    if len(save_ids) == 1:
        fields["save_id"] = save_ids[0]
    elif save_ids:
        fields["save_ids"] = list(save_ids)
    return fields


def fields_of(record: logging.LogRecord) -> dict[str, Any]:
    """A line's own fields and those of its request; its own win."""
    own: Mapping[str, Any] = getattr(record, "fields", {})
    around = request_fields()
    if "save_id" in own:
        around.pop("save_ids", None)
    return {**around, **own}


def line_formatter(log_format: LogFormat) -> logging.Formatter:
    """What every line goes through, those of libraries too. Nothing in a message or a field begins a line of its own."""
    rendered: list[Any] = [_in_utc, JSONRenderer(ensure_ascii=False), _on_one_line] if log_format == "json" else [_as_text]
    return ProcessorFormatter(processors=[_described, format_exc_info, *rendered])


def _described(logger: WrappedLogger, method: str, event: EventDict) -> EventDict:
    """What a line says, in the order in which it is written."""
    record: logging.LogRecord = event["_record"]
    line: EventDict = {
        "time": record.created,
        "level": record.levelname.lower(),
        "logger": record.name,
        "message": event["event"],
        **fields_of(record),
    }
    if "exc_info" in event:
        line["exc_info"] = event["exc_info"]
    return line


def _as_text(logger: WrappedLogger, method: str, event: EventDict) -> str:
    """Time, level, message, the fields as `name=value`, and the exception on indented lines below."""
    time = strftime("%Y-%m-%d %H:%M:%S", localtime(event.pop("time")))
    level, message, exception = event.pop("level").upper(), _escaped(event.pop("message")), event.pop("exception", "")
    del event["logger"]
    fields = "".join(f" {name}={_value(value)}" for name, value in event.items())
    stack = "".join(f"\n  {_escaped(line)}" for line in exception.split("\n")) if exception else ""
    return f"{time} {level:<7} {message}{fields}{stack}"


def _in_utc(logger: WrappedLogger, method: str, event: EventDict) -> EventDict:
    return {**event, "time": rfc3339(event["time"])}


def _on_one_line(logger: WrappedLogger, method: str, line: str) -> str:
    return _escaped(line)


def _escaped(text: str) -> str:
    return _CONTROL.sub(lambda found: f"\\u{ord(found.group()):04x}", text)


def _value(value: Any) -> str:  # noqa: ANN401 - any JSON value
    """As it is where that is one word, so that lines can be read; else as JSON, so that nothing breaks out of its line."""
    text = value if isinstance(value, str) else json.dumps(value, default=repr)
    return text if _PLAIN.fullmatch(text) else json.dumps(value, default=repr)


def configure_logging(log_format: LogFormat, level: str) -> None:
    """Sends everything to standard error. uvicorn's own start and stop lines are left out, its warnings are not."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(line_formatter(log_format))
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
    logging.getLogger("uvicorn").setLevel(max(logging.WARNING, logging.getLevelName(level.upper())))
