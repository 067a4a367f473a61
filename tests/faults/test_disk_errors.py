"""Every write, fsync and rename of a save is made to fail in turn, in a running service, below the C library's calls.

`STRATA_TEST_DISK_ERRORS=all` lets errors that stay strike at every single call, too; each of those takes as long as the service is patient.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path

import httpx
import numpy as np
import pytest
from safetensors.numpy import load_file

from tests.faults.children import Child, check_file, check_nothing_is_left, check_records, flags
from tests.faults.disk import FOR_EVER, HANGING_SECONDS, FaultyDisk, faulty_disk, name_of

EVERYTHING = os.environ.get("STRATA_TEST_DISK_ERRORS") == "all"
PROMPT = "The quick brown fox jumps over the lazy dog, and over all that stands in its way. " * 2
LAYERS = [0, 3, 6, "norm"]
SMALL_STEPS = ["--max-batch-tokens", "48", "--block-size", "16", "--no-prefix-cache"]
"""So that a save comes in several pieces, and each is computed anew."""


@dataclass
class World:
    """A service, its disk, and a save that went well, to compare others with."""

    child: Child
    disk: FaultyDisk
    root: Path
    state: Path
    names: Iterator[str] = field(default_factory=lambda: (f"{number}.safetensors" for number in count()))
    expected: dict[str, np.ndarray] = field(default_factory=dict)
    calls: dict[str, dict[str, int]] = field(default_factory=dict)

    def save(self, name: str | None = None, **transfer: object) -> httpx.Response:
        wanted = {"hidden_states_path": name or next(self.names), "layers": LAYERS, "include_output_tokens": True}
        return self.child.complete(prompt=PROMPT, max_tokens=20, kv_transfer_params=wanted | transfer)

    def saved(self, response: httpx.Response) -> None:
        """The file is whole, and holds the rows that it would hold on a disk in order."""
        assert response.status_code == 200, response.text
        path = response.json()["kv_transfer_params"]["hidden_states_path"]
        check_file(path)
        found = load_file(path)
        self.expected = self.expected or found
        assert found.keys() == self.expected.keys()
        for name, values in self.expected.items():
            # Requests that run beside this one change the last bits of its sums.
            np.testing.assert_allclose(found[name], values, rtol=0, atol=1e-3 if name == "hidden_states" else 0)

    def num_calls(self, site: str, match: str) -> int:
        """How often a save that goes well makes this call."""
        if match not in self.calls:
            self.disk.fail("linkat", match=match)  # With no error: it only counts.
            self.saved(self.save())
            self.calls[match] = self.disk.counts()
        return self.calls[match][site]

    def check_clean(self) -> None:
        """Nothing is left of what failed, and the next save works."""
        self.disk.heal()
        settled = self.child.settled()
        assert settled["strata_state_pages[referenced]"] == settled["strata_kv_blocks[referenced]"] == 0
        check_nothing_is_left(self.root)
        self.saved(self.save())
        check_records(self.state, self.root.parent)


def world(model_folder: Path, folder: Path, *more: str) -> Iterator[World]:
    root, state = folder / "saves" / "faulty", folder / "state"
    healthy = ["--save-root", str(folder / "saves" / "healthy")]
    with faulty_disk(folder, root) as disk, disk.under(flags(model_folder, root, state, *healthy, *SMALL_STEPS, *more)) as child:
        made = World(child, disk, root, state)
        made.saved(made.save())
        yield made


@pytest.fixture(scope="module")
def careful(model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    """Everything that a save can do: checksum, fsync of the file and of its directory."""
    yield from world(model_folder, tmp_path_factory.mktemp("careful"), "--durability", "full", "--checksum", "sha256")


@pytest.fixture(scope="module")
def careless(model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    """Nothing is synced: what was not written is only heard of when the file is closed."""
    yield from world(model_folder, tmp_path_factory.mktemp("careless"), "--durability", "none")


def match_of(site: str) -> str:
    """Where a call is made for the lock file, too, that of the temporary file is meant."""
    return ".part" if site in ("create", "fchmod", "pwrite", "pread") else ""


def case_id(value: object) -> str:
    return name_of(value) if isinstance(value, int) and value < 200 else str(value)


NOT_SYNCED = [(errno.EIO, 500, "io_error"), (errno.ENOSPC, 507, "no_space"), (errno.EDQUOT, 507, "no_space")]
PASSING = [errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EINTR]


@pytest.mark.parametrize("error", PASSING, ids=name_of)
@pytest.mark.parametrize("site", ["create", "pwrite", "pread", "renameat2", "fchmod"])
def test_an_error_that_passes_delays_a_save_at_any_call(careful: World, site: str, error: int) -> None:
    match = match_of(site)
    calls = careful.num_calls(site, match)
    assert calls
    for nth in range(1, calls + 1):
        careful.disk.fail(site, error, match=match, nth=nth, times=2)
        careful.saved(careful.save())
        assert careful.disk.fired
        assert careful.disk.fired <= 2
    careful.check_clean()


@pytest.mark.parametrize("error", [errno.EROFS, errno.ENXIO], ids=name_of)
@pytest.mark.parametrize("site", ["create", "pwrite", "pread", "renameat2", "fsync"])
def test_an_error_that_time_does_not_heal_fails_the_save_at_any_call(careful: World, site: str, error: int) -> None:
    match = match_of(site)
    calls = careful.num_calls(site, match)
    assert calls
    for nth in range(1, calls + 1):
        careful.disk.fail(site, error, match=match, nth=nth)
        refused(careful, careful.save(), 500, "io_error")
    careful.check_clean()


@pytest.mark.parametrize(("error", "status", "code"), NOT_SYNCED, ids=case_id)
def test_a_failed_fsync_of_file_or_directory_fails_the_save(careful: World, error: int, status: int, code: str) -> None:
    """A second fsync would succeed, though the kernel has given up on what the first one was about."""
    calls = careful.num_calls("fsync", "")
    assert calls == 2
    for nth in range(1, calls + 1):
        careful.disk.fail("fsync", error, nth=nth)
        refused(careful, careful.save(), status, code)
    careful.check_clean()


def test_an_interrupted_fsync_is_made_again(careful: World) -> None:
    careful.disk.fail("fsync", errno.EINTR, times=2)
    careful.saved(careful.save())
    assert careful.disk.fired == 2
    careful.check_clean()


def refused(world: World, response: httpx.Response, status: int, code: str) -> None:
    error = response.json()["error"]
    assert (response.status_code, error["code"]) == (status, code), response.text
    assert world.disk.fired
    world.child.settled()
    check_nothing_is_left(world.root)


STAYING = [("create", errno.EDQUOT), ("pwrite", errno.EIO)]
STAYING += [("create", errno.EIO), ("pwrite", errno.ENOSPC), ("pread", errno.EIO), ("renameat2", errno.ENOSPC)] if EVERYTHING else []


@pytest.mark.parametrize(("site", "error"), STAYING, ids=case_id)
def test_an_error_that_stays_fails_the_save_in_the_end(careful: World, site: str, error: int) -> None:
    match = match_of(site)
    calls = careful.num_calls(site, match)
    places = range(1, calls + 1) if EVERYTHING else [calls]
    for nth in places:
        careful.disk.fail(site, error, match=match, nth=nth, times=FOR_EVER)
        full = error in (errno.ENOSPC, errno.EDQUOT)
        refused(careful, careful.save(), 507 if full else 500, "no_space" if full else "io_error")
        assert careful.disk.fired > 5
    careful.check_clean()


@pytest.mark.parametrize("short_bytes", [1, 7, 4096])
def test_short_writes_go_on_where_they_stopped(careful: World, short_bytes: int) -> None:
    careful.disk.fail("pwrite", times=FOR_EVER if short_bytes > 1 else 500, short_bytes=short_bytes)
    careful.saved(careful.save())
    assert careful.disk.fired
    careful.check_clean()


@pytest.mark.parametrize("site", ["pwrite", "fsync", "renameat2"])
def test_calls_that_take_long_delay_a_save_and_nothing_else(careful: World, site: str) -> None:
    calls = careful.num_calls(site, "")
    for nth in range(1, calls + 1):
        careful.disk.fail(site, nth=nth, delay_seconds=0.2)
        careful.saved(careful.save())
        assert careful.disk.fired == 1
    careful.check_clean()


@pytest.mark.parametrize("on_conflict", ["error", "replace"])
def test_a_rename_that_was_carried_out_although_it_failed_is_a_saved_file(careful: World, on_conflict: str) -> None:
    """Network file systems lose answers. That the name stands for the file is what counts."""
    for error in (errno.EIO, errno.ETIMEDOUT, errno.EINTR):
        careful.disk.fail("renameat" if on_conflict == "replace" else "renameat2", error, carried_out=True)
        careful.saved(careful.save(on_conflict=on_conflict))
        assert careful.disk.fired == 1
    careful.check_clean()


def test_a_replacement_that_fails_leaves_the_old_file(careful: World) -> None:
    name = next(careful.names)
    careful.saved(careful.save(name))
    before = (careful.root / name).stat()
    careful.disk.fail("renameat", errno.EROFS)
    refused(careful, careful.save(name, on_conflict="replace"), 500, "io_error")
    assert os.path.samestat((careful.root / name).stat(), before)
    careful.check_clean()


CLAIMS = [
    ("linkat", errno.ENOSPC, 507, "no_space"),
    ("linkat", errno.EDQUOT, 507, "no_space"),
    ("linkat", errno.EIO, 500, "io_error"),
    ("fchmod", errno.EIO, 500, "io_error"),
    ("flock", errno.EIO, 500, "io_error"),
    ("flock", errno.ENOLCK, 500, "io_error"),
]
UNNAMED = "(deleted)"
"""How the kernel calls a file that was made without a name, such as a lock file, also when it has got one."""


@pytest.mark.parametrize(("site", "error", "status", "code"), CLAIMS, ids=case_id)
def test_a_lock_file_that_can_not_be_had_is_a_refusal(careful: World, site: str, error: int, status: int, code: str) -> None:
    careful.disk.fail(site, error, match=".lock" if site == "linkat" else UNNAMED)
    refused(careful, careful.save(), status, code)
    careful.check_clean()


@pytest.mark.parametrize("error", [errno.EOPNOTSUPP, errno.EPERM, errno.ENOENT], ids=name_of)
def test_a_file_system_on_which_no_unnamed_file_gets_a_name_has_lock_files_all_the_same(careful: World, error: int) -> None:
    careful.disk.fail("linkat", error, match=".lock")
    careful.saved(careful.save())
    assert careful.disk.fired == 1
    careful.check_clean()


@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EIO, errno.EROFS], ids=name_of)
@pytest.mark.parametrize("site", ["pwrite", "pread"])
def test_a_lock_file_without_its_mark_or_with_one_too_many_does_not_fail_a_save(careful: World, site: str, error: int) -> None:
    careful.disk.fail(site, error, match=UNNAMED, times=FOR_EVER)
    careful.saved(careful.save())
    assert careful.disk.fired == 1
    careful.check_clean()


def test_a_temporary_file_that_can_not_be_locked_fails_the_save(careful: World) -> None:
    careful.disk.fail("flock", errno.EACCES, match=".part")
    refused(careful, careful.save(), 500, "io_error")
    careful.check_clean()


def test_a_lock_that_can_not_be_given_back_ends_with_its_descriptor(careful: World) -> None:
    calls = careful.num_calls("flock", UNNAMED)
    careful.disk.fail("flock", errno.EIO, match=UNNAMED, nth=calls)
    careful.saved(careful.save())
    assert careful.disk.fired == 1
    careful.check_clean()


def test_a_link_that_appears_under_the_name_is_neither_followed_nor_replaced(careful: World) -> None:
    """And the temporary file goes, though removing it fails twice."""
    name = next(careful.names)
    with ThreadPoolExecutor() as pool:
        careful.disk.fail("pwrite", nth=2, delay_seconds=HANGING_SECONDS)
        running = pool.submit(careful.save, name)
        while not careful.disk.fired:
            assert not running.done()
        (careful.root / name).symlink_to(careful.root.parent / "outside")
        careful.disk.fail("unlinkat", errno.EIO, match=".part", times=2)
        refused(careful, running.result(), 409, "conflict")
    assert careful.disk.fired == 2
    assert not (careful.root.parent / "outside").exists()
    assert (careful.root / name).is_symlink()
    (careful.root / name).unlink()
    careful.check_clean()


@pytest.mark.parametrize(("error", "status", "code"), NOT_SYNCED, ids=case_id)
def test_what_is_only_heard_at_the_close_fails_an_unsynced_save(careless: World, error: int, status: int, code: str) -> None:
    assert careless.num_calls("fsync", "") == 0
    careless.disk.fail("close", error, match=".part")
    refused(careless, careless.save(), status, code)
    careless.check_clean()


def test_a_failing_close_after_the_file_has_its_name_changes_nothing(careful: World) -> None:
    careful.disk.fail("close", errno.EIO, match="safetensors", times=FOR_EVER)
    careful.saved(careful.save())
    assert careful.disk.fired
    careful.check_clean()


def test_saves_that_wait_for_a_full_disk_hold_nobody_up_on_another(careful: World) -> None:
    """More of them than there are writer threads, and all of them are still waiting when the others have been published."""
    careful.disk.fail("pwrite", errno.ENOSPC, times=FOR_EVER)
    healthy = careful.root.parent / "healthy"
    with ThreadPoolExecutor(8) as pool:
        stuck = [pool.submit(careful.save) for _ in range(8)]
        while careful.disk.fired < 16:
            assert not any(save.done() for save in stuck)
        for _ in range(4):
            careful.saved(careful.save(str(healthy / next(careful.names))))
        assert not any(save.done() for save in stuck)
        for save in stuck:
            refused(careful, save.result(), 507, "no_space")
    careful.check_clean()
