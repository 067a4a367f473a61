"""What goes by itself, and what stays: files, records, lock files and what crashes have left."""

import asyncio
import fcntl
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save

from service.errors import ServiceError
from service.registry.records import SaveRecord
from service.registry.registry import Registry
from service.saves import files as saved_files
from service.saves import reaper as reaper_module
from service.saves.files import remove_saved
from service.saves.paths.roots import SaveRoots
from service.saves.reaper import DAY_SECONDS, Reaper
from service.saves.space import Space


@cache
def states(save_id: str) -> bytes:
    tensors = {"hidden_states": np.ones((5, 2, 8), np.float32), "token_ids": np.arange(5)}
    return save(tensors, {"format": "strata.hidden_states.v1", "save_id": save_id, "num_tokens": "5"})


@dataclass
class World:
    root: Path
    roots: SaveRoots
    registry: Registry
    reaper: Reaper
    clock: list[float] = field(default_factory=lambda: [1000.0])

    def add(self, number: int, **changes: Any) -> SaveRecord:  # noqa: ANN401 - fields of SaveRecord
        """A completed save with its file and its lock file."""
        save_id = f"{number:032x}"
        path = self.root / f"{number % 3}" / f"{number}.st"
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(states(save_id))
        path.with_name(path.name + ".lock").write_text(f"strata {self.registry.service_id} released\n")
        status = path.stat()
        record = SaveRecord(save_id, str(path), "request", "model", (1, 2), "float32", created=1.0, status="completed", finished=1.0)
        record = replace(record, bytes=status.st_size, device=status.st_dev, inode=status.st_ino, **changes)
        self.registry.insert(record).result()
        return record

    def get(self, record: SaveRecord) -> SaveRecord:
        found = self.registry.get(record.id).result()
        assert found is not None
        return found

    def used(self) -> int:
        return self.registry.used_bytes().result()


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    root = tmp_path.resolve() / "saves"
    roots, registry = SaveRoots([str(root)]), Registry(tmp_path / "state", keep_seconds=100, keep_count=10**6)
    clock = [1000.0]
    reaper = Reaper(registry, roots, Space(registry, roots), lock_files=True, now=lambda: clock[0])
    yield World(root, roots, registry, reaper, clock)
    registry.close()
    roots.close()


def path_of(record: SaveRecord) -> Path:
    return Path(record.hidden_states_path)


def lock_of(record: SaveRecord) -> Path:
    return Path(record.hidden_states_path + ".lock")


def test_files_expire_at_their_time_and_not_before(world: World) -> None:
    records = [world.add(number, expires=1000.0 + number) for number in range(4)]
    forever = world.add(9)
    world.clock[0] = 1001.5
    assert asyncio.run(world.reaper.expire()) == 2
    assert [world.get(record).status for record in records] == ["expired", "expired", "completed", "completed"]
    assert [path_of(record).exists() for record in records] == [False, False, True, True]
    assert [lock_of(record).exists() for record in records] == [False, False, True, True]
    assert path_of(forever).exists()
    assert world.used() == 3 * len(states(forever.id))


def test_any_number_of_files_expires_at_once(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reaper_module, "PAGE", 3)
    records = [world.add(number, expires=5.0) for number in range(10)]
    assert asyncio.run(world.reaper.expire()) == 10
    assert not any(path_of(record).exists() for record in records)


def test_a_file_that_cannot_be_removed_does_not_keep_the_others(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reaper_module, "PAGE", 2)
    records = [world.add(number, expires=5.0) for number in range(7)]
    stuck = {records[0].id, records[1].id, records[2].id}
    tries: list[str] = []

    def failing(roots: SaveRoots, record: SaveRecord, *, lock_files: bool) -> bool:
        tries.append(record.id)
        if record.id in stuck:
            raise OSError(5, "Input/output error")
        return remove_saved(roots, record, lock_files=lock_files)

    monkeypatch.setattr(reaper_module, "remove_saved", failing)
    assert asyncio.run(world.reaper.expire()) == 4
    assert asyncio.run(world.reaper.expire()) == 0
    assert len(tries) == 7, "what has failed is not tried again at once"
    monkeypatch.setattr(world.reaper, "_retry_at", dict.fromkeys(stuck, 0.0))
    stuck.clear()
    assert asyncio.run(world.reaper.expire()) == 3
    assert world.reaper._retry_at == {}, "nothing is kept of what has gone"
    assert all(world.get(record).status == "expired" for record in records)


