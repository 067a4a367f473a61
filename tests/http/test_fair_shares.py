"""Nobody holds up others: clients that left, owners that ask for much, disks that hang, texts and bodies that are large."""

from __future__ import annotations

import json
import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import httpx
import pytest

from engine.saves.lock import LockFile
from service.http import strict_json
from service.http.auth import hashed_line, new_key
from service.http.limits import DEFAULT_LIMITS
from service.text.tokenizer import Tokenizer
from tests.http.gate import Gate, PublishingGate

if TYPE_CHECKING:
    from pathlib import Path

    from tests.http.conftest import Service, Services

ACCEPTED = {"kv_transfer_params": {"wait": "accepted"}}
MANY = 40
"""More than any pool has threads, asyncio's own included."""


def poll(service: Service, save_id: str) -> socket.socket:
    """Asks to be told when a save ends, on a connection of its own."""
    host, port = service.url.removeprefix("http://").split(":")
    connection = socket.create_connection((host, int(port)))
    connection.sendall(f"GET /saves/{save_id}?wait=60 HTTP/1.1\r\nHost: x\r\n\r\n".encode())
    return connection


def accepted(service: Service, **body: Any) -> str:  # noqa: ANN401 - any JSON value
    response = service.complete(**ACCEPTED, **body)
    assert response.status_code == 202, response.text
    save_id: str = response.json()["kv_transfer_params"]["save_id"]
    return save_id


def test_a_poll_whose_client_left_frees_its_place(services: Services, monkeypatch: pytest.MonkeyPatch) -> None:
    with services.run(limits=replace(DEFAULT_LIMITS, requests=3)) as service, PublishingGate(monkeypatch) as gate:
        save_id = accepted(service)
        gate.reached.wait()
        with ExitStack() as polls:
            while service.client.get("/saves").status_code != 429:
                polls.enter_context(closing(poll(service, save_id)))
        statuses = []
        while not statuses or (statuses[-1] == 429 and len(statuses) < 1000):
            statuses.append(service.client.get("/saves").status_code)
        assert statuses[-1] == 200
        assert service.client.get("/saves", params={"status": "completed"}).json()["data"] == [], "the save hadn't ended"
        assert service.runtime.shares.polls.total == 0


def test_a_request_whose_client_left_while_its_text_waits_frees_its_place(services: Services, monkeypatch: pytest.MonkeyPatch) -> None:
    encode = Tokenizer.encode
    with services.run(limits=replace(DEFAULT_LIMITS, requests=3)) as service, Gate() as gate:

        def held(tokenizer: Tokenizer, text: str, *how: bool, **named: bool) -> list[int]:
            gate.pass_through()
            return encode(tokenizer, text, *how, **named)

        monkeypatch.setattr(Tokenizer, "encode", held)
        with ExitStack() as clients:
            while service.client.get("/saves").status_code != 429:
                clients.enter_context(closing(service.send(prompt="Hello", max_tokens=1)))
            gate.reached.wait()
        statuses = []
        while not statuses or (statuses[-1] == 429 and len(statuses) < 1000):
            statuses.append(service.client.get("/saves").status_code)
        assert statuses[-1] == 200
        while 'strata_requests_total{outcome="aborted"} 3.0' not in service.client.get("/metrics").text:
            pass


class Owners:
    """A service with two owners."""

    def __init__(self, services: Services, folder: Path) -> None:
        self.alice, self.bob = ({"Authorization": f"Bearer {new_key()}"} for _ in range(2))
        self.file = folder / "keys"
        lines = [hashed_line(head["Authorization"].split()[1], name) for name, head in (("alice", self.alice), ("bob", self.bob))]
        self.file.write_text("\n".join(lines))


@pytest.fixture
def owners(services: Services, tmp_path: Path) -> Owners:
    return Owners(services, tmp_path)


def test_polls_of_one_owner_leave_room_for_another(services: Services, owners: Owners, monkeypatch: pytest.MonkeyPatch) -> None:
    limits = replace(DEFAULT_LIMITS, requests=8)
    with services.run(limits=limits, api_keys_file=owners.file) as service, PublishingGate(monkeypatch) as gate:
        response = service.client.post("/v1/completions", json={"prompt": "a", "max_tokens": 1, **ACCEPTED}, headers=owners.alice)
        save_id = response.json()["kv_transfer_params"]["save_id"]
        gate.reached.wait()
        with ExitStack() as polls:
            for _ in range(8):
                connection = polls.enter_context(closing(poll(service, save_id)))  # without a key
                connection.close()
            stop = threading.Event()

            def ask() -> None:
                with httpx.Client(base_url=service.url, timeout=None, trust_env=False, headers=owners.alice) as client:
                    while not stop.is_set():
                        client.get(f"/saves/{save_id}", params={"wait": 60})

            with ThreadPoolExecutor(8) as clients:
                for _ in range(8):
                    clients.submit(ask)
                while service.client.get("/saves", headers=owners.alice).status_code != 429:
                    pass
                refused = service.client.get("/saves", headers=owners.alice)
                others = [service.client.get("/saves", headers=owners.bob).status_code for _ in range(20)]
                stop.set()
                gate.open.set()
        assert refused.headers["retry-after"]
        assert "your keys" in refused.json()["error"]["message"]
        assert others == [200] * 20


