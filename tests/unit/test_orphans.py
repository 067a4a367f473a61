"""What crashes leave beside saves is removed; what anybody still writes, has made himself or could miss stays."""

import errno
import fcntl
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from service.saves import orphans
from service.saves.orphans import (
    MIN_PART_AGE_SECONDS,
    STALE_LOCK_SECONDS,
    part_name,
    remove_orphaned_files,
    remove_own_lock,
    remove_unlocked,
)
from service.saves.paths.roots import SaveRoots

ID = "0123456789abcdef0123456789abcdef"
OTHER = "f" * 32
HELD, RELEASED = b"strata me\n", b"strata me released\n"


@pytest.fixture
def root(tmp_path: Path) -> Path:
    made = tmp_path.resolve() / "saves"
    made.mkdir()
    return made


@pytest.fixture
def roots(root: Path) -> Iterator[SaveRoots]:
    opened = SaveRoots([str(root)])
    yield opened
    opened.close()


@pytest.fixture
def directory(root: Path) -> Iterator[int]:
    fd = os.open(root, os.O_RDONLY | os.O_DIRECTORY)
    yield fd
    os.close(fd)


def made(path: Path, content: bytes = b"") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    return path


def later(seconds: float) -> float:
    return time.time() + seconds


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))  # noqa: PTH208 - the listing's own descriptor must be closed at once


def without_locks(_fd: int, _operation: int) -> None:
    raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))


def test_the_temporary_file_of_a_save_is_hidden_and_named_after_it() -> None:
    assert part_name(ID) == f".{ID}.part"


def test_how_old_orphans_are_is_as_documented() -> None:
    assert (MIN_PART_AGE_SECONDS, STALE_LOCK_SECONDS) == (60, 86400)


