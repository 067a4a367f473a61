"""What a start refuses, warns of and puts off, and how it ends before its time."""

from __future__ import annotations

import logging
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import httpx
import pytest

from service import runtime
from service.http import server
from service.http.server import listen
from service.saves import orphans
from service.saves.reaper import Reaper
from tests.http.child import RUN
from tests.http.gate import Gate

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.http.conftest import Services

REPOSITORY = Path(__file__).parents[2]
HANGS = """
import sys, threading
from engine.engine import Engine
def start(self, progress=None):
    print("loading", flush=True)
    threading.Event().wait()
Engine.start = start
"""
STUB_PIP = """
import os, sys, time
print(os.getpid(), flush=True)
with open(os.environ["STUB_PIP_STARTED"], "w") as file:
    file.write(str(os.getpid()))
time.sleep(10**6)
"""


@contextmanager
def started(command: list[str], **environment: str) -> Iterator[subprocess.Popen[str]]:
    env = {**os.environ, "PYTHONUNBUFFERED": "1", **environment}
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env, cwd=REPOSITORY) as process:
        try:
            yield process
        finally:
            process.kill()


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_while_a_model_loads_ends_the_process_although_the_load_hangs(services: Services, number: signal.Signals) -> None:
    with started([sys.executable, "-c", HANGS + RUN, "serve", *services.flags()]) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "loading\n"
        process.send_signal(number)
        said, log = process.communicate()
        assert (process.returncode, said) == (0, "")
        assert "the start was interrupted" in log
        assert "Traceback" not in log
    with services.run() as service:
        service.completed()


def test_a_signal_while_a_model_is_fetched_leaves_no_process_and_no_part_of_it(services: Services, tmp_path: Path) -> None:
    stub = tmp_path / "stub/pip"
    stub.mkdir(parents=True)
    (stub / "__init__.py").touch()
    (stub / "__main__.py").write_text(STUB_PIP)
    flags = services.flags()
    at = flags.index("--model")
    command = [sys.executable, "-m", "service", "serve", *flags[:at], *flags[at + 2 :]]
    pid_file = tmp_path / "pid"
    with started(command, PYTHONPATH=str(stub.parent), STUB_PIP_STARTED=str(pid_file)) as process:
        while not (pid_file.exists() and pid_file.read_text()):
            assert process.poll() is None
            time.sleep(0.02)
        assert list((tmp_path / "state/models").glob("*.partial"))
        process.terminate()
        _, log = process.communicate()
        assert process.returncode == 0, log
    assert not is_running(int(pid_file.read_text()))
    assert list((tmp_path / "state/models").glob("*.partial")) == []


