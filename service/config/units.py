"""Sizes and times as people write them: `512MiB`, `4GiB`, `1.5GB`, plain bytes; `7d`, `12h`, plain seconds."""

import re

UNITS = {
    "": 1,
    "b": 1,
    "kib": 2**10,
    "mib": 2**20,
    "gib": 2**30,
    "tib": 2**40,
    "kb": 10**3,
    "mb": 10**6,
    "gb": 10**9,
    "tb": 10**12,
}
SECONDS = {"": 1, "s": 1, "m": 60, "h": 3600, "d": 86400, "w": 7 * 86400}
MAX_TTL_SECONDS = 100 * 366 * 86400
"""A century; dates end with the year 9999."""
PATTERN = re.compile(r"(\d+(?:\.\d+)?)\s*([a-zA-Z]*)")


def parse_size(text: str) -> int:
    """Bytes, at least 1. Raises `ValueError` with a message for the operator."""
    found = PATTERN.fullmatch(text.strip())
    unit = UNITS.get(found.group(2).lower()) if found else None
    size = int(float(found.group(1)) * unit) if found and unit else 0
    if size < 1:
        raise ValueError(f"{text!r} is not a size above 0; write bytes, or a number with KiB, MiB, GiB, TiB, KB, MB, GB or TB")
    return size


def parse_duration(text: str) -> float:
    """Seconds. Raises `ValueError` with a message for the operator."""
    found = PATTERN.fullmatch(text.strip())
    unit = SECONDS.get(found.group(2).lower()) if found else None
    if found is None or unit is None:
        raise ValueError(f"{text!r} is not a time; write seconds, or a number with s, m, h, d or w")
    return float(found.group(1)) * unit


def format_size(size: int) -> str:
    """The size in the largest binary unit that it fills."""
    value = float(size)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1024:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} TiB"
