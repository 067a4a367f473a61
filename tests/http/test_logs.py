"""What a service writes into its log about requests: ids, the access log, and never a prompt unless that is wanted."""

from __future__ import annotations

import json
import logging
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest

from engine.errors import SaveError
from engine.execution.runner import ModelRunner
from engine.saves.builder import FileBuilder
from service.cli.launcher import ServiceProcess
from service.http.auth import hashed_line
from tests.http.conftest import Services

Json = dict[str, Any]
SECRET = "wombat-in-the-moonlight"
KEY = "sk-a-key-that-only-these-tests-know"


@dataclass
class Logged:
    """A service as a process, and all the lines that it has printed."""

    client: httpx.Client
    url: str = ""
    printed: list[str] = field(default_factory=list)

    def objects(self) -> list[Json]:
        return [json.loads(line) for line in self.printed if line.startswith("{")]

    def of(self, request_id: str | None, message: str = "answered") -> Json:
        """The line of a request. It is written when the answer has been sent, and read here after that: so it may come a little later."""
        while not (found := [line for line in self.objects() if (line.get("request_id"), line["message"]) == (request_id, message)]):
            time.sleep(0.01)
        [line] = found
        return line

    def completion(self, name: str, route: str = "/v1/completions", **body: Any) -> httpx.Response:  # noqa: ANN401 - any JSON value
        known = {} if "messages" in body else {"prompt": "Hello"}
        return self.client.post(route, json=known | {"max_tokens": 2} | body, headers={"X-Request-Id": name})


Run = Callable[..., AbstractContextManager[Logged]]


@contextmanager
def logged_service(services: Services, *flags: str) -> Iterator[Logged]:
    printed: list[str] = []
    with ServiceProcess([*services.flags(), *flags], on_line=printed.append) as process:
        with httpx.Client(base_url=process.url, timeout=None, trust_env=False) as client:
            yield Logged(client, process.url, printed)
        process.stop()


@pytest.fixture
def logged(services: Services) -> Run:
    """Runs a service with flags of a test's own."""
    return partial(logged_service, services)


@pytest.fixture(scope="module")
def verbose(model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Logged]:
    """One service for all tests of this file that need no other: it writes everything, as JSON."""
    services = Services(model_folder, tmp_path_factory.mktemp("verbose"))
    with logged_service(services, "--log-format", "json", "--log-level", "debug") as service:
        yield service


def test_every_line_of_a_json_log_is_an_object(verbose: Logged) -> None:
    verbose.completion("a-request", kv_transfer_params={})
    verbose.completion("a-bad-one", temperature=-1)
    verbose.of("a-bad-one")
    others = [line for line in verbose.printed if not line.startswith("{")]
    assert [line.partition(" http")[0] for line in others] == ["Strata is ready at"]
    assert all({"time", "level", "logger", "message"} <= line.keys() for line in verbose.objects())


def test_the_access_log_says_what_was_answered(verbose: Logged) -> None:
    response = verbose.completion("first", kv_transfer_params={})
    save_id = response.json()["kv_transfer_params"]["save_id"]
    line = verbose.of("first")
    assert (line["level"], line["method"], line["path"], line["status"]) == ("info", "POST", "/v1/completions", 200)
    assert (line["client"], line["save_id"], line["bytes"]) == ("127.0.0.1", save_id, len(response.content))
    assert 0 < line["duration_seconds"] < response.elapsed.total_seconds()
    assert not {"key", "aborted", "trace_id"} & line.keys()


def test_a_refusal_is_logged_without_a_save(verbose: Logged) -> None:
    refused = verbose.completion("second", temperature=-1, kv_transfer_params={})
    line = verbose.of("second")
    assert (line["status"], line["bytes"]) == (400, len(refused.content))
    assert "save_id" not in line


