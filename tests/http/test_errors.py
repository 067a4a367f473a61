"""Errors have OpenAI's body whatever goes wrong, and a bad request never reaches the engine."""

from __future__ import annotations

import json
import socket
from typing import TYPE_CHECKING

import httpx
import pytest
import torch
from openai import ConflictError, OpenAI

from engine.errors import SaveError
from engine.execution.runner import ModelRunner, StepOutput
from engine.execution.step_input import StepInput
from service.errors import SaveFailed
from service.http.errors import error_response
from service.http.limits import MAX_BODY_BYTES

if TYPE_CHECKING:
    from tests.http.conftest import Service, Services


def error_of(response: httpx.Response) -> tuple[int, str, str]:
    body = response.json()
    assert set(body) == {"error"}
    error = body["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return response.status_code, error["code"], error["type"]


@pytest.mark.parametrize("path", ["/v1", "/v1/completion", "/saves/a/b", "/docs/", "/redoc", "/v1/completions/"])
def test_an_unknown_route_is_404_with_a_body(service: Service, path: str) -> None:
    assert error_of(service.client.get(path)) == (404, "not_found", "invalid_request_error")


@pytest.mark.parametrize(("method", "path"), [("GET", "/v1/completions"), ("POST", "/health"), ("PUT", "/saves"), ("POST", "/saves/x")])
def test_a_wrong_method_is_405_and_names_the_right_one(service: Service, method: str, path: str) -> None:
    response = service.client.request(method, path)
    assert error_of(response) == (405, "method_not_allowed", "invalid_request_error")
    assert response.headers["allow"]


@pytest.mark.parametrize(
    "content", [b"", b"{", b"[]", b"null", b'"text"', b"\xff\xfe", b'{"prompt": "a", "temperature": NaN}', b"[" * 100_000]
)
def test_a_body_that_is_no_json_object_is_400(service: Service, content: bytes) -> None:
    response = service.client.post("/v1/completions", content=content, headers={"Content-Type": "application/json"})
    assert error_of(response)[0] == 400


def test_a_body_without_the_json_type_is_400(service: Service) -> None:
    response = service.client.post("/v1/completions", content=b'{"prompt": "a"}', headers={"Content-Type": "text/plain"})
    assert error_of(response) == (400, "invalid_json", "invalid_request_error")


def test_a_number_too_large_for_json_is_400(service: Service) -> None:
    content = b'{"prompt": "a", "max_tokens": ' + b"9" * 10_000 + b"}"
    response = service.client.post("/v1/completions", content=content, headers={"Content-Type": "application/json"})
    assert error_of(response)[0] == 400


def test_a_body_that_is_announced_too_large_is_413(service: Service) -> None:
    host, port = service.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port))) as connection:
        head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {MAX_BODY_BYTES + 1}\r\n\r\n"
        connection.sendall(head.encode())
        answer = b""
        while not answer.endswith(b"}}"):
            answer += connection.recv(65536)
    assert answer.startswith(b"HTTP/1.1 413")
    assert b"body_too_large" in answer