def test_a_service_is_ready_while_orphans_are_looked_for(services: Services, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    gate = Gate()
    leftovers = orphans._orphans_below

    def late(*arguments: object) -> object:
        gate.pass_through()
        return leftovers(*arguments)  # type: ignore[arg-type]  # as they came

    monkeypatch.setattr(orphans, "_orphans_below", late)
    orphan = tmp_path / f"saves/.{'0' * 32}.part"
    orphan.parent.mkdir()
    orphan.touch()
    monkeypatch.setattr(runtime, "Reaper", partial(Reaper, now=lambda: time.time() + 90))
    with services.run(until_ready=False) as service, gate:
        gate.reached.wait()
        assert service.client.get("/health").json() == {"status": "ok"}
        saved = service.completed(kv_transfer_params={})["kv_transfer_params"]
        assert orphan.exists()
        gate.open.set()
        while orphan.exists():
            time.sleep(0.01)
        assert Path(saved["hidden_states_path"]).exists()


def test_a_cleaning_at_the_start_leaves_a_save_that_runs_alone(
    services: Services, monkeypatch: pytest.MonkeyPatch, slow_steps: None, tmp_path: Path
) -> None:
    """Even where its temporary file counts as old."""
    gate, cleaned = Gate(), threading.Event()
    clean = orphans.remove_orphaned_files

    def late(*arguments: object, **options: object) -> int:
        gate.pass_through()
        removed = clean(*arguments, **options | {"min_age_seconds": -60.0})  # type: ignore[arg-type]  # as they came
        cleaned.set()
        return removed

    monkeypatch.setattr("service.saves.reaper.remove_orphaned_files", late)
    with services.run() as service, gate:
        params = {"include_output_tokens": True, "wait": "accepted"}
        save_id = service.complete(max_tokens=60, ignore_eos=True, kv_transfer_params=params).json()["kv_transfer_params"]["save_id"]
        while not list((tmp_path / "saves").glob(".*.part")):
            assert service.record(save_id, wait=0)["status"] in ("queued", "running", "writing")
        gate.open.set()
        cleaned.wait()
        assert service.record(save_id)["status"] == "completed"


def test_a_state_directory_in_a_save_root_ends_the_command_with_2_and_one_line(services: Services, tmp_path: Path) -> None:
    state = tmp_path / "saves/state"
    command = [sys.executable, "-m", "service", "serve", *services.flags(), "--state-dir", str(state)]
    ended = subprocess.run(command, capture_output=True, text=True, check=False, cwd=REPOSITORY)
    assert ended.returncode == 2
    [line] = [line for line in ended.stderr.splitlines() if "ERROR" in line]
    assert f"--state-dir {state} lies in --save-root {tmp_path / 'saves'}" in line
    assert not (tmp_path / "saves").exists()


def test_sighup_without_keys_ends_nothing(services: Services) -> None:
    with started([sys.executable, "-m", "service", "serve", *services.flags()]) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        url = process.stdout.readline().split()[-1]
        process.send_signal(signal.SIGHUP)
        while "SIGHUP: there is no --api-keys-file" not in process.stderr.readline():
            assert process.poll() is None
        assert httpx.get(f"{url}/health", trust_env=False).json() == {"status": "ok"}
        process.terminate()
        process.communicate()
        assert process.returncode == 0


def test_a_service_on_this_machine_answers_no_name_of_others(services: Services) -> None:
    with services.run(allowed_host=("strata.example",)) as service:
        for path in ("/", "/v1/models", "/health", "/metrics", "/saves"):
            refused = service.client.get(path, headers={"Host": "evil.example"})
            assert (refused.status_code, refused.json()["error"]["code"]) == (421, "unknown_host")
            assert refused.headers["x-request-id"]
            assert service.client.get(path, headers={"Host": "strata.example"}).status_code == 200
            assert service.client.get(path).status_code == 200


def test_a_service_on_all_addresses_is_asked_by_any_name(services: Services) -> None:
    with services.run(host="0.0.0.0", allowed_host=()) as service:
        assert service.client.get("/v1/models", headers={"Host": "strata.example"}).status_code == 200


@pytest.mark.parametrize(
    ("host", "keys", "warned"), [("0.0.0.0", False, True), ("::", False, True), ("127.0.0.1", False, False), ("0.0.0.0", True, False)]
)
def test_a_service_that_others_reach_without_keys_is_warned_of(
    services: Services, caplog: pytest.LogCaptureFixture, host: str, keys: bool, warned: bool
) -> None:
    settings = services.settings(host=host, api_keys_file=Path("keys") if keys else None)
    with listen(host, 0) as listening, caplog.at_level(logging.WARNING):
        server._warn_if_open(settings, listening)
    assert [f"listening on {host} without --api-keys-file" in record.getMessage() for record in caplog.records] == [True] * warned


@pytest.mark.skipif(not socket.has_dualstack_ipv6(), reason="this machine has no sockets for both versions of IP")
def test_all_addresses_are_those_of_both_versions_of_ip() -> None:
    with listen("::", 0) as listening:
        for address in ("127.0.0.1", "::1"):
            socket.create_connection((address, listening.getsockname()[1])).close()


@pytest.mark.skipif(not socket.has_ipv6, reason="this machine has no IPv6")
def test_one_address_of_ipv6_is_that_one_only() -> None:
    with listen("::1", 0) as listening, pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", listening.getsockname()[1]))