def test_one_owner_can_not_fill_the_engine_s_queue(services: Services, owners: Owners, slow_steps: None) -> None:
    with services.run(max_running=2, max_queued=6, api_keys_file=owners.file) as service:
        body = {"prompt": "a", "max_tokens": 100, "ignore_eos": True, **ACCEPTED}
        statuses = [service.client.post("/v1/completions", json=body, headers=owners.alice).status_code for _ in range(6)]
        assert statuses == [202] * 4 + [429] * 2
        assert service.client.post("/v1/completions", json=body, headers=owners.bob).status_code == 202
        service.settled()
        assert service.client.post("/v1/completions", json=body, headers=owners.alice).status_code == 202


def test_a_disk_whose_lock_files_hang_holds_up_no_text_and_no_other_disk(
    services: Services, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    acquire = LockFile.acquire
    roots = (tmp_path / "saves", tmp_path / "other")
    with services.run(save_root=roots) as service, Gate() as gate, ThreadPoolExecutor(MANY) as clients:

        def hanging(directory_fd: int, name: str, *more: Any) -> LockFile:  # noqa: ANN401 - passed on
            if name.startswith("hang"):
                gate.pass_through()
            return acquire(directory_fd, name, *more)

        monkeypatch.setattr(LockFile, "acquire", hanging)
        bodies = [
            {"prompt": "a", "max_tokens": 1, "kv_transfer_params": {"hidden_states_path": f"hang-{i}.safetensors"}} for i in range(MANY)
        ]
        saves = [clients.submit(httpx.post, f"{service.url}/v1/completions", json=body, timeout=None, trust_env=False) for body in bodies]
        try:
            gate.reached.wait()
            with httpx.Client(base_url=service.url, timeout=30, trust_env=False) as client:
                for params in (None, {"hidden_states_path": f"{roots[1]}/new.safetensors"}):
                    response = client.post("/v1/completions", json={"prompt": "Hello", "max_tokens": 1, "kv_transfer_params": params})
                    assert response.status_code == 200, response.text
                save_id = response.json()["kv_transfer_params"]["save_id"]
                assert client.get(f"/saves/{save_id}/file").status_code == 200
                assert client.delete(f"/saves/{save_id}").status_code == 204
        finally:
            gate.open.set()
        assert [save.result().status_code for save in saves] == [200] * MANY


def test_texts_that_take_long_hold_up_no_saves_of_token_ids(services: Services, monkeypatch: pytest.MonkeyPatch) -> None:
    encode = Tokenizer.encode
    with services.run() as service, Gate() as gate, ThreadPoolExecutor(MANY) as clients:

        def held(tokenizer: Tokenizer, text: str, *how: bool, **named: bool) -> list[int]:
            gate.pass_through()
            return encode(tokenizer, text, *how, **named)

        monkeypatch.setattr(Tokenizer, "encode", held)
        texts = [
            clients.submit(
                httpx.post, f"{service.url}/v1/completions", json={"prompt": "a", "max_tokens": 1}, timeout=None, trust_env=False
            )
            for _ in range(MANY)
        ]
        try:
            gate.reached.wait()
            with httpx.Client(base_url=service.url, timeout=30, trust_env=False) as client:
                response = client.post("/v1/completions", json={"prompt": [5], "max_tokens": 1, "kv_transfer_params": {}})
            assert response.status_code == 200, response.text
        finally:
            gate.open.set()
        assert [text.result().status_code for text in texts] == [200] * MANY


@pytest.mark.parametrize("cut", [{}, {"truncate_prompt_tokens": 5}], ids=["whole", "cut"])
@pytest.mark.parametrize("route", ["/v1/completions", "/v1/chat/completions"])
def test_a_text_that_must_be_too_long_is_refused_before_it_is_tokenized(
    service: Service, route: str, cut: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(*_: object, **__: object) -> list[int]:
        raise AssertionError("tokenized")

    monkeypatch.setattr(Tokenizer, "encode", never)
    text = "x" * 100_000
    body: dict[str, Any] = {"prompt": text} if route == "/v1/completions" else {"messages": [{"role": "user", "content": text}]}
    response = service.client.post(route, json=body | cut)
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert (error["code"], error["param"]) == ("context_length_exceeded", "messages" if "messages" in body else "prompt")
    assert "256" in error["message"]


def test_a_text_that_is_cut_may_be_longer_than_the_context(service: Service) -> None:
    usage = service.completed(prompt="x" * 1000, truncate_prompt_tokens=10, max_tokens=1)["usage"]
    assert usage["prompt_tokens"] == 10


def test_texts_that_are_tokenized_for_their_own_sake_hold_up_no_prompts(services: Services, monkeypatch: pytest.MonkeyPatch) -> None:
    encode = Tokenizer.encode
    with services.run() as service, Gate() as gate, ThreadPoolExecutor(MANY) as clients:

        def held(tokenizer: Tokenizer, text: str, *how: bool, **named: bool) -> list[int]:
            if text == "held":
                gate.pass_through()
            return encode(tokenizer, text, *how, **named)

        monkeypatch.setattr(Tokenizer, "encode", held)
        texts = [
            clients.submit(httpx.post, f"{service.url}/tokenize", json={"prompt": "held"}, timeout=None, trust_env=False)
            for _ in range(MANY)
        ]
        try:
            gate.reached.wait()
            with httpx.Client(base_url=service.url, timeout=30, trust_env=False) as client:
                assert client.post("/v1/completions", json={"prompt": "a", "max_tokens": 1}).status_code == 200
        finally:
            gate.open.set()
        assert [text.result().status_code for text in texts] == [200] * MANY


def test_health_is_answered_while_a_large_body_is_parsed(services: Services, monkeypatch: pytest.MonkeyPatch) -> None:
    parse = strict_json.parse
    with services.run() as service, Gate() as gate, ThreadPoolExecutor(1) as clients:

        def held(body: bytes, *more: Any, **named: Any) -> Any:  # noqa: ANN401 - passed on
            gate.pass_through()
            return parse(body, *more, **named)

        monkeypatch.setattr(strict_json, "parse", held)
        body = {"prompt": "a", "max_tokens": 1, "kv_transfer_params": {"tensors": {"mask": [True] * 10**6}}}
        answer = clients.submit(httpx.post, f"{service.url}/v1/completions", json=body, timeout=None, trust_env=False)
        try:
            gate.reached.wait()
            assert httpx.get(f"{service.url}/health/live", timeout=30, trust_env=False).status_code == 200
        finally:
            gate.open.set()
        assert answer.result().status_code == 200, answer.result().text


TOO_MUCH = {
    "token ids": ({"prompt": [5] * 2_000_000}, "values"),
    "ignored numbers": ({"prompt": "a", "x": [0.5] * 2_000_000}, "values"),
    "client tensors": ({"prompt": "a", "kv_transfer_params": {"tensors": {"a": [1] * 2_000_000}}}, "values"),
    "lists": ({"prompt": "a", "x": [[]] * 100_000}, "containers"),
    "objects": ({"prompt": "a", "x": [{}] * 100_000}, "containers"),
    "names": ({"prompt": "a", "x": dict.fromkeys(map(str, range(300_000)))}, "names"),
}


@pytest.mark.parametrize(("body", "what"), TOO_MUCH.values(), ids=TOO_MUCH)
def test_a_body_that_holds_too_much_is_refused_before_it_is_parsed(
    service: Service, body: dict[str, Any], what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(*_: object, **__: object) -> None:
        raise AssertionError("parsed")

    monkeypatch.setattr(strict_json, "parse", never)
    response = service.client.post("/v1/completions", content=json.dumps(body), headers={"Content-Type": "application/json"})
    assert response.status_code == 400, response.text
    assert response.json()["error"]["code"] == "body_too_complex"
    assert what in response.json()["error"]["message"]


def test_texts_may_hold_any_number_of_commas_and_brackets(service: Service) -> None:
    service.completed(user='{[,:"\\' * 300_000)


def test_a_body_larger_than_the_context_can_need_is_413(service: Service) -> None:
    response = service.client.post("/v1/completions", json={"prompt": "a", "user": "x" * 20 * 2**20})
    assert (response.status_code, response.json()["error"]["code"]) == (413, "body_too_large")
    assert str(16 * 2**20 + 128 * 256) in response.json()["error"]["message"]
