"""Values of settings as operators write them, in flags, variables and files: each function is what pydantic runs before its own checks."""

import os
import re
from urllib.parse import urlsplit

from service.config.units import parse_duration, parse_size


def size_or_auto(value: object) -> object:
    if value == "auto":
        return None
    return parse_size(value) if isinstance(value, str) else value


def size_or_zero(value: object) -> object:
    return 0 if isinstance(value, str) and value.strip() == "0" else size_or_auto(value)


def size_or_none(value: object) -> object:
    return None if value == "none" else size_or_auto(value)


def duration(value: object) -> object:
    return parse_duration(value) if isinstance(value, str) else value


def number_or_auto(value: object) -> object:
    return None if value == "auto" else value


def _layer_id(text: object) -> object:
    stripped = text.strip() if isinstance(text, str) else text
    return stripped if stripped == "norm" or not isinstance(stripped, str) else int(stripped)


def layers(value: object) -> object:
    parts = value.split(",") if isinstance(value, str) else value
    if not isinstance(parts, list | tuple):
        return value
    try:
        return tuple(_layer_id(part) for part in parts)
    except ValueError:
        raise ValueError(f"{value!r} is not a comma-separated list of layer ids: integers or 'norm'") from None


def paths(value: object) -> object:
    return tuple(part for part in value.split(os.pathsep) if part) if isinstance(value, str) else value


_ORIGIN = re.compile(r"\*|[a-z][a-z0-9+.-]*://[^/?#@\s]+")
_HOST = re.compile(r"\*|(\*\.)?[A-Za-z0-9_-]+(\.[A-Za-z0-9_-]+)*|\[[0-9A-Fa-f:.]+\]")


def origins(value: object) -> object:
    return _comma_separated(value, _ORIGIN, "an origin such as https://example.org or https://example.org:8443")


def hosts(value: object) -> object:
    return _comma_separated(value, _HOST, "a host such as strata.example.org, *.example.org or [::1], without a port")


def _comma_separated(value: object, pattern: re.Pattern[str], description: str) -> object:
    """Commas stand between origins and hosts in the environment, since both can hold colons."""
    parts = [part for part in value.split(",") if part] if isinstance(value, str) else value
    if not isinstance(parts, list | tuple):
        return value
    for part in parts:
        if not pattern.fullmatch(str(part)):
            raise ValueError(f"{part!r} is not {description}")
    return tuple(parts)


def octal(value: object) -> object:
    if not isinstance(value, str):
        return value
    try:
        return int(value, 8)
    except ValueError:
        raise ValueError(f"{value!r} is not an octal number such as 022") from None


def path_map(value: object) -> object:
    entries = value.split(os.pathsep) if isinstance(value, str) else value
    if not isinstance(entries, list | tuple):
        return value
    return tuple(_path_pair(entry) for entry in entries if entry)


def _path_pair(entry: object) -> object:
    if not isinstance(entry, str):
        return entry
    client, separator, server = entry.partition("=")
    if not (separator and client.startswith("/") and server.startswith("/")):
        raise ValueError(f"{entry!r} is not FROM=TO with two absolute paths")
    return client, server


def http_url(text: str) -> str:
    """The text, where it is one. Raises `ValueError`."""
    try:
        parts = urlsplit(text)
        if parts.scheme in ("http", "https") and parts.hostname and (parts.port is None or parts.port):
            return text
    except ValueError:  # of a port that is none
        pass
    raise ValueError(f"{text!r} is not a URL such as http://127.0.0.1:4318")


def http_url_or_none(value: object) -> object:
    return http_url(value) if isinstance(value, str) else value
