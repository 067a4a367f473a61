"""Conditions and ranges of requests, whatever clients send."""

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from service.http.ranges import Span, Unsatisfiable, Validators, failed_precondition, requested_span

NOW = Validators('"tag"', 1_000_000_000)
DATES = ["Sun, 09 Sep 2001 01:46:40 GMT", "Sun, 09 Sep 2001 01:46:39 GMT", "Sun, 09 Sep 2001 01:46:41 GMT"]
"""That of `NOW`, a second before it, a second after it."""

texts = st.one_of(
    st.text(st.characters(max_codepoint=255), max_size=60),
    st.sampled_from([NOW.etag, f"W/{NOW.etag}", '"other"', "*", f'"a", {NOW.etag}', *DATES]),
    st.builds(
        "bytes={}{}{}".format, st.integers(0, 200) | st.just(""), st.sampled_from(["-", " - ", "", ","]), st.integers(0, 200) | st.just("")
    ),
)
headers = st.dictionaries(
    st.sampled_from(["if-match", "if-none-match", "if-modified-since", "if-unmodified-since", "range", "if-range"]), texts
)


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(headers, st.integers(1, 150))
def test_whatever_is_asked_the_answer_is_a_part_of_the_file_or_a_refusal(asked: dict[str, str], size: int) -> None:
    assert failed_precondition(asked, NOW) in (None, 304, 412)
    try:
        span = requested_span(asked, size, NOW)
    except Unsatisfiable:
        span = None
    assert span is None or 0 <= span.start < span.end <= size


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.integers(0, 120), st.integers(0, 120), st.integers(1, 100))
def test_a_range_selects_what_a_slice_does(first: int, last: int, size: int) -> None:
    data = bytes(size)
    for text, expected in ((f"bytes={first}-{last}", data[first : last + 1]), (f"bytes={first}-", data[first:])):
        if first > last and text != f"bytes={first}-":
            assert requested_span({"range": text}, size, NOW) is None
        elif expected:
            assert requested_span({"range": text}, size, NOW) == Span(first, first + len(expected))
        else:
            with pytest.raises(Unsatisfiable):
                requested_span({"range": text}, size, NOW)


@pytest.mark.parametrize(
    ("asked", "refusal"),
    [
        ({"if-match": NOW.etag}, None),
        ({"if-match": f"W/{NOW.etag}"}, 412),
        ({"if-match": "tag"}, 412),
        ({"if-unmodified-since": DATES[0]}, None),
        ({"if-unmodified-since": DATES[1]}, 412),
        ({"if-unmodified-since": DATES[1], "if-match": "*"}, None),
        ({"if-none-match": f"W/{NOW.etag}"}, 304),
        ({"if-none-match": '"tagg"'}, None),
        ({"if-none-match": '"other"', "if-modified-since": DATES[0]}, None),
        ({"if-modified-since": DATES[0]}, 304),
        ({"if-modified-since": DATES[1]}, None),
        ({"if-modified-since": DATES[2]}, 304),
        ({"if-match": '"other"', "if-none-match": NOW.etag}, 412),
    ],
)
def test_conditions_are_taken_in_the_order_of_the_standard(asked: dict[str, str], refusal: int | None) -> None:
    assert failed_precondition(asked, NOW) == refusal


@pytest.mark.parametrize("length", [60_000])
def test_a_long_header_of_nothing_is_read_in_one_go(length: int) -> None:
    for text in (" " * length, '"' * length, '" ' * (length // 2), "W/" * (length // 2)):
        assert failed_precondition({"if-none-match": text}, NOW) is None
        assert requested_span({"range": f"bytes={text}", "if-range": NOW.etag}, 10, NOW) is None
        assert requested_span({"range": "bytes=0-1", "if-range": text}, 10, NOW) is None
        assert failed_precondition({"if-modified-since": text}, NOW) is None
