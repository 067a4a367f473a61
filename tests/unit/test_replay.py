"""What a repeated idempotency key is answered with: the saves of the first request as they are, or nothing, or an error that says why."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, cast

import numpy as np
import pytest
from safetensors.numpy import save as safetensors

from engine.errors import SaveError
from service.errors import Conflict, Gone, SaveFailed
from service.registry.records import GroupMode, GroupRecord, SaveRecord, SaveStatus, StoredGroup
from service.registry.registry import Registry
from service.requests.replay import Replay, check_body, failure_of, join, read
from service.saves.life import Ending
from service.saves.paths.roots import SaveRoots
from tests.unit.live_saves import event, live_save, make_group, publish

if TYPE_CHECKING:
    from collections.abc import Iterator

    from service.services import Services

KEY = "kv_transfer_params.idempotency_key"
RECORD = live_save().record


@dataclass
class World:
    """The part of the services that a replay needs."""

    root: Path
    roots: SaveRoots
    registry: Registry
    recovers: Callable[[str], object] = field(default=lambda save_id: None)
    """What recovering the group of a save does."""
    looked_for: list[str | None] = field(default_factory=list)
    """For whom files were looked at on the threads of their disk."""

    @property
    def saver(self) -> World:
        return self

    @property
    def reads(self) -> World:
        return self

    def disk_of(self, record: SaveRecord) -> World:
        return self

    async def recover(self, save_id: str) -> None:
        self.recovers(save_id)

    async def run(self, owner: str | None, function: Callable[..., SaveRecord], *arguments: object) -> SaveRecord:
        self.looked_for.append(owner)
        return await asyncio.to_thread(function, *arguments)

    def insert(self, mode: GroupMode, *statuses: SaveStatus, size: int | None = None) -> list[SaveRecord]:
        """The records of a request; the files of those that are completed are there."""
        records = [self._saved(number, status) for number, status in enumerate(statuses)]
        self.registry.insert(*records, group=GroupRecord("group", len(records) if size is None else size, mode)).result()
        return records

    def _saved(self, number: int, status: SaveStatus) -> SaveRecord:
        path = self.root / f"{number}.safetensors"
        record = replace(live_save(number).record, hidden_states_path=str(path), status=status, owner="alice")
        if status != "completed":
            return record
        path.write_bytes(safetensors({"hidden_states": np.ones((1, 1, 2), np.float32)}, {"save_id": record.id, "num_tokens": "1"}))
        entry = path.stat()
        return replace(record, bytes=entry.st_size, device=entry.st_dev, inode=entry.st_ino)

    def stored(self) -> StoredGroup:
        found = self.registry.get_group("group").result()
        assert found is not None
        return found

    def read(self) -> Replay | None:
        return asyncio.run(read(cast("Services", self), self.stored()))

    def gone(self, number: int = 0) -> float | None:
        return self.stored().saves[number].gone


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    root = tmp_path.resolve() / "saves"
    made = World(root, SaveRoots([str(root)]), Registry(tmp_path / "state"))
    yield made
    made.registry.close()
    made.roots.close()


# Work that is under way.


def test_whoever_repeats_a_request_is_a_reader_of_its_work() -> None:
    group, _ = make_group(1, "independent")
    replay = join(group)
    assert group.leave() is True  # The first one.
    abandoned: list[str] = []
    group.on_abandoned = lambda: abandoned.append("")
    replay.leave()
    assert abandoned == [""]
    Replay((), None).leave()


def test_the_records_are_those_of_now() -> None:
    group, _ = make_group(2, "independent")
    replay = join(group)
    group.on_save_event(event(group.saves[1], "running"))
    assert [record.status for record in replay.records] == ["queued", "running"]
    assert Replay((RECORD,), None).records == (RECORD,)


def test_an_answer_without_files_waits_for_the_texts_and_another_for_the_ends() -> None:
    async def run() -> None:
        group, owner = make_group(1, "independent", awaits_text=True)
        replay = join(group)
        texts, ends = (asyncio.ensure_future(replay.wait_until_done(texts_only=texts_only)) for texts_only in (True, False))
        await asyncio.sleep(0)
        group.text_done(group.saves[0])
        await texts
        assert not ends.done()
        publish(group, owner, group.saves[0])
        owner.finish_all()
        await ends
        await Replay((RECORD,), None).wait_until_done(texts_only=False)

    asyncio.run(run())


def test_an_answer_that_is_all_or_nothing_fails_for_the_save_that_was_the_first_without_a_file() -> None:
    group, owner = make_group(2, "all_or_nothing")
    replay = join(group)
    replay.check_whole()
    group.abort(group.saves[1], Ending("cancelled", SaveError("no_space", "the disk is full")))
    for save in group.saves:
        group.on_save_event(event(save, "cancelled"))
    owner.finish_all()
    with pytest.raises(SaveFailed, match="the disk is full") as refused:
        replay.check_whole()
    assert (refused.value.save_id, refused.value.code, refused.value.status) == (group.saves[1].id, "no_space", 507)


# Work that has ended.


@pytest.mark.parametrize("status", ["failed", "cancelled", "completed", "expired", "running"])
def test_only_a_save_that_has_ended_without_a_file_fails_an_answer(status: SaveStatus) -> None:
    replay = Replay((RECORD, replace(live_save(1).record, status=status)), None)
    if status in ("failed", "cancelled"):
        with pytest.raises(SaveFailed) as refused:
            replay.check_whole()
        assert refused.value.save_id == f"{1:032x}"
    else:
        replay.check_whole()


def test_a_failure_says_what_the_record_says() -> None:
    known = failure_of(replace(RECORD, status="failed", error_code="io_error", error_message="the disk has failed"))
    assert (known.save_id, known.code) == (RECORD.id, "io_error")
    assert "the disk has failed" in str(known)
    unknown = failure_of(replace(RECORD, status="cancelled"))
    assert unknown.code == "cancelled"
    assert "the save is cancelled" in str(unknown)


def test_a_key_with_another_body_is_a_conflict() -> None:
    stored = StoredGroup(GroupRecord("group", 1, "independent", body_hash="a"), ())
    check_body(stored, "a")
    with pytest.raises(Conflict) as refused:
        check_body(stored, "b")
    assert (refused.value.status, refused.value.code, refused.value.param) == (409, "idempotency_key_reused", KEY)


@pytest.mark.parametrize("mode", ["all_or_nothing", "independent"])
def test_completed_saves_are_read_on_the_threads_of_their_disk(world: World, mode: GroupMode) -> None:
    records = world.insert(mode, "completed", "completed")
    descriptors = len(os.listdir("/proc/self/fd"))  # noqa: PTH208 - the listing's own descriptor must be closed at once
    replay = world.read()
    assert replay is not None
    assert (replay.saves, replay.live, world.looked_for) == (tuple(records), None, ["alice", "alice"])
    assert len(os.listdir("/proc/self/fd")) == descriptors  # noqa: PTH208 - as above


@pytest.mark.parametrize("mode", ["all_or_nothing", "independent"])
@pytest.mark.parametrize("statuses", [("failed", "cancelled"), ("expired", "expired")])
def test_a_key_is_free_where_no_file_is_left(world: World, mode: GroupMode, statuses: tuple[SaveStatus, ...]) -> None:
    world.insert(mode, *statuses)
    assert world.read() is None


@pytest.mark.parametrize("status", ["failed", "cancelled", "expired"])
def test_where_a_part_is_missing_only_independent_saves_are_read(world: World, status: SaveStatus) -> None:
    world.insert("all_or_nothing", "completed", status)
    with pytest.raises(Gone, match="is not there any more") as refused:
        world.read()
    assert (refused.value.status, refused.value.param) == (410, KEY)
    world.registry.delete(f"{0:032x}").result()
    world.registry.delete(f"{1:032x}").result()
    world.insert("independent", "completed", status)
    replay = world.read()
    assert replay is not None
    assert [record.status for record in replay.saves] == ["completed", status]


@pytest.mark.parametrize("mode", ["all_or_nothing", "independent"])
def test_a_key_of_which_a_save_was_deleted_is_gone(world: World, mode: GroupMode) -> None:
    world.insert(mode, "completed", size=2)
    with pytest.raises(Gone, match="was deleted") as refused:
        world.read()
    assert (refused.value.status, refused.value.param) == (410, KEY)


def test_a_save_whose_file_is_gone_has_expired_and_the_registry_learns_it_once(world: World) -> None:
    records = world.insert("independent", "completed", "completed")
    Path(records[0].hidden_states_path).unlink()
    replay = world.read()
    assert replay is not None
    assert [record.status for record in replay.saves] == ["expired", "completed"]
    assert (world.stored().saves[0].status, world.gone(1)) == ("completed", None)
    assert world.gone() is not None
    world.registry.update(records[0].id, gone=5.0).result()
    world.read()
    assert world.gone() == 5.0


def test_a_failed_save_is_not_looked_for_on_the_disk(world: World) -> None:
    world.insert("independent", "completed", "failed")
    world.read()
    assert world.gone(1) is None


def test_saves_that_nobody_owns_are_recovered_first(world: World) -> None:
    world.insert("independent", "completed", "running")
    recovered: list[str] = []

    def recover(save_id: str) -> None:
        recovered.append(save_id)
        world.registry.update(f"{1:032x}", status="failed").result()

    world.recovers = recover
    replay = world.read()
    assert replay is not None
    assert [record.status for record in replay.saves] == ["completed", "failed"]
    assert recovered == [f"{0:032x}"]
    world.read()
    assert len(recovered) == 1


def test_a_group_that_is_deleted_meanwhile_frees_its_key(world: World) -> None:
    world.insert("independent", "running")
    world.recovers = lambda save_id: world.registry.delete(save_id).result()
    assert world.read() is None
