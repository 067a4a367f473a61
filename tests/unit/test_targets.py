"""At most one save of a file is in flight, and the lock file tells clients so."""

import errno
import fcntl
import os
import shutil
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save

from engine.saves.lock import LockFile
from service.errors import DirectoryVanished, PathConflict, ServiceError
from service.registry.records import SaveRecord, SaveStatus
from service.registry.registry import Registry
from service.saves import targets as module
from service.saves.paths.roots import SaveRoots
from service.saves.targets import ClaimedTarget, Targets

SAVE_ID = "0123456789abcdef0123456789abcdef"


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path.resolve() / "saves"


@pytest.fixture
def targets(root: Path) -> Iterator[Targets]:
    roots = SaveRoots([str(root), str(root / "nested")])
    yield Targets(roots)
    roots.close()


def claim(targets: Targets, path: str | None = "dir/x", *, replace: bool = False) -> ClaimedTarget:
    return targets.claim(path, SAVE_ID, replace=replace)


def publish(target: ClaimedTarget, content: bytes = b"rows") -> None:
    with os.fdopen(os.open(target.name, os.O_WRONLY | os.O_CREAT, dir_fd=target.directory_fd), "wb") as file:
        file.write(content)
    target.published()


def is_locked(path: Path) -> bool:
    with path.open("r+b") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


def test_the_lock_is_held_until_the_file_is_published_and_its_file_stays(targets: Targets, root: Path) -> None:
    target = claim(targets)
    assert (target.name, target.path, target.replace) == ("x", str(root / "dir/x"), False)
    assert is_locked(root / "dir/x.lock")
    publish(target)
    assert not is_locked(root / "dir/x.lock")


def test_an_abandoned_claim_leaves_no_lock_file(targets: Targets, root: Path) -> None:
    claim(targets).abandoned()
    assert list((root / "dir").iterdir()) == []
    claim(targets).abandoned()


def test_whichever_end_comes_first_counts(targets: Targets, root: Path) -> None:
    target = claim(targets)
    publish(target)
    other = claim(targets, "other")  # Takes the number of the descriptor that was closed.
    target.abandoned()
    target.published()
    assert (root / "dir/x.lock").exists()
    os.fstat(other.directory_fd)
    other.abandoned()


def test_a_lock_file_is_marked_for_its_service_until_the_file_is_published(root: Path) -> None:
    roots = SaveRoots([str(root)])
    target = claim(Targets(roots, owner="me"))
    assert (root / "dir/x.lock").read_bytes() == b"strata me\n"
    publish(target)
    assert (root / "dir/x.lock").read_bytes() == b"strata me released\n"
    roots.close()


@pytest.mark.parametrize("replace", [False, True])
def test_a_file_that_is_being_written_is_a_conflict_under_every_path_that_leads_to_it(targets: Targets, root: Path, replace: bool) -> None:
    target = claim(targets, "nested/x")
    for path in ("nested/x", str(root / "nested/x")):
        with pytest.raises(PathConflict):
            claim(targets, path, replace=replace)
    target.abandoned()
    claim(targets, "nested/x").abandoned()


def test_claims_without_lock_files_still_exclude_each_other(root: Path) -> None:
    roots = SaveRoots([str(root)], lock_files=False)
    targets = Targets(roots, lock_files=False)
    target = claim(targets)
    with pytest.raises(PathConflict):
        claim(targets, replace=True)
    assert list((root / "dir").iterdir()) == []
    target.abandoned()
    roots.close()


def test_another_service_on_the_same_root_is_kept_out(targets: Targets, root: Path) -> None:
    roots = SaveRoots([str(root)])
    target = claim(targets)
    with pytest.raises(PathConflict):
        claim(Targets(roots))
    assert is_locked(root / "dir/x.lock")
    target.abandoned()
    roots.close()


