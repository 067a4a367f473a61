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
from datetime import UTC, datetime
from typing import Any, Literal

LogFormat = Literal["text", "json"]

_REQUEST: ContextVar[MutableMapping[str, Any] | None] = ContextVar("request", default=None)
_IDENTITY = ("request_id", "trace_id")
_SAVES = "save_ids"
_PLAIN = re.compile(r"[^\s\"=\\\x00-\x1f\x7f]+")


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


class TextFormatter(logging.Formatter):
    """Time, level, message, and the fields as `name=value`."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)-7s %(message)s", "%Y-%m-%d %H:%M:%S")

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 - logging's name
        return " ".join([super().formatMessage(record), *(f"{name}={_shown(value)}" for name, value in fields_of(record).items())])


def _shown(value: Any) -> str:  # noqa: ANN401 - any JSON value
    """As it is where that is one word, so that lines can be read; else as JSON, so that nothing breaks out of its line."""
    text = value if isinstance(value, str) else json.dumps(value)
    return text if _PLAIN.fullmatch(text) else json.dumps(value)


class JsonFormatter(logging.Formatter):
    """One object per line: time, level, logger, message, the fields and, where there is one, the exception."""

    def format(self, record: logging.LogRecord) -> str:
        line = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **fields_of(record),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False)


def configure_logging(log_format: LogFormat, level: str) -> None:
    """Sends everything to standard error. uvicorn's own start and stop lines are left out, its warnings are not."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter() if log_format == "json" else TextFormatter())
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
    logging.getLogger("uvicorn").setLevel(max(logging.WARNING, logging.getLevelName(level.upper())))
