"""A published file is opened and removed only if it is that very one, and is gone only where its file system is there."""

import errno
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save

from service.errors import Gone, ServiceError, StorageUnavailable
from service.registry.records import SaveRecord
from service.saves import files
from service.saves.files import check_reachable, device_of_saved, is_saved_file, open_saved, remove_saved
from service.saves.paths.roots import SaveRoots

ID = "a" * 32
OTHER_DEVICE = 7
"""No file system of this machine has that number."""


@cache
def states(save_id: str = ID) -> bytes:
    tensors = {"hidden_states": np.ones((5, 2, 8), np.float32), "token_ids": np.arange(5)}
    return save(tensors, {"format": "strata.hidden_states.v1", "save_id": save_id, "num_tokens": "5"})


@dataclass(frozen=True)
class World:
    root: Path
    roots: SaveRoots
    record: SaveRecord
    """Of `file`, as it was published."""

    @property
    def file(self) -> Path:
        return self.root / "dir/x"

    @property
    def lock(self) -> Path:
        return self.root / "dir/x.lock"

    @property
    def moved(self) -> SaveRecord:
        """The record where the file was put on a file system that had another number."""
        return replace(self.record, device=OTHER_DEVICE)

    @property
    def elsewhere(self) -> SaveRecord:
        """The record where the file was put in a folder that is no save root."""
        return replace(self.record, hidden_states_path=str(self.root.parent / "other/x"))

    def open_files(self) -> int:
        return len(os.listdir("/proc/self/fd"))  # noqa: PTH208 - the listing's own descriptor must be closed at once


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    root = tmp_path.resolve() / "saves"
    (root / "dir").mkdir(parents=True)
    file = root / "dir/x"
    file.write_bytes(states())
    (root / "dir/x.lock").touch()
    status = file.stat()
    record = SaveRecord(ID, str(file), "request", "model", (1, 2), "float32", created=1.0, status="completed", finished=1.0)
    record = replace(record, bytes=status.st_size, device=status.st_dev, inode=status.st_ino)
    roots = SaveRoots([str(root)])
    before = len(os.listdir("/proc/self/fd"))  # noqa: PTH208 - as above
    yield World(root, roots, record)
    assert len(os.listdir("/proc/self/fd")) == before  # noqa: PTH208 - as above
    roots.close()


def opened(world: World, record: SaveRecord) -> bytes:
    fd = open_saved(world.roots, record)
    try:
        return os.read(fd, 10**6)
    finally:
        os.close(fd)


def delete(world: World) -> None:
    world.file.unlink()


def delete_folder(world: World) -> None:
    world.file.unlink()
    world.lock.unlink()
    world.file.parent.rmdir()


def replace_by_other_save(world: World) -> None:
    world.file.write_bytes(states("b" * 32))


def replace_by_longer(world: World) -> None:
    world.file.write_bytes(states() + b"more")


def replace_by_other_inode(world: World) -> None:
    (world.root / "copy").write_bytes(states())
    (world.root / "copy").rename(world.file)


def replace_by_link(world: World) -> None:
    world.file.rename(world.root / "away")
    world.file.symlink_to(world.root / "away")


def replace_by_fifo(world: World) -> None:
    world.file.unlink()
    os.mkfifo(world.file)


CHANGES = [delete, delete_folder, replace_by_other_save, replace_by_longer, replace_by_other_inode, replace_by_link, replace_by_fifo]


def test_the_file_is_opened_and_removed(world: World) -> None:
    assert opened(world, world.record) == states()
    assert remove_saved(world.roots, world.record, lock_files=True) is True
    assert list(world.file.parent.iterdir()) == []
    assert remove_saved(world.roots, world.record, lock_files=True) is False


def test_the_lock_file_stays_where_there_are_to_be_none(world: World) -> None:
    assert remove_saved(world.roots, world.record, lock_files=False) is True
    assert world.lock.exists()


