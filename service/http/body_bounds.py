"""How much one body may hold, from the context length: its bytes, and what JSON makes objects of."""

import re
from dataclasses import dataclass, fields
from typing import Self

from service.errors import BadRequest
from service.http.limits import DEFAULT_LIMITS

MIB = 2**20
BASE_BYTES = 16 * MIB
BYTES_PER_TOKEN = 128
"""Sixteen prompts of full length, of eight bytes per token id or word."""
BASE_VALUES = MIB + 2**16
"""As many as client tensors may hold bytes (1 MiB, and 16 per token), and everything else."""
VALUES_PER_TOKEN = 16
BASE_CONTAINERS = 2**16
CONTAINERS_PER_TOKEN = 1
"""A pair of positions for every second token, for example."""
NAMES = 2**17
"""A bias for each token of most vocabularies, for example."""
PIECE_BYTES = MIB
_STRING = re.compile(rb'"[^"]*"?')
"""Where no quotes are escaped."""


@dataclass(frozen=True)
class BodyBounds:
    """Bounds on one JSON body, each a count."""

    values: int
    """Numbers, texts, and so on: commas, and one for each list and object."""
    containers: int
    """Lists and objects."""
    names: int
    """Names of fields."""

    @classmethod
    def of_context(cls, tokens: int) -> Self:
        """`tokens`: the context length."""
        return cls(BASE_VALUES + VALUES_PER_TOKEN * tokens, BASE_CONTAINERS + CONTAINERS_PER_TOKEN * tokens, NAMES)


def body_bytes(tokens: int, most: int = DEFAULT_LIMITS.body_bytes) -> int:
    """The largest body, for a context length."""
    return min(BASE_BYTES + BYTES_PER_TOKEN * tokens, most)


def check_counts(body: bytes, bounds: BodyBounds) -> None:
    """Raises `BadRequest` for a body that holds more than that. Makes no objects of it, and looks at it piece by piece."""
    counts = _counts(body)
    if not _exceeded(counts, bounds):
        return
    counts = _counts(_without_strings(body))
    name = _exceeded(counts, bounds)
    if not name:
        return
    raise BadRequest(
        f"the body holds {getattr(counts, name)} {name}, at most {getattr(bounds, name)} are allowed: send several requests",
        code="body_too_complex",
    )


def _without_strings(body: bytes) -> bytes:
    """The body without what stands in texts, which counts for nothing."""
    plain = body.replace(b"\\\\", b"").replace(b'\\"', b"")
    pieces, inside = [], False
    for start in range(0, len(plain), PIECE_BYTES):
        piece = (b'"' if inside else b"") + plain[start : start + PIECE_BYTES]
        inside = piece.count(b'"') % 2 == 1
        pieces.append(_STRING.sub(b"", piece))
    return b"".join(pieces)


def _exceeded(counts: BodyBounds, bounds: BodyBounds) -> str:
    """The name of the first bound that is exceeded; empty where none is."""
    names = (each.name for each in fields(BodyBounds))
    return next((name for name in names if getattr(counts, name) > getattr(bounds, name)), "")


def _counts(text: bytes) -> BodyBounds:
    commas = colons = opened = 0
    for start in range(0, len(text), PIECE_BYTES):
        piece = text[start : start + PIECE_BYTES]
        commas += piece.count(b",")
        colons += piece.count(b":")
        opened += piece.count(b"[") + piece.count(b"{")
    return BodyBounds(commas + opened, opened, colons)
