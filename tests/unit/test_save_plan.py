"""What is known of a save beforehand, compared with every length that the text may turn out to have."""

from __future__ import annotations

import pytest

from engine.request import EngineRequest, SamplingParams
from engine.saves.selection import ALL_ROWS, LAST_ROW, RowSelection
from engine.saves.spec import SaveSpec
from engine.scheduling.save_plan import plan_save
from tests.unit.core_fakes import Target

PROMPT = [7, 8, 9, 10, 11, 12]


def kept(rows: RowSelection, total: int) -> list[int]:
    return [position for low, high in rows.ranges(total) for position in range(low, high)]


@pytest.mark.parametrize(
    "rows",
    [
        ALL_ROWS,
        LAST_ROW,
        RowSelection(((1, 3), (4, 5))),
        RowSelection(((2, 4), (-2, None))),
        RowSelection(((3, -1),)),
        RowSelection(((4, 9),)),
    ],
)
@pytest.mark.parametrize("max_tokens", [0, 1, 5])
@pytest.mark.parametrize(("output", "last"), [(False, False), (True, False), (True, True)])
def test_the_number_of_rows_is_known_where_it_is_the_same_whatever_is_generated(
    rows: RowSelection, max_tokens: int, output: bool, last: bool
) -> None:
    save = SaveSpec("s", Target(), (1,), "float32", output, last, rows)
    plan = plan_save(EngineRequest("r", PROMPT, SamplingParams(max_tokens=max_tokens), save))
    assert plan is not None
    more = max_tokens - 1 + last if max_tokens and output else 0
    totals = [len(PROMPT) + count for count in range(int(last and max_tokens > 0), more + 1)]
    counts = {len(kept(rows, total)) for total in totals}
    assert plan.max_rows == totals[-1]
    assert plan.num_rows == (counts.pop() if len(counts) == 1 else None)
    assert (plan.end is not None) == (totals == [len(PROMPT)])
    if plan.end is not None:
        end = plan.end()
        assert list(end.token_ids) == [PROMPT[position] for position in kept(rows, len(PROMPT))]
        assert (end.num_tokens, end.num_prompt_tokens) == (len(PROMPT), len(PROMPT))


def test_nothing_is_planned_for_a_request_that_saves_nothing() -> None:
    assert plan_save(EngineRequest("r", PROMPT, SamplingParams())) is None