def test_an_existing_file_is_a_conflict_and_is_left_as_it_is(targets: Targets, root: Path) -> None:
    publish(claim(targets))
    with pytest.raises(PathConflict):
        claim(targets)
    assert sorted(path.name for path in (root / "dir").iterdir()) == ["x", "x.lock"]
    (root / "dir/x.lock").unlink()
    with pytest.raises(PathConflict):
        claim(targets)
    assert [path.name for path in (root / "dir").iterdir()] == ["x"]


def test_a_file_that_another_service_publishes_before_the_lock_is_had_keeps_its_lock_file(
    targets: Targets, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def publish_then_lock(directory_fd: int, name: str, umask: int, owner: str) -> LockFile:
        for made in (name, f"{name}.lock"):
            os.close(os.open(made, os.O_CREAT, dir_fd=directory_fd))
        return acquire(directory_fd, name, umask, owner)

    acquire = LockFile.acquire
    monkeypatch.setattr(LockFile, "acquire", publish_then_lock)
    with pytest.raises(PathConflict):
        claim(targets)
    assert sorted(path.name for path in (root / "dir").iterdir()) == ["x", "x.lock"]
    assert not is_locked(root / "dir/x.lock")


def test_an_existing_file_can_be_replaced(targets: Targets, root: Path) -> None:
    publish(claim(targets))
    publish(claim(targets, replace=True), b"newer")
    assert (root / "dir/x").read_bytes() == b"newer"


@pytest.mark.parametrize("lock_file_was_there", [False, True])
def test_a_failed_replacement_leaves_the_old_file_and_its_lock_file_as_they_were(
    targets: Targets, root: Path, lock_file_was_there: bool
) -> None:
    publish(claim(targets))
    if not lock_file_was_there:
        (root / "dir/x.lock").unlink()
    claim(targets, replace=True).abandoned()
    assert (root / "dir/x").read_bytes() == b"rows"
    assert (root / "dir/x.lock").exists() == lock_file_was_there


def test_a_lock_that_a_client_holds_is_a_conflict(targets: Targets, root: Path) -> None:
    (root / "dir").mkdir()
    with (root / "dir/x.lock").open("wb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        with pytest.raises(PathConflict):
            claim(targets)
    claim(targets).abandoned()


def test_of_many_claims_at_once_exactly_one_wins(targets: Targets) -> None:
    start, won, lost = threading.Barrier(8), [], []

    def run() -> None:
        start.wait()
        try:
            won.append(claim(targets, "new/dir/x"))
        except PathConflict as error:
            lost.append(error)

    threads = [threading.Thread(target=run) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (len(won), len(lost)) == (1, 7)
    won[0].abandoned()


def test_a_directory_that_vanishes_while_it_is_opened_is_made_again(targets: Targets, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    resolve, removals = SaveRoots.resolve, iter([True])

    def resolve_then_remove(self: SaveRoots, path: str | None, save_id: str, *, directory_only: bool = False) -> object:
        target = resolve(self, path, save_id, directory_only=directory_only)
        if next(removals, False):
            shutil.rmtree(root / "dir")
        return target

    monkeypatch.setattr(SaveRoots, "resolve", resolve_then_remove)
    target = claim(targets)
    assert is_locked(root / "dir/x.lock")
    target.abandoned()


def test_a_directory_that_vanishes_again_and_again_is_an_error(targets: Targets, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    resolve = SaveRoots.resolve

    def resolve_then_remove(self: SaveRoots, path: str | None, save_id: str, *, directory_only: bool = False) -> object:
        target = resolve(self, path, save_id, directory_only=directory_only)
        shutil.rmtree(root / "dir")
        return target

    with monkeypatch.context() as patch:
        patch.setattr(SaveRoots, "resolve", resolve_then_remove)
        with pytest.raises(DirectoryVanished):
            claim(targets)
    claim(targets).abandoned()


def test_a_lock_file_that_can_not_be_removed_is_logged_and_ends_the_claim(
    targets: Targets, root: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    remove = LockFile.remove

    def failing(lock: LockFile) -> None:
        remove(lock)
        raise OSError(errno.EIO, "I/O error")

    descriptors = len(os.listdir("/proc/self/fd"))  # noqa: PTH208 - the listing's own descriptor must be closed at once
    with monkeypatch.context() as patch:
        patch.setattr(LockFile, "remove", failing)
        claim(targets).abandoned()
    assert [vars(line)["fields"]["save_id"] for line in caplog.records if "could not be removed" in line.getMessage()] == [SAVE_ID]
    assert len(os.listdir("/proc/self/fd")) == descriptors  # noqa: PTH208 - as above
    claim(targets).abandoned()


def test_a_save_root_that_was_removed_is_an_error_of_the_server(targets: Targets, root: Path) -> None:
    shutil.rmtree(root)
    with pytest.raises(ServiceError) as refused:
        claim(targets)
    assert (refused.value.status, refused.value.code) == (500, "io_error")


def test_refused_claims_leave_no_descriptor_open(targets: Targets) -> None:
    publish(claim(targets))
    descriptors = len(os.listdir("/proc/self/fd"))  # noqa: PTH208 - the listing's own descriptor must be closed at once
    for _ in range(3):
        with pytest.raises(PathConflict):
            claim(targets)
    claim(targets, replace=True).abandoned()
    assert len(os.listdir("/proc/self/fd")) == descriptors  # noqa: PTH208 - as above


# Whose the file is that is to be replaced.

ALICE, BOB = "alice", "bob"
OTHER_ID = "f" * 32


@pytest.fixture
def registry(tmp_path: Path) -> Iterator[Registry]:
    opened = Registry(tmp_path / "state")
    yield opened
    opened.close()


@pytest.fixture
def owned(root: Path, registry: Registry) -> Iterator[Targets]:
    roots = SaveRoots([str(root), str(root / "nested")])
    yield Targets(roots, registry)
    roots.close()


def saved(root: Path, registry: Registry, name: str = "dir/x", **changes: Any) -> SaveRecord:  # noqa: ANN401 - fields of SaveRecord
    """A published file and its record."""
    path = root / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(save({"hidden_states": np.ones((1, 1, 2), np.float32)}, {"save_id": SAVE_ID, "num_tokens": "1"}))
    status = path.stat()
    known = SaveRecord(SAVE_ID, str(path), "r", "m", (1,), "float32", created=1.0, status="completed", owner=ALICE)
    record = replace(known, bytes=status.st_size, device=status.st_dev, inode=status.st_ino, **changes)
    registry.insert(record).result()
    return record


def replacing(targets: Targets, client: str | None, path: str = "dir/x") -> ClaimedTarget:
    return targets.claim(path, OTHER_ID, replace=True, client=client)


@pytest.mark.parametrize("client", [ALICE, None])
def test_a_file_can_be_replaced_by_its_owner_and_without_keys_by_everybody(
    owned: Targets, root: Path, registry: Registry, client: str | None
) -> None:
    saved(root, registry)
    replacing(owned, client).abandoned()


@pytest.mark.parametrize("path", ["nested/x", "/nested/x"])
def test_the_file_of_another_client_is_not_replaced_under_any_path(owned: Targets, root: Path, registry: Registry, path: str) -> None:
    record = saved(root, registry, "nested/x")
    with pytest.raises(PathConflict, match="another API key") as refused:
        replacing(owned, BOB, f"{root}{path}" if path.startswith("/") else path)
    assert (refused.value.status, refused.value.code, refused.value.param) == (
        409,
        "path_conflict",
        "kv_transfer_params.hidden_states_path",
    )
    assert (root / "nested/x").stat().st_ino == record.inode
    assert not (root / "nested/x.lock").exists()
    replacing(owned, ALICE, path.strip("/")).abandoned()


def test_the_file_of_nobody_is_not_a_clients(owned: Targets, root: Path, registry: Registry) -> None:
    saved(root, registry, owner=None)
    with pytest.raises(PathConflict):
        replacing(owned, BOB)


def test_a_lock_file_that_was_there_stays_where_a_replacement_is_refused(owned: Targets, root: Path, registry: Registry) -> None:
    saved(root, registry)
    (root / "dir/x.lock").touch()
    with pytest.raises(PathConflict):
        replacing(owned, BOB)
    assert (root / "dir/x.lock").exists()
    assert not is_locked(root / "dir/x.lock")


@pytest.mark.parametrize("client", [ALICE, BOB, None])
@pytest.mark.parametrize("status", ["queued", "running", "writing"])
def test_a_file_whose_save_has_not_ended_is_in_flight_for_everybody(
    owned: Targets, root: Path, registry: Registry, client: str | None, status: SaveStatus
) -> None:
    saved(root, registry, status=status)
    with pytest.raises(PathConflict, match="being written"):
        replacing(owned, client)


def overwritten(path: Path) -> None:
    path.write_bytes(path.read_bytes() + b"more")


def copied(path: Path) -> None:
    content = path.read_bytes()
    path.rename(path.with_name("moved"))
    path.write_bytes(content)


def without_header(path: Path) -> None:
    path.write_bytes(b"x" * path.stat().st_size)


@pytest.mark.parametrize("change", [overwritten, copied, without_header, Path.unlink], ids=lambda change: change.__name__)
def test_a_file_without_a_record_can_be_replaced(owned: Targets, root: Path, registry: Registry, change: Callable[[Path], None]) -> None:
    saved(root, registry)
    change(root / "dir/x")
    replacing(owned, BOB).abandoned()


def test_a_file_that_can_not_be_read_is_none_of_ours(
    owned: Targets, root: Path, registry: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = os.open

    def refuse(path: str, flags: int, *arguments: Any, **options: Any) -> int:  # noqa: ANN401 - passed on
        if path == "x":
            raise PermissionError
        return opened(path, flags, *arguments, **options)

    saved(root, registry)
    monkeypatch.setattr(os, "open", refuse)
    replacing(owned, BOB).abandoned()


def test_a_disk_that_fails_refuses_the_replacement(owned: Targets, root: Path, registry: Registry, monkeypatch: pytest.MonkeyPatch) -> None:
    saved(root, registry)
    monkeypatch.setattr(module, "read_published", lambda fd: (_ for _ in ()).throw(OSError(errno.EIO, "I/O error")))
    descriptors = len(os.listdir("/proc/self/fd"))  # noqa: PTH208 - the listing's own descriptor must be closed at once
    with pytest.raises(ServiceError) as refused:
        replacing(owned, ALICE)
    assert (refused.value.status, refused.value.code, refused.value.param) == (500, "io_error", "kv_transfer_params.hidden_states_path")
    assert len(os.listdir("/proc/self/fd")) == descriptors  # noqa: PTH208 - as above
    monkeypatch.undo()
    replacing(owned, ALICE).abandoned()


@pytest.mark.parametrize("kind", ["link", "fifo"])
def test_what_is_no_file_any_more_is_not_followed_and_not_waited_for(
    owned: Targets, root: Path, registry: Registry, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    saved(root, registry)
    resolve = SaveRoots.resolve

    def resolve_then_swap(self: SaveRoots, path: str | None, save_id: str, *, directory_only: bool = False) -> object:
        target = resolve(self, path, save_id, directory_only=directory_only)
        (root / "dir/x").rename(root / "dir/y")
        if kind == "link":
            (root / "dir/x").symlink_to("y")
        else:
            os.mkfifo(root / "dir/x")
        return target

    monkeypatch.setattr(SaveRoots, "resolve", resolve_then_swap)
    with pytest.raises(ServiceError) as refused:
        replacing(owned, BOB)
    assert (refused.value.status, refused.value.code) == (500, "io_error")
    assert sorted(path.name for path in (root / "dir").iterdir()) == ["x", "y"]


def test_a_new_file_is_nobodys(owned: Targets, root: Path, registry: Registry) -> None:
    replacing(owned, BOB).abandoned()
    owned.claim("dir/y", OTHER_ID, replace=False, client=BOB).abandoned()
