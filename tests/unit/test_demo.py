"""The demonstration's client and report, against a server and files made here."""

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from service.cli import demo_client
from service.cli.demo_client import Completion, RequestFailed, complete, wait_for_save
from service.cli.demo_report import completion_lines, file_lines, metric_lines

ANSWER = {
    "id": "cmpl-1",
    "object": "text_completion",
    "created": 0,
    "model": "m",
    "choices": [{"index": 0, "text": " blue", "finish_reason": "length", "logprobs": None}],
    "usage": {"prompt_tokens": 3, "completion_tokens": 1, "total_tokens": 4},
    "kv_transfer_params": {"save_id": "abc", "status": "writing"},
}
BODY = {"model": "m", "prompt": "The sky is", "max_tokens": 1, "kv_transfer_params": {"wait": False}}


class Server(HTTPServer):
    """Answers completions with `ANSWER` and a save's record with the next of `records`."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.records: list[dict[str, Any]] = []
        self.received: list[dict[str, Any]] = []
        self.status = 200


class Handler(BaseHTTPRequestHandler):
    server: Server

    def do_GET(self) -> None:
        self._send(200, self.server.records.pop(0))

    def do_POST(self) -> None:
        self.server.received.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
        error = {"error": {"message": "max_tokens is too large", "type": "invalid_request_error"}}
        self._send(self.server.status, ANSWER if self.server.status == 200 else error)

    def _send(self, status: int, body: dict[str, Any]) -> None:
        content = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the base class names it so
        pass


@pytest.fixture
def server() -> Iterator[Server]:
    with Server() as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def url_of(server: Server) -> str:
    return f"http://127.0.0.1:{server.server_port}"


@pytest.fixture(params=["openai", "urllib"])
def client(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "urllib":
        monkeypatch.setattr(demo_client.importlib.util, "find_spec", lambda name: None)
    return str(request.param)


def test_a_completion_is_the_same_through_either_client(server: Server, client: str) -> None:
    completion = complete(url_of(server), BODY)
    assert (completion.client, completion.text, completion.save_id) == (client, " blue", "abc")
    assert (completion.prompt_tokens, completion.completion_tokens) == (3, 1)
    assert server.received == [BODY]


@pytest.mark.usefixtures("client")
def test_a_refused_completion_says_why(server: Server) -> None:
    server.status = 400
    with pytest.raises(RequestFailed, match="max_tokens is too large"):
        complete(url_of(server), BODY)


def test_a_save_is_polled_until_it_is_completed(server: Server) -> None:
    server.records = [{"status": "queued"}, {"status": "writing"}, {"status": "completed", "bytes": 7}]
    assert wait_for_save(url_of(server), "abc") == {"status": "completed", "bytes": 7}


def test_a_save_that_failed_is_an_error(server: Server) -> None:
    server.records = [{"status": "failed", "error": {"code": "no_space"}}]
    with pytest.raises(RequestFailed, match="no_space"):
        wait_for_save(url_of(server), "abc")


def test_the_report_shows_text_speed_and_file() -> None:
    record = {"status": "completed", "hidden_states_path": "/saves/x.safetensors", "bytes": 1234}
    lines = "\n".join(completion_lines("The sky is", Completion(ANSWER, 0.5, "openai"), record))
    for part in ("The sky is", "blue", "2.0 tokens per second", "/saves/x.safetensors (1,234 bytes)"):
        assert part in lines


def test_the_report_shows_tensors_and_the_norm_of_each_layer(tmp_path: Path) -> None:
    rows = torch.zeros(3, 2, 4, dtype=torch.bfloat16)
    rows[:, 0, 0] = torch.tensor([1.0, 2.0, 3.0])
    rows[:, 1] = 2.0
    save_file({"hidden_states": rows, "token_ids": torch.arange(3)}, tmp_path / "x", {"layers": '[2, "norm"]', "dtype": "bfloat16"})
    lines = [line.split() for line in file_lines(tmp_path / "x")]
    assert ["hidden_states", "[3,", "2,", "4]", "bfloat16"] in lines
    assert ["token_ids", "[3]", "int64"] in lines
    assert [line[2] for line in lines if line[0] == "layer"] == ["2.00", "4.00"]
    assert [line[1] for line in lines if line[0] == "layer"] == ["2", "norm"]


def test_the_report_shows_the_metrics_asked_for_unless_they_are_zero() -> None:
    exposition = '# HELP strata_a x\nstrata_a{outcome="ok"} 3.0\nstrata_b 0.0\nstrata_c 5.0\n'
    assert [line.split() for line in metric_lines(exposition, ["strata_a", "strata_b"])] == [['strata_a{outcome="ok"}', "3"]]