@pytest.mark.parametrize("change", CHANGES)
def test_anything_else_in_its_place_is_not_the_file_and_stays(world: World, change: Callable[[World], None]) -> None:
    change(world)
    before = {path: path.read_bytes() for path in world.root.rglob("*") if path.is_file()}
    with pytest.raises(Gone):
        opened(world, world.record)
    assert remove_saved(world.roots, world.record, lock_files=False) is False
    assert {path: path.read_bytes() for path in world.root.rglob("*") if path.is_file()} == before


@pytest.mark.parametrize("change", CHANGES)
def test_nothing_is_known_of_a_file_whose_file_system_is_not_there(world: World, change: Callable[[World], None]) -> None:
    change(world)
    with pytest.raises(StorageUnavailable, match="is not there now"):
        opened(world, world.moved)
    with pytest.raises(StorageUnavailable, match="is not there now"):
        remove_saved(world.roots, world.moved, lock_files=True)
    assert world.lock.exists() is (change is not delete_folder), "the lock file may be somebody's on the file system that is there"


def test_nothing_is_known_of_a_file_below_no_root(world: World) -> None:
    world.root.with_name("other").mkdir()
    world.file.rename(world.root.with_name("other") / "x")
    with pytest.raises(StorageUnavailable, match="no save root"):
        opened(world, world.elsewhere)
    with pytest.raises(StorageUnavailable, match="no save root"):
        remove_saved(world.roots, world.elsewhere, lock_files=True)
    assert (world.root.with_name("other") / "x").exists()


def test_a_file_whose_file_system_has_a_new_number_is_the_file(world: World) -> None:
    assert opened(world, world.moved) == states()
    assert remove_saved(world.roots, world.moved, lock_files=True) is True
    with pytest.raises(Gone):  # Its file system is known by now.
        opened(world, world.moved)
    assert remove_saved(world.roots, world.moved, lock_files=True) is False


def test_a_record_from_before_there_were_device_numbers_is_taken_for_one_of_this_file_system(world: World) -> None:
    plain = replace(world.record, device=None)
    assert opened(world, plain) == states()
    delete(world)
    with pytest.raises(Gone):
        opened(world, plain)
    check_reachable(world.roots, plain)


def test_the_status_tells_the_file_by_device_inode_size_and_kind(world: World) -> None:
    status = world.file.stat()
    assert is_saved_file(status, world.record)
    assert not is_saved_file(None, world.record)
    assert not is_saved_file(world.lock.stat(), world.record)
    assert not is_saved_file(world.file.parent.stat(), replace(world.record, inode=world.file.parent.stat().st_ino, bytes=4096))
    for changed in ({"device": OTHER_DEVICE}, {"inode": 1}, {"bytes": 1}):
        assert not is_saved_file(status, replace(world.record, **changed))


# What changes at the last moment.


def before_open(monkeypatch: pytest.MonkeyPatch, act: Callable[[], None]) -> None:
    """Something happens between the look at the file and its opening."""
    os_open, acts = os.open, iter([act])

    def open_after(path: str, flags: int, *arguments: Any, **options: Any) -> int:  # noqa: ANN401 - passed on
        if path == "x":
            next(acts, lambda: None)()
        return os_open(path, flags, *arguments, **options)

    monkeypatch.setattr(os, "open", open_after)


@pytest.mark.parametrize("change", CHANGES)
def test_what_takes_the_place_of_a_file_while_it_is_opened_is_not_the_file(
    world: World, monkeypatch: pytest.MonkeyPatch, change: Callable[[World], None]
) -> None:
    before_open(monkeypatch, lambda: change(world))
    with pytest.raises(Gone):
        opened(world, world.record)


@pytest.mark.parametrize("change", CHANGES)
def test_what_takes_the_place_of_a_file_while_it_is_removed_stays(
    world: World, monkeypatch: pytest.MonkeyPatch, change: Callable[[World], None]
) -> None:
    left: dict[Path, bytes] = {}

    def act() -> None:
        change(world)
        left.update((path, path.read_bytes()) for path in world.root.rglob("*") if path.is_file())

    before_open(monkeypatch, act)
    assert remove_saved(world.roots, world.record, lock_files=False) is False
    assert {path: path.read_bytes() for path in world.root.rglob("*") if path.is_file()} == left


