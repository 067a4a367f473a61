"""Why a text ends with a token."""

from __future__ import annotations

import pytest

from engine.cache.kv import BlockTables
from engine.request import EngineRequest, SamplingParams
from engine.scheduling.sequence import TokenSequence

PROMPT, EOS = [5, 6], frozenset({2})


class StopAt:
    """A text that one token completes."""

    def __init__(self, token_id: int) -> None:
        self.seen: list[int] = []
        self._token_id = token_id

    def completes_stop(self, token_id: int) -> bool:
        self.seen.append(token_id)
        return token_id == self._token_id


@pytest.mark.parametrize(
    ("token", "num_before", "ignore_eos", "expected"),
    [
        (9, 0, False, (None, None)),
        (9, 2, False, (None, None)),
        (9, 3, False, ("length", None)),
        (2, 0, False, ("stop", 2)),
        (2, 3, False, ("stop", 2)),
        (2, 0, True, (None, None)),
        (7, 0, True, ("stop", 7)),
        (4, 0, False, ("stop", None)),
        (4, 3, True, ("stop", None)),
    ],
)
def test_a_text_ends_with_a_stop_token_or_text_or_its_last_token(
    token: int, num_before: int, ignore_eos: bool, expected: tuple[str | None, int | None]
) -> None:
    sampling = SamplingParams(max_tokens=4, stop_token_ids=frozenset({7}), ignore_eos=ignore_eos)
    checker = StopAt(4)
    request = EngineRequest("r", PROMPT, sampling, stop_checker=checker)
    sequence = TokenSequence(request, 0, 1, [*PROMPT, *[9] * num_before, token], {}, BlockTables(1, []))
    assert sequence.stop_reason(token, EOS) == expected
    assert checker.seen == [token], "the checker is shown every token"


def test_a_token_that_is_the_end_of_a_stop_text_and_a_stop_token_too_counts_as_the_token() -> None:
    request = EngineRequest("r", PROMPT, SamplingParams(max_tokens=4), stop_checker=StopAt(2))
    sequence = TokenSequence(request, 0, 1, [*PROMPT, 2], {}, BlockTables(1, []))
    assert sequence.stop_reason(2, EOS) == ("stop", 2)
