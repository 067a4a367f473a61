"""Lock files: who holds one, who finds it busy, and what becomes of files that are replaced meanwhile."""

import errno
import fcntl
import os
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from engine.errors import ConfigError
from engine.saves.lock import LockBusy, LockFile, is_marked, probe_flock, was_left_by

REPOSITORY = Path(__file__).resolve().parents[3]

WAITING_CLIENT = """
import fcntl, os, sys
fd = os.open(sys.argv[1], os.O_RDWR)
print("waiting", flush=True)
fcntl.flock(fd, fcntl.LOCK_EX)
print("locked", flush=True)
os.remove(sys.argv[1])
"""


@pytest.fixture
def directory(tmp_path: Path) -> Iterator[int]:
    fd = os.open(tmp_path, os.O_RDONLY | os.O_DIRECTORY)
    yield fd
    os.close(fd)


def test_a_held_lock_is_busy_for_others_and_free_once_released(directory: int, tmp_path: Path) -> None:
    held = LockFile.acquire(directory, "a", 0o022)
    with pytest.raises(LockBusy, match=r"a\.lock is locked"):
        LockFile.acquire(directory, "a", 0o022)
    held.release()
    held.release()
    assert (tmp_path / "a.lock").exists()
    LockFile.acquire(directory, "a", 0o022).release()


@pytest.mark.parametrize(("umask", "mode"), [(0o022, 0o644), (0, 0o666)])
def test_a_lock_file_has_the_mode_asked_for(directory: int, tmp_path: Path, umask: int, mode: int) -> None:
    before = os.umask(0o077)
    try:
        LockFile.acquire(directory, "a", umask).release()
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "a.lock").stat().st_mode) == mode


def test_a_lock_file_left_by_others_keeps_its_mode(directory: int, tmp_path: Path) -> None:
    (tmp_path / "a.lock").touch()
    (tmp_path / "a.lock").chmod(0o600)
    LockFile.acquire(directory, "a", 0).release()
    assert stat.S_IMODE((tmp_path / "a.lock").stat().st_mode) == 0o600


