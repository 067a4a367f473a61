"""Live groups with the registry and files they work with: commits that fail, deletions, records that nobody owns, and the end."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import pytest
from safetensors.numpy import save as safetensors

from engine.saves.spec import SavedFile
from service.errors import ServiceError
from service.observe.metrics import Metrics
from service.registry.records import GroupMode, GroupRecord, IdempotencyKeyTaken
from service.registry.registry import Registry
from service.saves import deletion, saver
from service.saves.deletion import Deleter
from service.saves.life import LiveSave, SaveState
from service.saves.paths.roots import SaveRoots
from service.saves.saver import Saver
from service.saves.space import Need, Space
from service.shares import Shares
from service.threads import Threads
from tests.unit.live_saves import event, live_save

if TYPE_CHECKING:
    from collections.abc import Mapping

    from service.registry.records import SaveRecord
    from service.saves.groups import SaveGroup


class FailingRegistry(Registry):
    """Refuses ends, deletions and inserts as long as it is told to."""

    failures = 0
    attempts = 0
    error: Exception = ServiceError("locked", code="registry_error")

    def _refuse(self) -> Future[Any] | None:
        self.attempts += 1
        if not self.failures:
            return None
        self.failures -= 1
        refused: Future[Any] = Future()
        refused.set_exception(self.error)
        return refused

    def end(self, changes: Mapping[str, Mapping[str, Any]]) -> Future[Any]:
        return self._refuse() or super().end(changes)

    def delete(self, save_id: str) -> Future[bool]:
        return self._refuse() or super().delete(save_id)

    def insert(self, *records: SaveRecord, group: GroupRecord | None = None) -> Future[None]:
        return self._refuse() or super().insert(*records, group=group)


@dataclass
class World:
    """A saver without an engine; `engine` notes what it was asked to abort."""

    registry: FailingRegistry
    roots: SaveRoots
    saver: Saver
    deleter: Deleter
    aborted: list[str] = field(default_factory=list)

    def abort(self, request_id: str) -> None:
        self.aborted.append(request_id)

    async def group(self, num_saves: int = 1, mode: GroupMode = "all_or_nothing", **changes: Any) -> SaveGroup:  # noqa: ANN401 - fields
        saves = [live_save(number) for number in range(num_saves)]
        for save in saves:
            save.record = replace(save.record, hidden_states_path=f"{self.roots.roots[0].path}/{save.id}.safetensors")
        record = replace(GroupRecord("group", num_saves, mode), **changes)
        group = await self.saver.insert(record, saves)
        for save in saves:
            group.submitted(save, f"engine-{save.record.choice}")
        return group

    def publish(self, save: LiveSave) -> Path:
        path = Path(save.record.hidden_states_path)
        path.write_bytes(safetensors({"hidden_states": np.ones((1, 1, 2), np.float32)}, {"save_id": save.id, "num_tokens": "1"}))
        path.with_name(path.name + ".lock").touch()
        status = path.stat()
        file = SavedFile((1, 1, 2), 1, status.st_size, status.st_dev, status.st_ino)
        self.saver.on_event(event(save, "completed", file=file))
        return path

    def files(self) -> list[str]:
        return sorted(path.name for path in Path(self.roots.roots[0].path).iterdir())

    async def record(self, save: LiveSave) -> SaveRecord | None:
        return await asyncio.wrap_future(self.registry.get(save.id))

    async def status(self, save: LiveSave) -> str | None:
        record = await self.record(save)
        return None if record is None else record.status


Scenario = Callable[[World], Awaitable[None]]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[Scenario], None]:
    """Runs a scenario on a loop of its own."""
    monkeypatch.setattr(saver, "FIRST_RETRY_SECONDS", 0.001)

    async def scenario_of(scenario: Scenario) -> None:
        registry, roots = FailingRegistry(tmp_path / "state"), SaveRoots([str(tmp_path / "saves")])
        space = Space(registry, roots)
        threads = Threads(Shares(1))
        made = Saver(registry, roots, space, Metrics(), asyncio.get_running_loop(), threads=threads, lock_files=True)
        world = World(registry, roots, made, Deleter(made))
        made.engine = world
        try:
            await scenario(world)
            await made.wait_idle()
            assert not made._tasks
        finally:
            threads.close()
            registry.close()
            roots.close()

    return lambda scenario: asyncio.run(scenario_of(scenario))


def test_a_save_is_inserted_heard_of_and_completed(run: Callable[[Scenario], None]) -> None:
    async def scenario(world: World) -> None:
        group = await world.group(2)
        assert await world.status(group.saves[1]) == "queued"
        assert world.saver.find("group") is group
        world.saver.on_event(event(group.saves[0], "running"))
        for save in group.saves:
            world.publish(save)
        await group.until_ended()
        assert [await world.status(save) for save in group.saves] == ["completed"] * 2
        assert world.saver.find("group") is None
        assert len(world.files()) == 4
        world.saver.on_event(event(group.saves[0], "failed"))  # Of a save that nobody knows any more.

    run(scenario)


def test_a_group_is_there_until_the_last_of_its_saves_has_ended(run: Callable[[Scenario], None]) -> None:
    async def scenario(world: World) -> None:
        group = await world.group(2, "independent")
        world.publish(group.saves[0])
        while not group.saves[0].ended:
            await group.until_changed()
        assert world.saver.find("group") is group
        world.publish(group.saves[1])
        await group.until_ended()
        assert world.saver.find("group") is None

    run(scenario)


def test_ends_are_counted_and_give_their_room_back(run: Callable[[Scenario], None]) -> None:
    async def scenario(world: World) -> None:
        space = world.saver.space
        ids = [live_save(number).id for number in range(3)]
        await space.reserve([Need(save_id, world.roots.roots[0].fd, 10) for save_id in ids], lambda save_id: 0, asyncio.to_thread)
        group = await world.group(3, "independent")
        world.publish(group.saves[0])
        world.saver.on_event(event(group.saves[1], "failed", seconds=2.0))
        world.saver.on_event(event(group.saves[2], "cancelled"))
        await group.until_ended()
        assert space.reserved_bytes == 0
        shown = world.saver.metrics.exposition().decode()
        assert 'strata_saves_total{outcome="completed"} 1.0' in shown
        assert 'strata_saves_total{outcome="failed"} 1.0' in shown
        assert 'strata_saves_total{outcome="cancelled"} 1.0' in shown
        assert 'strata_save_failures_total{code="no_space"} 1.0' in shown
        assert "strata_save_latency_seconds_sum 2.0" in shown

    run(scenario)


def test_only_failures_that_somebody_should_know_of_are_warned_of(
    run: Callable[[Scenario], None], caplog: pytest.LogCaptureFixture
) -> None:
    async def scenario(world: World) -> None:
        group = await world.group(2)
        world.saver.on_event(event(group.saves[0], "failed"))
        world.saver.on_event(event(group.saves[1], "cancelled"))
        await group.until_ended()

    run(scenario)
    warned = [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert [record.getMessage() for record in warned] == ["a save failed: the disk is full"]
    assert cast("Any", warned[0]).fields == {"request_id": "request", "save_id": f"{0:032x}"}


def test_records_that_can_not_be_inserted_leave_no_group(run: Callable[[Scenario], None]) -> None:
    async def scenario(world: World) -> None:
        group = await world.group(1, idempotency_key="k")
        with pytest.raises(IdempotencyKeyTaken):
            await world.saver.insert(GroupRecord("other", 1, idempotency_key="k"), [live_save(7)])
        assert (world.saver.find("group"), world.saver.find("other")) == (group, None)
        world.saver.on_event(event(live_save(7), "running"))
        world.publish(group.saves[0])
        await group.until_ended()

    run(scenario)


def test_a_refused_request_leaves_no_record_and_no_reservation(run: Callable[[Scenario], None], caplog: pytest.LogCaptureFixture) -> None:
    async def scenario(world: World) -> None:
        space, folder = world.saver.space, world.roots.roots[0].fd
        await space.reserve([Need(live_save(number).id, folder, 10) for number in range(2)], lambda save_id: 0, asyncio.to_thread)
        group = await world.group(2)
        world.registry.failures = 1
        await world.saver.withdraw(group)
        assert space.reserved_bytes == 0
        assert world.saver.find("group") is None
        assert sorted([await world.status(save) for save in group.saves], key=str) == [None, "queued"]
        assert group.ended
        await world.saver.recover_all()
        assert {await world.status(save) for save in group.saves} == {None, "failed"}

    run(scenario)
    assert ["could not be deleted" in record.getMessage() for record in caplog.records if record.levelno == logging.ERROR] == [True]


# Commits that fail.


def test_how_long_ends_are_committed_again_is_as_documented() -> None:
    assert saver.COMMIT_TIMEOUT_SECONDS == 15
    assert (
        0 < saver.FIRST_RETRY_SECONDS < saver.COMMIT_TIMEOUT_SECONDS < saver.SHUTDOWN_TIMEOUT_SECONDS
    )  # The end of the service waits for what is tried again.


@pytest.mark.parametrize("failures", [1, 3])
def test_an_end_is_committed_again_until_the_registry_takes_it(run: Callable[[Scenario], None], failures: int) -> None:
    async def scenario(world: World) -> None:
        group = await world.group(2)
        world.registry.failures, world.registry.attempts = failures, 0
        for save in group.saves:
            world.publish(save)
        await group.until_ended()
        assert world.registry.attempts == failures + 1
        assert [await world.status(save) for save in group.saves] == ["completed"] * 2

    run(scenario)


def test_between_two_attempts_there_is_a_pause_that_doubles(run: Callable[[Scenario], None], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(saver, "FIRST_RETRY_SECONDS", 0.01)

    async def scenario(world: World) -> None:
        group = await world.group()
        world.registry.failures = 3
        started = time.monotonic()
        world.publish(group.saves[0])
        await group.until_ended()
        assert time.monotonic() - started > 0.06  # The least that pauses of 10, 20 and 40 ms take, less what clocks round.

    run(scenario)


def test_after_some_time_the_files_are_taken_back_and_everybody_is_told(
    run: Callable[[Scenario], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(saver, "COMMIT_TIMEOUT_SECONDS", 0.02)

    async def scenario(world: World) -> None:
        group = await world.group(2)
        world.registry.failures = 10**6
        for save in group.saves:
            world.publish(save)
        await group.until_ended()
        assert world.files() == []
        assert [save.state for save in group.saves] == [SaveState.DISCARDED] * 2
        assert [await world.status(save) for save in group.saves] == ["queued"] * 2
        assert world.saver.find("group") is None
        with pytest.raises(ServiceError):
            await world.saver.recover_all()
        world.registry.failures = 0
        await world.saver.recover_all()
        assert [await world.status(save) for save in group.saves] == ["failed"] * 2

    run(scenario)


def test_an_error_that_no_repetition_mends_is_not_tried_again(run: Callable[[Scenario], None]) -> None:
    async def scenario(world: World) -> None:
        group = await world.group()
        world.registry.failures, world.registry.attempts, world.registry.error = 1, 0, TypeError("not JSON")
        world.publish(group.saves[0])
        await group.until_ended()
        assert world.registry.attempts == 2
        assert (await world.status(group.saves[0]), world.files()) == ("failed", [])

    run(scenario)


def test_the_end_of_the_service_waits_for_one_attempt_each(run: Callable[[Scenario], None], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(saver, "FIRST_RETRY_SECONDS", 10**6)
    monkeypatch.setattr(saver, "COMMIT_TIMEOUT_SECONDS", 10**9)
    pausing, pause = asyncio.Event(), Saver._pause

    async def noted(made: Saver, seconds: float) -> None:
        pausing.set()
        await pause(made, seconds)

    monkeypatch.setattr(Saver, "_pause", noted)

    async def scenario(world: World) -> None:
        group = await world.group()
        world.registry.failures, world.registry.attempts = 10**6, 0
        world.publish(group.saves[0])
        await pausing.wait()
        world.saver.stop_retrying()
        await world.saver.wait_idle()
        assert group.ended
        assert world.registry.attempts == 3  # The one before, the last one for the file, and one for the failure.
        world.registry.failures = 0

    run(scenario)


def test_the_end_of_the_service_does_not_wait_for_ever(
    run: Callable[[Scenario], None], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(saver, "SHUTDOWN_TIMEOUT_SECONDS", 0.01)

    async def scenario(world: World) -> None:
        task = world.saver.start(asyncio.Event().wait())  # type: ignore[arg-type]
        await world.saver.wait_idle()
        assert not task.done()
        task.cancel()

    run(scenario)
    assert "1 saves could not be ended in time" in caplog.text


def test_work_that_fails_is_logged_and_work_that_is_cancelled_is_not(
    run: Callable[[Scenario], None], caplog: pytest.LogCaptureFixture
) -> None:
    async def fail() -> None:
        raise RuntimeError("a fault of our own")

    async def scenario(world: World) -> None:
        complaints: list[dict[str, Any]] = []
        world.saver.loop.set_exception_handler(lambda _, context: complaints.append(context))
        world.saver.start(fail())
        world.saver.start(asyncio.Event().wait()).cancel()  # type: ignore[arg-type]
        await world.saver.wait_idle()
        assert complaints == []

    run(scenario)
    errors = [record for record in caplog.records if record.levelno == logging.ERROR]
    assert [record.getMessage() for record in errors] == ["a background task of a save failed"]


def test_a_file_that_can_not_be_removed_keeps_nobody_waiting(
    run: Callable[[Scenario], None], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*_: object, **__: object) -> bool:
        raise RuntimeError("a fault of our own")

    async def scenario(world: World) -> None:
        group = await world.group(2)
        world.publish(group.saves[0])
        world.saver.on_event(event(group.saves[1], "failed"))
        await group.until_ended()
        assert [await world.status(save) for save in group.saves] == ["failed"] * 2
        assert len(world.files()) == 2

    monkeypatch.setattr(saver, "remove_saved", broken)
    run(scenario)
    assert "can't be removed" in caplog.text


def test_a_record_that_can_not_be_brought_up_to_date_is_only_logged(
    run: Callable[[Scenario], None], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def scenario(world: World) -> None:
        group = await world.group()

        def refused(save_id: str, **changes: object) -> Future[Any]:
            future: Future[Any] = Future()
            future.set_exception(ServiceError("locked"))
            return future

        with monkeypatch.context() as patch:
            patch.setattr(world.registry, "update", refused)
            group.on_save_event(event(group.saves[0], "running"))
        world.publish(group.saves[0])
        await group.until_ended()
        assert await world.status(group.saves[0]) == "completed"

    run(scenario)
    assert "a record could not be updated" in caplog.text


# Engines that die.


def test_when_the_engine_has_gone_everybody_is_told(run: Callable[[Scenario], None]) -> None:
    async def scenario(world: World) -> None:
        group = await world.group(3)
        world.publish(group.saves[1])
        world.saver.on_event(event(group.saves[0], "running"))
        await asyncio.sleep(0)
        world.saver.fail_all("the engine has failed")
        await group.until_ended()
        records = [await world.record(save) for save in group.saves]
        assert [None if record is None else record.status for record in records] == ["failed"] * 3
        assert (records[0] is not None and records[0].error_code, world.files()) == ("engine_error", [])

    run(scenario)


def test_without_an_engine_there_is_nothing_to_abort(run: Callable[[Scenario], None]) -> None:
    async def scenario(world: World) -> None:
        group = await world.group()
        group.saves[0].engine_id = ""
        world.saver.abort(group.saves[0])
        world.saver.engine = None
        group.saves[0].engine_id = "engine-0"
        world.saver.abort(group.saves[0])
        assert world.aborted == []
        world.publish(group.saves[0])
        await group.until_ended()

    run(scenario)


# Deletions.


def test_a_running_save_is_cancelled_and_its_record_stays(run: Callable[[Scenario], None]) -> None:
    async def scenario(world: World) -> None:
        group = await world.group(2, "independent")
        save = group.saves[0]
        deleting = asyncio.ensure_future(world.deleter.delete(save.record))
        while world.aborted != ["engine-0"]:
            await asyncio.sleep(0)
        world.saver.on_event(event(save, "cancelled"))
        await deleting
        record = await world.record(save)
        assert record is not None
        assert (record.status, record.error_code) == ("cancelled", "cancelled")
        await world.deleter.delete(record)
        assert await world.record(save) is None
        world.publish(group.saves[1])
        await group.until_ended()
        await world.deleter.delete(group.saves[1].record)
        assert world.files() == []

    run(scenario)


def test_a_save_whose_file_came_too_late_is_removed_with_its_record(run: Callable[[Scenario], None]) -> None:
    async def scenario(world: World) -> None:
        group = await world.group()
        deleting = asyncio.ensure_future(world.deleter.delete(group.saves[0].record))
        while not world.aborted:
            await asyncio.sleep(0)
        world.publish(group.saves[0])
        await deleting
        assert (await world.record(group.saves[0]), world.files()) == (None, [])

    run(scenario)


def test_a_published_save_that_waits_for_the_others_is_cancelled_with_them(run: Callable[[Scenario], None]) -> None:
    async def scenario(world: World) -> None:
        group = await world.group(2)
        world.publish(group.saves[0])
        while group.saves[0].state is not SaveState.PUBLISHED:
            await group.until_changed()
        deleting = asyncio.ensure_future(world.deleter.delete(group.saves[0].record))
        while world.aborted != ["engine-1"]:
            await asyncio.sleep(0)
        world.saver.on_event(event(group.saves[1], "cancelled"))
        await deleting
        await group.until_ended()
        assert [await world.status(save) for save in group.saves] == ["cancelled", "failed"]
        assert world.files() == []

    run(scenario)


def test_a_save_that_is_just_completing_is_removed_once_it_has(run: Callable[[Scenario], None]) -> None:
    async def scenario(world: World) -> None:
        group = await world.group()
        record = group.saves[0].record
        world.publish(group.saves[0])
        while group.saves[0].state is not SaveState.COMPLETING:
            await group.until_changed()
        await world.deleter.delete(record)
        assert (await world.record(group.saves[0]), world.files(), world.aborted) == (None, [], [])

    run(scenario)


@pytest.mark.parametrize("published", [False, True])
def test_a_record_that_nobody_owns_is_recovered_when_it_is_deleted(run: Callable[[Scenario], None], published: bool) -> None:
    async def scenario(world: World) -> None:
        group = await world.group()
        if published:
            world.publish(group.saves[0])
        world.saver._forget(group)
        await world.deleter.delete(group.saves[0].record)
        assert await world.status(group.saves[0]) == (None if published else "failed")
        assert world.files() == []

    run(scenario)


def test_what_a_live_group_owns_is_not_recovered(run: Callable[[Scenario], None]) -> None:
    async def scenario(world: World) -> None:
        group = await world.group()
        await world.saver.recover(group.saves[0].id)
        await world.saver.recover("missing")
        await world.saver.recover_all()
        assert await world.status(group.saves[0]) == "queued"
        world.publish(group.saves[0])
        await group.until_ended()

    run(scenario)


def test_an_answer_does_not_wait_longer_than_it_may(run: Callable[[Scenario], None], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deletion, "ANSWER_SECONDS", 0.01)

    async def scenario(world: World) -> None:
        group = await world.group()
        await world.deleter.delete(group.saves[0].record)
        assert not group.ended
        world.saver.on_event(event(group.saves[0], "cancelled"))
        await group.until_ended()

    run(scenario)


def test_a_file_that_can_not_be_removed_keeps_its_record(run: Callable[[Scenario], None], monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario(world: World) -> None:
        group = await world.group()
        world.publish(group.saves[0])
        await group.until_ended()
        with monkeypatch.context() as patch:
            patch.setattr(deletion, "remove_saved", lambda *_, **__: (_ for _ in ()).throw(OSError(5, "I/O error")))
            with pytest.raises(ServiceError) as refused:
                await world.deleter.delete(group.saves[0].record)
        assert (refused.value.status, refused.value.code, refused.value.param) == (500, "io_error", "save_id")
        assert await world.status(group.saves[0]) == "completed"

    run(scenario)