class TestTemporaryFiles:
    def test_they_go_once_they_are_older_than_asked(self, roots: SaveRoots, root: Path) -> None:
        part = made(root / f"a/b/{part_name(ID)}")
        assert remove_orphaned_files(roots, now=later(MIN_PART_AGE_SECONDS - 5)) == 0
        assert remove_orphaned_files(roots, now=later(500), min_age_seconds=510) == 0
        assert remove_orphaned_files(roots) == 0
        assert part.exists()
        assert remove_orphaned_files(roots, now=later(MIN_PART_AGE_SECONDS + 5)) == 1
        assert not part.exists()

    def test_the_newer_of_both_times_counts(self, roots: SaveRoots, root: Path) -> None:
        part = made(root / part_name(ID))
        os.utime(part, (1.0, 1.0))
        assert remove_orphaned_files(roots) == 0, "restored from somewhere: the inode is new all the same"
        os.utime(part, (1.0, later(1000)))
        assert remove_orphaned_files(roots, now=later(900)) == 0
        assert remove_orphaned_files(roots, now=later(1100)) == 1

    def test_the_clock_is_the_machines_unless_told(self, roots: SaveRoots, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        made(root / part_name(ID))
        now = later(MIN_PART_AGE_SECONDS + 5)
        monkeypatch.setattr(orphans.time, "time", lambda: now)
        assert remove_orphaned_files(roots) == 1

    @pytest.mark.parametrize(
        "name",
        [
            "plain.part",
            f"{ID}.part",
            f".{ID}.part.txt",
            f".x{ID}.part",
            f".{ID}0.part",
            f".{ID.upper()}.part",
            ".0123.part",
            ".probe-0123456789abcde.part",
            ".probe-0123456789abcdefa.part",
            "x.safetensors",
            f".hidden/.{ID}.part",
        ],
    )
    def test_other_names_stay(self, roots: SaveRoots, root: Path, name: str) -> None:
        path = made(root / name)
        assert remove_orphaned_files(roots, now=later(10**6), owner="me") == 0
        assert path.exists()

    def test_probes_and_all_of_a_tree_go(self, roots: SaveRoots, root: Path) -> None:
        names = (".probe-0123456789abcdef.part", part_name(ID), part_name(OTHER), f"x/{part_name(ID)}", f"x/y/{part_name(ID)}")
        paths = [made(root / name) for name in names]
        assert remove_orphaned_files(roots, now=later(100)) == len(paths)
        assert [path for path in paths if path.exists()] == []

    def test_links_and_what_they_lead_to_stay(self, roots: SaveRoots, root: Path) -> None:
        victim = made(root.parent / f"outside/{part_name(ID)}")
        (root / part_name(ID)).symlink_to(victim)
        (root / "link").symlink_to(victim.parent)
        os.mkfifo(root / part_name(OTHER))
        (root / part_name("a" * 32)).mkdir()
        assert remove_orphaned_files(roots, now=later(100)) == 0
        assert victim.exists()
        assert len(list(root.iterdir())) == 4

    def test_what_a_link_leads_to_is_not_locked_even_for_a_moment(
        self, roots: SaveRoots, root: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        locked: list[int] = []
        (root / part_name(ID)).symlink_to(made(root.parent / f"outside/{part_name(ID)}"))
        monkeypatch.setattr(fcntl, "flock", lambda fd, _operation: locked.append(fd))
        assert remove_orphaned_files(roots, now=later(100)) == 0
        assert locked == []

    def test_what_somebody_has_locked_stays(self, roots: SaveRoots, root: Path) -> None:
        part = made(root / part_name(ID))
        with part.open("wb") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            assert remove_orphaned_files(roots, now=later(100)) == 0
        assert remove_orphaned_files(roots, now=later(100)) == 1

    def test_a_root_inside_another_is_gone_through_once(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        outer, inner, sibling = (str(tmp_path / name) for name in ("outer", "outer/inner", "outer2"))
        roots = SaveRoots([inner, outer, sibling])
        for folder in (outer, inner, sibling):
            made(Path(folder) / part_name(ID))
        walked: list[int] = []
        fwalk = os.fwalk

        def counted(*arguments: object, dir_fd: int, **options: object) -> object:
            walked.append(dir_fd)
            return fwalk(*arguments, dir_fd=dir_fd, **options)  # type: ignore[call-overload]  # as they came

        monkeypatch.setattr(os, "fwalk", counted)
        assert remove_orphaned_files(roots, now=later(100)) == 3
        assert walked == [roots.roots[1].fd, roots.roots[2].fd]
        roots.close()

    def test_an_end_that_is_asked_for_comes_at_once(self, roots: SaveRoots, root: Path) -> None:
        for name in (ID, OTHER):
            made(root / part_name(name))
        made(root / f"x/{part_name(ID)}")
        assert remove_orphaned_files(roots, now=later(100), stop=lambda: True) == 0
        asked: list[None] = []

        def after_one() -> bool:
            asked.append(None)
            return len(asked) > 1

        assert remove_orphaned_files(roots, now=later(100), stop=after_one) == 1
        assert len(asked) == 2
        before = open_files()
        assert remove_orphaned_files(roots, now=later(100), stop=lambda: False) == 2
        assert open_files() == before


class TestLockFiles:
    def test_without_an_owner_none_goes(self, roots: SaveRoots, root: Path) -> None:
        made(root / "x.lock", HELD)
        made(root / "y.lock", b"strata \n")
        assert remove_orphaned_files(roots, now=later(10**6)) == 0

    def test_one_that_a_crash_has_left_goes_at_once(self, roots: SaveRoots, root: Path) -> None:
        lock = made(root / "a/x.lock", HELD)
        assert remove_orphaned_files(roots, owner="me") == 1
        assert not lock.exists()

    def test_one_that_was_released_goes_after_a_day(self, roots: SaveRoots, root: Path) -> None:
        lock = made(root / "x.lock", RELEASED)
        assert remove_orphaned_files(roots, owner="me", now=later(STALE_LOCK_SECONDS - 60)) == 0
        assert remove_orphaned_files(roots, owner="me") == 0
        assert remove_orphaned_files(roots, owner="me", now=later(STALE_LOCK_SECONDS + 60)) == 1
        assert not lock.exists()

    @pytest.mark.parametrize("content", [HELD, RELEASED])
    @pytest.mark.parametrize("beside", ["file", "folder", "link"])
    def test_one_stays_where_anything_stands_under_its_name(self, roots: SaveRoots, root: Path, content: bytes, beside: str) -> None:
        made(root / "x.lock", content)
        if beside == "file":
            made(root / "x")
        elif beside == "folder":
            (root / "x").mkdir()
        else:
            (root / "x").symlink_to("nowhere")
        assert remove_orphaned_files(roots, owner="me", now=later(10**6)) == 0

    @pytest.mark.parametrize("content", [HELD, RELEASED])
    def test_one_that_is_held_stays(self, roots: SaveRoots, root: Path, content: bytes) -> None:
        lock = made(root / "x.lock", content)
        with lock.open("r+b") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            assert remove_orphaned_files(roots, owner="me", now=later(10**6)) == 0
        assert remove_orphaned_files(roots, owner="me", now=later(10**6)) == 1

    @pytest.mark.parametrize("content", [HELD, RELEASED])
    def test_a_hard_link_stays(self, roots: SaveRoots, root: Path, content: bytes) -> None:
        (root / "x.lock").hardlink_to(made(root / "victim", content))
        assert remove_orphaned_files(roots, owner="me", now=later(10**6)) == 0
        assert (root / "x.lock").exists()

    @pytest.mark.parametrize(
        "content", [b"", b"strata you\n", b"strata you released\n", b"strata\n", b"strata me", b"1234\n", RELEASED + b"x"]
    )
    def test_those_of_others_stay_and_are_not_locked(
        self, roots: SaveRoots, root: Path, monkeypatch: pytest.MonkeyPatch, content: bytes
    ) -> None:
        def taken(*_: object) -> None:
            raise AssertionError("a lock was taken")

        lock = made(root / "x.lock", content)
        monkeypatch.setattr(fcntl, "flock", taken)
        assert remove_orphaned_files(roots, owner="me", now=later(10**6)) == 0
        assert lock.read_bytes() == content

    @pytest.mark.parametrize("content", [HELD, RELEASED])
    def test_one_whose_file_comes_before_the_lock_is_had_stays(
        self, roots: SaveRoots, root: Path, monkeypatch: pytest.MonkeyPatch, content: bytes
    ) -> None:
        lock, flock = made(root / "x.lock", content), fcntl.flock

        def publish_then_lock(fd: int, operation: int) -> None:
            made(root / "x")
            flock(fd, operation)

        monkeypatch.setattr(fcntl, "flock", publish_then_lock)
        assert remove_orphaned_files(roots, owner="me", now=later(10**6)) == 0
        assert lock.exists()

    def test_without_file_locks_only_those_of_a_crash_go(self, roots: SaveRoots, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        made(root / "held.lock", HELD)
        released = made(root / "released.lock", RELEASED)
        monkeypatch.setattr(fcntl, "flock", without_locks)
        assert remove_orphaned_files(roots, owner="me", now=later(10**6)) == 1
        assert [path.name for path in root.iterdir()] == [released.name]

    def test_that_of_one_name_is_removed_alone(self, directory: int, root: Path) -> None:
        made(root / "x.lock", HELD)
        made(root / "y.lock", HELD)
        assert remove_own_lock(directory, "x", "you") is False
        assert remove_own_lock(directory, "x", "me") is True
        assert remove_own_lock(directory, "x", "me") is False
        assert [path.name for path in root.iterdir()] == ["y.lock"]


class TestRemovingOneFile:
    def test_a_free_one_goes_and_leaves_no_descriptor(self, directory: int, root: Path) -> None:
        made(root / "x")
        before = open_files()
        assert remove_unlocked(directory, "x") is True
        assert remove_unlocked(directory, "x") is False
        assert open_files() == before

    def test_one_that_was_exchanged_before_the_lock_was_had_stays(
        self, directory: int, root: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        made(root / "x", b"old")
        flock = fcntl.flock

        def exchange_then_lock(fd: int, operation: int) -> None:
            (root / "x").unlink()
            made(root / "x", b"new")
            flock(fd, operation)

        monkeypatch.setattr(fcntl, "flock", exchange_then_lock)
        before = open_files()
        assert remove_unlocked(directory, "x") is False
        assert (root / "x").read_bytes() == b"new"
        assert open_files() == before

    def test_it_is_asked_about_before_and_after_the_lock(self, directory: int, root: Path) -> None:
        made(root / "x")
        for answers in ([False], [True, False]):
            left = list(answers)
            assert remove_unlocked(directory, "x", only_if=lambda fd, left=left: left.pop(0)) is False
            assert left == []
        assert remove_unlocked(directory, "x", only_if=lambda fd: os.fstat(fd).st_size == 0) is True

    @pytest.mark.parametrize(("known", "removed"), [(True, True), (False, False)])
    def test_without_file_locks_only_what_is_known_to_be_ours_goes(
        self, directory: int, root: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, known: bool, removed: bool
    ) -> None:
        made(root / "x")
        monkeypatch.setattr(fcntl, "flock", without_locks)
        assert remove_unlocked(directory, "x", changed_before=None if known else later(100)) is removed
        assert ("the orphaned file x can't be locked and is kept: " in caplog.text) is not removed

    @pytest.mark.parametrize(
        ("broken", "said"),
        [("unlink", "the orphaned file x could not be removed: "), ("fstat", "the orphaned file x can't be inspected and is kept: ")],
    )
    def test_a_disk_that_fails_is_a_line_in_the_log(
        self, directory: int, root: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, broken: str, said: str
    ) -> None:
        def failing(*_: object, **__: object) -> None:
            raise OSError(errno.EIO, os.strerror(errno.EIO))

        made(root / "x")
        before = open_files()
        with monkeypatch.context() as patch:
            patch.setattr(os, broken, failing)
            assert remove_unlocked(directory, "x") is False
        assert f"{said}{os.strerror(errno.EIO)}" in caplog.text
        assert open_files() == before
        assert (root / "x").exists()

    def test_the_lock_is_let_go_where_the_file_stays(self, directory: int, root: Path) -> None:
        made(root / "x")
        first: list[Callable[[], None]] = []

        def only_once(_fd: int) -> bool:
            first.append(lambda: None)
            return len(first) < 2

        assert remove_unlocked(directory, "x", only_if=only_once) is False
        with (root / "x").open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
