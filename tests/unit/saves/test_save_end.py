"""What a file is told of its tokens at the end."""

import numpy as np
import pytest

from engine.saves.chunk import SaveEnd
from engine.saves.selection import ALL_ROWS, LAST_ROW, RowSelection

TOKENS = list(range(100, 112))


@pytest.mark.parametrize("tokens", [TOKENS, np.array(TOKENS)], ids=["list", "array"])
@pytest.mark.parametrize(
    ("rows", "kept"),
    [
        (LAST_ROW, [9]),
        (RowSelection(((1, 3), (5, 6), (-2, None))), [1, 2, 5, 8, 9]),
        (RowSelection(((20, 30),)), []),
    ],
)
def test_tokens_and_positions_are_those_of_the_kept_rows(tokens: list[int], rows: RowSelection, kept: list[int]) -> None:
    end = SaveEnd.of(rows, tokens, 10, 4)
    assert end.positions is not None
    assert list(end.positions) == kept
    assert list(end.token_ids) == [100 + position for position in kept]
    assert (end.num_tokens, end.num_prompt_tokens) == (10, 4)


@pytest.mark.parametrize("rows", [ALL_ROWS, RowSelection(((0, 4), (4, None))), RowSelection(((0, 12),))])
def test_where_all_rows_were_kept_there_are_no_positions(rows: RowSelection) -> None:
    end = SaveEnd.of(rows, TOKENS, 10, 4)
    assert end.positions is None
    assert list(end.token_ids) == TOKENS[:10]
