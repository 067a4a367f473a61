"""The fewest tokens that a text can have, known from its characters alone: before minutes go into tokenizing what is refused anyway."""

import json
from dataclasses import dataclass
from typing import Any

from tokenizers import Tokenizer as Backend
from tokenizers import models

from service.text.token_bytes import byte_letters

MOST_COMPOSED = 4
"""Characters that Unicode's composition (NFC, NFKC) can make one of: Greek letters with three marks."""
PIECE_CHARACTERS = 2**16
_KEPT = frozenset({"NFD", "NFKD", "Lowercase", "Prepend", "ByteLevel", "Digits", "Metaspace", "UnicodeScripts"})
"""Steps that drop no character and make none of several."""
_COMPOSING = frozenset({"NFC", "NFKC"})
_ALL_BYTES = tuple(f"<0x{byte:02X}>" for byte in range(256))


@dataclass(frozen=True)
class TokenBound:
    """What is known of a tokenizer."""

    most_characters: int | None
    """That one token stands for; None where there is no bound: spaces that are dropped, a run of unknown characters that is one token."""
    drops_spaces: bool = False
    """Tokens that take the spaces around them with them: only other characters count."""
    dropped: str = ""
    """Characters that the vocabulary has no piece for, and that vanish therefore."""

    def least_tokens(self, text: str) -> int:
        """No more than the text really has, without what is put around it."""
        if self.most_characters is None:
            return 0
        characters = _without_spaces(text) if self.drops_spaces else len(text)
        characters -= sum(map(text.count, self.dropped))
        return -(-characters // self.most_characters)


def token_bound(backend: Backend) -> TokenBound:
    """Of a byte-level or byte-fallback BPE, or one that has a token for each unknown character; nothing is said of others."""
    vocab = backend.get_vocab(with_added_tokens=True)
    steps = [*_steps(backend.normalizer), *_steps(backend.pre_tokenizer)]
    dropped = _dropped(backend, {step["type"] for step in steps})
    if not vocab or dropped is None or not all(map(_keeps_characters, steps)):
        return TokenBound(None)
    composed = MOST_COMPOSED if any(step["type"] in _COMPOSING for step in steps) else 1
    added = backend.get_added_tokens_decoder().values()
    return TokenBound(composed * max(map(len, vocab)), any(token.lstrip or token.rstrip for token in added), dropped)


def _steps(component: Any) -> list[dict[str, Any]]:  # noqa: ANN401 - a normalizer or a pre-tokenizer
    """As tokenizer.json has them, sequences written out."""
    if component is None:
        return []
    rest, steps = [json.loads(component.__getstate__())], []
    while rest:
        step = rest.pop(0)
        if step["type"] == "Sequence":
            rest = [*step.get("normalizers", step.get("pretokenizers", ())), *rest]
        else:
            steps.append(step)
    return steps


def _keeps_characters(step: dict[str, Any]) -> bool:
    kind = step["type"]
    if kind == "Replace":
        return "String" in step["pattern"] and len(step["content"]) >= len(step["pattern"]["String"])
    if kind in ("Split", "Punctuation"):
        return bool(step["behavior"] != "Removed")
    return kind in _KEPT or kind in _COMPOSING


def _dropped(backend: Backend, kinds: set[str]) -> str | None:
    """Characters that no token stands for; None where there is no saying, or where one token can stand for any number of characters."""
    model = backend.model
    if not isinstance(model, models.BPE):
        return None
    if "ByteLevel" in kinds:
        missing = [byte for byte, letter in enumerate(byte_letters()) if model.token_to_id(letter) is None]
        # What isn't ASCII has a byte of these.
        return None if any(0x80 <= byte < 0xC0 for byte in missing) else "".join(chr(byte) for byte in missing if byte < 0x80)
    has_bytes = model.byte_fallback and all(model.token_to_id(piece) is not None for piece in _ALL_BYTES)
    return "" if has_bytes or (model.unk_token is not None and not model.fuse_unk) else None


def _without_spaces(text: str) -> int:
    pieces = (text[start : start + PIECE_CHARACTERS] for start in range(0, len(text), PIECE_CHARACTERS))
    return sum(len(word) for piece in pieces for word in piece.split())
