"""The form of log lines, and which request and save they say they belong to."""

from __future__ import annotations

import asyncio
import json
import logging
import re
import threading
from concurrent.futures import Future
from pathlib import Path

import pytest

from service.observe.failures import logs_failure
from service.observe.logs import LogFormat, line_formatter, lines_of_request, lines_of_saves


class Written(logging.Handler):
    """Keeps what a formatter makes of the lines."""

    def __init__(self, log_format: LogFormat) -> None:
        super().__init__()
        self.setFormatter(line_formatter(log_format))
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(self.format(record))

    def objects(self) -> list[dict[str, object]]:
        return [json.loads(line) for line in self.lines]


def logger_to(handler: Written) -> logging.Logger:
    logger = logging.Logger("of.a.test")
    logger.addHandler(handler)
    return logger


def test_a_json_line_is_one_object_whatever_is_in_it() -> None:
    written = Written("json")
    log = logger_to(written)
    log.info('two\nlines "and" %s', "ünïcode", extra={"fields": {"path": "/a\nb", "status": 200}})
    [line] = written.lines
    assert "\n" not in line
    found = json.loads(line)
    assert found["message"] == 'two\nlines "and" ünïcode'
    assert (found["level"], found["logger"], found["path"], found["status"]) == ("info", "of.a.test", "/a\nb", 200)
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", str(found["time"]))


def test_an_exception_stands_in_its_line() -> None:
    written = Written("json")
    try:
        raise ValueError("what went wrong")
    except ValueError:
        logger_to(written).exception("it failed")
    [found] = written.objects()
    assert "ValueError: what went wrong" in str(found["exception"])


def test_a_text_line_carries_its_fields_and_nothing_breaks_out_of_them() -> None:
    written = Written("text")
    logger_to(written).warning("refused", extra={"fields": {"status": 429, "path": "/a\nINFO forged=1", "key": "alice"}})
    [line] = written.lines
    assert line.endswith(r'WARNING refused status=429 path="/a\nINFO forged=1" key=alice')


@pytest.mark.parametrize("control", ["\n", "\r\n", "\x1b[2K", "\x85", "\x9b2K", "\u2028"])
@pytest.mark.parametrize("log_format", ["text", "json"])
def test_nothing_that_a_client_sends_begins_a_line_or_moves_a_cursor(log_format: LogFormat, control: str) -> None:
    forged = f"{control}2026-01-01 00:00:00 ERROR forged"
    written = Written(log_format)
    logger_to(written).warning("ignored the fields %s", forged, extra={"fields": {"key": forged, "keys": [forged]}})
    [line] = written.lines
    assert line.isprintable()
    assert line.splitlines() == [line]
    if log_format == "json":
        assert written.objects()[0]["key"] == forged


def test_the_message_of_an_exception_can_not_look_like_a_line_in_a_text_log() -> None:
    written = Written("text")
    try:
        raise ValueError("bad\n2026-01-01 00:00:00 ERROR forged\x1b[2K")
    except ValueError:
        logger_to(written).exception("it failed")
    first, *more = written.lines[0].split("\n")
    assert first.endswith("ERROR   it failed")
    assert "  2026-01-01 00:00:00 ERROR forged\\u001b[2K" in more
    assert all(line.startswith("  ") for line in more)


def test_lines_of_libraries_have_the_same_form() -> None:
    written = Written("text")
    logger = logging.getLogger("uvicorn.error")
    logger.addHandler(written)
    try:
        logger.warning("Invalid HTTP request received.")
    finally:
        logger.removeHandler(written)
    assert re.fullmatch(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d WARNING Invalid HTTP request received\.", written.lines[0])


def test_a_value_that_is_no_json_does_not_cost_the_line() -> None:
    for log_format in ("text", "json"):
        written = Written(log_format)
        logger_to(written).info("x", extra={"fields": {"what": {1, 2}, "path": Path("/a b")}})
        assert "{1, 2}" in written.lines[0]


def test_lines_within_a_request_carry_its_id_as_it_is_then() -> None:
    written = Written("json")
    log = logger_to(written)
    state: dict[str, object] = {"request_id": "first"}
    log.info("before")
    with lines_of_request(state):
        log.info("within")
        state["request_id"] = "renamed"
        log.info("later")
    log.info("after")
    assert [line.get("request_id") for line in written.objects()] == [None, "first", "renamed", None]


def test_threads_and_tasks_of_a_request_belong_to_it_and_others_do_not() -> None:
    written = Written("json")
    log = logger_to(written)

    async def one(request_id: str) -> None:
        with lines_of_request({"request_id": request_id}):
            await asyncio.sleep(0)
            await asyncio.to_thread(log.info, "in a thread of %s", request_id)
            await asyncio.create_task(later(request_id))

    async def later(request_id: str) -> None:
        log.info("in a task of %s", request_id)

    async def both() -> None:
        await asyncio.gather(one("a"), one("b"))

    asyncio.run(both())
    stranger = threading.Thread(target=log.info, args=("in a thread of %s", None))
    with lines_of_request({"request_id": "c"}):
        stranger.start()
        stranger.join()
    lines = written.objects()
    assert len(lines) == 5
    assert all(str(line["message"]).endswith(f" of {line.get('request_id')}") for line in lines)


@pytest.mark.parametrize(
    ("save_ids", "expected"), [([], {}), (["one"], {"save_id": "one"}), (["one", "two"], {"save_ids": ["one", "two"]})]
)
def test_lines_say_which_saves_a_request_has(save_ids: list[str], expected: dict[str, object]) -> None:
    written = Written("json")
    with lines_of_request({"request_id": "a"}):
        lines_of_saves(save_ids)
        logger_to(written).info("x")
    [line] = written.objects()
    assert {name: value for name, value in line.items() if name.startswith("save")} == expected


def test_what_a_line_says_of_itself_counts_more_than_what_is_around_it() -> None:
    written = Written("json")
    with lines_of_request({"request_id": "around"}):
        lines_of_saves(["one", "two"])
        logger_to(written).info("x", extra={"fields": {"request_id": "own", "save_id": "three"}})
    [line] = written.objects()
    assert (line["request_id"], line["save_id"], line.get("save_ids")) == ("own", "three", None)


def test_saves_of_no_request_are_nobodys() -> None:
    lines_of_saves(["one"])
    written = Written("json")
    logger_to(written).info("x")
    assert "save_id" not in written.objects()[0]


def test_what_nobody_waits_for_is_logged_where_it_fails(caplog: pytest.LogCaptureFixture) -> None:
    failed, cancelled, done = Future[None](), Future[None](), Future[None]()
    for future in (failed, cancelled, done):
        future.add_done_callback(logs_failure(logging.getLogger("of.a.test"), "it failed", {"save_id": "one"}))
    failed.set_exception(ValueError("why"))
    cancelled.cancel()
    cancelled.set_running_or_notify_cancel()
    done.set_result(None)
    [record] = caplog.records
    assert (record.name, record.getMessage(), vars(record)["fields"]) == ("of.a.test", "it failed", {"save_id": "one"})
    assert record.exc_info is not None
    assert record.exc_info[1] is failed.exception()
