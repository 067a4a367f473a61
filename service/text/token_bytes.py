"""How the pieces of a vocabulary spell bytes, for the two kinds of tokenizers that spell them: byte-level and byte-fallback BPE."""

import json
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal

from tokenizers import Tokenizer as Backend

BYTE_LEVEL: Literal["byte_level"] = "byte_level"
BYTE_FALLBACK: Literal["byte_fallback"] = "byte_fallback"
OTHER: Literal["other"] = "other"
SPACE = "▁"
_HEX = frozenset("0123456789abcdefABCDEF")


@dataclass(frozen=True)
class DecoderKind:
    """What the decoder of a tokenizer.json does."""

    name: Literal["byte_level", "byte_fallback", "other"]
    strip: int = 0
    """How many spaces it takes off the start of a text (byte_fallback only)."""


def decoder_kind(backend: Backend) -> DecoderKind:
    """`other` for everything whose rules aren't known exactly: such text is decoded by the library itself."""
    # The state that pickling uses is the decoder's JSON; `backend.to_str` would write the whole vocabulary too.
    decoder = {} if backend.decoder is None else json.loads(backend.decoder.__getstate__())
    steps: list[dict[str, Any]] = decoder["decoders"] if decoder.get("type") == "Sequence" else [decoder]
    kinds = [step.get("type") for step in steps]
    if kinds == ["ByteLevel"]:
        return DecoderKind(BYTE_LEVEL)
    if kinds[:3] == ["Replace", "ByteFallback", "Fuse"] and _unescapes_space(steps[0]):
        if len(steps) == 3:
            return DecoderKind(BYTE_FALLBACK)
        if kinds[3:] == ["Strip"] and steps[3]["content"] == " " and steps[3]["stop"] == 0:
            return DecoderKind(BYTE_FALLBACK, strip=steps[3]["start"])
    return DecoderKind(OTHER)


def _unescapes_space(step: dict[str, Any]) -> bool:
    return step.get("pattern") == {"String": SPACE} and step.get("content") == " "


def piece_bytes(kind: DecoderKind, piece: str) -> bytes:
    """What a piece of the vocabulary contributes to a text."""
    if kind.name == BYTE_LEVEL:
        return byte_level_bytes(piece)
    byte = fallback_byte(piece)
    return piece.replace(SPACE, " ").encode("utf-8") if byte is None else bytes([byte])


def byte_level_bytes(piece: str) -> bytes:
    """A piece of a byte-level vocabulary; one with a character outside the byte alphabet stands for itself."""
    table = _byte_alphabet()
    try:
        return bytes(table[character] for character in piece)
    except KeyError:
        return piece.encode("utf-8")


def byte_letters() -> tuple[str, ...]:
    """The byte alphabet's letter for each byte."""
    return tuple(sorted(_byte_alphabet(), key=_byte_alphabet().__getitem__))


def fallback_byte(piece: str) -> int | None:
    """The byte that a piece like `<0xE2>` stands for."""
    if len(piece) == 6 and piece.startswith("<0x") and piece.endswith(">") and _HEX.issuperset(piece[3:5]):
        return int(piece[3:5], 16)
    return None


@cache
def _byte_alphabet() -> dict[str, int]:
    """GPT-2's alphabet: printable Latin-1 characters stand for themselves, the other bytes for characters from U+0100 on.

    Source: `bytes_to_unicode` in https://github.com/openai/gpt-2/blob/master/src/encoder.py.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + index): byte for index, byte in enumerate(others)}
