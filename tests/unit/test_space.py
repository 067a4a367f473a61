"""Room for running saves: never promised twice, and given back exactly once."""

import asyncio
import errno
import os
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from service.errors import DiskFull, ServiceError
from service.registry.records import SaveRecord
from service.registry.registry import Registry
from service.saves.paths.roots import SaveRoots
from service.saves.space import (
    DEFAULT_RESERVE_PART,
    LARGEST_DEFAULT_RESERVE,
    LOG_INTERVAL_SECONDS,
    LOW_SPACE_FACTOR,
    Disk,
    Need,
    QuotaExceeded,
    Space,
)

BLOCK = 4096


@pytest.fixture
def registry(tmp_path: Path) -> Iterator[Registry]:
    opened = Registry(tmp_path / "state")
    yield opened
    opened.close()


@pytest.fixture
def roots(tmp_path: Path) -> Iterator[SaveRoots]:
    opened = SaveRoots([str(tmp_path / "saves")])
    yield opened
    opened.close()


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Figures of the one disk, in blocks."""
    figures = SimpleNamespace(f_blocks=1000, f_frsize=BLOCK, f_bavail=100)
    monkeypatch.setattr(os, "fstatvfs", lambda fd: figures)
    return figures


def test_the_figures_are_as_documented() -> None:
    assert (LARGEST_DEFAULT_RESERVE, DEFAULT_RESERVE_PART, LOW_SPACE_FACTOR, LOG_INTERVAL_SECONDS) == (2**30, 20, 1.25, 60)


def nothing_written(save_id: str) -> int:
    return 0


def needs(roots: SaveRoots, *blocks: int, first: int = 0) -> list[Need]:
    return [Need(f"{first + number}", roots.roots[0].fd, count * BLOCK) for number, count in enumerate(blocks)]


def test_the_default_reserve_is_the_smaller_of_1_gib_and_5_percent(registry: Registry, roots: SaveRoots, disk: SimpleNamespace) -> None:
    space, path = Space(registry, roots), roots.roots[0].path
    space.refresh()
    assert space.disks[path].reserve == 50 * BLOCK
    disk.f_blocks = 10**9
    space.refresh()
    assert space.disks[path].reserve == LARGEST_DEFAULT_RESERVE


def test_saves_fit_down_to_the_reserve_and_no_further(registry: Registry, roots: SaveRoots, disk: SimpleNamespace) -> None:
    async def run() -> None:
        space = Space(registry, roots)
        await space.reserve(needs(roots, 20, 30), nothing_written, asyncio.to_thread)
        with pytest.raises(DiskFull):
            await space.reserve([Need("x", roots.roots[0].fd, 1)], nothing_written, asyncio.to_thread)
        assert space.reserved_bytes == 50 * BLOCK
        space.release("0")
        space.release("0")
        await space.reserve(needs(roots, 20, first=5), nothing_written, asyncio.to_thread)

    asyncio.run(run())


def test_of_one_request_all_saves_fit_or_none_is_reserved(registry: Registry, roots: SaveRoots, disk: SimpleNamespace) -> None:
    async def run() -> None:
        space = Space(registry, roots)
        with pytest.raises(DiskFull):
            await space.reserve(needs(roots, 30, 21), nothing_written, asyncio.to_thread)
        assert space.reserved_bytes == 0

    asyncio.run(run())


def test_what_running_saves_have_written_is_not_counted_twice(registry: Registry, roots: SaveRoots, disk: SimpleNamespace) -> None:
    async def run() -> None:
        space = Space(registry, roots)
        await space.reserve(needs(roots, 40), nothing_written, asyncio.to_thread)
        disk.f_bavail = 70  # 30 of the 40 are on the disk
        with pytest.raises(DiskFull):
            await space.reserve(needs(roots, 10, first=1), nothing_written, asyncio.to_thread)
        await space.reserve(needs(roots, 10, first=1), lambda save_id: 30 * BLOCK if save_id == "0" else 0, asyncio.to_thread)

    asyncio.run(run())


def test_what_ends_while_the_figures_are_read_still_counts(registry: Registry, roots: SaveRoots, monkeypatch: pytest.MonkeyPatch) -> None:
    """The figures may be from before the save has landed, and its reservation has gone."""

    async def run() -> None:
        space = Space(registry, roots, max_saved_bytes=100 * BLOCK, min_free_bytes=0)
        await space.reserve(needs(roots, 60), nothing_written, asyncio.to_thread)
        used_bytes = registry.used_bytes

        def late() -> object:
            used = used_bytes()
            used.result()
            space.release("0")
            return used

        monkeypatch.setattr(registry, "used_bytes", late)
        with pytest.raises(QuotaExceeded):
            await space._reserve(needs(roots, 60, first=1), nothing_written, asyncio.to_thread)

    asyncio.run(run())


def test_the_quota_counts_what_is_saved_and_what_is_reserved(registry: Registry, roots: SaveRoots) -> None:
    record = SaveRecord("a" * 32, "/x", "request", "model", (1,), "float32", created=1.0, status="completed", bytes=50 * BLOCK)
    registry.insert(record).result()

    async def run() -> None:
        space = Space(registry, roots, max_saved_bytes=100 * BLOCK, min_free_bytes=0)
        await space.reserve(needs(roots, 30), nothing_written, asyncio.to_thread)
        with pytest.raises(QuotaExceeded):
            await space.reserve(needs(roots, 21, first=1), nothing_written, asyncio.to_thread)
        await space.reserve(needs(roots, 20, first=1), nothing_written, asyncio.to_thread)

    asyncio.run(run())


def test_room_that_a_recount_finds_is_used_at_once(registry: Registry, roots: SaveRoots) -> None:
    record = SaveRecord("a" * 32, "/x", "request", "model", (1,), "float32", created=1.0, status="completed", bytes=90)
    registry.insert(record).result()

    async def recount() -> None:
        await asyncio.wrap_future(registry.update(record.id, gone=5.0))

    async def run() -> None:
        space = Space(registry, roots, max_saved_bytes=100, min_free_bytes=0)
        space.recount = recount
        await space.reserve([Need("x", roots.roots[0].fd, 100)], nothing_written, asyncio.to_thread)

    asyncio.run(run())


def test_a_disk_near_its_reserve_is_a_line_in_the_log_now_and_then(
    registry: Registry, roots: SaveRoots, disk: SimpleNamespace, caplog: pytest.LogCaptureFixture
) -> None:
    space = Space(registry, roots)
    space.refresh()
    assert caplog.records == []
    disk.f_bavail = 60
    for _ in range(3):
        space.refresh()
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert roots.roots[0].path in caplog.text


def completed(registry: Registry, size: int, number: int = 1) -> SaveRecord:
    record = SaveRecord(f"{number:032x}", "/x", "request", "model", (1,), "float32", created=1.0, status="completed", bytes=size)
    registry.insert(record).result()
    return record


def reserved(space: Space, *needs: Need) -> None:
    asyncio.run(space.reserve(needs, nothing_written, asyncio.to_thread))


def test_a_look_tells_what_is_saved_and_free_and_kept_free(registry: Registry, roots: SaveRoots, disk: SimpleNamespace) -> None:
    completed(registry, 7)
    space = Space(registry, roots, min_free_bytes=3)
    assert (space.saved_bytes, space.disks) == (0, {})
    space.refresh()
    root = roots.roots[0]
    assert (space.saved_bytes, space.disks) == (7, {root.path: Disk(os.fstat(root.fd).st_dev, 100 * BLOCK, 3)})


@pytest.mark.parametrize(("blocks", "reserve"), [(20 * 2**18, 2**30), (20 * 2**18 - 1, 2**30 - 205), (19, 3891), (0, 0)])
def test_the_default_reserve_to_the_byte(registry: Registry, roots: SaveRoots, disk: SimpleNamespace, blocks: int, reserve: int) -> None:
    disk.f_blocks = blocks
    space = Space(registry, roots)
    space.refresh()
    assert space.disks[roots.roots[0].path].reserve == reserve


def test_a_disk_that_can_not_be_looked_at_is_a_line_and_keeps_no_other_from_it(
    registry: Registry, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    roots = SaveRoots([str(tmp_path / "broken"), str(tmp_path / "fine")])
    broken, fine = roots.roots
    real = os.fstatvfs

    def figures(fd: int) -> object:
        if fd == broken.fd:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return real(fd)

    monkeypatch.setattr(os, "fstatvfs", figures)
    space = Space(registry, roots, min_free_bytes=0)
    space.refresh()
    assert list(space.disks) == [fine.path]
    assert caplog.messages == [f"the free space of {broken.path} can't be read: {os.strerror(errno.EIO)}"]
    roots.close()


@pytest.mark.parametrize(("blocks", "warned"), [(62, True), (63, False)])
def test_near_the_reserve_is_a_quarter_above_it(
    registry: Registry, roots: SaveRoots, disk: SimpleNamespace, caplog: pytest.LogCaptureFixture, blocks: int, warned: bool
) -> None:
    disk.f_bavail = blocks
    Space(registry, roots).refresh()
    assert bool(caplog.messages) is warned


def test_what_running_saves_may_need_is_not_free(
    registry: Registry, roots: SaveRoots, disk: SimpleNamespace, caplog: pytest.LogCaptureFixture
) -> None:
    space, path = Space(registry, roots), roots.roots[0].path
    reserved(space, *needs(roots, 50))
    space.refresh()
    line = f"the disk of {path} is nearly full: 200.0 KiB are free, saves that need the last 200.0 KiB are refused"
    assert caplog.messages == [line]
    disk.f_bavail = 10
    caplog.clear()
    Space(registry, roots).refresh()
    assert "nearly full: 40.0 KiB are free" in caplog.text


def test_a_reserve_of_nothing_is_never_near(
    registry: Registry, roots: SaveRoots, disk: SimpleNamespace, caplog: pytest.LogCaptureFixture
) -> None:
    disk.f_bavail = 0
    space = Space(registry, roots, min_free_bytes=0)
    space.refresh()
    reserved(space, *needs(roots, 10**6))
    assert caplog.messages == []


def test_a_warning_comes_again_after_a_minute_and_other_subjects_have_their_own(
    registry: Registry, roots: SaveRoots, disk: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    now = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    disk.f_bavail = 60
    space = Space(registry, roots, max_saved_bytes=1)

    def lines() -> int:
        caplog.clear()
        space.refresh()
        for need in (needs(roots, 1), needs(roots, 1, first=1)):
            with pytest.raises(QuotaExceeded):
                reserved(space, *need)
        return len(caplog.messages)

    assert lines() == 2
    now[0] = LOG_INTERVAL_SECONDS - 1
    assert lines() == 0
    now[0] = LOG_INTERVAL_SECONDS
    assert lines() == 2


def test_what_is_refused_for_the_disk_says_the_figures_and_asks_for_no_recount(
    registry: Registry, roots: SaveRoots, disk: SimpleNamespace, caplog: pytest.LogCaptureFixture
) -> None:
    async def never() -> None:
        raise AssertionError("files were counted again")

    space = Space(registry, roots)
    space.recount = never
    with pytest.raises(DiskFull) as refused:
        reserved(space, *needs(roots, 30, 21))
    assert refused.value.code == "no_space"
    assert refused.value.message == (
        f"the request may need {51 * BLOCK} bytes; the disk has {100 * BLOCK} left, of which {50 * BLOCK} are kept free"
    )
    assert caplog.messages == ["a request was refused: it may need 204.0 KiB, 400.0 KiB are free"]
    disk.f_bavail = 10
    reserved(Space(registry, roots, min_free_bytes=1), *needs(roots, 9))
    overdrawn = Space(registry, roots, min_free_bytes=BLOCK)
    reserved(overdrawn, *needs(roots, 9))
    disk.f_bavail = 5
    with pytest.raises(DiskFull, match="the disk has 0 left"):
        reserved(overdrawn, *needs(roots, 1, first=1))


def test_what_is_refused_for_the_quota_says_the_figures(registry: Registry, roots: SaveRoots, caplog: pytest.LogCaptureFixture) -> None:
    completed(registry, 50)
    space = Space(registry, roots, max_saved_bytes=100, min_free_bytes=0)
    fd = roots.roots[0].fd
    reserved(space, Need("a", fd, 30))
    with pytest.raises(QuotaExceeded) as refused:
        reserved(space, Need("b", fd, 11), Need("c", fd, 10))
    taken = "50 bytes are saved and 30 reserved for running saves"
    assert refused.value.code == "quota_exceeded"
    assert refused.value.message == f"the request may need 21 bytes; {taken} of the 100 that may be saved"
    assert caplog.messages == [f"a request was refused: {taken} of 100"]
    reserved(space, Need("b", fd, 10), Need("c", fd, 10))
    assert space.reserved_bytes == 50


def test_a_recount_that_finds_no_room_is_asked_for_once(registry: Registry, roots: SaveRoots) -> None:
    completed(registry, 100)
    counted: list[None] = []

    async def recount() -> None:
        counted.append(None)

    space = Space(registry, roots, max_saved_bytes=100, min_free_bytes=0)
    space.recount = recount
    with pytest.raises(QuotaExceeded):
        reserved(space, Need("a", roots.roots[0].fd, 1))
    assert len(counted) == 1


def test_room_for_files_of_no_bytes_is_there_to_the_last_byte(registry: Registry, roots: SaveRoots) -> None:
    completed(registry, 100)
    reserved(Space(registry, roots, max_saved_bytes=100, min_free_bytes=0), Need("a", roots.roots[0].fd, 0))


def test_without_a_quota_nobody_asks_what_is_saved(registry: Registry, roots: SaveRoots, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "used_bytes", None)
    reserved(Space(registry, roots, min_free_bytes=0), Need("a", roots.roots[0].fd, 1))


@pytest.fixture
def two_disks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[SaveRoots]:
    """Roots on devices 1 and 2, of 100 blocks each."""
    roots = SaveRoots([str(tmp_path / "first"), str(tmp_path / "second")])
    devices, real = {root.fd: number for number, root in enumerate(roots.roots, 1)}, os.fstat
    with monkeypatch.context() as patch:
        patch.setattr(os, "fstat", lambda fd: SimpleNamespace(st_dev=devices[fd]) if fd in devices else real(fd))
        patch.setattr(os, "fstatvfs", lambda fd: SimpleNamespace(f_blocks=0, f_frsize=BLOCK, f_bavail=100))
        yield roots
    roots.close()


def test_each_disk_has_its_own_room(registry: Registry, two_disks: SaveRoots) -> None:
    first, second = (root.fd for root in two_disks.roots)
    space = Space(registry, two_disks, min_free_bytes=10 * BLOCK)
    reserved(space, Need("a", first, 90 * BLOCK), Need("b", second, 50 * BLOCK))
    for full in (Need("c", first, 1), Need("c", second, 41 * BLOCK)):
        with pytest.raises(DiskFull):
            reserved(space, full)
    with pytest.raises(DiskFull):
        reserved(space, Need("c", second, 20 * BLOCK), Need("d", second, 21 * BLOCK))
    reserved(space, Need("c", second, 20 * BLOCK), Need("d", second, 20 * BLOCK))
    space.release("a")
    reserved(space, Need("e", first, 90 * BLOCK))
    assert space.reserved_bytes == 180 * BLOCK


def test_what_is_written_on_one_disk_is_not_free_on_another(registry: Registry, two_disks: SaveRoots) -> None:
    first, second = (root.fd for root in two_disks.roots)
    space = Space(registry, two_disks, min_free_bytes=10 * BLOCK)
    reserved(space, Need("a", first, 90 * BLOCK), Need("b", second, 90 * BLOCK))
    with pytest.raises(DiskFull):
        asyncio.run(space.reserve([Need("c", first, 1)], lambda save_id: 90 * BLOCK if save_id == "b" else 0, asyncio.to_thread))
    asyncio.run(space.reserve([Need("c", first, 1)], lambda save_id: 90 * BLOCK if save_id == "a" else 0, asyncio.to_thread))


def test_a_save_that_wrote_more_than_it_reserved_gives_nothing_to_others(registry: Registry, two_disks: SaveRoots) -> None:
    first = two_disks.roots[0].fd
    space = Space(registry, two_disks, min_free_bytes=10 * BLOCK)
    reserved(space, Need("a", first, 40 * BLOCK), Need("b", first, 40 * BLOCK))

    def written(save_id: str) -> int:
        return 60 * BLOCK if save_id == "a" else 0

    with pytest.raises(DiskFull):
        asyncio.run(space.reserve([Need("c", first, 50 * BLOCK + 1)], written, asyncio.to_thread))
    asyncio.run(space.reserve([Need("c", first, 50 * BLOCK)], written, asyncio.to_thread))


def test_what_lands_while_the_disk_is_looked_at_may_be_missing_in_its_figures(
    registry: Registry, two_disks: SaveRoots, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = (root.fd for root in two_disks.roots)
    space = Space(registry, two_disks, min_free_bytes=10 * BLOCK)
    reserved(space, Need("a", first, 60 * BLOCK), Need("b", second, 60 * BLOCK))
    disks_of = space._disks_of

    def late(needs: list[Need]) -> list[Disk]:
        disks = disks_of(needs)
        space.release("a")
        return disks

    monkeypatch.setattr(space, "_disks_of", late)
    with pytest.raises(DiskFull):
        reserved(space, Need("c", first, 31 * BLOCK))
    reserved(space, Need("c", first, 31 * BLOCK))


def test_a_folder_that_can_not_be_looked_at_is_an_error_for_the_client(
    registry: Registry, roots: SaveRoots, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(_fd: int) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    space = Space(registry, roots)
    monkeypatch.setattr(os, "fstatvfs", failing)
    with pytest.raises(ServiceError) as refused:
        reserved(space, Need("a", roots.roots[0].fd, 1))
    assert refused.value.code == "io_error"
    assert space.reserved_bytes == 0
