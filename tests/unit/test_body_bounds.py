"""What a JSON body may hold is counted without making anything of it."""

from __future__ import annotations

import json
import sys
import threading
import time
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import pytest
from hypothesis import given
from hypothesis import strategies as st

from service.errors import BadRequest
from service.http import body_bounds
from service.http.body_bounds import BodyBounds, body_bytes, check_counts
from service.http.strict_json import parse, parse_quickly, parse_slowly

TIGHT = BodyBounds(values=10, containers=10, names=10)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text('",:[{\\x', max_size=8),
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(st.text('",:[{\\x', max_size=4), inner, max_size=5),
    max_leaves=40,
)


def counted(value: Any) -> BodyBounds:  # noqa: ANN401 - any JSON value
    """As the bounds count: commas, and one for each list and object; lists and objects; names."""
    if not isinstance(value, list | dict):
        return BodyBounds(0, 0, 0)
    inner = [counted(item) for item in (value.values() if isinstance(value, dict) else value)]
    commas = max(len(value) - 1, 0)
    values, containers = commas + 1 + sum(each.values for each in inner), 1 + sum(each.containers for each in inner)
    return BodyBounds(values, containers, (len(value) if isinstance(value, dict) else 0) + sum(each.names for each in inner))


@pytest.mark.parametrize("piece", [1, 7, 2**20])
@given(value=JSON, bounds=st.builds(BodyBounds, *[st.integers(0, 12)] * 3))
def test_a_body_is_refused_exactly_where_it_holds_too_much(piece: int, value: Any, bounds: BodyBounds) -> None:  # noqa: ANN401 - any JSON
    real = counted(value)
    fits = real.values <= bounds.values and real.containers <= bounds.containers and real.names <= bounds.names
    body = json.dumps(value).encode()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(body_bounds, "PIECE_BYTES", piece)
        if fits:
            check_counts(body, bounds)
        else:
            with pytest.raises(BadRequest, match="at most"):
                check_counts(body, bounds)


@pytest.mark.parametrize("body", [b'"' + b"[" * 100, b'"' + b'\\",{' * 100, b"\\" * 101])
def test_a_text_that_never_ends_counts_for_nothing_either(body: bytes) -> None:
    check_counts(body, TIGHT)


def test_what_is_no_json_is_counted_all_the_same() -> None:
    with pytest.raises(BadRequest, match="100 containers") as error:
        check_counts(b'[["' * 100, BodyBounds(1000, 10, 10))
    assert error.value.code == "body_too_complex"


def test_bounds_follow_from_the_context() -> None:
    short, long = BodyBounds.of_context(8192), BodyBounds.of_context(131072)
    assert short.values > 2**20 + 16 * 8192, "as many truth values as client tensors may hold"
    assert long.values > 2**20 + 16 * 131072
    assert body_bytes(8192) < body_bytes(131072) <= body_bytes(2**30) == 64 * 2**20


@pytest.mark.parametrize("text", ['[1,2.5,{"a":"\\u00e9"}]', '{"a":[{}],"b":null}', '"x"', "-0.0", "[]", " [ 1 , true ] "])
def test_both_parsers_make_the_same_of_a_body(text: str) -> None:
    assert repr(parse_slowly(text)) == repr(parse_quickly(text))


STRING_PARTS = [
    "a",
    "é",
    "😀",
    '\\"',
    "\\\\",
    "\\n",
    "\\u00e9",
    "\\ud83d\\ude00",
    "\\ud83d",
    "\\ude00",
    "\\/",
    "x" * 20,
    "\\x",
    "\n",
    "\\u12",
]


@given(parts=st.lists(st.sampled_from(STRING_PARTS), max_size=12), end=st.sampled_from(['"', "", "\\"]), size=st.integers(12, 40))
def test_a_string_is_the_same_however_it_is_cut(parts: list[str], end: str, size: int) -> None:
    text = f'"{"".join(parts)}{end}'

    def parsed(parser: Callable[[str], Any]) -> object:
        try:
            return parser(text)
        except json.JSONDecodeError:
            return None

    with patch("service.http.strict_json._PIECE_CHARACTERS", size):
        assert parsed(parse_slowly) == parsed(parse_quickly)


@pytest.mark.parametrize("parser", [parse_quickly, parse_slowly])
@pytest.mark.parametrize(
    "text", ["1e999", "[-1E+400]", '{"x": {"y": 1e309}}', "1" * 400 + ".0", "NaN", '{"a":1,"a":2}', "[1,]", "[" * 100_000]
)
def test_both_parsers_refuse_the_same(parser: Callable[[str], Any], text: str) -> None:
    with pytest.raises(json.JSONDecodeError):
        parse(text.encode(), parser=parser)


@pytest.mark.parametrize("value", [[12345] * 300_000, 'a,{"' * 1_000_000], ids=["numbers", "a text of escapes"])
def test_other_threads_run_while_a_large_body_is_parsed(value: object) -> None:
    """The parser in C lets nobody in between its first byte and its last."""
    text, turns, slots, done = json.dumps(value), 0, 0, threading.Event()

    def other() -> None:
        nonlocal turns, slots
        last = time.perf_counter()
        while not done.is_set():
            now = time.perf_counter()
            slots += now > last + 1e-4
            turns, last = turns + 1, now

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        thread = threading.Thread(target=other)
        thread.start()
        while not turns:
            pass
        before = slots
        parse_slowly(text)
        during = slots - before
        done.set()
        thread.join()
    finally:
        sys.setswitchinterval(interval)
    assert during > 20, "the lock was let go of so many times"
