"""After a crash every save is either completed, its file whole, or failed with nothing left of it; nobody else's files are touched."""

import errno
import fcntl
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save

from service.registry.records import SaveRecord
from service.registry.registry import Registry
from service.saves.orphans import remove_orphaned_files, remove_unlocked
from service.saves.paths.roots import SaveRoots
from service.saves.recovery import RecoveryResult, recover

REPOSITORY = Path(__file__).resolve().parents[2]
SAVE_ID = "0123456789abcdef0123456789abcdef"
OTHER_ID = "f" * 32
MUCH_LATER = 10_000.0


@dataclass(frozen=True)
class World:
    base: Path
    roots: SaveRoots
    registry: Registry

    @property
    def root(self) -> Path:
        return self.base / "saves"

    @property
    def file(self) -> Path:
        return self.root / "dir/x.safetensors"

    @property
    def lock(self) -> Path:
        return self.root / "dir/x.safetensors.lock"

    @property
    def part(self) -> Path:
        return self.root / f"dir/.{SAVE_ID}.part"

    def leave_lock(self) -> None:
        """The lock file as this service has it while a file is written."""
        self.lock.write_text(f"strata {self.registry.service_id}\n")

    def crash(self, **changes: Any) -> SaveRecord:  # noqa: ANN401 - fields of SaveRecord
        """The record of a save that was being written to `file`."""
        plain = SaveRecord(SAVE_ID, str(self.file), "request", "model", (1, 2), "float32", created=1.0, status="writing")
        record = replace(plain, **changes)
        self.registry.insert(record).result()
        return record

    def outcome(self) -> SaveRecord:
        found = self.registry.get(SAVE_ID).result()
        assert found is not None
        return found


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    base = tmp_path.resolve()
    (base / "saves/dir").mkdir(parents=True)
    (base / "outside").mkdir()
    made = World(base, SaveRoots([str(base / "saves")]), Registry(base / "state"))
    yield made
    made.registry.close()
    made.roots.close()


@cache
def states(save_id: str = SAVE_ID) -> bytes:
    """A small file as a save publishes it, by the safetensors library. Cached: the library writes metadata in any order."""
    tensors = {"hidden_states": np.ones((5, 2, 8), np.float32), "token_ids": np.arange(5)}
    return save(tensors, {"format": "strata.hidden_states.v1", "save_id": save_id, "num_tokens": "7"})


def expect_interrupted(world: World) -> None:
    assert recover(world.registry, world.roots) == RecoveryResult(completed=0, failed=1)
    record = world.outcome()
    assert (record.status, record.error_code) == ("failed", "interrupted")
    assert record.finished is not None
    assert not world.part.exists()


def test_a_file_that_was_published_before_the_crash_completes_its_record(world: World) -> None:
    world.crash(ttl_seconds=60.0)
    world.file.write_bytes(states())
    world.lock.touch()
    assert recover(world.registry, world.roots) == RecoveryResult(completed=1, failed=0)
    record, status = world.outcome(), world.file.stat()
    assert (record.status, record.shape, record.num_tokens, record.bytes) == ("completed", (5, 2, 8), 7, status.st_size)
    assert (record.device, record.inode) == (status.st_dev, status.st_ino)
    assert record.finished is not None
    assert record.expires == record.finished + 60.0
    assert world.file.read_bytes() == states()
    assert world.lock.exists()


def test_a_second_name_that_publishing_by_link_has_left_is_removed(world: World) -> None:
    world.crash()
    world.part.write_bytes(states())
    world.file.hardlink_to(world.part)
    assert recover(world.registry, world.roots).completed == 1
    assert [path.name for path in world.file.parent.iterdir()] == [world.file.name]


@pytest.mark.parametrize("status", ["queued", "running", "writing"])
def test_a_save_that_was_not_published_is_failed_and_leaves_nothing(world: World, status: str) -> None:
    world.crash(status=status)
    world.part.write_bytes(states()[:100])
    world.leave_lock()
    expect_interrupted(world)
    assert list(world.file.parent.iterdir()) == []


def test_records_that_had_ended_and_their_files_stay_as_they_are(world: World) -> None:
    record = world.crash(status="completed", finished=2.0)
    world.lock.touch()
    assert recover(world.registry, world.roots) == RecoveryResult(completed=0, failed=0)
    assert world.outcome() == record
    assert world.lock.exists()


def test_recovering_twice_changes_nothing_more(world: World) -> None:
    world.crash()
    world.file.write_bytes(states())
    recover(world.registry, world.roots)
    before = world.outcome()
    assert recover(world.registry, world.roots) == RecoveryResult(completed=0, failed=0)
    assert world.outcome() == before


