"""A published file is opened and removed only if it is that very one, and is gone only where its file system is there."""

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save

from service.errors import Gone, StorageUnavailable
from service.registry.records import SaveRecord
from service.saves.files import check_in_sight, device_of_saved, is_saved_file, open_saved, remove_saved
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


CHANGES = [delete, delete_folder, replace_by_other_save, replace_by_longer, replace_by_other_inode, replace_by_link]


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
    check_in_sight(world.roots, plain)


def test_the_status_tells_the_file_by_device_inode_size_and_kind(world: World) -> None:
    status = world.file.stat()
    assert is_saved_file(status, world.record)
    assert not is_saved_file(None, world.record)
    assert not is_saved_file(world.lock.stat(), world.record)
    assert not is_saved_file(world.file.parent.stat(), replace(world.record, inode=world.file.parent.stat().st_ino, bytes=4096))
    for changed in ({"device": OTHER_DEVICE}, {"inode": 1}, {"bytes": 1}):
        assert not is_saved_file(status, replace(world.record, **changed))


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
