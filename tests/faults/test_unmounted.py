"""A volume that isn't mounted: its files are not taken for removed ones, and all is as it was when it is back."""

from __future__ import annotations

import shutil
import sqlite3
import subprocess
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.faults.children import Child, flags, running
from tests.faults.disk import tmpfs


@contextmanager
def mounted(volume: Path, root: Path) -> Iterator[None]:
    done = subprocess.run([shutil.which("mount") or "false", "--bind", str(volume), str(root)], capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"mounting is forbidden here: {done.stderr.strip() or 'mount is missing'}")
    try:
        yield
    finally:
        subprocess.run(["umount", "--lazy", root], check=True)


def saved(child: Child, **params: Any) -> dict[str, Any]:  # noqa: ANN401 - fields of kv_transfer_params
    answer = child.complete(kv_transfer_params=params)
    assert answer.status_code == 200, answer.text
    transfer: dict[str, Any] = answer.json()["kv_transfer_params"]
    return transfer


def file_of(child: Child, save: dict[str, Any]) -> httpx.Response:
    return child.client.get(f"/saves/{save['save_id']}/file")


def test_files_on_a_volume_that_is_away_are_neither_removed_nor_lost(model_folder: Path, tmp_path: Path) -> None:
    root, volume = tmp_path.resolve() / "saves", tmp_path / "volume"
    root.mkdir()
    arguments = flags(model_folder, root, tmp_path / "state")
    with tmpfs(volume, "16m"):
        with mounted(volume, root), running(arguments) as child:
            kept, expiring = saved(child, hidden_states_path="a/kept"), saved(child, hidden_states_path="a/expiring", ttl_seconds=1000.0)
        with closing(sqlite3.connect(tmp_path / "state/registry.sqlite3")) as database, database:
            database.execute(
                "UPDATE saves SET expires = 1 WHERE id = ?", [expiring["save_id"]]
            )  # Its time is over while the volume is away.
        with running(arguments) as child:  # The folder is there, and empty.
            while "2 files can't be inspected" not in child.service.tail():
                assert {record["status"] for record in child.records()} == {"completed"}
            for save in (kept, expiring):
                refused = file_of(child, save)
                assert (refused.status_code, refused.json()["error"]["code"]) == (503, "storage_unavailable")
                assert child.client.delete(f"/saves/{save['save_id']}").status_code == 500
            assert len(child.records()) == 2
        assert sorted(path.name for path in (volume / "a").iterdir() if path.suffix != ".lock") == ["expiring", "kept"]
        with mounted(volume, root), running(arguments) as child:
            assert file_of(child, kept).status_code == 200
            while child.client.get(f"/saves/{expiring['save_id']}").json()["status"] == "completed":
                pass
            assert file_of(child, kept).status_code == 200
        assert sorted(path.name for path in (volume / "a").iterdir() if path.suffix != ".lock") == ["kept"]
