"""A disk that is really full: a file system of a few MiB, and many times as much to be saved.

`STRATA_TEST_DISK_FULL=1000` (requests) is the full run.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest

from tests.faults.children import Child, check_file, check_nothing_is_left, check_records, flags, number_from_environment, running
from tests.faults.disk import tmpfs

REQUESTS = number_from_environment("STRATA_TEST_DISK_FULL", 200)
NUM_CLIENTS = 200
"""At once: a save that finds the disk full is given some seconds, so few at a time would take long."""
LAYERS = list(range(7))


@dataclass
class FullDisk:
    """A service on a small file system."""

    child: Child
    root: Path
    state: Path

    def save(self, number: int, prompt_length: int = 180, **transfer: object) -> httpx.Response:
        prompt = "".join(random.Random(number).choices("abcdefgh ", k=prompt_length))
        wanted = {"layers": LAYERS, "hidden_states_path": f"{number % 5}/", "include_output_tokens": True}
        # A connection of its own: the pool of one client is not made for so many threads.
        with httpx.Client(base_url=self.child.service.url, timeout=None, trust_env=False, verify=False) as client:
            return Child(self.child.service, client).complete(prompt=prompt, max_tokens=20, kv_transfer_params=wanted | transfer)

    def check(self) -> None:
        """Whatever has come of the requests: files are whole, and there is nothing else."""
        metrics = self.child.settled()
        assert metrics["strata_state_pages[referenced]"] == metrics["strata_kv_blocks[referenced]"] == 0
        check_nothing_is_left(self.root)
        for path in self.root.rglob("*.safetensors"):
            check_file(path)

    def free(self, keep: int) -> None:
        """What a client does that has read its files."""
        for path in sorted(self.root.rglob("*.safetensors"))[keep:]:
            path.unlink()
            path.with_name(path.name + ".lock").unlink()


@pytest.fixture(scope="module")
def full_disk(model_folder: Path, tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Iterator[FullDisk]:
    folder = tmp_path_factory.mktemp("full")
    state = folder / "state"
    with (
        tmpfs(folder / "saves", request.param) as root,
        running(flags(model_folder, root, state, "--min-free-bytes", "0", "--max-queued", "2000")) as child,
    ):
        yield FullDisk(child, root, state)


def outcome(response: httpx.Response) -> str:
    """Which of the ends that a request may have it came to."""
    if response.status_code == 200:
        path = response.json()["kv_transfer_params"]["hidden_states_path"]
        check_file(path)
        return "published"
    error = response.json()["error"]
    assert (response.status_code, error["code"]) == (507, "no_space"), response.text
    return "refused"


@pytest.mark.parametrize("full_disk", ["4m"], indirect=True)
def test_every_save_on_a_full_disk_is_a_whole_file_or_a_refusal(full_disk: FullDisk) -> None:
    with ThreadPoolExecutor(NUM_CLIENTS) as clients:
        ends = Counter(clients.map(lambda number: outcome(full_disk.save(number)), range(REQUESTS)))
    print(f"{REQUESTS} requests on a disk of 4 MiB: {dict(ends)}")
    assert ends["published"] >= 10
    assert ends["refused"] >= 10
    full_disk.check()
    check_records(full_disk.state, full_disk.root)

    plain = full_disk.child.complete()
    assert plain.status_code == 200, plain.text
    assert full_disk.child.client.get("/health").status_code == 200

    full_disk.free(keep=2)
    for number in range(8):
        assert outcome(full_disk.save(REQUESTS + number)) == "published"
    full_disk.child.settled()
    check_nothing_is_left(full_disk.root)


@pytest.mark.parametrize("full_disk", ["4m"], indirect=True)
def test_space_that_is_freed_in_time_saves_the_saves_that_wait_for_it(full_disk: FullDisk) -> None:
    """No request fails where a client makes room as it reads: the service waits a little before it gives a save up."""
    full_disk.free(keep=0)
    taken = full_disk.root / "taken"
    with pytest.raises(OSError, match="No space left"):
        taken.write_bytes(bytes(8 << 20))
    with ThreadPoolExecutor(8) as clients:
        waiting = [clients.submit(full_disk.save, number) for number in range(8)]
        while full_disk.child.metrics()["strata_writer_queue_depth"] < 1:
            assert not any(save.done() for save in waiting)
        taken.unlink()
        assert [outcome(save.result()) for save in waiting] == ["published"] * 8
    full_disk.check()


@pytest.mark.parametrize("full_disk", ["4m,nr_inodes=30"], indirect=True)
def test_a_disk_without_a_free_inode_is_full_too(full_disk: FullDisk) -> None:
    with ThreadPoolExecutor(40) as clients:
        ends = Counter(clients.map(lambda number: outcome(full_disk.save(number, 20)), range(40)))
    assert min(ends["published"], ends["refused"]) >= 5
    full_disk.check()
    full_disk.free(keep=2)
    assert outcome(full_disk.save(100, 20)) == "published"
