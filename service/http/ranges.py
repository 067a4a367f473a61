"""Conditional requests and byte ranges (RFC 9110, sections 13 and 14) for a file with a strong ETag."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC
from email.utils import formatdate, parsedate_to_datetime

# Without backtracking, so that a header of spaces costs no time.
_RANGE = re.compile(r"\s*+(\d*+)\s*+-\s*+(\d*+)\s*+", re.ASCII)
_TAG = re.compile(r'(?P<weak>W/)?(?P<tag>"[\x21\x23-\x7e\x80-\xff]*")\s*(?:,|$)')
_MAX_DIGITS = 30
"""Of a number in a range; no file is that long, and Python refuses to read numbers of any length."""


@dataclass(frozen=True)
class Validators:
    """What tells one state of a file from another."""

    etag: str
    """Strong, with its quotes."""
    modified: int
    """Seconds since 1970."""

    @property
    def last_modified(self) -> str:
        return formatdate(self.modified, usegmt=True)


@dataclass(frozen=True)
class Span:
    """Bytes `start` to `end - 1`."""

    start: int
    end: int


class Unsatisfiable(Exception):
    """A range that has no byte in the file."""


def failed_precondition(headers: Mapping[str, str], now: Validators) -> int | None:
    """412 or 304 where a condition of the request says so, in the order of RFC 9110 section 13.2.2; None: go on."""
    if "if-match" in headers:
        if not _matches(headers["if-match"], now.etag, weakly=False):
            return 412
    elif "if-unmodified-since" in headers:
        date = _date(headers["if-unmodified-since"])
        if date is not None and now.modified > date:
            return 412
    if "if-none-match" in headers:
        return 304 if _matches(headers["if-none-match"], now.etag, weakly=True) else None
    date = _date(headers.get("if-modified-since", ""))
    return 304 if date is not None and now.modified <= date else None


def requested_span(headers: Mapping[str, str], size: int, now: Validators) -> Span | None:
    """The one range asked for. None, for the whole file: no range, several, one that is malformed, or one of another state of the file.

    Raises `Unsatisfiable`.
    """
    unit, separator, text = headers.get("range", "").partition("=")
    found = _RANGE.fullmatch(text)
    if unit.strip().lower() != "bytes" or not separator or found is None or not _is_current(headers.get("if-range"), now):
        return None
    first, last = found.groups()
    if max(len(first), len(last)) > _MAX_DIGITS or not (first or last) or (first and last and int(last) < int(first)):
        return None
    start = int(first) if first else max(0, size - int(last))
    end = min(size, int(last) + 1) if first and last else size
    if start >= end:
        raise Unsatisfiable
    return Span(start, end)


def _matches(header: str, etag: str, *, weakly: bool) -> bool:
    if header.strip() == "*":
        return True
    return any(found["tag"] == etag and (weakly or not found["weak"]) for found in _TAG.finditer(header))


def _is_current(if_range: str | None, now: Validators) -> bool:
    """An ETag has to match strongly, a date exactly."""
    if if_range is None:
        return True
    return if_range.strip() == now.etag or (not if_range.strip().startswith(('"', "W/")) and _date(if_range) == now.modified)


def _date(text: str) -> int | None:
    """An HTTP date in seconds since 1970; None for anything else, which is ignored."""
    try:
        date = parsedate_to_datetime(text)
        return int((date if date.tzinfo else date.replace(tzinfo=UTC)).timestamp())
    except (ValueError, TypeError, IndexError, OverflowError):
        return None