def test_what_somebody_holds_a_lock_on_is_left(world: World) -> None:
    world.crash()
    world.leave_lock()
    with world.part.open("wb") as part, world.lock.open("r+b") as lock:
        fcntl.flock(part, fcntl.LOCK_EX)
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert recover(world.registry, world.roots).failed == 1
    assert world.part.exists()
    assert world.lock.exists()


def test_the_file_of_another_save_under_the_name_is_left_with_its_lock_file(world: World) -> None:
    world.crash()
    world.file.write_bytes(states(OTHER_ID))
    world.part.touch()
    world.lock.touch()
    expect_interrupted(world)
    assert world.file.read_bytes() == states(OTHER_ID)
    assert world.lock.exists()


FOREIGN_MARKS = ["", f"strata {OTHER_ID}\n", "strata", "1234\n", "strata \n"]


@pytest.mark.parametrize("content", FOREIGN_MARKS)
def test_a_lock_file_that_the_service_has_not_made_is_left(world: World, content: str) -> None:
    world.crash()
    world.lock.write_text(content)
    expect_interrupted(world)
    assert remove_orphaned_files(world.roots, owner=world.registry.service_id, now=time.time() + MUCH_LATER) == 0
    assert world.lock.read_text() == content


def test_a_lock_file_without_a_record_is_removed_where_the_service_has_made_it_and_its_file_never_came(world: World) -> None:
    mine = f"strata {world.registry.service_id}\n"
    orphan, held, published, linked = (world.root / f"dir/{name}.lock" for name in ("orphan", "held", "published", "linked"))
    for lock in (orphan, held, published):
        lock.write_text(mine)
    (world.root / "dir/published").write_bytes(states())
    (world.base / "outside/secret.lock").write_text(mine)
    linked.symlink_to(world.base / "outside/secret.lock")
    foreign = [world.root / f"dir/{number}.lock" for number in range(len(FOREIGN_MARKS))]
    for lock, content in zip(foreign, FOREIGN_MARKS, strict=True):
        lock.write_text(content)
    with held.open("r+b") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        assert remove_orphaned_files(world.roots) == 0
        assert remove_orphaned_files(world.roots, owner=world.registry.service_id) == 1
    assert not orphan.exists()
    assert [lock for lock in (held, published, linked, *foreign, world.base / "outside/secret.lock") if not lock.exists()] == []


