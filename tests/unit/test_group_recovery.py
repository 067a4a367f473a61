"""What a start makes of a group that a crash has interrupted: all of it or each alone, in one commit, with nothing left of what failed."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from functools import cache
from itertools import product
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from safetensors.numpy import save

from service.registry.records import GroupMode, GroupRecord, SaveRecord
from service.registry.registry import Registry
from service.saves import recovery
from service.saves.paths.roots import SaveRoots
from service.saves.recovery import RecoveryResult, recover, recover_group

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

KINDS = ("published", "torn", "without text", "foreign", "missing")
"""What a crash may have left of a save; only the first can be completed."""


@cache
def states(save_id: str) -> bytes:
    tensors = {"hidden_states": np.ones((5, 2, 8), np.float32), "token_ids": np.arange(5)}
    return save(tensors, {"format": "strata.hidden_states.v1", "save_id": save_id, "num_tokens": "7"})


@dataclass
class Crash:
    """A state directory and a save root as a crash has left them."""

    root: Path
    roots: SaveRoots
    registry: Registry

    def path(self, number: int) -> Path:
        return self.root / f"{number}.safetensors"

    def beside(self, number: int) -> list[Path]:
        """The lock file, as this service marks it, and the temporary file."""
        return [self.root / f"{number}.safetensors.lock", self.root / f".{number:032x}.part"]

    def left(self, number: int, kind: str, **changes: Any) -> SaveRecord:  # noqa: ANN401 - fields of SaveRecord
        save_id = f"{number:032x}"
        record = SaveRecord(save_id, str(self.path(number)), "r", "m", (1,), "float32", created=1.0, status="writing", choice=number)
        content = states("f" * 32 if kind == "foreign" else save_id)
        if kind != "missing":
            self.path(number).write_bytes(content[:-1] if kind == "torn" else content)
        if kind in ("missing", "torn"):
            lock, part = self.beside(number)
            lock.write_text(f"strata {self.registry.service_id}\n")
            part.touch()
        return replace(record, output={} if kind == "without text" else None, **changes)

    def group(self, mode: GroupMode, *saves: SaveRecord, size: int | None = None) -> None:
        record = GroupRecord("group", len(saves) if size is None else size, mode)
        self.registry.insert(*saves, group=record).result()

    def statuses(self) -> list[str]:
        stored = self.registry.get_group("group").result()
        assert stored is not None
        return [record.status for record in stored.saves]

    def files(self) -> list[str]:
        return sorted(path.name for path in self.root.iterdir())


@pytest.fixture
def crash(tmp_path: Path) -> Iterator[Crash]:
    root = tmp_path.resolve() / "saves"
    left = Crash(root, SaveRoots([str(root)]), Registry(tmp_path / "state"))
    yield left
    left.registry.close()
    left.roots.close()


@pytest.mark.parametrize("kinds", list(product(KINDS, repeat=2)), ids=str)
def test_all_or_nothing_is_all_or_nothing_after_a_crash(crash: Crash, kinds: tuple[str, ...]) -> None:
    crash.group("all_or_nothing", *(crash.left(number, kind) for number, kind in enumerate(kinds)))
    commits = crash.registry.commits
    if kinds == ("published", "published"):
        assert recover(crash.registry, crash.roots) == RecoveryResult(completed=2, failed=0)
        assert crash.statuses() == ["completed"] * 2
        assert crash.files() == ["0.safetensors", "1.safetensors"]
    else:
        assert recover(crash.registry, crash.roots) == RecoveryResult(completed=0, failed=2)
        assert crash.statuses() == ["failed"] * 2
        assert crash.files() == [f"{number}.safetensors" for number, kind in enumerate(kinds) if kind == "foreign"]
    assert crash.registry.commits == commits + 1


@pytest.mark.parametrize("kinds", list(product(KINDS, repeat=2)), ids=str)
def test_independent_saves_are_recovered_each_alone(crash: Crash, kinds: tuple[str, ...]) -> None:
    crash.group("independent", *(crash.left(number, kind) for number, kind in enumerate(kinds)))
    commits, completed = crash.registry.commits, kinds.count("published")
    assert recover(crash.registry, crash.roots) == RecoveryResult(completed, 2 - completed)
    assert crash.statuses() == ["completed" if kind == "published" else "failed" for kind in kinds]
    kept = [f"{number}.safetensors" for number, kind in enumerate(kinds) if kind in ("published", "foreign")]
    assert crash.files() == kept
    assert crash.registry.commits == commits + 1


def test_a_completed_record_has_what_its_file_says_and_a_failed_one_why(crash: Crash) -> None:
    crash.group("independent", crash.left(0, "published", ttl_seconds=60.0), crash.left(1, "missing"))
    recover(crash.registry, crash.roots)
    stored = crash.registry.get_group("group").result()
    assert stored is not None
    completed, failed = stored.saves
    status = crash.path(0).stat()
    assert (completed.shape, completed.num_tokens, completed.bytes) == ((5, 2, 8), 7, status.st_size)
    assert (completed.device, completed.inode) == (status.st_dev, status.st_ino)
    assert completed.finished is not None
    assert completed.expires == completed.finished + 60.0
    assert (failed.error_code, failed.error_message) == ("interrupted", "the service ended before the file was published")


@pytest.mark.parametrize("ended", ["failed", "cancelled", "completed", "expired"])
def test_all_or_nothing_what_had_ended_before_the_crash_decides(crash: Crash, ended: str) -> None:
    before = crash.left(0, "published", finished=5.0)
    crash.group("all_or_nothing", replace(before, status=ended), crash.left(1, "published"))  # type: ignore[arg-type]
    recover(crash.registry, crash.roots)
    assert crash.statuses() == [ended, "completed" if ended == "completed" else "failed"]
    assert crash.path(0).exists()
    assert crash.path(1).exists() is (ended == "completed")


def test_all_or_nothing_a_deleted_record_leaves_nothing_whole(crash: Crash) -> None:
    crash.group("all_or_nothing", crash.left(0, "published"), size=2)
    assert recover(crash.registry, crash.roots) == RecoveryResult(completed=0, failed=1)
    assert crash.files() == []


def test_a_text_that_was_kept_completes_its_save(crash: Crash) -> None:
    record = replace(crash.left(0, "published"), output={"text": "a"})
    crash.group("all_or_nothing", record)
    assert recover(crash.registry, crash.roots) == RecoveryResult(completed=1, failed=0)
    stored = crash.registry.get_group("group").result()
    assert stored is not None
    assert stored.saves[0].output == {"text": "a"}


def test_a_group_that_has_ended_and_one_that_is_not_there_are_left_alone(crash: Crash) -> None:
    crash.group("all_or_nothing", crash.left(0, "missing", finished=1.0), size=1)
    crash.registry.update(f"{0:032x}", status="failed").result()
    commits, files = crash.registry.commits, crash.files()
    assert recover_group(crash.registry, crash.roots, "group") == RecoveryResult(0, 0)
    assert recover_group(crash.registry, crash.roots, "missing") == RecoveryResult(0, 0)
    assert (crash.registry.commits, crash.files()) == (commits, files)


def test_every_group_is_recovered_for_itself(crash: Crash) -> None:
    crash.group("all_or_nothing", crash.left(0, "published"), crash.left(1, "missing"))
    crash.registry.insert(crash.left(2, "published"), group=GroupRecord("other", 1, "all_or_nothing")).result()
    assert recover(crash.registry, crash.roots) == RecoveryResult(completed=1, failed=2)


@pytest.mark.parametrize("moment", range(3))
def test_a_crash_in_the_middle_of_a_recovery_is_recovered_from(crash: Crash, monkeypatch: pytest.MonkeyPatch, moment: int) -> None:
    crash.group("all_or_nothing", *(crash.left(number, kind) for number, kind in enumerate(("published", "missing", "published"))))
    settle, calls = recovery._clean_up_files, []

    def dying(*arguments: Any, **options: Any) -> None:  # noqa: ANN401 - passed on
        if len(calls) == moment:
            raise KeyboardInterrupt
        calls.append(arguments)
        settle(*arguments, **options)

    with monkeypatch.context() as patch:
        patch.setattr(recovery, "_clean_up_files", dying)
        with pytest.raises(KeyboardInterrupt):
            recover(crash.registry, crash.roots)
    assert crash.statuses() == ["writing"] * 3
    assert recover(crash.registry, crash.roots) == RecoveryResult(completed=0, failed=3)
    assert (crash.statuses(), crash.files()) == (["failed"] * 3, [])


@pytest.mark.parametrize("mode", ["all_or_nothing", "independent"])
def test_a_group_that_can_be_seen_only_in_part_stays_open(crash: Crash, tmp_path: Path, mode: GroupMode) -> None:
    unseen = crash.left(0, "missing", hidden_states_path=str(tmp_path.resolve() / "elsewhere/0.safetensors"))
    crash.group(mode, unseen, crash.left(1, "published"), crash.left(2, "missing"))
    files = crash.files()
    assert recover(crash.registry, crash.roots) == RecoveryResult(completed=0, failed=0, unreachable=3)
    assert (crash.statuses(), crash.files()) == (["writing"] * 3, files)


@pytest.mark.parametrize("kind", ["published", "without text"])
def test_a_file_that_can_not_be_read_fails_its_save_and_stays(
    crash: Crash, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, kind: str
) -> None:
    crash.group("all_or_nothing", crash.left(0, kind))
    monkeypatch.setattr(recovery, "read_published", lambda fd: (_ for _ in ()).throw(OSError(5, "I/O error")))
    assert recover(crash.registry, crash.roots) == RecoveryResult(completed=0, failed=1)
    assert (crash.statuses(), crash.files()) == (["failed"], ["0.safetensors"])
    assert "can't be read: I/O error" in caplog.text


@pytest.mark.parametrize(("kind", "lost"), [("published", 0), ("without text", 0), ("torn", 1)])
def test_only_a_file_that_has_lost_its_end_is_an_error_of_the_disk(
    crash: Crash, caplog: pytest.LogCaptureFixture, kind: str, lost: int
) -> None:
    crash.group("independent", crash.left(0, kind))
    recover(crash.registry, crash.roots)
    assert caplog.text.count("the disk has lost a part") == lost


def test_a_file_that_can_not_be_removed_does_not_keep_the_others(crash: Crash, monkeypatch: pytest.MonkeyPatch) -> None:
    crash.group("all_or_nothing", crash.left(0, "published"), crash.left(1, "published"), crash.left(2, "missing"))
    unlink = os.unlink

    def refuse(path: str, **options: Any) -> None:  # noqa: ANN401 - passed on
        if path == "0.safetensors":
            raise OSError(30, "read-only")
        unlink(path, **options)

    monkeypatch.setattr(os, "unlink", refuse)
    assert recover(crash.registry, crash.roots) == RecoveryResult(completed=0, failed=3)
    assert crash.files() == ["0.safetensors"]


def test_recovery_leaves_no_descriptor_open(crash: Crash) -> None:
    crash.group("independent", *(crash.left(number, kind) for number, kind in enumerate(KINDS)))
    descriptors = len(os.listdir("/proc/self/fd"))  # noqa: PTH208 - the listing's own descriptor must be closed at once
    recover(crash.registry, crash.roots)
    assert len(os.listdir("/proc/self/fd")) == descriptors  # noqa: PTH208 - as above
