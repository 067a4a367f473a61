"""Text out of tokens as they come, without ever splitting a character.

`tokenizers.decoders.DecodeStream` is not used: it doesn't give the end of a text, nor what is held back, which offsets and stop strings
need; and it gives other text, or fails, where byte tokens are malformed (`TestDecodeStream`).
"""

import codecs
from collections import deque
from collections.abc import Sequence
from typing import Protocol

from service.text.token_bytes import BYTE_FALLBACK, BYTE_LEVEL, SPACE, fallback_byte
from service.text.tokenizer import Tokenizer

REPLACEMENT = "\ufffd"
CONTEXT_TOKENS = 8
"""How many tokens before a text are kept where their text decides how it begins."""
LONGEST_CHARACTER = 16
"""Tokens that may be held back for one character before they are given up as malformed (decoders of unknown kind only)."""


class _Decoder(Protocol):
    """One way of decoding. Special tokens that are to be skipped never reach it."""

    def push(self, token_id: int) -> str: ...

    def pending(self) -> str: ...

    def flush(self) -> str: ...


class IncrementalDecoder:
    """Decodes one sequence of tokens piece by piece.

    All deltas and the flush joined are what `Tokenizer.decode` makes of all the tokens, whatever the pieces were. A token costs the same
    however long the text is. `context` are the tokens before the text, where there are any: some tokenizers drop a space at the very
    start of a text, and only there.
    """

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool = True, context: Sequence[int] = ()) -> None:
        self._skipped = tokenizer.special_ids if skip_special_tokens else frozenset()
        # Text of the context is not repeated, so only its last tokens can matter.
        before = [token_id for token_id in context[-8 * CONTEXT_TOKENS :] if token_id not in self._skipped][-CONTEXT_TOKENS:]
        self._decoder = _decoder_for(tokenizer, before)

    def push(self, token_ids: Sequence[int]) -> str:
        """The text that these tokens complete; what may still change is held back."""
        return "".join(self._decoder.push(token_id) for token_id in token_ids if token_id not in self._skipped)

    def pending(self) -> str:
        """The text held back, as `flush` would give it now."""
        return self._decoder.pending()

    def flush(self) -> str:
        """The end of the text: what was held back, with replacement characters for incomplete ones. Nothing may be pushed after it."""
        return self._decoder.flush()


def _decoder_for(tokenizer: Tokenizer, before: Sequence[int]) -> _Decoder:
    if tokenizer.decoder_kind.name == BYTE_LEVEL:
        return _ByteLevelDecoder(tokenizer)
    if tokenizer.decoder_kind.name == BYTE_FALLBACK:
        return _ByteFallbackDecoder(tokenizer, 0 if before else tokenizer.decoder_kind.strip)
    return _WindowDecoder(tokenizer, before)


class _ByteLevelDecoder:
    """Every token is some bytes, and the text is their UTF-8 decoding with replacement of what is malformed."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, token_id: int) -> str:
        return self._utf8.decode(self._tokenizer.token_bytes(token_id))

    def pending(self) -> str:
        held, _ = self._utf8.getstate()
        return held.decode("utf-8", errors="replace")

    def flush(self) -> str:
        return self._utf8.decode(b"", final=True)


class _ByteFallbackDecoder:
    """SentencePiece with byte tokens.

    A run of byte tokens is text if all of it is valid UTF-8, else one replacement character per byte (the rule of the `tokenizers`
    library), so a run is held back until the next other token.
    """

    def __init__(self, tokenizer: Tokenizer, strip: int) -> None:
        self._tokenizer = tokenizer
        self._strip = strip
        self._run = bytearray()

    def push(self, token_id: int) -> str:
        piece = self._tokenizer.token_piece(token_id)
        if piece is None:
            return ""
        byte = fallback_byte(piece)
        if byte is not None:
            self._run.append(byte)
            return ""
        return self._start_stripped(self._take_run() + piece.replace(SPACE, " "))

    def pending(self) -> str:
        text = self._decoded_run()
        return text[self._leading(text) :]

    def flush(self) -> str:
        return self._start_stripped(self._take_run())

    def _decoded_run(self) -> str:
        try:
            return self._run.decode("utf-8")
        except UnicodeDecodeError:
            return REPLACEMENT * len(self._run)

    def _take_run(self) -> str:
        text = self._decoded_run()
        self._run.clear()
        return text

    def _leading(self, text: str) -> int:
        """How many spaces go, of those that this text begins with."""
        return min(self._strip, len(text) - len(text.lstrip(" ")))

    def _start_stripped(self, text: str) -> str:
        if not self._strip:
            return text
        dropped = self._leading(text)
        # Text of spaces alone leaves the rest to be dropped from what follows.
        self._strip = self._strip - dropped if dropped == len(text) else 0
        return text[dropped:]


class _WindowDecoder:
    """Any other tokenizer: the library decodes a short window of tokens with and without the new ones."""

    def __init__(self, tokenizer: Tokenizer, before: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        self._before: deque[int] = deque(before, maxlen=CONTEXT_TOKENS)
        self._new: list[int] = []

    def push(self, token_id: int) -> str:
        self._new.append(token_id)
        delta = self.pending()
        if not delta or (delta.endswith(REPLACEMENT) and len(self._new) < LONGEST_CHARACTER):
            return ""
        self._advance()
        return delta

    def pending(self) -> str:
        before = list(self._before)
        return self._decode(before + self._new)[len(self._decode(before)) :]

    def flush(self) -> str:
        delta = self.pending()
        self._advance()
        return delta

    def _advance(self) -> None:
        self._before.extend(self._new)
        self._new.clear()

    def _decode(self, token_ids: list[int]) -> str:
        return self._tokenizer.decode(token_ids, skip_special_tokens=False)
