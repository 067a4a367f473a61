"""The form of log lines, and which request and save they say they belong to."""

from __future__ import annotations

import asyncio
import json
import logging
import threading

import pytest

from service.observe.logs import JsonFormatter, TextFormatter, lines_of_request, lines_of_saves


class Written(logging.Handler):
    """Keeps what a formatter makes of the lines."""

    def __init__(self, formatter: logging.Formatter) -> None:
        super().__init__()
        self.setFormatter(formatter)
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
    written = Written(JsonFormatter())
    log = logger_to(written)
    log.info('two\nlines "and" %s', "ünïcode", extra={"fields": {"path": "/a\nb", "status": 200}})
    [line] = written.lines
    assert "\n" not in line
    found = json.loads(line)
    assert found["message"] == 'two\nlines "and" ünïcode'
    assert (found["level"], found["logger"], found["path"], found["status"]) == ("info", "of.a.test", "/a\nb", 200)
    assert found["time"].endswith("+00:00")


def test_an_exception_stands_in_its_line() -> None:
    written = Written(JsonFormatter())
    try:
        raise ValueError("what went wrong")
    except ValueError:
        logger_to(written).exception("it failed")
    [found] = written.objects()
    assert "ValueError: what went wrong" in str(found["exception"])


def test_a_text_line_carries_its_fields_and_nothing_breaks_out_of_them() -> None:
    written = Written(TextFormatter())
    logger_to(written).warning("refused", extra={"fields": {"status": 429, "path": "/a\nINFO forged=1", "key": "alice"}})
    [line] = written.lines
    assert line.endswith(r'WARNING refused status=429 path="/a\nINFO forged=1" key=alice')


def test_lines_within_a_request_carry_its_id_as_it_is_then() -> None:
    written = Written(JsonFormatter())
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
    written = Written(JsonFormatter())
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
    written = Written(JsonFormatter())
    with lines_of_request({"request_id": "a"}):
        lines_of_saves(save_ids)
        logger_to(written).info("x")
    [line] = written.objects()
    assert {name: value for name, value in line.items() if name.startswith("save")} == expected


def test_what_a_line_says_of_itself_counts_more_than_what_is_around_it() -> None:
    written = Written(JsonFormatter())
    with lines_of_request({"request_id": "around"}):
        lines_of_saves(["one", "two"])
        logger_to(written).info("x", extra={"fields": {"request_id": "own", "save_id": "three"}})
    [line] = written.objects()
    assert (line["request_id"], line["save_id"], line.get("save_ids")) == ("own", "three", None)


def test_saves_of_no_request_are_nobodys() -> None:
    lines_of_saves(["one"])
    written = Written(JsonFormatter())
    logger_to(written).info("x")
    assert "save_id" not in written.objects()[0]