def test_a_record_without_its_file_expires_too(world: World) -> None:
    record = world.add(1, expires=5.0)
    path_of(record).unlink()
    assert asyncio.run(world.reaper.expire()) == 1
    assert world.get(record).status == "expired"
    assert not lock_of(record).exists()


def test_a_sweep_finds_what_has_gone_and_what_is_there_again(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reaper_module, "PAGE", 2)
    records = [world.add(number) for number in range(7)]
    size = len(states(records[0].id))
    asyncio.run(world.reaper.sweep())
    assert world.used() == 7 * size
    path_of(records[0]).unlink()
    path_of(records[1]).rename(world.root / "away")
    path_of(records[2]).write_bytes(b"shorter")
    path_of(records[5]).unlink()
    path_of(records[5]).symlink_to(world.root / "away")
    asyncio.run(world.reaper.sweep())
    assert [world.get(record).gone is not None for record in records] == [True, True, True, False, False, True, False]
    assert world.used() == 3 * size
    (world.root / "away").rename(path_of(records[1]))
    asyncio.run(world.reaper.sweep())
    assert world.get(records[1]).gone is None
    assert world.used() == 4 * size
    assert all(world.get(record).status == "completed" for record in records)


def test_a_directory_that_is_swapped_for_a_link_holds_no_file_of_ours(world: World) -> None:
    record = world.add(1)
    path_of(record).parent.rename(world.root / "elsewhere")
    path_of(record).parent.symlink_to("elsewhere")
    asyncio.run(world.reaper.sweep())
    assert world.get(record).gone is not None


def test_a_sweep_removes_no_lock_file_whosever_it_is(world: World) -> None:
    ours, foreign = world.add(1), world.add(2)
    lock_of(foreign).write_bytes(b"")
    for record in (ours, foreign):
        path_of(record).unlink()
        os.utime(lock_of(record), (1.0, 1.0))
    world.clock[0] = time.time() + 10 * DAY_SECONDS
    asyncio.run(world.reaper.sweep())
    assert world.get(ours).gone == world.get(foreign).gone == world.clock[0]
    assert [lock_of(ours).exists(), lock_of(foreign).exists()] == [True, True]


def test_a_forgotten_lock_file_of_ours_is_removed_after_a_day(world: World) -> None:
    forgotten, held, beside, empty = (world.add(number) for number in range(4))
    foreign = world.root / "poetry.lock"
    foreign.touch()
    lock_of(empty).write_bytes(b"")
    for record in (forgotten, held, empty):
        path_of(record).unlink()
    world.clock[0] = time.time() + DAY_SECONDS - 60
    asyncio.run(world.reaper.remove_orphans())
    assert lock_of(forgotten).exists()
    world.clock[0] += 120
    with lock_of(held).open("r+b") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        asyncio.run(world.reaper.remove_orphans())
    assert [path.exists() for path in (*map(lock_of, (forgotten, held, beside, empty)), foreign)] == [False, True, True, True, True]


OTHER_DEVICE = 7
"""No file system of this machine has that number."""


def away(world: World, number: int, **changes: Any) -> SaveRecord:  # noqa: ANN401 - fields of SaveRecord
    """A save on a file system that isn't mounted now: what stands in its place is an empty folder of another one."""
    record = world.add(number, **changes)
    path_of(record).unlink()
    lock_of(record).unlink()
    moved = replace(record, device=OTHER_DEVICE)
    world.registry.update(record.id, device=OTHER_DEVICE).result()
    return moved


def not_configured(world: World, number: int, **changes: Any) -> SaveRecord:  # noqa: ANN401 - fields of SaveRecord
    """A save in a folder that was a save root once."""
    record = world.add(number, **changes)
    old = world.root.parent / "old" / f"{number}.st"
    old.parent.mkdir(exist_ok=True)
    path_of(record).rename(old)
    moved = replace(record, hidden_states_path=str(old))
    world.registry.update(record.id, hidden_states_path=str(old)).result()
    return moved


@pytest.mark.parametrize("unseen", [away, not_configured])
def test_a_file_that_can_not_be_looked_at_has_not_been_removed(world: World, unseen: Callable[..., SaveRecord]) -> None:
    record = unseen(world, 1)
    asyncio.run(world.reaper.sweep())
    assert world.get(record) == record
    assert world.used() == record.bytes