def test_a_body_that_turns_out_too_large_is_413(service: Service) -> None:
    def endless() -> object:
        yield b'{"prompt": "'
        for _ in range(MAX_BODY_BYTES // 2**20 + 1):
            yield b"a" * 2**20

    response = service.client.post("/v1/completions", content=endless(), headers={"Content-Type": "application/json"})
    assert error_of(response)[:2] == (413, "body_too_large")


def test_a_long_bad_list_is_refused_with_a_short_message(service: Service) -> None:
    response = service.client.post("/v1/completions", json={"prompt": [1] * 100_000 + ["x"]})
    assert response.status_code == 400
    assert len(response.text) < 1000
    assert len(service.client.post("/v1/completions", json={"prompt": [1], "n": "x" * 10**6}).text) < 1000


def test_bad_requests_never_reach_the_engine_and_leave_no_record(service: Service) -> None:
    engine = service.runtime.services(for_new_work=True).engine
    before = engine.stats().computed_tokens_total, len(service.client.get("/saves").json()["data"])
    service.refused(400, temperature=-1, kv_transfer_params={})
    service.refused(400, prompt=[10**6], kv_transfer_params={})
    service.refused(400, kv_transfer_params={"layers": [70]})
    service.refused(403, kv_transfer_params={"hidden_states_path": "/elsewhere/x"})
    assert before == (engine.stats().computed_tokens_total, len(service.client.get("/saves").json()["data"]))
    assert service.runtime.services(for_new_work=True).events.attached == 0


def test_a_full_queue_is_429_and_says_when_to_come_again(services: Services, slow_steps: None) -> None:
    with services.run(max_running=1, max_queued=1) as service:
        running = service.complete(max_tokens=200, ignore_eos=True, kv_transfer_params={"wait": "accepted"})
        assert running.status_code == 202
        responses = [service.complete(max_tokens=200, ignore_eos=True, kv_transfer_params={"wait": "accepted"}) for _ in range(4)]
        refused = [response for response in responses if response.status_code == 429]
        assert len(refused) >= 2
        assert error_of(refused[0]) == (429, "queue_full", "rate_limit_error")
        assert int(refused[0].headers["retry-after"]) >= 1
        assert len(service.client.get("/saves").json()["data"]) == 5 - len(refused)


def test_an_unexpected_failure_is_500_without_details(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("a secret path /srv/private/x")

    monkeypatch.setattr("service.requests.admission.sampling_params", fail)
    response = service.complete()
    assert error_of(response) == (500, "internal_error", "server_error")
    assert "secret" not in response.text
    monkeypatch.undo()
    assert service.runtime.services(for_new_work=True).events.attached == 0
    service.completed()


def test_errors_that_a_repeat_meets_again_say_so(services: Services) -> None:
    """OpenAI's clients send a request with the status 409 or 500 again, unless this header tells them not to."""

    def told(code: str, response: httpx.Response) -> str | None:
        assert response.json()["error"]["code"] == code
        return response.headers.get("x-should-retry")

    with services.run() as service:
        service.completed(kv_transfer_params={"hidden_states_path": "taken.safetensors"})
        assert told("path_conflict", service.complete(kv_transfer_params={"hidden_states_path": "taken.safetensors"})) == "false"
        service.completed(kv_transfer_params={"idempotency_key": "once"})
        assert told("idempotency_key_reused", service.complete(max_tokens=2, kv_transfer_params={"idempotency_key": "once"})) == "false"
        assert told("invalid_value", service.complete(temperature=-1)) is None
        assert told("not_found", service.client.get("/saves/none")) is None
        sent: list[httpx.Request] = []
        http = httpx.Client(event_hooks={"request": [sent.append]})
        with OpenAI(base_url=f"{service.url}/v1", api_key="EMPTY", max_retries=3, http_client=http) as client:
            extra = {"kv_transfer_params": {"hidden_states_path": "taken.safetensors"}}
            with pytest.raises(ConflictError):
                client.completions.create(model="tiny", prompt="x", extra_body=extra)
        assert len(sent) == 1


@pytest.mark.parametrize(("code", "told"), [("non_finite", "false"), ("out_of_range", "false"), ("io_error", None), ("no_space", None)])
def test_a_save_that_fails_for_what_it_holds_is_not_worth_a_repeat(code: str, told: str | None) -> None:
    assert error_response(SaveFailed("id", SaveError(code, "why"))).headers.get("x-should-retry") == told  # type: ignore[arg-type]


def test_a_failing_step_fails_its_requests_only(services: Services, monkeypatch: pytest.MonkeyPatch) -> None:
    with services.run() as service:
        run = ModelRunner.run
        failing = [True]

        def fail_once(runner: ModelRunner, step: StepInput, sampled_before: torch.Tensor | None = None) -> StepOutput:
            if failing:
                failing.pop()
                raise RuntimeError("a kernel failed")
            return run(runner, step, sampled_before)

        monkeypatch.setattr(ModelRunner, "run", fail_once)
        error = service.refused(500, kv_transfer_params={"hidden_states_path": "x.safetensors"})
        assert error["code"] == "engine_error"
        assert "kernel" not in json.dumps(error)
        assert service.record(error["save_id"])["status"] == "failed"
        assert service.completed(kv_transfer_params={"hidden_states_path": "x.safetensors"})
