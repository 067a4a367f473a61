"""The text of one choice: stop strings, what may already be sent, and where each token's text begins."""

from collections.abc import Sequence

from engine.errors import InvalidRequest
from service.text.decoding import REPLACEMENT, IncrementalDecoder
from service.text.tokenizer import Tokenizer


class StopStrings:
    """Tells the engine when a text has come to one of its stop strings (an `engine.request.StopChecker`).

    Used by the engine's thread only. The text is that of the output alone, special tokens left out where they are skipped.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        stop: Sequence[str],
        skip_special_tokens: bool = True,
        context: Sequence[int] = (),
        min_tokens: int = 0,
    ) -> None:
        """`min_tokens`: stop strings that end within the text of so many tokens don't count."""
        self._decoder = IncrementalDecoder(tokenizer, skip_special_tokens, context)
        self._stop = _checked(stop)
        self._reach = max(map(len, self._stop), default=1) - 1
        self._ignored = min_tokens
        self._behind = 0  # characters of the tail, below which no stop string may end
        self._tail = ""

    def completes_stop(self, token_id: int) -> bool:
        """Whether the text that ends with this token contains a stop string. Called once per token, in order."""
        text = self._tail + self._decoder.push((token_id,))
        pending = self._decoder.pending()
        # An incomplete character isn't text yet, however it would be shown if the text ended here.
        seen = text if REPLACEMENT in pending else text + pending
        if self._ignored:
            self._ignored -= 1
            self._behind = len(seen)
        self._tail = text[-self._reach :] if self._reach else ""
        found = first_stop(seen, self._stop, self._behind)
        self._behind = max(0, self._behind - len(text) + len(self._tail))
        return found is not None


class TextStream:
    """Turns the tokens of one choice into the text to send.

    The text ends before the stop string that is complete first (of two complete at the same character, the longer), or behind it with
    `include_stop`. Stop strings that end within the text of the first `min_tokens` tokens don't count. What could become a stop string is
    held back until that is known, so nothing sent is ever taken back.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        stop: Sequence[str] = (),
        include_stop: bool = False,
        skip_special_tokens: bool = True,
        context: Sequence[int] = (),
        min_tokens: int = 0,
    ) -> None:
        self._decoder = IncrementalDecoder(tokenizer, skip_special_tokens, context)
        self._stop = _checked(stop)
        self._ignored = min_tokens
        self._behind = 0  # characters from the start of the text, below which no stop string may end
        self._longest = max(map(len, self._stop), default=0)
        self._include_stop = include_stop
        self._held = ""  # decoded, not sent
        self._sent = 0  # characters
        self._decoded = 0  # characters
        self._offsets: list[int] = []
        self.matched: str | None = None
        """The stop string that ended the text."""

    @property
    def length(self) -> int:
        """Characters sent so far."""
        return self._sent

    def push(self, token_ids: Sequence[int], finished: bool = False, stop_token_id: int | None = None) -> str:
        """The text that can be sent now that these tokens have come; after the last ones (`finished`) all of it.

        `stop_token_id`: the last of these tokens ended the text by its id. It has no text of its own, unless `include_stop`.
        """
        silent = stop_token_id is not None and not self._include_stop
        spoken = token_ids[:-1] if silent and token_ids else token_ids
        for token_id in spoken:
            self._offsets.append(self._next_offset())
            self._take_token(self._decoder.push((token_id,)))
        self._offsets += [self._next_offset()] * (len(token_ids) - len(spoken))
        if finished:
            self._take(self._decoder.flush())
        return self._send(finished)

    def offsets(self, start: int = 0) -> list[int]:
        """Where in the text each token's text begins, in characters, for all tokens from number `start` on.

        A token within a character begins where the character does; tokens behind a stop string begin at the end of the text.
        """
        end = self._decoded if self.matched is None else self._sent + len(self._held)
        return [min(offset, end) for offset in self._offsets[start:]]

    def _next_offset(self) -> int:
        return max(self._decoded + self._num_pending(), self._offsets[-1] if self._offsets else 0)

    def _num_pending(self) -> int:
        """Characters that are complete and may still change."""
        pending = self._decoder.pending()
        return 0 if REPLACEMENT in pending else len(pending)

    def _take_token(self, text: str) -> None:
        if self._ignored:
            self._ignored -= 1
            self._behind = self._decoded + len(text) + self._num_pending()
        self._take(text)

    def _take(self, text: str) -> None:
        self._decoded += len(text)
        if self.matched is not None or not text:
            return
        # Anything of a stop string that came before has been held back, so looking there is enough.
        self._held += text
        found = first_stop(self._held, self._stop, self._behind - (self._decoded - len(self._held)))
        if found is not None:
            start, self.matched = found
            self._held = self._held[: start + len(self.matched) * self._include_stop]

    def _send(self, finished: bool) -> str:
        keep = 0 if finished or self.matched is not None else self._possible_start()
        delta, self._held = self._held[: len(self._held) - keep], self._held[len(self._held) - keep :]
        self._sent += len(delta)
        return delta

    def _possible_start(self) -> int:
        """Length of the longest end of the held text with which a stop string begins."""
        for length in range(min(self._longest - 1, len(self._held)), 0, -1):
            if self._held.endswith(tuple(stop[:length] for stop in self._stop if len(stop) > length)):
                return length
        return 0


def _checked(stop: Sequence[str]) -> tuple[str, ...]:
    if "" in stop:
        raise InvalidRequest("stop must not hold an empty string", "stop")
    return tuple(stop)


def first_stop(text: str, stop: Sequence[str], behind: int = 0) -> tuple[int, str] | None:
    """Start and value of the stop string whose end comes first; of those that end together, the longest.

    Only those count that end behind the first `behind` characters. This doesn't depend on how the text was cut into tokens, which the
    leftmost start would.
    """
    found = [(text.find(candidate, max(0, behind - len(candidate) + 1)), candidate) for candidate in stop]
    ends = [(start + len(candidate), start, candidate) for start, candidate in found if start >= 0]
    if not ends:
        return None
    _, start, candidate = min(ends)
    return start, candidate
