"""A group decides what becomes of its saves: together or each alone, whatever comes in whatever order, and no save is ever stuck."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from itertools import permutations
from typing import TYPE_CHECKING

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from engine.errors import SaveError
from service.saves.groups import NOT_RECORDED, SIBLING_FAILED, SaveGroup
from service.saves.life import Ending, LiveSave, SaveState, Signal
from tests.unit.live_saves import FILE, FakeOwner, event, make_group, publish

if TYPE_CHECKING:
    from service.registry.records import GroupMode

MODES: list[GroupMode] = ["all_or_nothing", "independent"]
DELETED = Ending("cancelled", SaveError("cancelled", "deleted"))


def states(group: SaveGroup) -> list[str]:
    return [save.state.name for save in group.saves]


def statuses(group: SaveGroup, owner: FakeOwner) -> list[str]:
    return [owner.registry[save.id] for save in group.saves]


# The way of one save.


def test_the_record_follows_the_engine(group_of_one: tuple[SaveGroup, FakeOwner, LiveSave]) -> None:
    group, owner, save = group_of_one
    group.on_save_event(event(save, "running", time_ns=5))
    group.on_save_event(event(save, "writing", time_ns=6))
    assert owner.progress == [(save.id, {"status": "running"}), (save.id, {"status": "writing"})]
    assert save.times_ns == {"running": 5, "writing": 6}
    group.on_save_event(event(save, "completed", time_ns=7, seconds=1.5))
    assert (save.file, save.seconds, save.times_ns["completed"]) == (FILE, 1.5, 7)


@pytest.fixture
def group_of_one() -> tuple[SaveGroup, FakeOwner, LiveSave]:
    group, owner = make_group(1, "all_or_nothing")
    return group, owner, group.saves[0]


def test_a_published_file_is_committed_and_then_the_save_has_ended(group_of_one: tuple[SaveGroup, FakeOwner, LiveSave]) -> None:
    group, owner, save = group_of_one
    ends = Counter[str]()
    save.on_end = lambda: ends.update(["end"])
    publish(group, owner, save)
    assert (states(group), group.ended, owner.ended, save.status) == (["COMPLETING"], False, [], "queued")
    before = time.time()
    assert owner.finish().kind == "commit"
    assert (states(group), group.ended, owner.ended, save.status) == (["COMPLETED"], True, [save.id], "completed")
    assert save.record.finished is not None
    assert before - 60 < save.record.finished <= time.time()
    assert save.record.bytes == FILE.bytes
    assert ends == {"end": 1}
    assert group.first_failed is None
    assert not group.aborted


def test_a_save_that_the_engine_fails_ends_as_it_says(group_of_one: tuple[SaveGroup, FakeOwner, LiveSave]) -> None:
    group, owner, save = group_of_one
    group.on_save_event(event(save, "failed", seconds=0.5))
    assert (states(group), owner.registry[save.id], save.seconds) == (["ENDING"], "queued", 0.5)
    assert group.first_failed is save
    owner.finish()
    assert (states(group), owner.registry[save.id]) == (["DISCARDED"], "failed")
    assert (save.record.error_code, save.record.error_message) == ("no_space", "the disk is full")
    assert owner.ended == [save.id]
    assert group.aborted


def test_an_engine_that_gives_no_reason_has_failed(group_of_one: tuple[SaveGroup, FakeOwner, LiveSave]) -> None:
    group, _, save = group_of_one
    group.on_save_event(event(save, "failed", error=None))
    assert save.error is not None
    assert (save.error.code, str(save.error)) == ("engine_error", "no reason is known")


def test_a_save_that_is_given_up_is_aborted_and_ends_as_was_said(group_of_one: tuple[SaveGroup, FakeOwner, LiveSave]) -> None:
    group, owner, save = group_of_one
    group.abort(save, DELETED)
    assert (states(group), owner.aborted, owner.pending) == (["ABORTING"], [save.id], [])
    group.on_save_event(event(save, "cancelled"))
    owner.finish()
    assert (owner.registry[save.id], save.error) == ("cancelled", DELETED.error)
    assert save.record.error_message == "deleted"


def test_an_engine_that_fails_while_it_aborts_knows_better(group_of_one: tuple[SaveGroup, FakeOwner, LiveSave]) -> None:
    group, owner, save = group_of_one
    group.abort(save, DELETED)
    group.on_save_event(event(save, "failed"))
    owner.finish()
    assert (owner.registry[save.id], save.record.error_code) == ("failed", "no_space")


def test_an_engine_that_cancels_unasked_ends_the_save_as_cancelled(group_of_one: tuple[SaveGroup, FakeOwner, LiveSave]) -> None:
    group, owner, save = group_of_one
    group.on_save_event(event(save, "cancelled"))
    owner.finish()
    assert (owner.registry[save.id], save.record.error_message) == ("cancelled", "the request was aborted")


def test_a_file_that_is_published_while_it_is_aborted_is_removed(group_of_one: tuple[SaveGroup, FakeOwner, LiveSave]) -> None:
    group, owner, save = group_of_one
    group.abort(save, DELETED)
    publish(group, owner, save)
    assert states(group) == ["REMOVING"]
    assert owner.finish().kind == "remove"
    assert states(group) == ["ENDING"]
    owner.finish()
    assert (owner.registry[save.id], owner.files) == ("cancelled", set())


def test_a_save_that_is_just_being_completed_can_not_be_given_up(group_of_one: tuple[SaveGroup, FakeOwner, LiveSave]) -> None:
    group, owner, save = group_of_one
    publish(group, owner, save)
    group.abort(save, DELETED)
    assert (save.ending, owner.aborted) == (None, [])
    owner.finish()
    assert owner.registry[save.id] == "completed"


def test_a_file_whose_record_can_not_be_written_is_taken_back(group_of_one: tuple[SaveGroup, FakeOwner, LiveSave]) -> None:
    group, owner, save = group_of_one
    publish(group, owner, save)
    owner.finish(well=False)
    assert (states(group), save.ending) == (["REMOVING"], NOT_RECORDED)
    owner.finish()
    owner.finish()
    assert (states(group), owner.registry[save.id], owner.files) == (["DISCARDED"], "failed", set())
    assert save.record.error_code == "io_error"


def test_a_save_whose_end_can_not_be_recorded_has_ended_all_the_same(group_of_one: tuple[SaveGroup, FakeOwner, LiveSave]) -> None:
    group, owner, save = group_of_one
    publish(group, owner, save)
    owner.finish_all(well=False)
    assert (states(group), owner.registry[save.id], owner.files) == (["DISCARDED"], "queued", set())
    assert (save.status, save.record.error_code, owner.ended) == ("failed", "io_error", [save.id])


@pytest.mark.parametrize("status", ["running", "writing", "completed", "failed", "cancelled"])
def test_events_of_a_save_that_has_ended_change_nothing(group_of_one: tuple[SaveGroup, FakeOwner, LiveSave], status: str) -> None:
    group, owner, save = group_of_one
    publish(group, owner, save)
    owner.finish()
    before, changes = (save.record, save.file, dict(save.times_ns), save.ending), Counter[str]()
    save.on_change = lambda: changes.update(["change"])
    group.on_save_event(event(save, status, time_ns=1, file=None))
    group.abort_all(DELETED)
    assert (save.record, save.file, save.times_ns, save.ending) == before
    assert (owner.pending, owner.aborted, owner.ended, changes) == ([], [], [save.id], {})


def test_every_move_of_a_save_is_told(group_of_one: tuple[SaveGroup, FakeOwner, LiveSave]) -> None:
    group, owner, save = group_of_one
    told: list[str] = []
    save.on_change = lambda: told.append(save.state.name)
    group.on_save_event(event(save, "running"))
    group.on_save_event(event(save, "writing"))
    publish(group, owner, save)
    owner.finish()
    assert told == ["RUNNING", "WRITING", "COMPLETING", "COMPLETING", "COMPLETED"]


# Texts.


def test_a_save_completes_once_its_file_and_its_text_are_there() -> None:
    for text_first in (False, True):
        group, owner = make_group(1, "independent", awaits_text=True)
        save = group.saves[0]
        if text_first:
            group.text_done(save, output={"text": "a"})
            assert owner.pending == []
            publish(group, owner, save)
        else:
            publish(group, owner, save)
            assert (states(group), owner.pending) == (["PUBLISHED"], [])
            group.text_done(save, output={"text": "a"})
        owner.finish()
        assert owner.progress[0] == (save.id, {"output": {"text": "a"}})
        assert (owner.registry[save.id], save.record.output) == ("completed", {"text": "a"})


def test_a_text_that_nobody_keeps_is_waited_for_all_the_same() -> None:
    group, owner = make_group(1, "all_or_nothing", awaits_text=True)
    publish(group, owner, group.saves[0])
    assert owner.pending == []
    group.text_done(group.saves[0])
    assert owner.progress == []
    owner.finish()
    assert (statuses(group, owner), group.saves[0].record.output) == (["completed"], None)


def test_the_text_of_a_save_that_has_ended_changes_nothing() -> None:
    group, owner = make_group(1, "independent", awaits_text=True)
    group.on_save_event(event(group.saves[0], "failed"))
    owner.finish()
    group.text_done(group.saves[0], output={"text": "late"})
    assert (owner.progress, owner.pending, group.saves[0].record.output) == ([], [], None)


def test_a_save_that_waits_for_its_text_can_be_given_up() -> None:
    group, owner = make_group(1, "independent", awaits_text=True)
    publish(group, owner, group.saves[0])
    group.abort_all(DELETED)
    owner.finish_all()
    group.text_done(group.saves[0], output={"text": "late"})
    assert (statuses(group, owner), owner.files, owner.aborted) == (["cancelled"], set(), [])


# Several saves.


@pytest.mark.parametrize("order", list(permutations(range(3))))
def test_all_or_nothing_the_saves_complete_in_one_commit_when_the_last_file_is_there(order: tuple[int, ...]) -> None:
    group, owner = make_group(3, "all_or_nothing", awaits_text=True)
    for index in order:
        group.text_done(group.saves[index])
    for index in order:
        assert owner.pending == []
        publish(group, owner, group.saves[index])
    assert states(group) == ["COMPLETING"] * 3
    assert owner.finish().ids == [save.id for save in group.saves]
    assert statuses(group, owner) == ["completed"] * 3
    assert owner.ended == [save.id for save in group.saves]
    assert owner.pending == []


def test_all_or_nothing_the_last_text_completes_the_saves() -> None:
    group, owner = make_group(2, "all_or_nothing", awaits_text=True)
    for save in group.saves:
        publish(group, owner, save)
    group.text_done(group.saves[1])
    assert owner.pending == []
    group.text_done(group.saves[0])
    owner.finish_all()
    assert statuses(group, owner) == ["completed"] * 2


def test_each_of_the_saves_has_its_own_record_after_a_common_commit() -> None:
    group, owner = make_group(3, "all_or_nothing")
    for save in group.saves:
        publish(group, owner, save)
    owner.finish()
    assert [save.record.choice for save in group.saves] == [0, 1, 2]


@pytest.mark.parametrize("how", ["failed", "cancelled", "deleted"])
def test_all_or_nothing_one_that_has_no_file_takes_the_others_with_it(how: str) -> None:
    group, owner = make_group(4, "all_or_nothing")
    first, published, running, queued = group.saves
    publish(group, owner, published)
    group.on_save_event(event(running, "running"))
    group.on_save_event(event(first, "running"))
    if how == "deleted":
        group.abort(first, DELETED)
    else:
        group.on_save_event(event(first, how))
    assert states(group) == ["ABORTING" if how == "deleted" else "ENDING", "REMOVING", "ABORTING", "ABORTING"]
    assert owner.aborted == [save.id for save in ((first,) if how == "deleted" else ()) + (running, queued)]
    assert group.first_failed is first
    assert group.aborted
    assert [save.ending for save in group.saves[1:]] == [SIBLING_FAILED] * 3
    publish(group, owner, running)  # It came too late.
    group.on_save_event(event(queued, "cancelled"))
    group.on_save_event(event(first, "cancelled"))
    owner.finish_all()
    assert statuses(group, owner) == ["failed" if how == "failed" else "cancelled", "failed", "failed", "failed"]
    assert owner.files == set()
    assert group.ended


def test_independent_saves_complete_and_fail_alone() -> None:
    group, owner = make_group(3, "independent")
    publish(group, owner, group.saves[2])
    assert owner.finish().ids == [group.saves[2].id]
    group.on_save_event(event(group.saves[0], "failed"))
    assert owner.finish().ids == [group.saves[0].id]
    assert (states(group), group.ended, group.aborted) == (["DISCARDED", "QUEUED", "COMPLETED"], False, False)
    publish(group, owner, group.saves[1])
    owner.finish()
    assert statuses(group, owner) == ["failed", "completed", "completed"]
    assert owner.aborted == []
    assert group.first_failed is group.saves[0]


def test_all_or_nothing_a_commit_that_fails_takes_all_files_back() -> None:
    group, owner = make_group(2, "all_or_nothing")
    for save in group.saves:
        publish(group, owner, save)
    owner.finish(well=False)
    assert states(group) == ["REMOVING"] * 2
    owner.finish_all()
    assert (statuses(group, owner), owner.files) == (["failed"] * 2, set())
    assert [save.record.error_code for save in group.saves] == ["io_error"] * 2


def test_whoever_gives_all_up_ends_what_can_be_ended() -> None:
    group, owner = make_group(3, "independent")
    publish(group, owner, group.saves[0])
    group.on_save_event(event(group.saves[1], "writing"))
    group.abort_all(DELETED)
    assert states(group) == ["COMPLETING", "ABORTING", "ABORTING"]
    assert [save.ending for save in group.saves] == [None, DELETED, DELETED]


@pytest.mark.parametrize("mode", MODES)
def test_saves_that_are_given_up_together_end_for_the_same_reason(mode: GroupMode) -> None:
    group, owner = make_group(3, mode, awaits_text=True)
    publish(group, owner, group.saves[1])
    group.abort_all(DELETED)
    group.abort_all(SIBLING_FAILED)
    assert [save.ending for save in group.saves] == [DELETED] * 3
    for save in group.saves:
        group.on_save_event(event(save, "cancelled"))
    owner.finish_all()
    assert statuses(group, owner) == ["cancelled"] * 3


# The engine's ids, and requests that are refused.


def test_a_save_that_was_given_up_before_the_engine_had_it_is_aborted_then() -> None:
    group, owner = make_group(2, "independent")
    group.abort(group.saves[0], DELETED)
    owner.aborted.clear()
    for number, save in enumerate(group.saves):
        group.submitted(save, f"engine-{number}")
    assert [save.engine_id for save in group.saves] == ["engine-0", "engine-1"]
    assert owner.aborted == [group.saves[0].id]


def test_a_group_that_is_withdrawn_has_ended_without_a_word_to_the_registry() -> None:
    group, owner = make_group(2, "all_or_nothing")
    changes = Counter[str]()
    for save in group.saves:
        save.on_change = lambda: changes.update(["change"])
    group.abort(group.saves[0], DELETED)
    changes.clear()
    group.withdraw()
    assert (states(group), group.ended) == (["DISCARDED"] * 2, True)
    assert (owner.pending, owner.ended, owner.progress) == ([], [], [])
    assert changes == {"change": 2}
    group.on_save_event(event(group.saves[1], "running"))
    assert states(group) == ["DISCARDED"] * 2


# Readers.


def test_a_group_is_abandoned_when_the_last_of_its_readers_has_left() -> None:
    group, _ = make_group(1, "independent")
    calls: list[int] = []
    group.on_abandoned = lambda: calls.append(1)
    group.join()
    assert group.leave() is True
    assert calls == []
    assert group.leave() is False
    assert calls == [1]


def test_nobody_has_to_know_that_a_group_is_abandoned() -> None:
    group, _ = make_group(1, "independent")
    assert group.leave() is False


def test_waiting_ends_with_the_last_save() -> None:
    async def scenario() -> None:
        group, owner = make_group(2, "independent", awaits_text=True)
        ended, texts = asyncio.ensure_future(group.until_ended()), asyncio.ensure_future(group.until_texts_done())
        for save in group.saves:
            await asyncio.sleep(0)
            assert not texts.done()
            group.text_done(save, output={})
        await texts
        for save in group.saves:
            await asyncio.sleep(0)
            assert not ended.done()
            publish(group, owner, save)
            owner.finish()
        await ended
        await group.until_ended()
        await group.until_texts_done()

    asyncio.run(scenario())


def test_nobody_waits_for_the_text_of_a_save_that_has_ended_without() -> None:
    async def scenario() -> None:
        group, owner = make_group(1, "independent", awaits_text=True)
        waiting = asyncio.ensure_future(group.until_texts_done())
        await asyncio.sleep(0)
        group.on_save_event(event(group.saves[0], "failed"))
        owner.finish()
        await waiting

    asyncio.run(scenario())


def test_a_group_is_known_by_its_record() -> None:
    group, _ = make_group(1, "independent")
    assert group.id == "group"


# Everything in any order.

ENGINE = ("running", "writing", "completed")
NUM_SAVES = 3


class GroupMachine(RuleBasedStateMachine):
    """The engine's events in their order, texts, deletions, commits and removals as they come."""

    @initialize(mode=st.sampled_from(MODES), awaits_text=st.booleans())
    def make(self, mode: GroupMode, awaits_text: bool) -> None:
        self.group, self.owner = make_group(NUM_SAVES, mode, awaits_text=awaits_text)
        self.said = [0] * NUM_SAVES
        self.texts = [not awaits_text] * NUM_SAVES
        self.ends = Counter[str]()
        for save in self.group.saves:
            save.on_end = lambda save=save: self.ends.update([save.id])  # type: ignore[misc]

    @rule(index=st.integers(0, NUM_SAVES - 1))
    def engine_goes_on(self, index: int) -> None:
        if self.said[index] < len(ENGINE):
            status = ENGINE[self.said[index]]
            self.said[index] += 1
            if status == "completed":
                publish(self.group, self.owner, self.group.saves[index])
            else:
                self.group.on_save_event(event(self.group.saves[index], status))

    @rule(index=st.integers(0, NUM_SAVES - 1), status=st.sampled_from(["failed", "cancelled"]))
    def engine_ends(self, index: int, status: str) -> None:
        if self.said[index] < len(ENGINE):
            self.said[index] = len(ENGINE)
            self.group.on_save_event(event(self.group.saves[index], status))

    @rule(index=st.integers(0, NUM_SAVES - 1))
    def text(self, index: int) -> None:
        if not self.texts[index]:
            self.texts[index] = True
            self.group.text_done(self.group.saves[index], output={"text": "a"})

    @rule(index=st.integers(0, NUM_SAVES - 1))
    def deletion(self, index: int) -> None:
        self.group.abort(self.group.saves[index], DELETED)

    @precondition(lambda self: self.owner.pending)
    @rule(data=st.data(), well=st.booleans())
    def work(self, data: st.DataObject, well: bool) -> None:
        self.owner.finish(data.draw(st.integers(0, len(self.owner.pending) - 1)), well=well)

    @invariant()
    def all_or_nothing_is_kept(self) -> None:
        if hasattr(self, "group") and self.group.all_or_nothing:
            assert len({status == "completed" for status in self.owner.registry.values()}) == 1

    @invariant()
    def whatever_says_completed_has_a_file(self) -> None:
        if hasattr(self, "group"):
            assert {save_id for save_id, status in self.owner.registry.items() if status == "completed"} <= self.owner.files

    def teardown(self) -> None:
        """Whatever the engine has been asked to end it ends, and texts and commits come."""
        if not hasattr(self, "group"):
            return
        for index in range(NUM_SAVES):
            self.text(index)
            self.engine_ends(index, "cancelled")
        self.owner.finish_all()
        assert self.group.ended
        assert self.ends == {save.id: 1 for save in self.group.saves}
        assert sorted(self.owner.ended) == sorted(save.id for save in self.group.saves)
        completed = {save.id for save in self.group.saves if save.state is SaveState.COMPLETED}
        assert completed == self.owner.files
        assert completed == {save.id for save in self.group.saves if save.status == "completed"}
        assert not any(save.can(signal) for save in self.group.saves for signal in Signal)


GroupMachine.TestCase.settings = settings(max_examples=80, stateful_step_count=30, deadline=None)
TestGroupMachine = GroupMachine.TestCase