@pytest.mark.parametrize("unseen", [away, not_configured])
def test_a_file_that_can_not_be_looked_at_does_not_expire(world: World, unseen: Callable[..., SaveRecord]) -> None:
    record, seen = unseen(world, 1, expires=5.0), world.add(2, expires=6.0)
    assert asyncio.run(world.reaper.expire()) == 1
    assert world.get(record) == record
    assert world.get(seen).status == "expired"
    assert asyncio.run(world.reaper.purge()) is None
    assert world.get(record) == record


def test_what_comes_in_sight_again_goes_on_as_if_nothing_had_been(world: World) -> None:
    there, removed, expired = world.add(1), world.add(2), world.add(3, expires=5.0)
    path_of(removed).unlink()
    empty = world.root.with_name("empty")
    empty.mkdir()
    other = SaveRoots([str(empty)])
    absent = Reaper(world.registry, other, Space(world.registry, other), lock_files=True, now=lambda: 1000.0)
    asyncio.run(absent.sweep())
    assert asyncio.run(absent.expire()) == 0
    other.close()
    assert [world.get(record) for record in (there, removed, expired)] == [there, removed, expired]
    asyncio.run(world.reaper.sweep())
    assert asyncio.run(world.reaper.expire()) == 1
    assert [world.get(record).gone is not None for record in (there, removed)] == [False, True]
    assert not path_of(expired).exists()


def test_a_file_system_that_comes_back_under_another_number_is_known_by_its_files(world: World) -> None:
    missing, there, expiring = world.add(1), world.add(2), world.add(3, expires=5.0)
    path_of(missing).unlink()
    for record in (missing, there, expiring):
        world.registry.update(record.id, device=OTHER_DEVICE).result()
    asyncio.run(world.reaper.sweep())
    assert world.get(there) == there, "the record has the new number"
    asyncio.run(world.reaper.sweep())
    assert world.get(missing).gone is not None
    assert asyncio.run(world.reaper.expire()) == 1
    assert not path_of(expiring).exists()


def test_a_file_of_another_save_tells_nothing_about_the_file_system(world: World) -> None:
    missing, other = away(world, 1), world.add(2)
    world.registry.update(other.id, device=OTHER_DEVICE).result()
    path_of(other).write_bytes(states(missing.id))
    for _ in range(2):
        asyncio.run(world.reaper.sweep())
    assert world.get(missing).gone is world.get(other).gone is None


def test_files_out_of_sight_are_one_line_in_the_log_until_their_number_changes(world: World, caplog: pytest.LogCaptureFixture) -> None:
    records = [away(world, number) for number in range(2)]

    def swept() -> list[str]:
        caplog.clear()
        asyncio.run(world.reaper.sweep())
        return [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]

    [line] = swept()
    assert line.startswith(f"2 files can't be inspected, such as {records[1].hidden_states_path}: ")
    assert swept() == []
    other = not_configured(world, 2)
    [line] = swept()
    assert line.startswith(f"3 files can't be inspected, such as {other.hidden_states_path}: ")
    for record in (*records, other):
        world.registry.delete(record.id).result()
    assert swept() == []
    away(world, 3)
    assert [line[:8] for line in swept()] == ["1 files "]


def test_a_single_file_out_of_sight_is_told_by_the_first_sweep(world: World, caplog: pytest.LogCaptureFixture) -> None:
    away(world, 1)
    asyncio.run(world.reaper.sweep())
    assert "1 files can't be inspected" in caplog.text


def test_expired_files_out_of_sight_are_no_warnings(world: World, caplog: pytest.LogCaptureFixture) -> None:
    away(world, 1, expires=5.0)
    asyncio.run(world.reaper.expire())
    assert [record for record in caplog.records if record.levelname == "WARNING"] == []


