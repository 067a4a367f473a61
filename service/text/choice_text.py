"""What a choice says in text: its pieces as they come, where tokens begin, and the log-probabilities of the OpenAI API."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from engine.request import TokenLogprobs
from service.text.stream import TextStream
from service.text.tokenizer import Tokenizer

LOWEST_LOGPROB = -9999.0
"""JSON has no infinity; the OpenAI API writes this instead."""
PromptReport = list[dict[str, dict[str, Any]] | None]
"""vLLM's `prompt_logprobs`: None for the first token, then for each the tokens that were scored there, by id."""


class ChoiceText:
    """The text of one choice. Without a tokenizer the text is empty and tokens are shown as `token_id:…`."""

    def __init__(self, stream: TextStream | None) -> None:
        """`stream`: None without a tokenizer."""
        self._stream = stream

    @property
    def matched_stop(self) -> str | None:
        """The stop string that ended the text."""
        return None if self._stream is None else self._stream.matched

    def push(self, token_ids: Sequence[int], finished: bool, stop_token_id: int | None) -> str:
        return "" if self._stream is None else self._stream.push(token_ids, finished, stop_token_id)

    def offsets(self, start: int, count: int) -> list[int]:
        """Where tokens number `start` to `start + count - 1` begin in the text, in characters."""
        return [0] * count if self._stream is None else self._stream.offsets(start)[:count]


@dataclass(frozen=True)
class Echo:
    """What stands before a choice's text."""

    text: str = ""
    offsets: tuple[int, ...] | None = ()
    """Where the prompt's tokens begin in it; None where they aren't reported."""


def echo_of(tokenizer: Tokenizer | None, token_ids: Sequence[int], text: str | None) -> Echo:
    """The prompt's text with its tokens' offsets: the client's own text, or without one what its tokens say, special tokens included."""
    if tokenizer is None:
        return Echo("", (0,) * len(token_ids))
    for skip in (False,) if text is None else (True, False):
        echo = _decoded(tokenizer, token_ids, skip)
        if text is None or echo.text == text:
            return echo
    assert text is not None
    return _own_text(tokenizer, token_ids, text)


def _decoded(tokenizer: Tokenizer, token_ids: Sequence[int], skip_special_tokens: bool) -> Echo:
    stream = TextStream(tokenizer, skip_special_tokens=skip_special_tokens)
    return Echo(stream.push(token_ids, finished=True), tuple(stream.offsets()))


def _own_text(tokenizer: Tokenizer, token_ids: Sequence[int], text: str) -> Echo:
    """A text that spells special tokens out: those that the tokenizer has put around it have no part in it."""
    bare = tokenizer.encode(text, add_special_tokens=False)
    before = next((at for at in range(len(token_ids) - len(bare) + 1) if list(token_ids[at : at + len(bare)]) == bare), 0)
    behind = max(0, len(token_ids) - before - len(bare))
    offsets = _decoded(tokenizer, token_ids[before : len(token_ids) - behind], skip_special_tokens=False).offsets or ()
    places = (*(0,) * before, *offsets, *(len(text),) * behind)
    return Echo(text, tuple(min(place, len(text)) for place in places))


@dataclass(frozen=True)
class TokenNames:
    """How reports name tokens: by their text or, without a tokenizer and on request, as `token_id:…`."""

    tokenizer: Tokenizer | None
    as_ids: bool = False

    def name(self, token_id: int) -> str:
        return f"token_id:{token_id}" if self.as_ids or self.tokenizer is None else self.tokenizer.token_text(token_id)

    def raw_bytes(self, token_id: int) -> list[int]:
        return [] if self.tokenizer is None else list(self.tokenizer.token_bytes(token_id))

    def text(self, token_id: int) -> str:
        return "" if self.tokenizer is None else self.tokenizer.token_text(token_id)


LogprobsReport = Callable[[TokenNames, Sequence[int], Iterable[TokenLogprobs | None], Sequence[int]], dict[str, Any]]
"""From token ids, their scores and where their text begins to a report; every value of it is a list, so that reports can be joined."""


def logprobs_object(
    names: TokenNames, token_ids: Sequence[int], scores: Iterable[TokenLogprobs | None], offsets: Sequence[int]
) -> dict[str, Any]:
    """The `logprobs` of a completion choice. The sampled token is among `top_logprobs` whether or not it is one of the likeliest."""
    logprobs: list[float | None] = []
    top: list[dict[str, float] | None] = []
    for score in scores:  # read once: those of a long prompt are made one by one
        logprobs.append(None if score is None else _finite(score.logprob))
        top.append(None if score is None else _top(names, score))
    tokens = [names.name(token_id) for token_id in token_ids]
    return {"tokens": tokens, "token_logprobs": logprobs, "top_logprobs": top, "text_offset": list(offsets)}


def chat_logprobs(
    names: TokenNames, token_ids: Sequence[int], scores: Iterable[TokenLogprobs | None], offsets: Sequence[int]
) -> dict[str, Any]:
    """The `logprobs` of a chat completion's choice: with each token its bytes, and the likeliest tokens whether or not it is among them."""
    return {"content": [_scored(names, score) for score in scores if score is not None]}


def prompt_report(names: TokenNames, scores: Iterable[TokenLogprobs | None], top: int) -> PromptReport:
    """The prompt's own tokens and at each place the `top` likeliest ones, with their ranks."""
    return [None if score is None else _ranked(names, score, top) for score in scores]


def with_top(scores: Iterable[TokenLogprobs | None], top: int) -> Iterable[TokenLogprobs | None]:
    """The same scores with only so many of the likeliest tokens."""
    for score in scores:
        yield score if score is None else TokenLogprobs(score.token_id, score.logprob, score.rank, score.top[:top])


def _ranked(names: TokenNames, score: TokenLogprobs, top: int) -> dict[str, dict[str, Any]]:
    likeliest = [(token_id, logprob, place + 1) for place, (token_id, logprob) in enumerate(score.top[:top])]
    return {
        str(token_id): {"logprob": _finite(logprob), "rank": rank, "decoded_token": names.text(token_id)}
        for token_id, logprob, rank in ((score.token_id, score.logprob, score.rank), *likeliest)
    }


def _scored(names: TokenNames, score: TokenLogprobs) -> dict[str, Any]:
    top = [_token(names, token_id, logprob) for token_id, logprob in score.top]
    return _token(names, score.token_id, score.logprob) | {"top_logprobs": top}


def _token(names: TokenNames, token_id: int, logprob: float) -> dict[str, Any]:
    return {"token": names.name(token_id), "logprob": _finite(logprob), "bytes": names.raw_bytes(token_id)}


def _top(names: TokenNames, score: TokenLogprobs) -> dict[str, float]:
    top: dict[str, float] = {}
    for token_id, logprob in (*score.top, (score.token_id, score.logprob)):
        # Two tokens can have the same text; the likelier one comes first.
        top.setdefault(names.name(token_id), _finite(logprob))
    return top


def _finite(logprob: float) -> float:
    return max(logprob, LOWEST_LOGPROB)