def test_a_client_in_another_process_waits_until_the_lock_is_released(directory: int, tmp_path: Path) -> None:
    held = LockFile.acquire(directory, "a", 0o022)
    command = [sys.executable, "-c", WAITING_CLIENT, str(tmp_path / "a.lock")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as client:
        assert client.stdout is not None
        assert client.stdout.readline() == "waiting\n"
        assert client.poll() is None
        held.release()
        assert client.stdout.readline() == "locked\n"
    assert client.returncode == 0
    assert list(tmp_path.iterdir()) == []


def test_a_released_lock_is_free_although_a_child_has_inherited_it(directory: int, tmp_path: Path) -> None:
    held = LockFile.acquire(directory, "a", 0o022)
    inherited = os.dup(held.fd)
    held.release()
    LockFile.acquire(directory, "a", 0o022).release()
    os.close(inherited)


def test_a_file_replaced_between_opening_and_locking_is_not_taken_for_the_lock(
    directory: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real_flock, replaced, path = fcntl.flock, [], tmp_path / "a.lock"
    path.touch()

    def replace_then_lock(fd: int, operation: int) -> None:
        if operation & fcntl.LOCK_EX and len(replaced) < 2:
            replaced.append(fd)
            path.unlink()
            path.touch()
        real_flock(fd, operation)

    monkeypatch.setattr(fcntl, "flock", replace_then_lock)
    held = LockFile.acquire(directory, "a", 0o022)
    assert len(replaced) == 2
    assert os.fstat(held.fd).st_ino == path.stat().st_ino
    held.release()


def test_a_lock_that_is_replaced_for_ever_is_given_up(directory: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.lock"
    path.touch()

    def replace(_fd: int, _operation: int) -> None:
        path.unlink()
        path.touch()

    monkeypatch.setattr(fcntl, "flock", replace)
    with pytest.raises(LockBusy, match="keeps being replaced"):
        LockFile.acquire(directory, "a", 0o022)


def test_of_two_that_make_the_lock_file_at_once_one_gets_it(directory: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    others: list[LockFile] = []

    def faster(*arguments: object, **options: object) -> None:
        monkeypatch.undo()
        others.append(LockFile.acquire(directory, "a", 0o022, "other"))
        os.link(*arguments, **options)  # type: ignore[arg-type]  # as they came

    monkeypatch.setattr(os, "link", faster)
    with pytest.raises(LockBusy, match=r"a\.lock is locked"):
        LockFile.acquire(directory, "a", 0o022, "me")
    assert [is_marked(other.fd, "other") for other in others] == [True]
    others[0].release()


@pytest.mark.parametrize("unnamed", [True, False])
def test_a_lock_file_says_whose_it_is_and_whether_it_is_held_or_was_released(
    directory: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, unnamed: bool
) -> None:
    if not unnamed:  # a file system that has no unnamed files, or a machine without /proc
        monkeypatch.setattr(os, "link", unsupported)
    held = LockFile.acquire(directory, "a", 0o022, "me")
    assert (tmp_path / "a.lock").read_bytes() == b"strata me\n"
    assert is_marked(held.fd, "me")
    assert was_left_by(held.fd, "me")
    assert not is_marked(held.fd, "m")
    assert not was_left_by(held.fd, "m")
    assert stat.S_IMODE((tmp_path / "a.lock").stat().st_mode) == 0o644
    held.release()
    assert (tmp_path / "a.lock").read_bytes() == b"strata me released\n"
    with (tmp_path / "a.lock").open("rb") as released:
        assert not is_marked(released.fileno(), "me")
        assert was_left_by(released.fileno(), "me")
        assert not was_left_by(released.fileno(), "m")
    assert [path.name for path in tmp_path.iterdir()] == ["a.lock"]


@pytest.mark.parametrize("content", [b"", b"1234\n"])
def test_a_lock_file_that_others_have_made_is_not_marked_nor_changed(directory: int, tmp_path: Path, content: bytes) -> None:
    (tmp_path / "a.lock").write_bytes(content)
    held = LockFile.acquire(directory, "a", 0o022, "me")
    assert (tmp_path / "a.lock").read_bytes() == content
    held.release()
    assert (tmp_path / "a.lock").read_bytes() == content


def test_a_lock_that_a_crash_of_another_service_has_left_is_taken_over_and_keeps_its_mark(directory: int, tmp_path: Path) -> None:
    os.close(LockFile.acquire(directory, "a", 0o022, "other").fd)
    LockFile.acquire(directory, "a", 0o022, "me").release()
    assert (tmp_path / "a.lock").read_bytes() == b"strata other\n"


def test_a_lock_that_an_own_crash_has_left_is_taken_over_and_released(directory: int, tmp_path: Path) -> None:
    os.close(LockFile.acquire(directory, "a", 0o022, "me").fd)
    LockFile.acquire(directory, "a", 0o022, "me").release()
    assert (tmp_path / "a.lock").read_bytes() == b"strata me released\n"


@pytest.mark.parametrize("content", [b"strata is what this diary is about\n", b"strata me\n", b"strata \n", b"strata me\nand more"])
@pytest.mark.parametrize("owner", ["me", ""])
def test_a_lock_file_that_is_a_hard_link_is_refused_and_what_it_links_to_stays(
    directory: int, tmp_path: Path, content: bytes, owner: str
) -> None:
    victim = tmp_path / "victim"
    victim.write_bytes(content)
    (tmp_path / "a.lock").hardlink_to(victim)
    with pytest.raises(LockBusy, match=r"a\.lock is a hard link"):
        LockFile.acquire(directory, "a", 0o022, owner)
    assert victim.read_bytes() == content
    with victim.open("rb") as file:
        assert not is_marked(file.fileno(), owner)
        assert not was_left_by(file.fileno(), owner)


def test_a_lock_file_that_becomes_a_hard_link_while_it_is_held_is_not_written_to(directory: int, tmp_path: Path) -> None:
    held = LockFile.acquire(directory, "a", 0o022, "me")
    (tmp_path / "copy").hardlink_to(tmp_path / "a.lock")
    held.release()
    assert (tmp_path / "copy").read_bytes() == b"strata me\n"


@pytest.mark.parametrize("content", [b"strata is what this diary is about\n", b"strata me\nand more", b"strata you\n", b"strata \n"])
@pytest.mark.parametrize("owner", ["me", ""])
def test_a_lock_file_with_any_other_content_than_the_own_mark_stays_as_it_is(
    directory: int, tmp_path: Path, content: bytes, owner: str
) -> None:
    (tmp_path / "a.lock").write_bytes(content)
    LockFile.acquire(directory, "a", 0o022, owner).release()
    assert (tmp_path / "a.lock").read_bytes() == content


def test_no_descriptor_is_left_of_a_lock_file_that_is_refused(directory: int, tmp_path: Path) -> None:
    (tmp_path / "victim").touch()
    (tmp_path / "a.lock").hardlink_to(tmp_path / "victim")
    before = len(os.listdir("/proc/self/fd"))  # noqa: PTH208 - the listing's own descriptor must be closed at once
    with pytest.raises(LockBusy):
        LockFile.acquire(directory, "a", 0o022, "me")
    assert len(os.listdir("/proc/self/fd")) == before  # noqa: PTH208 - as above


def test_a_lock_works_although_there_is_no_room_for_its_mark(directory: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "pwrite", unsupported)
    held = LockFile.acquire(directory, "a", 0o022, "me")
    with pytest.raises(LockBusy):
        LockFile.acquire(directory, "a", 0o022, "you")
    held.release()


def unsupported(*_: object, **__: object) -> None:
    raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))


KILLED_IN_A_CALL = """
import os, sys
from engine.saves import lock
calls = {"made": "open", "locked": "flock", "marked": "pwrite", "named": "link"}
when, number = sys.argv[2], int(sys.argv[3])
def dying(owner, name):
    real = getattr(owner, name)
    def call(*arguments, **options):
        if number: os.kill(os.getpid(), 9)
        real(*arguments, **options)
        os.kill(os.getpid(), 9)
    setattr(owner, name, call)
directory = os.open(sys.argv[1], os.O_RDONLY)
dying(lock.fcntl if calls[when] == "flock" else lock.os, calls[when])
lock.LockFile.acquire(directory, "a", 0o022, "me")
"""


@pytest.mark.parametrize("before", [1, 0])
@pytest.mark.parametrize("when", ["made", "locked", "marked", "named"])
def test_a_kill_while_a_lock_is_taken_leaves_a_marked_file_or_none(tmp_path: Path, when: str, before: int) -> None:
    done = subprocess.run([sys.executable, "-c", KILLED_IN_A_CALL, str(tmp_path), when, str(before)], cwd=REPOSITORY, check=False)
    assert done.returncode == -9
    named = when == "named" and not before
    assert [path.read_bytes() for path in tmp_path.iterdir()] == ([b"strata me\n"] if named else [])


def test_a_failed_save_takes_its_lock_file_with_it(directory: int, tmp_path: Path) -> None:
    held = LockFile.acquire(directory, "a", 0o022)
    held.remove()
    held.remove()
    assert list(tmp_path.iterdir()) == []


def test_a_lock_file_of_somebody_else_is_not_removed(directory: int, tmp_path: Path) -> None:
    held = LockFile.acquire(directory, "a", 0o022)
    (tmp_path / "a.lock").unlink()
    (tmp_path / "a.lock").write_text("another")
    held.remove()
    assert (tmp_path / "a.lock").read_text() == "another"


@pytest.mark.parametrize("kind", ["symlink", "directory", "fifo"])
def test_what_is_no_regular_file_is_not_locked(directory: int, tmp_path: Path, kind: str) -> None:
    path = tmp_path / "a.lock"
    if kind == "symlink":
        path.symlink_to("elsewhere")
    elif kind == "directory":
        path.mkdir()
    else:
        os.mkfifo(path)
    with pytest.raises(LockBusy, match="not a regular file"):
        LockFile.acquire(directory, "a", 0o022)
    assert not (tmp_path / "elsewhere").exists()


def test_a_file_system_with_flock_passes_the_probe(directory: int, tmp_path: Path) -> None:
    probe_flock(directory)
    assert list(tmp_path.iterdir()) == []


def test_a_file_system_without_flock_is_refused(directory: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fcntl, "flock", unsupported)
    with pytest.raises(ConfigError, match="no flock"):
        probe_flock(directory)
    assert list(tmp_path.iterdir()) == []


def test_a_file_system_whose_flock_keeps_nobody_out_is_refused(directory: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fcntl, "flock", lambda _fd, _operation: None)
    with pytest.raises(ConfigError, match="second"):
        probe_flock(directory)