@pytest.mark.parametrize("change", [replace_by_longer, replace_by_other_inode, replace_by_link, replace_by_fifo])
def test_what_can_not_be_the_file_is_not_opened(world: World, monkeypatch: pytest.MonkeyPatch, change: Callable[[World], None]) -> None:
    openings: list[None] = []
    change(world)
    before_open(monkeypatch, lambda: openings.append(None))
    with pytest.raises(Gone):
        opened(world, world.record)
    assert openings == []


def test_a_header_that_can_not_be_read_is_not_a_file_that_is_gone(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "read_published", lambda fd: (_ for _ in ()).throw(OSError(errno.EIO, "I/O error")))
    with pytest.raises(ServiceError) as refused:
        opened(world, world.record)
    assert (refused.value.status, refused.value.code) == (500, "io_error")


def test_a_disk_that_fails_is_not_a_file_that_is_gone(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise OSError(errno.EIO, "I/O error")

    before_open(monkeypatch, fail)
    with pytest.raises(ServiceError) as refused:
        opened(world, world.record)
    assert (refused.value.status, refused.value.code) == (500, "io_error")
    monkeypatch.undo()
    monkeypatch.setattr(world.roots, "locate", lambda path: (_ for _ in ()).throw(ServiceError("the disk has failed", code="io_error")))
    for look in (lambda: opened(world, world.record), lambda: remove_saved(world.roots, world.record, lock_files=True)):
        with pytest.raises(ServiceError, match="the disk has failed"):
            look()


def before_rename(monkeypatch: pytest.MonkeyPatch, act: Callable[[], None]) -> None:
    """Something happens between the opening of the file and its removal."""
    rename = os.rename

    def rename_after(source: str, target: str, **options: Any) -> None:  # noqa: ANN401 - passed on
        monkeypatch.setattr(os, "rename", rename)
        act()
        rename(source, target, **options)

    monkeypatch.setattr(os, "rename", rename_after)


def test_a_file_that_a_client_removes_at_the_same_time_has_gone(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    before_rename(monkeypatch, world.file.unlink)
    assert remove_saved(world.roots, world.record, lock_files=True) is False
    assert list(world.file.parent.iterdir()) == []


def test_a_file_that_takes_the_name_at_the_last_moment_has_it_again(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    before_rename(monkeypatch, lambda: replace_by_other_inode(world))
    assert remove_saved(world.roots, world.record, lock_files=True) is False
    assert world.file.stat().st_ino != world.record.inode
    assert sorted(path.name for path in world.file.parent.iterdir()) == ["x", "x.lock"]


def test_a_file_whose_name_is_taken_again_meanwhile_is_kept_under_another_and_told_of(
    world: World, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    names_file = files.names_file

    def caught(directory_fd: int, name: str, fd: int) -> bool:
        world.file.write_bytes(b"the second")
        return names_file(directory_fd, name, fd)

    monkeypatch.setattr(files, "names_file", caught)
    before_rename(monkeypatch, lambda: (world.root / "first").rename(world.file))
    (world.root / "first").write_bytes(b"the first")
    assert remove_saved(world.roots, world.record, lock_files=False) is False
    assert world.file.read_bytes() == b"the second"
    [kept] = set(world.file.parent.iterdir()) - {world.file, world.lock}
    assert (kept.read_bytes(), kept.name[:2]) == (b"the first", "x.")
    assert f"is kept as {kept.name}" in caplog.text


def test_a_sweep_learns_where_the_file_is_without_reading_it_unless_it_must(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    directory_fd = os.open(world.file.parent, os.O_RDONLY)
    device = world.record.device
    assert device_of_saved(world.roots, directory_fd, world.moved) == device
    replace_by_other_inode(world)
    assert device_of_saved(world.roots, directory_fd, world.moved) is None
    assert device_of_saved(world.roots, directory_fd, world.record) is None
    current = replace(world.record, inode=world.file.stat().st_ino)

    def never(*_: object) -> None:
        raise AssertionError("the file was read")

    monkeypatch.setattr("service.saves.files.read_published", never)
    assert device_of_saved(world.roots, directory_fd, current) == device
    delete(world)
    assert device_of_saved(world.roots, directory_fd, current) is None
    os.close(directory_fd)
