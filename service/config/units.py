"""Sizes and times as people write them: `512MiB`, `4GiB`, `1.5GB`, plain bytes; `7d`, `12h`, plain seconds."""

import re

from pydantic import ByteSize, TypeAdapter

SECONDS = {"": 1, "s": 1, "m": 60, "h": 3600, "d": 86400, "w": 7 * 86400}
MAX_TTL_SECONDS = 100 * 366 * 86400
"""A century; dates end with the year 9999."""
_SIZE = re.compile(r"\d{1,18}(?:\.\d{1,18})?\s*(?:(?:[kmgt]i?)?b)?", re.ASCII | re.IGNORECASE)
"""Asked before pydantic, which ignores whatever stands behind what it can read: `1,5GiB` would be one byte."""
_DURATION = re.compile(r"(\d+(?:\.\d+)?)\s*([a-zA-Z]*)", re.ASCII)
_BYTES = TypeAdapter(ByteSize)


def parse_size(text: str) -> int:
    """Bytes, at least 1. Raises `ValueError` with a message for the operator."""
    size = _BYTES.validate_python(text) if _SIZE.fullmatch(text.strip()) else 0
    if size < 1:
        raise ValueError(f"{text!r} is not a size above 0; write bytes, or a number with KiB, MiB, GiB, TiB, KB, MB, GB or TB")
    return int(size)


def parse_duration(text: str) -> float:
    """Seconds. Raises `ValueError` with a message for the operator."""
    found = _DURATION.fullmatch(text.strip())
    unit = SECONDS.get(found.group(2).lower()) if found else None
    if found is None or unit is None:
        raise ValueError(f"{text!r} is not a time; write seconds, or a number with s, m, h, d or w")
    return float(found.group(1)) * unit


def format_size(size: int) -> str:
    """The size in the largest binary unit that it fills."""
    return ByteSize(size).human_readable(separator=" ")
