"""What bodies, records, files and log lines have in common: JSON objects and times."""

from datetime import UTC, datetime
from typing import Any

Json = dict[str, Any]
"""A JSON object."""


def rfc3339(seconds: float) -> str:
    """The time of RFC 3339, in UTC with milliseconds: `2026-01-31T12:00:00.000Z`. `seconds` are since 1970."""
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
