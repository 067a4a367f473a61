"""What is known of a request's save before the request runs."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np

from engine.request import EngineRequest
from engine.saves.chunk import SaveEnd
from engine.saves.selection import IntArray
from engine.saves.spec import SaveSpec
from engine.scheduling.limits import saved_rows


@dataclass(frozen=True)
class SavePlan:
    """What the writer is told when a save begins, see `SaveWriter.begin`."""

    spec: SaveSpec
    num_rows: int | None
    """How many rows will be kept, where that is known."""
    max_rows: int
    end: Callable[[], SaveEnd] | None
    """Makes the end, where it is known."""


def plan_save(request: EngineRequest) -> SavePlan | None:
    """None: the request saves nothing. Takes a while for a long prompt or many pairs of positions, so no lock is to be held."""
    save, prompt = request.save, request.prompt_token_ids
    if save is None:
        return None
    lowest, highest = saved_rows(request)
    fewest, most = (_rows_per_range(save, total) for total in (lowest, highest))
    # The rows that each pair keeps grow or shrink steadily with the length, so equal ends mean a constant.
    num_rows = int(most.sum()) if np.array_equal(fewest, most) else None
    # Rows of the prompt alone: nothing of the file's end is left to be found out.
    end = partial(SaveEnd.of, save.rows, prompt, highest, len(prompt)) if highest == len(prompt) else None
    return SavePlan(save, num_rows, highest, end)


def _rows_per_range(save: SaveSpec, total: int) -> IntArray:
    starts, ends = save.rows.spans(total)
    return ends - starts
