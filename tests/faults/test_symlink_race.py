"""A directory that turns into a symbolic link and back while saves go through it. `STRATA_TEST_SYMLINK_SAVES=2000` is the full run."""

from __future__ import annotations

import ctypes
import os
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx

from tests.faults.children import Child, check_file, check_nothing_is_left, flags, number_from_environment, running

SAVES = number_from_environment("STRATA_TEST_SYMLINK_SAVES", 60)
"""How many must be let through, how many refused, and how many removed."""
AT_FDCWD, RENAME_EXCHANGE = -100, 2
NUM_CLIENTS = 4


def exchange(one: Path, other: Path) -> None:
    """Both names change places in one step."""
    renameat2 = ctypes.CDLL(None, use_errno=True).renameat2
    if renameat2(AT_FDCWD, os.fsencode(one), AT_FDCWD, os.fsencode(other), RENAME_EXCHANGE):
        raise OSError(ctypes.get_errno(), "renameat2")


@contextmanager
def exchanging(one: Path, other: Path) -> Iterator[list[int]]:
    """Exchanges them as fast as it can until the block ends, and leaves them as they were. The list counts."""
    ending, count = threading.Event(), [0]

    def work() -> None:
        while not ending.is_set() or count[0] % 2:
            exchange(one, other)
            count[0] += 1

    thread = threading.Thread(target=work)
    thread.start()
    try:
        yield count
    finally:
        ending.set()
        thread.join()


def picture(folder: Path) -> dict[str, tuple[int, bytes | None]]:
    """Everything in a folder; times of directories tell of entries that came and went."""
    paths = [folder, *sorted(folder.rglob("*"))]
    return {str(path): (path.stat().st_mtime_ns, path.read_bytes() if path.is_file() else None) for path in paths}


def save_through(child: Child, number: int, answers: Counter[int], deleted: Counter[int]) -> list[str]:
    """Saves into the directory, into new ones below it and over a file on the other side; returns the acknowledged paths."""
    paths: list[str] = []
    with httpx.Client(base_url=child.service.url, timeout=None, trust_env=False) as client:
        for turn in range(10**9):
            if min(answers[200], answers[403], 5 * deleted[204]) >= SAVES:
                return paths
            name = (f"door/{number}-{turn}.st", f"door/sub/{number}-{turn}.st", f"door/new-{number}-{turn}/x.st", "door/secret.st")[
                turn % 4
            ]
            params: dict[str, Any] = {"hidden_states_path": name, "on_conflict": "replace"}
            body = {"prompt": "Hello", "max_tokens": 1, "kv_transfer_params": params | {"wait": turn % 3 != 0}}
            response = client.post("/v1/completions", json=body)
            answers[response.status_code] += 1
            if response.status_code != 200 or "secret" in name:
                continue
            transfer = response.json()["kv_transfer_params"]
            if turn % 5 == 0:
                deleted[client.delete(f"/saves/{transfer['save_id']}").status_code] += 1
            elif transfer["status"] == "completed":
                paths.append(transfer["hidden_states_path"])
    return paths


def test_nothing_is_ever_made_outside_the_roots(model_folder: Path, tmp_path: Path, record_property: Callable[[str, Any], None]) -> None:
    root, outside, state = tmp_path.resolve() / "saves", tmp_path / "outside", tmp_path / "state"
    for folder in (root / "door/sub", outside / "sub"):
        folder.mkdir(parents=True)
    (outside / "secret.st").write_text("nobody's business")
    (root / "door.other").symlink_to(outside)
    before = picture(outside)
    answers, deleted = Counter[int](), Counter[int]()
    acknowledged: list[str] = []
    with running(flags(model_folder, root, state)) as child:
        with exchanging(root / "door", root / "door.other") as exchanges:

            def work(number: int) -> None:
                acknowledged.extend(save_through(child, number, answers, deleted))

            threads = [threading.Thread(target=work, args=[number]) for number in range(NUM_CLIENTS)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        child.settled()
        assert picture(outside) == before
        for path in acknowledged:
            check_file(path)
            assert Path(path).resolve().is_relative_to(root)
        check_nothing_is_left(root)
    counts = {"exchanges": exchanges[0], "answers": dict(answers), "deletions": dict(deleted), "acknowledged": len(acknowledged)}
    record_property("counts", counts)
    print(counts)
    assert set(answers) <= {200, 403, 409}
    assert set(deleted) == {204}
