"""Names, modes and locks of published files."""

import errno
import fcntl
import os
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from engine.errors import ConfigError, SaveError
from engine.saves import file, libc
from engine.saves.file import WRITE_BACK_BYTES, PartFile
from engine.saves.publish import REMOVE_ATTEMPTS, PublishMethod, probe_publishing, publish_file, remove_if_present
from engine.saves.retry import RetryPolicy

if TYPE_CHECKING:
    from tests.unit.saves.conftest import Bench


def refuse(number: int) -> Callable[..., int]:
    def call(*_arguments: object, **_options: object) -> int:
        raise OSError(number, os.strerror(number))

    return call


@pytest.fixture
def directory(tmp_path: Path) -> Iterator[int]:
    fd = os.open(tmp_path, os.O_RDONLY | os.O_DIRECTORY)
    yield fd
    os.close(fd)


@pytest.fixture(params=["renameat2", "missing", "not supported"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Publishing must be the same whichever call does it."""
    if request.param != "renameat2":
        monkeypatch.setattr(libc, "renameat2", None if request.param == "missing" else refuse(errno.EINVAL))
    return str(request.param)


def test_a_new_name_is_given_in_one_step(directory: int, tmp_path: Path, way: str) -> None:
    (tmp_path / ".x.part").write_text("new")
    publish_file(directory, ".x.part", "x", replace=False)
    assert [path.name for path in tmp_path.iterdir()] == ["x"]
    assert (tmp_path / "x").read_text() == "new"


@pytest.mark.parametrize("kind", ["file", "directory", "symlink", "dangling symlink"])
def test_nothing_that_exists_is_replaced_unasked(directory: int, tmp_path: Path, way: str, kind: str) -> None:
    (tmp_path / ".x.part").write_text("new")
    taken = tmp_path / "x"
    if kind == "file":
        taken.write_text("old")
    elif kind == "directory":
        taken.mkdir()
    else:
        taken.symlink_to(".x.part" if kind == "symlink" else "nowhere")
    before = os.lstat(taken)
    with pytest.raises(SaveError, match="x exists already") as caught:
        publish_file(directory, ".x.part", "x", replace=False)
    assert caught.value.code == "conflict"
    assert os.lstat(taken).st_ino == before.st_ino
    assert (tmp_path / ".x.part").read_text() == "new"


def test_replacing_takes_the_place_of_a_file_or_link_but_not_of_a_directory(directory: int, tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.write_text("untouched")
    (tmp_path / "file").write_text("old")
    (tmp_path / "link").symlink_to("other")
    (tmp_path / "directory").mkdir()
    for name in ("file", "link", "absent"):
        (tmp_path / ".x.part").write_text("new")
        publish_file(directory, ".x.part", name, replace=True)
        assert (tmp_path / name).read_text() == "new"
        assert not (tmp_path / name).is_symlink()
    (tmp_path / ".x.part").write_text("new")
    with pytest.raises(SaveError) as caught:
        publish_file(directory, ".x.part", "directory", replace=True)
    assert caught.value.code == "conflict"
    assert other.read_text() == "untouched"


def test_a_link_whose_answer_was_lost_counts_as_made(directory: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(libc, "renameat2", None)
    (tmp_path / ".x.part").write_text("new")
    os.link(tmp_path / ".x.part", tmp_path / "x")
    publish_file(directory, ".x.part", "x", replace=False)
    assert [path.name for path in tmp_path.iterdir()] == ["x"]


def test_the_probe_names_the_way_and_leaves_nothing(directory: int, tmp_path: Path, way: str) -> None:
    expected = PublishMethod.RENAME_NOREPLACE if way == "renameat2" else PublishMethod.LINK
    assert probe_publishing(directory) is expected
    assert list(tmp_path.iterdir()) == []


def test_a_root_that_offers_no_way_is_refused(directory: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(libc, "renameat2", refuse(errno.EINVAL))
    monkeypatch.setattr(os, "link", refuse(errno.EPERM))
    with pytest.raises(ConfigError, match="can't publish"):
        probe_publishing(directory)
    assert list(tmp_path.iterdir()) == []


def test_a_file_that_appears_meanwhile_is_a_conflict(bench: "Bench") -> None:
    target = bench.target()
    job = bench.begin(bench.spec(target), num_rows=5, max_rows=5)
    (bench.folder / target.name).write_text("somebody else's")
    bench.save_all(bench.rows(5), job)
    event = bench.wait_for_end()
    assert (event.status, event.error.code if event.error else None) == ("failed", "conflict")
    assert (bench.folder / target.name).read_text() == "somebody else's"
    assert bench.names() == [target.name]
    assert target.calls == ["abandoned"]


def test_a_file_that_exists_is_replaced_where_asked(bench: "Bench") -> None:
    target = bench.target(replace=True)
    (bench.folder / target.name).write_text("old")
    job = bench.begin(bench.spec(target), num_rows=5, max_rows=5)
    bench.save_all(bench.rows(5), job)
    assert bench.wait_for_end().status == "completed"
    assert len(bench.read().tensors["token_ids"]) == 5
    assert bench.names() == [target.name]


@pytest.mark.parametrize(("umask", "mode"), [(0o022, 0o644), (0o000, 0o666), (0o077, 0o600)])
def test_the_mode_follows_the_umask_asked_for_and_not_the_process(make_bench: "Callable[..., Bench]", umask: int, mode: int) -> None:
    bench = make_bench(umask=umask)
    before = os.umask(0o027)
    try:
        bench.save_all(bench.rows(5), bench.begin(bench.spec(bench.target()), num_rows=5, max_rows=5))
        bench.wait_for_end()
    finally:
        os.umask(before)
    assert stat.S_IMODE((bench.folder / "a.safetensors").stat().st_mode) == mode
    bench.close()


def test_a_temporary_file_is_locked_as_long_as_it_is_one(bench: "Bench") -> None:
    job = bench.begin(bench.spec(bench.target()), num_rows=None, max_rows=5)
    assert bench.writer.wait_idle(60)
    assert bench.names() == []
    job.append(bench.chunk(bench.rows(3), 0))
    assert bench.writer.wait_idle(60)
    with (bench.folder / ".id.part").open() as other, pytest.raises(BlockingIOError):
        fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
    job.cancel(SaveError("cancelled", "enough"))
    bench.wait_for_end()


def test_a_temporary_file_that_a_cleaner_took_is_made_again(bench: "Bench", monkeypatch: pytest.MonkeyPatch) -> None:
    real_flock, taken = fcntl.flock, []

    def lose_the_first(fd: int, operation: int) -> None:
        if not taken:
            taken.append(fd)
            (bench.folder / ".id.part").unlink()
        real_flock(fd, operation)

    monkeypatch.setattr(fcntl, "flock", lose_the_first)
    rows = bench.rows(5)
    bench.save_all(rows, bench.begin(bench.spec(bench.target()), num_rows=5, max_rows=5))
    assert bench.wait_for_end().status == "completed"
    assert taken
    assert (bench.read().tensors["hidden_states"] == rows).all()


@pytest.mark.parametrize("supported", [True, False])
def test_long_files_are_written_back_while_they_grow(
    make_bench: "Callable[..., Bench]", monkeypatch: pytest.MonkeyPatch, supported: bool
) -> None:
    started: list[int] = []

    def start(_fd: int, _offset: int, size: int, _flags: int) -> int:
        started.append(size)
        return 0 if supported else refuse(errno.ENOSYS)()

    monkeypatch.setattr(libc, "sync_file_range", start)
    bench = make_bench(page_size=528, width=4096)
    rows = bench.rows(700, layers=1).repeat(1, 2, 1)
    job = bench.begin(bench.spec(bench.target()), num_rows=700, max_rows=700)
    bench.save_all(rows, job, step=350)
    assert bench.wait_for_end().status == "completed"
    assert (bench.read().tensors["hidden_states"] == rows).all()
    assert min(started) >= WRITE_BACK_BYTES
    if supported:
        assert rows.numel() * 4 - WRITE_BACK_BYTES < sum(started) <= rows.numel() * 4 + WRITE_BACK_BYTES
    else:
        assert len(started) == 1
    bench.close()


def test_targets_hear_of_the_file_before_the_event(bench: "Bench") -> None:
    target = bench.target()
    heard: list[int] = []
    target.published = lambda: heard.append(len(bench.last_events()))
    bench.save_all(bench.rows(5), bench.begin(bench.spec(target), num_rows=5, max_rows=5))
    bench.wait_for_end()
    assert heard == [0]


@pytest.mark.parametrize(
    ("number", "failures", "attempts", "gone"),
    [
        (errno.EIO, REMOVE_ATTEMPTS - 1, REMOVE_ATTEMPTS, True),
        (errno.EINTR, 1, 2, True),
        (errno.EIO, REMOVE_ATTEMPTS, REMOVE_ATTEMPTS, False),
        (errno.EACCES, 1, 1, False),
    ],
)
def test_a_file_that_cannot_be_removed_for_a_moment_is_tried_again(
    directory: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, failures: int, attempts: int, gone: bool
) -> None:
    (tmp_path / "a").touch()
    unlink, calls = os.unlink, list[str]()

    def fail_at_first(name: str, *, dir_fd: int) -> None:
        calls.append(name)
        if len(calls) <= failures:
            raise OSError(number, os.strerror(number))
        unlink(name, dir_fd=dir_fd)

    monkeypatch.setattr(os, "unlink", fail_at_first)
    if gone:
        remove_if_present(directory, "a")
    else:
        with pytest.raises(OSError, match=os.strerror(number)):
            remove_if_present(directory, "a")
    assert (len(calls), (tmp_path / "a").exists()) == (attempts, not gone)


def test_removing_what_is_not_there_is_no_error(directory: int) -> None:
    remove_if_present(directory, "a")


def test_a_file_that_others_take_away_whenever_it_is_made_is_an_error_in_the_end(
    directory: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names: list[str] = []
    monkeypatch.setattr(file, "names_file", lambda _directory, name, _fd: bool(names.append(name)))
    with pytest.raises(OSError, match=os.strerror(errno.EBUSY)):
        PartFile.create(directory, ".a.part", 0o022, RetryPolicy(0.0), write_back=False)
    assert names == [".a.part"] * file.CREATE_ATTEMPTS
    assert list(tmp_path.iterdir()) == []


def test_a_file_that_was_discarded_is_closed_once(directory: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    part = PartFile.create(directory, ".a.part", 0o022, RetryPolicy(0.0), write_back=False)
    closed: list[int] = []
    monkeypatch.setattr(os, "close", closed.append)
    opened = part.fd
    part.discard()
    part.discard()
    part.close()
    monkeypatch.undo()
    os.close(opened)
    assert closed == [opened]
    assert list(tmp_path.iterdir()) == []