def test_requests_about_a_save_are_logged_with_its_id(verbose: Logged) -> None:
    save_id = verbose.completion("of-a-save", kv_transfer_params={}).json()["kv_transfer_params"]["save_id"]
    for name, path in (("polled", f"/saves/{save_id}"), ("downloaded", f"/saves/{save_id}/file")):
        verbose.client.get(path, params={"secret": "query"}, headers={"X-Request-Id": name})
        line = verbose.of(name)
        assert (line["path"], line["save_id"]) == (path, save_id)


def test_a_request_is_logged_under_the_id_of_its_body(verbose: Logged) -> None:
    verbose.completion("named-by-header", request_id="named-by-body")
    assert verbose.of("named-by-body")["status"] == 200


def test_several_choices_are_several_saves_of_one_line(verbose: Logged) -> None:
    choices = verbose.completion("many", prompt=["a", "b"], kv_transfer_params={}).json()["choices"]
    assert verbose.of("many")["save_ids"] == [choice["kv_transfer_params"]["save_id"] for choice in choices]


def test_probes_are_logged_for_those_who_debug(verbose: Logged) -> None:
    verbose.client.get("/health", headers={"X-Request-Id": "probe"})
    assert verbose.of("probe")["level"] == "debug"


def test_the_access_log_names_the_key_where_it_has_a_name(logged: Run, tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    nameless = KEY + "-of-nobody"
    keys.write_text(f"{hashed_line(KEY, 'alice')}\n{hashed_line(nameless)}\n")
    with logged("--log-format", "json", "--api-keys-file", str(keys)) as service:
        for request_id, key in (("hers", KEY), ("nobodys", nameless), ("wrong", KEY + "x")):
            service.client.get("/v1/models", headers={"X-Request-Id": request_id, "Authorization": f"Bearer {key}"})
        found = {request_id: service.of(request_id) for request_id in ("hers", "nobodys", "wrong")}
    assert [line.get("key") for line in found.values()] == ["alice", None, None]
    assert [line["status"] for line in found.values()] == [200, 200, 401]
    assert KEY not in "".join(service.printed)


def connected(service: Logged) -> socket.socket:
    host, port = service.url.removeprefix("http://").split(":")
    return socket.create_connection((host, int(port)))


def test_an_answer_that_a_client_did_not_wait_for_is_logged_as_aborted(verbose: Logged) -> None:
    body = json.dumps({"prompt": "Hello", "max_tokens": 200, "ignore_eos": True, "stream": True}).encode()
    fields = {"Host": "localhost", "X-Request-Id": "left", "Content-Type": "application/json", "Content-Length": len(body)}
    head = "\r\n".join(["POST /v1/completions HTTP/1.1", *(f"{name}: {value}" for name, value in fields.items())])
    with connected(verbose) as connection:
        connection.sendall(head.encode() + b"\r\n\r\n" + body)
        assert connection.recv(20).startswith(b"HTTP/1.1 200")
    assert verbose.of("left")["aborted"] is True


def test_a_path_is_logged_as_it_was_sent_so_that_it_can_not_forge_a_line(verbose: Logged) -> None:
    verbose.client.get("/x%0A2026-01-01 00:00:00 ERROR forged", headers={"X-Request-Id": "forger"})
    assert verbose.of("forger")["path"] == "/x%0A2026-01-01%2000:00:00%20ERROR%20forged"


def test_bytes_that_are_no_request_leave_a_line_too(verbose: Logged) -> None:
    with connected(verbose) as connection:
        connection.sendall(b"\x16\x03\x01\x00\x05hello\r\n\r\n")
        assert b"400" in connection.recv(100)
    line = verbose.of(None, "rejected a malformed request: this is not a valid HTTP/1.1 request")
    assert (line["status"], line["client"]) == (400, "127.0.0.1")


def send_prompts(service: Logged) -> None:
    """The secret in every place that takes text, in requests that work and in some that don't."""
    messages = [{"role": "user", "content": SECRET}]
    bodies: list[Json] = [
        {"prompt": SECRET, "kv_transfer_params": {"include_output_tokens": True}},
        {"prompt": [SECRET, SECRET], "echo": True, "logprobs": 1, "stream": True},
        {"prompt": SECRET, "kv_transfer_params": {"wait": "accepted", "idempotency_key": "once"}},
        {"prompt": SECRET, "kv_transfer_params": {"wait": "accepted", "idempotency_key": "once"}},
        {"prompt": SECRET, "stop": [SECRET], "user": SECRET},
        {"prompt": SECRET, "kv_transfer_params": {"metadata": {"about": SECRET}, "hidden_states_path": "a/../../b"}},
        {"prompt": {"text": SECRET}},
        {"prompt": SECRET, "max_tokens": SECRET},
        {"prompt": SECRET * 100},
        {"prompt": SECRET, "unknown_field": SECRET},
    ]
    for number, body in enumerate(bodies):
        service.completion(f"request-{number}", **body)
    service.completion("chat", "/v1/chat/completions", messages=messages)
    service.completion("refused-chat", "/v1/chat/completions", messages=[{"role": "nobody", "content": SECRET}])
    service.completion("render", "/v1/chat/completions/render", messages=messages)
    service.completion("tokenize", "/tokenize", prompt=SECRET)
    service.client.post("/v1/completions", content=f'{{"prompt": "{SECRET}"', headers={"X-Request-Id": "broken"})
    service.of("broken")


def test_no_prompt_is_logged_at_any_level(verbose: Logged) -> None:
    send_prompts(verbose)
    assert len([line for line in verbose.objects() if line["message"] == "answered"]) >= 15
    assert [line for line in verbose.printed if SECRET in line] == []


def test_prompts_are_logged_where_that_is_asked_for(logged: Run) -> None:
    with logged("--log-format", "json", "--log-prompts") as service:
        service.completion("text", prompt=[SECRET, "Hello"])
        service.completion("tokens", prompt=[[72, 73]])
        service.completion("chat", "/v1/chat/completions", messages=[{"role": "user", "content": SECRET}])
        service.completion("refused", prompt=SECRET, temperature=-1)
        service.of("refused")
        found = {request_id: service.of(request_id, "prompts")["prompts"] for request_id in ("text", "tokens", "chat")}
    assert found["text"] == [SECRET, "Hello"]
    assert len(found["tokens"][0]) == 2
    assert f"[user]{SECRET};[assistant]" in found["chat"][0]
    assert not [line for line in service.objects() if line.get("request_id") == "refused" and SECRET in json.dumps(line)]


def test_a_save_that_fails_is_logged_with_its_ids(
    services: Services, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(self: FileBuilder, *arguments: object) -> None:
        raise SaveError("no_space", "the disk is full")

    monkeypatch.setattr(FileBuilder, "complete", full)
    with services.run() as service, caplog.at_level(logging.WARNING):
        error = service.refused(507, request_id="to-be-lost", kv_transfer_params={})
    [record] = [record for record in caplog.records if record.getMessage().startswith("a save failed")]
    assert vars(record)["fields"] == {"request_id": "to-be-lost", "save_id": error["save_id"]}


def test_a_step_that_raises_is_logged_with_the_ids_that_the_client_knows(
    services: Services, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(self: ModelRunner, step: object, sampled_before: object = None) -> None:
        raise ValueError("no such kernel")

    monkeypatch.setattr(ModelRunner, "run", broken)
    with services.run() as service, caplog.at_level(logging.ERROR):
        error = service.refused(500, request_id="unlucky", kv_transfer_params={})
    [record] = [record for record in caplog.records if record.getMessage().startswith("a step over")]
    assert vars(record)["fields"] == {"request_id": "unlucky", "save_id": error["save_id"]}


def test_a_field_s_name_can_not_forge_a_line(logged: Run) -> None:
    with logged("--log-level", "debug") as service:
        service.completion("forger", **{"x\n2026-01-01 00:00:00 ERROR   forged": 1})
        while not any("answered" in line and "forger" in line for line in service.printed):
            time.sleep(0.01)
    assert any("ignored fields" in line for line in service.printed)
    assert not any(line.startswith("2026-01-01") for line in service.printed)
