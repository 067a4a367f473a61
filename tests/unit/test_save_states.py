"""Every signal in every state of a save: where it leads, or that it comes late and changes nothing; and no save is ever stuck."""

from __future__ import annotations

from dataclasses import replace

import pytest

from engine.errors import SaveError
from service.saves.life import LAST, TRANSITIONS, Ending, SaveState, Signal, file_url
from tests.unit.live_saves import FILE, live_save

TABLE = """
            STARTED  COMPUTED  PUBLISHED  STOPPED  ABORT     COMPLETE    COMMITTED  NOT_COMMITTED  REMOVED  WITHDRAWN
QUEUED      RUNNING  WRITING   PUBLISHED  ENDING   ABORTING  -           -          -              -        DISCARDED
RUNNING     -        WRITING   PUBLISHED  ENDING   ABORTING  -           -          -              -        -
WRITING     -        -         PUBLISHED  ENDING   ABORTING  -           -          -              -        -
ABORTING    -        -         REMOVING   ENDING   -         -           -          -              -        DISCARDED
PUBLISHED   -        -         -          -        REMOVING  COMPLETING  -          -              -        -
COMPLETING  -        -         -          -        -         -           COMPLETED  REMOVING       -        -
REMOVING    -        -         -          -        -         -           -          -              ENDING   -
ENDING      -        -         -          -        -         -           DISCARDED  DISCARDED      -        -
COMPLETED   -        -         -          -        -         -           -          -              -        -
DISCARDED   -        -         -          -        -         -           -          -              -        -
"""
SIGNALS, *ROWS = [line.split() for line in TABLE.strip().splitlines()]
CELLS = [(row[0], signal, target) for row in ROWS for signal, target in zip(SIGNALS, row[1:], strict=True)]


def test_the_table_has_every_state_and_every_signal() -> None:
    assert {row[0] for row in ROWS} == {state.name for state in SaveState}
    assert set(SIGNALS) == {signal.name for signal in Signal}


@pytest.mark.parametrize(("state", "signal", "target"), CELLS)
def test_a_signal_moves_a_save_as_the_table_says_or_changes_nothing(state: str, signal: str, target: str) -> None:
    save = live_save(state=SaveState[state])
    before = replace(save)
    allowed = target != "-"
    assert save.can(Signal[signal]) is allowed
    assert save == before
    assert save.apply(Signal[signal]) is allowed
    if allowed:
        assert save.state is SaveState[target]
        shown = {"RUNNING": "running", "WRITING": "writing"}.get(target, "queued")
        assert save.record == replace(before.record, status=shown)
    else:
        assert save == before


def test_no_signal_leads_back_to_a_state_that_a_save_has_left() -> None:
    order = [SaveState[row[0]] for row in ROWS]
    later = {state: set(targets.values()) for state, targets in TRANSITIONS.items()}
    seen: set[SaveState] = set()
    while remaining := [state for state in order if state not in seen]:
        ends = [state for state in remaining if later[state] <= seen]
        assert ends, f"a circle among {remaining}"
        seen.update(ends)


_OF_THE_ENGINE = (Signal.PUBLISHED, Signal.STOPPED)
_OF_THE_REGISTRY = (Signal.COMMITTED, Signal.NOT_COMMITTED)
EVENTUALLY = {
    "QUEUED": _OF_THE_ENGINE,
    "RUNNING": _OF_THE_ENGINE,
    "WRITING": _OF_THE_ENGINE,
    "ABORTING": _OF_THE_ENGINE,
    "PUBLISHED": (Signal.COMPLETE, Signal.ABORT),
    "COMPLETING": _OF_THE_REGISTRY,
    "REMOVING": (Signal.REMOVED,),
    "ENDING": _OF_THE_REGISTRY,
}
"""What comes in the end in each state, one or the other: from the engine, from the group, from the registry and from the disk."""


@pytest.mark.parametrize(("state", "signals"), EVENTUALLY.items())
def test_whatever_comes_in_the_end_moves_a_save_on(state: str, signals: tuple[Signal, ...]) -> None:
    assert set(signals) <= set(TRANSITIONS[SaveState[state]])


def test_only_saves_with_nothing_to_come_have_ended() -> None:
    assert {state.name for state in LAST} == {"COMPLETED", "DISCARDED"}
    assert {state.name for state in SaveState} == set(EVENTUALLY) | {state.name for state in LAST}
    assert [live_save(state=state).ended for state in SaveState] == [state in LAST for state in SaveState]


def test_a_save_is_known_by_its_record() -> None:
    save = live_save(7)
    assert (save.id, save.status, save.error) == (f"{7:032x}", "queued", None)
    save.record = replace(save.record, status="failed")
    save.ending = Ending("failed", SaveError("no_space", "full"))
    assert (save.status, save.error) == ("failed", save.ending.error)


def test_the_record_of_a_save_that_completes_has_its_file_and_its_text() -> None:
    save = live_save(file=FILE)
    save.record = replace(save.record, output={"text": "a"}, cached_tokens=4)
    assert save.completion(5.0) == {
        "status": "completed",
        "finished": 5.0,
        "output": {"text": "a"},
        "cached_tokens": 4,
        "shape": (3, 2, 8),
        "num_tokens": 3,
        "bytes": 100,
        "device": 1,
        "inode": 2,
        "checksum": "sha256:00",
    }


@pytest.mark.parametrize("status", ["failed", "cancelled"])
def test_the_record_of_a_save_without_a_file_says_why(status: str) -> None:
    save = live_save(ending=Ending(status, SaveError("no_space", "the disk is full")))
    expected = {"status": status, "finished": 5.0, "error_code": "no_space", "error_message": "the disk is full"}
    assert save.discarding(5.0) == expected


def test_an_answer_tells_of_the_file_only_once_the_save_is_completed() -> None:
    save = live_save(3)
    known = {
        "hidden_states_path": "/client/3",
        "save_id": save.id,
        "status": "queued",
        "layers": [1, 2],
        "dtype": "float32",
    }
    assert save.transfer() == known
    save.file = FILE
    assert save.transfer() == known
    save.record = replace(save.record, status="completed")
    of_file = {"status": "completed", "num_tokens": 3, "shape": [3, 2, 8], "bytes": 100, "url": f"/saves/{save.id}/file"}
    assert save.transfer() == known | of_file
    assert file_url("x") == "/saves/x/file"


def test_nobody_has_to_listen_to_a_save() -> None:
    save = live_save()
    save.on_change()
    save.on_end()
