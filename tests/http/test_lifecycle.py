"""Clients that go away, signals, and an engine that dies."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import httpx
import pytest

from service.cli.main import main
from tests.http.child import child

if TYPE_CHECKING:
    from pathlib import Path

    from tests.http.conftest import Service, Services

LONG: dict[str, Any] = {"prompt": "Hello", "max_tokens": 200, "ignore_eos": True, "temperature": 0}


def leave_after(service: Service, body: dict[str, Any], num_bytes: int) -> None:
    """Sends a completion and closes the connection once that many bytes of the answer have come."""
    with service.send(**body) as connection:
        received = 0
        while received < num_bytes:
            received += len(connection.recv(4096))
        while not num_bytes and not service.client.get("/saves").json()["data"]:
            pass


@pytest.mark.parametrize("body", [{}, {"n": 3}, {"stream": True}, {"stream": True, "n": 2}])
def test_a_client_that_goes_away_ends_its_request(services: Services, slow_steps: None, body: dict[str, Any]) -> None:
    with services.run() as service:
        engine = service.runtime.services(for_new_work=True).engine
        params = {"include_output_tokens": True, "hidden_states_path": "gone/"}
        leave_after(service, LONG | body | {"kv_transfer_params": params}, 300 if "stream" in body else 0)
        service.settled()
        records = service.client.get("/saves").json()["data"]
        assert len(records) == body.get("n", 1)
        assert {service.record(record["id"])["status"] for record in records} == {"cancelled"}
        assert engine.stats().computed_tokens_total < 150 * len(records)
        assert engine.stats().kv_blocks.referenced == engine.stats().state_pages.referenced == 0
        assert [path.name for path in service.root.rglob("*") if path.is_file()] == []
        assert service.runtime.services(for_new_work=True).events.attached == 0
        assert 'strata_requests_total{outcome="aborted"} 1.0' in service.client.get("/metrics").text


def test_a_client_that_does_not_wait_may_go_away(services: Services, slow_steps: None) -> None:
    with services.run() as service:
        accepted = service.complete(max_tokens=30, ignore_eos=True, kv_transfer_params={"wait": "accepted"}).json()
        service.client.close()
        with httpx.Client(base_url=service.url, trust_env=False, timeout=None) as other:
            record = other.get(f"/saves/{accepted['kv_transfer_params']['save_id']}", params={"wait": 60}).json()
        assert (record["status"], len(record["output"]["token_ids"])) == ("completed", 30)


SLOW = """
import sys, time
from engine.core import EngineCore
step = EngineCore.step
def slow_step(core):
    time.sleep(0.02)
    return step(core)
EngineCore.step = slow_step
"""
DYING = """
import sys
from engine.core import EngineCore
def dying_step(core):
    raise MemoryError("the device is gone")
EngineCore.step = dying_step
"""


def test_a_signal_drains_running_requests_and_refuses_new_ones(services: Services, tmp_path: Path) -> None:
    with child(services, LONG, SLOW) as running, ThreadPoolExecutor(1) as pool:
        answer = pool.submit(running.post, kv_transfer_params={"include_output_tokens": True})
        running.until_running()
        running.process.send_signal(signal.SIGTERM)
        while running.client.get("/health").json() != {"status": "draining"}:
            pass
        assert running.client.get("/health").status_code == 503
        assert running.client.get("/health/live").status_code == 200
        refused = running.post()
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "draining")
        record = running.client.get("/saves").json()["data"][0]
        assert record["status"] in ("running", "writing")
        assert answer.result().status_code == 200
        transfer = answer.result().json()["kv_transfer_params"]
        assert (transfer["status"], transfer["num_tokens"]) == ("completed", 6 + 200 - 1)
        assert running.process.wait() == 0
    assert [path.suffix for path in (tmp_path / "saves").iterdir() if path.suffix != ".lock"] == [".safetensors"]


def test_what_does_not_finish_in_time_is_ended_and_the_exit_is_clean(services: Services, tmp_path: Path) -> None:
    with child(services, LONG, SLOW, "--drain-seconds", "0.2") as running, ThreadPoolExecutor(1) as pool:
        answer = pool.submit(running.post, kv_transfer_params={"include_output_tokens": True})
        running.until_running()
        running.process.send_signal(signal.SIGINT)
        assert answer.result().status_code == 503
        assert running.process.wait() == 0
    assert list((tmp_path / "saves").iterdir()) == []
    with services.run() as service:
        assert service.client.get("/saves").json()["data"][0]["status"] in ("cancelled", "failed")


def test_a_dead_engine_answers_everybody_and_ends_the_process(services: Services) -> None:
    with child(services, LONG, DYING) as running:
        answer = running.post(kv_transfer_params={})
        assert answer.status_code in (500, 503)
        assert answer.json()["error"]["code"]
        health = running.client.get("/health")
        assert (health.status_code, health.json()) == (503, {"status": "dead"})
        assert running.client.get("/health/live").status_code == 503
        assert running.post().status_code == 503
        assert running.process.wait() == 1


def test_a_port_in_use_ends_the_command_with_2(services: Services) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        command = [sys.executable, "-m", "service", "serve", *services.flags(), "--port", port]
        ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ended.returncode == 2
    assert ended.stderr.startswith(f"strata: can't listen on 127.0.0.1 port {port}: ")
    assert "Traceback" not in ended.stderr


def test_a_killed_service_leaves_records_that_say_so_and_no_partial_file(services: Services, tmp_path: Path) -> None:
    with child(services, LONG, SLOW) as running, ThreadPoolExecutor(1) as pool:
        answer = pool.submit(running.post, kv_transfer_params={"include_output_tokens": True, "hidden_states_path": "killed.safetensors"})
        running.until_running()
        time.sleep(0.2)
        running.process.kill()
        assert isinstance(answer.exception(), httpx.TransportError)
    with services.run() as service:
        record = service.client.get("/saves").json()["data"][0]
        assert (record["status"], record["error"]["code"]) == ("failed", "interrupted")
        assert [path.name for path in (tmp_path / "saves").rglob("*")] == []
        service.completed(kv_transfer_params={"hidden_states_path": "killed.safetensors"})


def test_the_command_line_checks_and_shows_files(service: Service, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = service.completed(kv_transfer_params={"metadata": {"k": "v"}})["kv_transfer_params"]["hidden_states_path"]
    assert main(["verify", path]) == 0
    assert capsys.readouterr().out == f"{path}: ok\n"
    assert main(["inspect", path]) == 0
    shown = capsys.readouterr().out
    assert "hidden_states" in shown
    assert "[6, 3, 32]" in shown
    assert "user.k" in shown
    broken = tmp_path / "broken.safetensors"
    with open(path, "rb") as file:  # noqa: PTH123 - only half of it
        broken.write_bytes(file.read(2000))
    assert main(["verify", str(broken), str(tmp_path / "missing")]) == 1
    assert len(capsys.readouterr().out.splitlines()) == 2
