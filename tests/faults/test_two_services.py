"""Two services on one save root or one state directory, and retries that come all at once."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.faults.children import Child, check_file, check_nothing_is_left, ended, flags, running, saved_files
from tests.http.child import RUN

RETRIES = 32
CLEANS_AT_ONCE = """
from service.saves import reaper
remove_orphaned_files = reaper.remove_orphaned_files
reaper.remove_orphaned_files = lambda *arguments, **options: remove_orphaned_files(*arguments, **options | {"min_age_seconds": -60.0})
"""
"""A service that takes temporary files of any age for old ones."""
BROKEN = """
from service.http.middleware import RequestId
def broken(self, app):
    raise RuntimeError("this can't work")
RequestId.__init__ = broken
"""


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("shared").resolve() / "saves"


@pytest.fixture(scope="module")
def child(model_folder: Path, root: Path) -> Iterator[Child]:
    with running(flags(model_folder, root, root.parent / "first")) as first:
        yield first


def transfer_of(answer: httpx.Response) -> dict[str, Any]:
    assert answer.status_code == 200, answer.text
    transfer: dict[str, Any] = answer.json()["kv_transfer_params"]
    return transfer


def test_two_services_on_one_root_never_take_each_others_names(child: Child, model_folder: Path, root: Path) -> None:
    with running(flags(model_folder, root, root.parent / "second")) as other, ThreadPoolExecutor(8) as pool:
        named = {number: f"named/{number}.safetensors" for number in range(20)}

        def both(path: str | None) -> list[httpx.Response]:
            params = {} if path is None else {"hidden_states_path": path}
            return [future.result() for future in [pool.submit(one.complete, kv_transfer_params=params) for one in (child, other)]]

        for path in named.values():
            statuses = sorted(answer.status_code for answer in both(path))
            assert statuses == [200, 409], path
        unnamed = [transfer_of(answer) for _ in range(20) for answer in both(None)]
        assert len({transfer["hidden_states_path"] for transfer in unnamed}) == 40
        files = saved_files(root)
        assert all(files[transfer["hidden_states_path"]] == transfer["save_id"] for transfer in unnamed)
        other.settled()
    child.settled()
    assert {record["id"] for record in child.records(status="completed")} < set(files.values())
    for path in files:
        check_file(path)
    check_nothing_is_left(root)


def stopped_while_writing(child: Child, root: Path) -> bool:
    """Stops the service where it is writing a file just now, or lets it go on."""
    child.signal(signal.SIGSTOP)
    os.waitid(os.P_PID, child.pid, os.WSTOPPED)
    if list(root.glob(".*.part")):
        return True
    child.signal(signal.SIGCONT)
    time.sleep(0.005)
    return False


def test_the_start_of_a_second_service_leaves_what_the_first_is_writing(child: Child, model_folder: Path, root: Path) -> None:
    stray = root / f".{'0' * 32}.part"
    params = {"include_output_tokens": True, "hidden_states_path": "live.safetensors", "on_conflict": "replace"}
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(child.complete, max_tokens=240, kv_transfer_params=params)
        while not stopped_while_writing(child, root):
            if answer.done():  # It was too fast for us.
                answer = pool.submit(child.complete, max_tokens=240, kv_transfer_params=params)
        live = list(root.glob(".*.part"))
        try:
            stray.write_bytes(b"of a service that was killed")
            command = [sys.executable, "-c", CLEANS_AT_ONCE + RUN, "serve", *flags(model_folder, root, root.parent / "third")]
            with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as second:
                assert second.stdout is not None
                assert second.stdout.readline().startswith("Strata is ready")
                while stray.exists():  # it cleans when it is ready
                    time.sleep(0.01)
                second.kill()
            assert list(root.glob(".*.part")) == live
        finally:
            child.signal(signal.SIGCONT)
        transfer = transfer_of(answer.result())
    assert transfer["num_tokens"] == 6 + 240 - 1
    check_file(transfer["hidden_states_path"])
    check_nothing_is_left(root)


def test_a_second_service_on_a_state_directory_is_refused_in_one_line(child: Child, model_folder: Path, root: Path) -> None:
    state = root.parent / "first"
    status, said = ended(flags(model_folder, root, state))
    assert status == 2
    assert f"--state-dir {state}: is in use by another service" in said
    assert "Traceback" not in said
    assert transfer_of(child.complete(kv_transfer_params={}))["status"] == "completed"


def test_a_server_that_can_not_be_put_together_ends_with_an_error(model_folder: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-c", BROKEN + RUN, "serve", *flags(model_folder, tmp_path / "saves", tmp_path / "state")]
    assert subprocess.run(command, capture_output=True, check=False).returncode != 0


def test_parallel_retries_with_one_key_compute_once(child: Child) -> None:
    child.settled()
    before = child.metrics()
    body = {"max_tokens": 40, "cache_salt": "retries", "kv_transfer_params": {"idempotency_key": "retries", "include_output_tokens": True}}
    with ThreadPoolExecutor(RETRIES) as pool:
        answers = [future.result() for future in [pool.submit(child.complete, **body) for _ in range(RETRIES)]]
    assert len({transfer_of(answer)["save_id"] for answer in answers}) == 1
    assert len({answer.json()["choices"][0]["text"] for answer in answers}) == 1
    after = child.settled()
    assert after["strata_computed_tokens_total"] - before["strata_computed_tokens_total"] == 6 + 40 - 1
    assert after["strata_requests_total[replayed]"] - before["strata_requests_total[replayed]"] == RETRIES - 1


def test_parallel_retries_with_another_body_are_all_refused(child: Child) -> None:
    first = {"max_tokens": 200, "kv_transfer_params": {"idempotency_key": "other body", "wait": "accepted"}}
    assert child.complete(**first).status_code == 202
    with ThreadPoolExecutor(RETRIES) as pool:
        bodies = [first | {"max_tokens": 1 + number} for number in range(RETRIES)]
        answers = [future.result() for future in [pool.submit(child.complete, **body) for body in bodies]]
    assert {(answer.status_code, answer.json()["error"]["code"]) for answer in answers} == {(409, "idempotency_key_reused")}


def test_delete_download_and_expiry_act_on_nothing_that_clients_have_put_in_a_files_place(child: Child, root: Path) -> None:
    victim = root.parent / "victims/x.safetensors"
    victim.parent.mkdir()
    victim.write_bytes(b"not yours")
    kinds = ("moved", "deleted", "replaced", "linked", "hard-linked", "folder", "another save")

    def misplace(kind: str, ttl_seconds: float | None) -> tuple[str, Path]:
        expiring = {} if ttl_seconds is None else {"ttl_seconds": ttl_seconds}
        path = f"clients/{kind}-{ttl_seconds}/x.safetensors"
        transfer = transfer_of(child.complete(kv_transfer_params={"hidden_states_path": path, **expiring}))
        file = Path(transfer["hidden_states_path"])
        file.rename(file.with_name("moved"))
        if kind == "replaced":
            file.write_bytes(b"mine")
        elif kind == "linked":
            file.symlink_to(victim)
        elif kind == "hard-linked":
            file.hardlink_to(victim)
        elif kind == "folder":
            file.parent.rename(file.parent.with_name(f"away-{ttl_seconds}"))
            file.parent.symlink_to(victim.parent)
        elif kind == "another save":
            (file.parent / "x.safetensors.lock").unlink()
            transfer_of(child.complete(kv_transfer_params={"hidden_states_path": path}))
        elif kind == "deleted":
            file.with_name("moved").unlink()
        return transfer["save_id"], file.parent

    expiring = [misplace(kind, 2.0) for kind in kinds]
    removed = [misplace(kind, None) for kind in kinds]
    before = {
        path: path.read_bytes()
        for _, folder in (*expiring, *removed)
        for path in folder.rglob("*")
        if path.suffix != ".lock" and path.is_file()
    }
    assert before
    for save_id, _ in removed:
        assert child.client.get(f"/saves/{save_id}/file").status_code == 410
        assert child.client.delete(f"/saves/{save_id}").status_code == 204
        assert child.client.get(f"/saves/{save_id}").status_code == 404
    while any(child.client.get(f"/saves/{save_id}").json()["status"] == "completed" for save_id, _ in expiring):
        time.sleep(0.05)
    assert {path: path.read_bytes() for path in before} == before
    assert victim.read_bytes() == b"not yours"
