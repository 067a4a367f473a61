"""What a choice says in text: its pieces as they come, where tokens begin, and the log-probabilities of the OpenAI API."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from engine.request import TokenLogprobs
from service.text.stream import TextStream
from service.text.tokenizer import Tokenizer

LOWEST_LOGPROB = -9999.0
"""JSON has no infinity; the OpenAI API writes this instead."""


class ChoiceText:
    """The text of one choice. Without a tokenizer the text is empty and tokens are shown as `token_id:…`."""

    def __init__(self, tokenizer: Tokenizer | None, stop: Sequence[str], context: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        self._stream = None if tokenizer is None else TextStream(tokenizer, stop, context=context)

    def push(self, token_ids: Sequence[int], finished: bool, stop_token_id: int | None) -> str:
        return "" if self._stream is None else self._stream.push(token_ids, finished, stop_token_id)

    def offsets(self, start: int, count: int) -> list[int]:
        """Where tokens number `start` to `start + count - 1` begin in the text, in characters."""
        return [0] * count if self._stream is None else self._stream.offsets(start)[:count]


@dataclass(frozen=True)
class Echo:
    """The prompt as it stands before a choice's text."""

    text: str = ""
    offsets: tuple[int, ...] = ()


def echo_of(tokenizer: Tokenizer | None, token_ids: Sequence[int], text: str | None) -> Echo:
    """The prompt's text with its tokens' offsets: the client's own text where there is one, else what its tokens say."""
    if tokenizer is None:
        return Echo("", (0,) * len(token_ids))
    echo = Echo()
    for skip in (True, False):
        stream = TextStream(tokenizer, skip_special_tokens=skip)
        echo = Echo(stream.push(token_ids, finished=True), tuple(stream.offsets()))
        if text is None or echo.text == text:
            return echo
    return Echo(text or "", echo.offsets)


LogprobsReport = Callable[[Tokenizer | None, Sequence[int], Sequence[TokenLogprobs | None], Sequence[int]], dict[str, Any]]
"""From token ids, their scores and where their text begins to a report; every value of it is a list, so that reports can be joined."""


def logprobs_object(
    tokenizer: Tokenizer | None, token_ids: Sequence[int], scores: Sequence[TokenLogprobs | None], offsets: Sequence[int]
) -> dict[str, Any]:
    """The `logprobs` of a completion choice. The sampled token is among `top_logprobs` whether or not it is one of the likeliest."""
    logprobs: list[float | None] = []
    top: list[dict[str, float] | None] = []
    for score in scores:  # read once: those of a long prompt are made one by one
        logprobs.append(None if score is None else _finite(score.logprob))
        top.append(None if score is None else _top(tokenizer, score))
    tokens = [_token_text(tokenizer, token_id) for token_id in token_ids]
    return {"tokens": tokens, "token_logprobs": logprobs, "top_logprobs": top, "text_offset": list(offsets)}


def chat_logprobs(
    tokenizer: Tokenizer | None, token_ids: Sequence[int], scores: Sequence[TokenLogprobs | None], offsets: Sequence[int]
) -> dict[str, Any]:
    """The `logprobs` of a chat completion's choice: with each token its bytes, and the likeliest tokens whether or not it is among them."""
    return {"content": [_scored(tokenizer, score) for score in scores if score is not None]}


def _scored(tokenizer: Tokenizer | None, score: TokenLogprobs) -> dict[str, Any]:
    top = [_token(tokenizer, token_id, logprob) for token_id, logprob in score.top]
    return _token(tokenizer, score.token_id, score.logprob) | {"top_logprobs": top}


def _token(tokenizer: Tokenizer | None, token_id: int, logprob: float) -> dict[str, Any]:
    raw = b"" if tokenizer is None else tokenizer.token_bytes(token_id)
    return {"token": _token_text(tokenizer, token_id), "logprob": _finite(logprob), "bytes": list(raw)}


def _top(tokenizer: Tokenizer | None, score: TokenLogprobs) -> dict[str, float]:
    top: dict[str, float] = {}
    for token_id, logprob in (*score.top, (score.token_id, score.logprob)):
        # Two tokens can have the same text; the likelier one comes first.
        top.setdefault(_token_text(tokenizer, token_id), _finite(logprob))
    return top


def _token_text(tokenizer: Tokenizer | None, token_id: int) -> str:
    return f"token_id:{token_id}" if tokenizer is None else tokenizer.token_text(token_id)


def _finite(logprob: float) -> float:
    return max(logprob, LOWEST_LOGPROB)