def test_the_lock_of_others_is_not_taken_even_for_a_moment(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    def taken(*_: object) -> None:
        raise AssertionError("a lock was taken")

    world.lock.write_text(f"strata {OTHER_ID}\n")
    monkeypatch.setattr(fcntl, "flock", taken)
    assert remove_orphaned_files(world.roots, owner=world.registry.service_id) == 0


def test_a_file_that_is_published_before_the_lock_is_had_keeps_its_lock_file(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    world.leave_lock()
    flock = fcntl.flock

    def publish_then_lock(fd: int, operation: int) -> None:
        world.file.write_bytes(states())
        flock(fd, operation)

    monkeypatch.setattr(fcntl, "flock", publish_then_lock)
    assert remove_orphaned_files(world.roots, owner=world.registry.service_id) == 0
    assert world.lock.exists()


def test_a_service_keeps_its_name_and_has_it_alone(world: World, tmp_path: Path) -> None:
    name = world.registry.service_id
    world.registry.close()
    again, other = Registry(world.base / "state"), Registry(tmp_path / "other")
    assert again.service_id == name
    assert other.service_id != name
    again.close()
    other.close()


@pytest.mark.parametrize("lost_bytes", [1, 100])
def test_a_file_of_the_save_that_lost_its_end_is_removed(world: World, lost_bytes: int) -> None:
    world.crash()
    world.file.write_bytes(states()[:-lost_bytes])
    expect_interrupted(world)
    assert not world.file.exists()


@pytest.mark.parametrize("released", [False, True])
@pytest.mark.parametrize("kept", [True, False])
def test_a_file_is_kept_only_with_the_text_that_its_record_was_to_carry(world: World, kept: bool, released: bool) -> None:
    world.crash(output={"text": "a", "token_ids": [1], "finish_reason": "length"} if kept else {})
    world.file.write_bytes(states())
    if released:
        world.lock.touch()
    else:
        world.leave_lock()
    if kept:
        assert recover(world.registry, world.roots) == RecoveryResult(completed=1, failed=0)
    else:
        expect_interrupted(world)
    assert (world.file.exists(), world.lock.exists()) == (kept, kept)


def framed(header: object) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text


OURS = {"save_id": SAVE_ID, "num_tokens": "1"}
FOREIGN = {
    "empty": b"",
    "three bytes": b"abc",
    "header longer than the file": (1000).to_bytes(8, "little") + b"{}",
    "absurd header length": b"\xff" * 64,
    "not JSON": framed(b"hello"),
    "not UTF-8": framed(b'{"\xff": 1}'),
    "deep JSON": framed(b"[" * 100_000),
    "a list": framed([1]),
    "a number": framed(1),
    "no metadata": framed({}),
    "metadata is text": framed({"__metadata__": "save_id"}),
    "no tensors": framed({"__metadata__": OURS}),
    "tensor is null": framed({"__metadata__": OURS, "hidden_states": None}),
    "no offsets": framed({"__metadata__": OURS, "hidden_states": {"dtype": "F32", "shape": [1], "data_offsets": []}}),
    "shape is text": framed({"__metadata__": OURS, "hidden_states": {"dtype": "F32", "shape": "abc", "data_offsets": [0, 4]}}),
    "infinite offset": framed(
        b'{"__metadata__": {"save_id": "%s", "num_tokens": "1"}, "x": {"dtype": "F32", "shape": [], "data_offsets": [0, 1e999]}}'
        % SAVE_ID.encode()
    ),
    "no number of tokens": framed(
        {"__metadata__": {"save_id": SAVE_ID}, "hidden_states": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}
    ),
    "many tokens": framed(
        {"__metadata__": OURS | {"num_tokens": "9" * 5000}, "hidden_states": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}
    ),
    "too many tokens": framed(
        {"__metadata__": OURS | {"num_tokens": "9" * 30}, "hidden_states": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}
    ),
}


@pytest.mark.parametrize("content", FOREIGN.values(), ids=FOREIGN.keys())
def test_whatever_stands_under_the_name_does_not_stop_the_start(world: World, content: bytes) -> None:
    world.crash()
    world.file.write_bytes(content)
    expect_interrupted(world)
    assert world.file.read_bytes() == content


@pytest.mark.parametrize("kind", ["directory", "fifo", "link"])
def test_what_is_no_file_is_not_opened(world: World, kind: str) -> None:
    world.crash()
    secret = world.base / "outside/secret"
    secret.write_bytes(states())
    if kind == "directory":
        world.file.mkdir()
    elif kind == "fifo":
        os.mkfifo(world.file)
    else:
        world.file.symlink_to(secret)
    expect_interrupted(world)
    assert os.path.lexists(world.file)
    assert secret.read_bytes() == states()


def test_a_directory_that_has_become_a_link_is_not_followed(world: World) -> None:
    world.crash()
    world.file.parent.rmdir()
    world.file.parent.symlink_to(world.base / "outside")
    for name in (world.file.name, world.lock.name):
        (world.base / "outside" / name).write_bytes(states())
    outside_part = world.base / "outside" / world.part.name
    outside_part.touch()
    assert recover(world.registry, world.roots).failed == 1
    assert len(list((world.base / "outside").iterdir())) == 3


def test_a_directory_that_has_gone_fails_the_save(world: World) -> None:
    world.crash()
    world.file.parent.rmdir()
    expect_interrupted(world)


def test_a_file_below_no_save_root_keeps_its_record_open(world: World) -> None:
    record = world.crash(hidden_states_path=str(world.base / "outside/x"))
    assert recover(world.registry, world.roots) == RecoveryResult(completed=0, failed=0, unreachable=1)
    assert world.outcome() == record


def test_only_old_unlocked_temporary_files_of_ours_are_cleaned(world: World) -> None:
    kept = [
        world.root / "dir/plain.part",
        world.root / f"dir/{SAVE_ID}.part",
        world.root / f"dir/.{SAVE_ID}.part.txt",
        world.root / f"dir/.{SAVE_ID.upper()}.part",
        world.root / "dir/.0123.part",
        world.root / "dir/x.safetensors",
        world.root / "dir/x.safetensors.lock",
        world.root / f".hidden/.{SAVE_ID}.part",
        world.base / f"outside/.{SAVE_ID}.part",
    ]
    gone = [world.root / f".{OTHER_ID}.part", world.part, world.root / f"a/b/.{SAVE_ID}.part", world.root / ".probe-0123456789abcdef.part"]
    for path in (*kept, *gone):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    link, link_to_directory = world.root / f".{'a' * 32}.part", world.root / "link"
    link.symlink_to(kept[-1])
    link_to_directory.symlink_to(world.base / "outside")
    held = world.root / f".{'b' * 32}.part"
    with held.open("wb") as part:
        fcntl.flock(part, fcntl.LOCK_EX)
        assert remove_orphaned_files(world.roots, now=time.time() + MUCH_LATER) == len(gone)
        assert held.exists()
    assert [path for path in gone if path.exists()] == []
    assert [path for path in (*kept, link) if not os.path.lexists(path)] == []
    assert remove_orphaned_files(world.roots, now=time.time() + MUCH_LATER) == 1  # The one that is no longer held.


def test_a_temporary_file_that_is_a_moment_old_may_still_be_locked_by_its_writer(world: World) -> None:
    world.part.touch()
    os.utime(world.part, (0, 0))  # Restored from somewhere: the inode is new all the same.
    assert remove_orphaned_files(world.roots) == 0
    assert world.part.exists()


def test_a_root_inside_another_is_cleaned_once(tmp_path: Path) -> None:
    roots = SaveRoots([str(tmp_path / "outer"), str(tmp_path / "outer/inner")])
    for directory in ("outer", "outer/inner"):
        (tmp_path / directory / f".{SAVE_ID}.part").touch()
    assert remove_orphaned_files(roots, now=time.time() + MUCH_LATER) == 2
    roots.close()


def test_a_file_that_takes_the_name_before_the_lock_is_had_is_not_removed(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    world.part.write_bytes(b"old")
    flock = fcntl.flock

    def exchange_then_lock(fd: int, operation: int) -> None:
        world.part.unlink()
        world.part.write_bytes(b"new")
        flock(fd, operation)

    monkeypatch.setattr(fcntl, "flock", exchange_then_lock)
    directory_fd = os.open(world.part.parent, os.O_RDONLY)
    assert remove_unlocked(directory_fd, world.part.name) is False
    os.close(directory_fd)
    assert world.part.read_bytes() == b"new"


def test_without_file_locks_only_what_is_known_to_be_ours_is_removed(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_locks(fd: int, operation: int) -> None:
        raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))

    world.crash()
    world.part.touch()
    stray = world.root / f"dir/.{OTHER_ID}.part"
    stray.touch()
    monkeypatch.setattr(fcntl, "flock", no_locks)
    assert remove_orphaned_files(world.roots, now=time.time() + MUCH_LATER) == 0
    expect_interrupted(world)
    assert stray.exists()


CHILD = """
import fcntl, os, sys, time
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from service.saves.paths.roots import SaveRoots
from service.registry.records import SaveRecord
from service.registry.registry import Registry
from service.saves.targets import Targets

base = Path(sys.argv[2])
registry = Registry(base / "state")
targets = Targets(SaveRoots([str(base / "saves")]), owner=registry.service_id)
open_files = []
for number in range(8):
    save_id = f"{number:032x}"
    target = targets.claim(f"new/{number}.safetensors", save_id, replace=False)
    registry.insert(SaveRecord(save_id, target.path, "r", "m", (1,), "float32", 1.0)).result()
    part = os.open(f".{save_id}.part", os.O_RDWR | os.O_CREAT | os.O_EXCL, dir_fd=target.directory_fd)
    fcntl.flock(part, fcntl.LOCK_EX)
    os.write(part, b"rows")
    open_files.append(part)
    if number % 2:
        # Published, but the process dies before the commit.
        os.pwrite(part, sys.stdin.buffer.read(int(sys.argv[3])), 0)
        os.rename(f".{save_id}.part", target.name, src_dir_fd=target.directory_fd, dst_dir_fd=target.directory_fd)
print("under way", flush=True)
time.sleep(1000)
"""


def test_a_killed_service_leaves_whole_files_and_nothing_else(world: World) -> None:
    world.registry.close()
    contents = [states(f"{number:032x}") for number in (1, 3, 5, 7)]
    arguments = [sys.executable, "-c", CHILD, str(REPOSITORY), str(world.base), str(len(contents[0]))]
    with subprocess.Popen(arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdin is not None
        assert child.stdout is not None
        child.stdin.write(b"".join(contents))
        child.stdin.flush()
        assert child.stdout.readline() == b"under way\n"
        child.send_signal(signal.SIGKILL)
    assert len(list((world.root / "new").glob(".*.part"))) == 4

    registry = Registry(world.base / "state")
    assert recover(registry, world.roots) == RecoveryResult(completed=4, failed=4)
    by_status = {status: {int(record.id, 16) for record in registry.list(status=status).result()} for status in ("completed", "failed")}
    registry.close()
    assert by_status == {"completed": {1, 3, 5, 7}, "failed": {0, 2, 4, 6}}
    found = {path.name: path.read_bytes() for path in (world.root / "new").iterdir() if path.suffix != ".lock"}
    assert found == {f"{number}.safetensors": content for number, content in zip((1, 3, 5, 7), contents, strict=True)}
    assert {path.name for path in (world.root / "new").glob("*.lock")} == {f"{number}.safetensors.lock" for number in (1, 3, 5, 7)}
