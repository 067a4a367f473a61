"""Room for running saves: never promised twice, and given back exactly once."""

import asyncio
import os
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from service.errors import DiskFull
from service.registry.records import SaveRecord
from service.registry.registry import Registry
from service.saves.paths.roots import SaveRoots
from service.saves.space import LARGEST_DEFAULT_RESERVE, Need, QuotaExceeded, Space

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


def nothing_written(save_id: str) -> int:
    return 0


def needs(roots: SaveRoots, *blocks: int, first: int = 0) -> list[Need]:
    return [Need(f"{first + number}", roots.roots[0].fd, count * BLOCK) for number, count in enumerate(blocks)]


def test_the_default_reserve_is_the_smaller_of_1_gib_and_5_percent(registry: Registry, roots: SaveRoots, disk: SimpleNamespace) -> None:
    space, path = Space(registry, roots), roots.roots[0].path
    space.look()
    assert space.disks[path].reserve == 50 * BLOCK
    disk.f_blocks = 10**9
    space.look()
    assert space.disks[path].reserve == LARGEST_DEFAULT_RESERVE


def test_saves_fit_down_to_the_reserve_and_no_further(registry: Registry, roots: SaveRoots, disk: SimpleNamespace) -> None:
    async def run() -> None:
        space = Space(registry, roots)
        await space.reserve(needs(roots, 20, 30), nothing_written)
        with pytest.raises(DiskFull):
            await space.reserve([Need("x", roots.roots[0].fd, 1)], nothing_written)
        assert space.reserved_bytes == 50 * BLOCK
        space.release("0")
        space.release("0")
        await space.reserve(needs(roots, 20, first=5), nothing_written)

    asyncio.run(run())


def test_of_one_request_all_saves_fit_or_none_is_reserved(registry: Registry, roots: SaveRoots, disk: SimpleNamespace) -> None:
    async def run() -> None:
        space = Space(registry, roots)
        with pytest.raises(DiskFull):
            await space.reserve(needs(roots, 30, 21), nothing_written)
        assert space.reserved_bytes == 0

    asyncio.run(run())


def test_what_running_saves_have_written_is_not_counted_twice(registry: Registry, roots: SaveRoots, disk: SimpleNamespace) -> None:
    async def run() -> None:
        space = Space(registry, roots)
        await space.reserve(needs(roots, 40), nothing_written)
        disk.f_bavail = 70  # 30 of the 40 are on the disk
        with pytest.raises(DiskFull):
            await space.reserve(needs(roots, 10, first=1), nothing_written)
        await space.reserve(needs(roots, 10, first=1), lambda save_id: 30 * BLOCK if save_id == "0" else 0)

    asyncio.run(run())


def test_what_ends_while_the_figures_are_read_still_counts(registry: Registry, roots: SaveRoots, monkeypatch: pytest.MonkeyPatch) -> None:
    """The figures may be from before the save has landed, and its reservation has gone."""

    async def run() -> None:
        space = Space(registry, roots, max_saved_bytes=100 * BLOCK, min_free_bytes=0)
        await space.reserve(needs(roots, 60), nothing_written)
        used_bytes = registry.used_bytes

        def late() -> object:
            used = used_bytes()
            used.result()
            space.release("0")
            return used

        monkeypatch.setattr(registry, "used_bytes", late)
        with pytest.raises(QuotaExceeded):
            await space._reserve(needs(roots, 60, first=1), nothing_written)

    asyncio.run(run())


def test_the_quota_counts_what_is_saved_and_what_is_reserved(registry: Registry, roots: SaveRoots) -> None:
    record = SaveRecord("a" * 32, "/x", "request", "model", (1,), "float32", created=1.0, status="completed", bytes=50 * BLOCK)
    registry.insert(record).result()

    async def run() -> None:
        space = Space(registry, roots, max_saved_bytes=100 * BLOCK, min_free_bytes=0)
        await space.reserve(needs(roots, 30), nothing_written)
        with pytest.raises(QuotaExceeded):
            await space.reserve(needs(roots, 21, first=1), nothing_written)
        await space.reserve(needs(roots, 20, first=1), nothing_written)

    asyncio.run(run())


def test_room_that_a_recount_finds_is_used_at_once(registry: Registry, roots: SaveRoots) -> None:
    record = SaveRecord("a" * 32, "/x", "request", "model", (1,), "float32", created=1.0, status="completed", bytes=90)
    registry.insert(record).result()

    async def recount() -> None:
        await asyncio.wrap_future(registry.update(record.id, gone=5.0))

    async def run() -> None:
        space = Space(registry, roots, max_saved_bytes=100, min_free_bytes=0)
        space.recount = recount
        await space.reserve([Need("x", roots.roots[0].fd, 100)], nothing_written)

    asyncio.run(run())


def test_a_disk_near_its_reserve_is_a_line_in_the_log_now_and_then(
    registry: Registry, roots: SaveRoots, disk: SimpleNamespace, caplog: pytest.LogCaptureFixture
) -> None:
    space = Space(registry, roots)
    space.look()
    assert caplog.records == []
    disk.f_bavail = 60
    for _ in range(3):
        space.look()
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert roots.roots[0].path in caplog.text
