"""At most one save of a file is in flight, and the lock file tells clients so."""

import fcntl
import os
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from engine.saves.lock import LockFile
from service.errors import PathConflict, ServiceError
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