def test_a_disk_that_fails_is_not_a_file_that_was_removed(
    world: World, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    record = world.add(1, expires=5.0)
    path_of(record).unlink()

    def failing(*_: object) -> int:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(saved_files, "status_of", failing)
    asyncio.run(world.reaper.sweep())
    assert asyncio.run(world.reaper.expire()) == 0
    assert world.get(record) == record
    assert "can't be removed: [Errno 5]" in caplog.text


def test_a_file_that_can_not_be_looked_at_does_not_keep_a_sweep_from_the_others(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    records, status_of = [world.add(number) for number in range(3)], saved_files.status_of

    def failing(directory_fd: int, name: str) -> os.stat_result | None:
        if name == path_of(records[0]).name:
            raise OSError(5, "Input/output error")
        return status_of(directory_fd, name)

    for record in records:
        path_of(record).unlink()
    monkeypatch.setattr(saved_files, "status_of", failing)
    asyncio.run(world.reaper.sweep())
    assert [world.get(record).gone for record in records] == [None, 1000.0, 1000.0]


def counted_sweeps(world: World, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Grows by one with every page of records that is looked at."""
    looks: list[int] = []
    look_at = world.reaper._check_files

    def look(records: Sequence[SaveRecord]) -> dict[str, dict[str, Any]]:
        looks.append(len(records))
        return look_at(records)

    monkeypatch.setattr(world.reaper, "_check_files", look)
    return looks


def test_a_recount_sees_what_was_removed_before_it_however_soon_after_the_last(world: World) -> None:
    records, expiring = [world.add(number) for number in range(10)], world.add(10, expires=1005.0)

    async def run() -> None:
        for record in records:
            await world.reaper.recount()
            path_of(record).unlink()
        world.clock[0] = 1006.0
        await world.reaper.recount()

    asyncio.run(run())
    assert all(world.get(record).gone is not None for record in records)
    assert world.get(expiring).status == "expired"


def test_recounts_that_are_asked_for_at_once_share_a_sweep(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    world.add(1)
    looks = counted_sweeps(world, monkeypatch)

    async def run() -> None:
        await asyncio.gather(*(world.reaper.recount() for _ in range(100)))

    asyncio.run(run())
    assert len(looks) == 1


def test_whoever_asks_while_a_sweep_runs_waits_for_the_next(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    record, looks = world.add(1), counted_sweeps(world, monkeypatch)

    async def run() -> None:
        loop, look_at = asyncio.get_running_loop(), world.reaper._check_files
        others: list[asyncio.Task[None]] = []

        def look_and_wait(records: Sequence[SaveRecord]) -> dict[str, dict[str, Any]]:
            changes = look_at(records)
            if not others:  # it was still there when the sweep came by
                path_of(record).unlink()
                asyncio.run_coroutine_threadsafe(ask(), loop).result()
            return changes

        async def ask() -> None:
            others.extend(loop.create_task(world.reaper.recount()) for _ in range(20))
            await asyncio.sleep(0)

        monkeypatch.setattr(world.reaper, "_check_files", look_and_wait)
        await world.reaper.recount()
        await asyncio.gather(*others)

    asyncio.run(run())
    assert world.get(record).gone is not None
    assert len(looks) == 2


def test_who_shares_a_sweep_with_somebody_who_leaves_gets_another(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    record, in_sweep = world.add(1), threading.Event()
    path_of(record).unlink()
    look_at, left = world.reaper._check_files, threading.Event()

    def look_late(records: Sequence[SaveRecord]) -> dict[str, dict[str, Any]]:
        in_sweep.set()
        left.wait()
        return look_at(records)

    monkeypatch.setattr(world.reaper, "_check_files", look_late)

    async def run() -> None:
        first, second = (asyncio.create_task(world.reaper.recount()) for _ in range(2))
        await asyncio.to_thread(in_sweep.wait)
        first.cancel()
        left.set()
        await asyncio.gather(first, second, return_exceptions=True)
        assert first.cancelled()

    asyncio.run(run())
    assert world.get(record).gone is not None


def test_a_recount_comes_three_times_as_long_after_the_last_sweep_as_that_took(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    world.add(1)
    clock, pauses, look_at = [100.0], list[float](), world.reaper._check_files
    monkeypatch.setattr(reaper_module.time, "monotonic", lambda: clock[0])

    def look(records: Sequence[SaveRecord]) -> dict[str, dict[str, Any]]:
        clock[0] += 2.0
        return look_at(records)

    async def pause(seconds: float) -> None:
        pauses.append(seconds)

    monkeypatch.setattr(world.reaper, "_check_files", look)
    monkeypatch.setattr(world.reaper, "_pause", pause)

    async def run() -> None:
        await world.reaper.recount()
        clock[0] += 1.0
        await world.reaper.recount()

    asyncio.run(run())
    assert pauses == [-100.0, 5.0]


def test_only_a_pause_of_some_time_waits(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[float] = []

    async def wait_for(waiting: Any, seconds: float) -> None:  # noqa: ANN401 - a coroutine
        waiting.close()
        waits.append(seconds)
        raise TimeoutError

    monkeypatch.setattr(asyncio, "wait_for", wait_for)
    for seconds in (-1.0, 0.0, 0.5):
        asyncio.run(world.reaper._pause(seconds))
    assert waits == [0.5]


def test_a_sweep_leaves_no_descriptor_open(world: World) -> None:
    for number in range(7):
        world.add(number)
    asyncio.run(world.reaper.sweep())
    before = len(os.listdir("/proc/self/fd"))  # noqa: PTH208 - the listing's own descriptor must be closed at once
    asyncio.run(world.reaper.sweep())
    assert len(os.listdir("/proc/self/fd")) == before  # noqa: PTH208 - as above


def test_how_often_things_are_done_is_as_documented() -> None:
    names = (
        "TICK_SECONDS",
        "SWEEP_SECONDS",
        "ORPHANS_SECONDS",
        "DAY_SECONDS",
        "RETRY_SECONDS",
        "PAGE",
        "PURGED_AT_ONCE",
        "COOLDOWN_FACTOR",
    )
    assert [getattr(reaper_module, name) for name in names] == [1, 600, 3600, 86400, 60, 500, 10_000, 3]


def test_a_recount_that_rests_ends_with_the_service(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reaper_module, "COOLDOWN_FACTOR", 10**9)
    world.add(1)

    async def run() -> None:
        await world.reaper.recount()
        resting = asyncio.create_task(world.reaper.recount())
        await asyncio.sleep(0)
        await world.reaper.close()
        await resting

    asyncio.run(run())


def test_old_records_go_however_many_there_are(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reaper_module, "PURGED_AT_ONCE", 3)
    records = [world.add(number, finished=800.0 + 20 * number) for number in range(10)]
    asyncio.run(world.reaper.purge())
    assert [record for record in records if world.registry.get(record.id).result()] == records[5:]
    assert all(path_of(record).exists() for record in records)


def test_what_a_crash_in_a_removal_leaves_is_removed_after_a_minute_by_a_start_and_after_a_day_else(
    world: World, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")

    def crash(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    def left(number: int) -> Path:
        with monkeypatch.context() as patch:
            patch.setattr(saved_files.os, "unlink", crash)
            with pytest.raises(KeyboardInterrupt):
                remove_saved(world.roots, world.add(number), lock_files=True)
        (aside,) = world.root.rglob(".*.part")
        return aside

    def cleaned(aside: Path, age_seconds: float) -> bool:
        world.clock[0] = time.time() + age_seconds
        asyncio.run(world.reaper.remove_orphans())
        return not aside.exists()

    aside = left(1)
    assert cleaned(aside, 90)
    assert "removed 1 temporary files and lock files that no save uses" in caplog.text
    caplog.clear()
    aside = left(2)
    assert not cleaned(aside, 90)
    assert not cleaned(aside, DAY_SECONDS - 60)
    assert caplog.records == []
    assert cleaned(aside, DAY_SECONDS + 60)


def test_the_first_cleaning_leaves_what_was_made_a_moment_ago(world: World) -> None:
    part = world.root / f".{1:032x}.part"
    part.touch()
    world.clock[0] = time.time() + 30
    asyncio.run(world.reaper.remove_orphans())
    assert part.exists()


def test_a_cleaning_that_fails_is_a_first_one_again(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    part = world.root / f".{1:032x}.part"
    part.touch()
    world.clock[0] = time.time() + 90

    def failing(*_: object, **__: object) -> None:
        raise OSError(5, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(reaper_module, "remove_orphaned_files", failing)
        with pytest.raises(OSError, match="Input/output"):
            asyncio.run(world.reaper.remove_orphans())
    asyncio.run(world.reaper.remove_orphans())
    assert not part.exists()


def test_a_cleaning_ends_with_the_service(world: World) -> None:
    part = world.root / f".{1:032x}.part"
    part.touch()
    world.clock[0] = time.time() + 90

    async def run() -> None:
        await world.reaper.close()
        await world.reaper.remove_orphans()

    asyncio.run(run())
    assert part.exists()


def test_a_job_that_takes_long_rests_three_times_as_long(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]
    monkeypatch.setattr(reaper_module.time, "monotonic", lambda: clock[0])

    async def work() -> None:
        clock[0] += 50.0

    async def quick() -> None:
        pass

    long, short = reaper_module._Job(work, 1.0), reaper_module._Job(quick, 1.0)
    asyncio.run(world.reaper._attempt(long))
    asyncio.run(world.reaper._attempt(short))
    assert (long.due, short.due) == (200.0, 51.0)


def test_it_does_everything_at_the_start_and_ends_when_told(world: World) -> None:
    record, old, gone = world.add(1, expires=5.0), world.add(2, finished=1.0), world.add(3, finished=999.0)
    path_of(gone).unlink()

    async def run() -> None:
        world.reaper.start()
        while world.registry.get(old.id).result() is not None or world.get(gone).gone is None:
            await asyncio.sleep(0.01)
        await world.reaper.close()
        await world.reaper.close()

    asyncio.run(run())
    assert not path_of(record).exists()


def counted(world: World, monkeypatch: pytest.MonkeyPatch, name: str, at_the: dict[int, Callable[[], None]]) -> list[None]:
    """Grows by one with every run of a job, which does something at the runs of some numbers."""
    runs: list[None] = []

    async def job() -> None:
        runs.append(None)
        at_the.get(len(runs), lambda: None)()

    monkeypatch.setattr(world.reaper, name, job)
    return runs


def test_a_job_runs_when_it_is_due_and_not_with_the_others(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reaper_module, "TICK_SECONDS", 0.001)
    looks = counted(world, monkeypatch, "refresh", {5: world.reaper._closing.set})
    others = [counted(world, monkeypatch, name, {}) for name in ("sweep", "purge", "remove_orphans", "recover")]
    pauses: list[float] = []
    pause = world.reaper._pause

    async def noted(seconds: float) -> None:
        pauses.append(seconds)
        await pause(seconds)

    monkeypatch.setattr(world.reaper, "_pause", noted)
    asyncio.run(world.reaper._run())
    assert [len(looks), *map(len, others)] == [5, 1, 1, 1, 1]
    assert len(pauses) >= 5
    assert set(pauses) == {0.001}


def test_no_job_begins_once_the_service_ends(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    expiries = counted(world, monkeypatch, "expire", {1: world.reaper._closing.set})
    others = [counted(world, monkeypatch, name, {}) for name in ("refresh", "sweep", "purge", "remove_orphans", "recover")]
    asyncio.run(world.reaper._run())
    assert [len(expiries), *map(len, others)] == [1, 0, 0, 0, 0, 0]


def test_the_end_of_the_service_waits_for_the_job_under_way(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    async def run() -> None:
        begun, goes_on = asyncio.Event(), asyncio.Event()

        async def long() -> None:
            begun.set()
            await goes_on.wait()

        monkeypatch.setattr(world.reaper, "expire", long)
        world.reaper.start()
        await begun.wait()
        closing = asyncio.ensure_future(world.reaper.close())
        for _ in range(10):
            await asyncio.sleep(0)
        assert not closing.done()
        goes_on.set()
        await closing

    asyncio.run(run())


def test_a_refresh_reads_what_is_saved_and_what_is_free(world: World) -> None:
    world.add(1)
    asyncio.run(world.reaper.refresh())
    assert world.reaper.space.saved_bytes == world.used() > 0
    assert list(world.reaper.space.disks) == [str(world.root)]


def test_a_sweep_opens_a_directory_once_for_the_files_that_follow_each_other(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in (0, 3, 6, 1, 4):
        world.add(number)
    openings: list[str] = []

    def opened(roots: SaveRoots, record: SaveRecord) -> int | None:
        openings.append(path_of(record).parent.name)
        return saved_files.open_directory(roots, record)

    monkeypatch.setattr(reaper_module, "open_directory", opened)
    asyncio.run(world.reaper.sweep())
    assert openings == ["0", "1"]


def test_a_directory_that_can_not_be_opened_does_not_keep_a_sweep_from_the_others(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    records = [world.add(number) for number in (0, 1, 3)]

    def opened(roots: SaveRoots, record: SaveRecord) -> int | None:
        if path_of(record).parent.name == "1":
            raise ServiceError("the disk has failed", code="io_error")
        return saved_files.open_directory(roots, record)

    for record in records:
        path_of(record).unlink()
    monkeypatch.setattr(reaper_module, "open_directory", opened)
    asyncio.run(world.reaper.sweep())
    assert [world.get(record).gone for record in records] == [1000.0, None, 1000.0]


def test_a_job_that_fails_does_not_end_the_others(world: World, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    gone = world.add(3, finished=999.0)
    path_of(gone).unlink()

    async def failing() -> int:
        raise RuntimeError("broken")

    monkeypatch.setattr(world.reaper, "expire", failing)

    async def run() -> None:
        world.reaper.start()
        while world.get(gone).gone is None:
            await asyncio.sleep(0.01)
        await world.reaper.close()

    asyncio.run(run())
    assert "will be retried" in caplog.text
