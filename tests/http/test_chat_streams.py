"""Server-sent events of chats, and what keeps streams of any kind alive: heartbeats, and readers that take their time."""

from __future__ import annotations

import json
import socket
import time
from typing import TYPE_CHECKING, Any

import pytest
from openai import OpenAI

from service.http.responses import stream

if TYPE_CHECKING:
    from tests.http.conftest import Service

BODY: dict[str, Any] = {"max_tokens": 20, "ignore_eos": True, "temperature": 0}
HI = [{"role": "user", "content": "Hi"}]


def chunks(service: Service, **body: Any) -> list[dict[str, Any]]:  # noqa: ANN401 - any JSON value
    response = service.chat(stream=True, **BODY | body)
    assert response.status_code == 200, response.text
    lines = [line.removeprefix("data: ") for line in response.text.split("\n\n") if line]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


def test_the_first_chunk_of_each_choice_names_the_role(service: Service) -> None:
    events = chunks(service, n=2)
    assert [event["choices"][0]["delta"] for event in events[:2]] == [{"role": "assistant", "content": ""}] * 2
    assert [event["choices"][0]["index"] for event in events[:2]] == [0, 1]
    assert all("role" not in event["choices"][0]["delta"] for event in events[2:])
    assert {event["object"] for event in events} == {"chat.completion.chunk"}
    assert len({event["id"] for event in events}) == 1


def test_the_chunks_joined_are_the_whole_answer(service: Service) -> None:
    wanted = {"n": 2, "logprobs": True, "top_logprobs": 1, "return_token_ids": True}
    whole, events = service.chatted(**BODY, **wanted), chunks(service, **wanted)
    assert events[0]["prompt_token_ids"] == whole["prompt_token_ids"]
    for expected in whole["choices"]:
        parts = [choice for event in events for choice in event["choices"] if choice["index"] == expected["index"]]
        assert "".join(part["delta"].get("content", "") for part in parts) == expected["message"]["content"]
        assert [token for part in parts for token in part["token_ids"]] == expected["token_ids"]
        tokens = [entry["token"] for part in parts if part["logprobs"] for entry in part["logprobs"]["content"]]
        assert tokens == [entry["token"] for entry in expected["logprobs"]["content"]]
        assert [part["finish_reason"] for part in parts] == [None] * (len(parts) - 1) + ["length"]


def test_usage_comes_last_where_it_is_asked_for(service: Service) -> None:
    events = chunks(service, stream_options={"include_usage": True})
    assert all(event["usage"] is None for event in events[:-1])
    assert events[-1]["choices"] == []
    assert events[-1]["usage"]["completion_tokens"] == 20
    assert all("usage" not in event for event in chunks(service))


def test_usage_comes_with_every_chunk_where_it_is_asked_for(service: Service) -> None:
    events = chunks(service, stream_options={"include_usage": True, "continuous_usage_stats": True})
    counts = [event["usage"]["completion_tokens"] for event in events]
    assert (counts[0], counts[-1]) == (0, 20)
    assert counts == sorted(counts)
    with_key: dict[str, Any] = {"kv_transfer_params": {"idempotency_key": "usage"}}
    for _ in range(2):
        repeated = chunks(service, **with_key, stream_options={"include_usage": True, "continuous_usage_stats": True})
        assert all(event["usage"]["prompt_tokens"] == events[0]["usage"]["prompt_tokens"] for event in repeated)


def test_chunks_have_the_fields_of_vllm(service: Service) -> None:
    stop = service.chatted(**BODY)["choices"][0]["message"]["content"][6:9]
    events = chunks(service, stop=stop)
    assert events[0]["prompt_token_ids"] is None
    assert {event["system_fingerprint"] for event in events} == {event["choices"][0]["token_ids"] for event in events} == {None}
    assert [event["choices"][0]["stop_reason"] for event in events] == [None] * (len(events) - 1) + [stop]


def test_an_echo_is_streamed_before_the_text(service: Service) -> None:
    messages = [*HI, {"role": "assistant", "content": "Good d"}]
    whole = service.chatted(**BODY, messages=messages)["choices"][0]["message"]["content"]
    events = chunks(service, messages=messages, echo=True)
    assert "".join(event["choices"][0]["delta"].get("content", "") for event in events) == "Good d" + whole


def test_the_first_chunk_names_the_file_and_the_last_one_finds_it_complete(service: Service) -> None:
    events = chunks(service, kv_transfer_params={})
    first, last = events[0]["kv_transfer_params"], events[-1]["kv_transfer_params"]
    assert first["hidden_states_path"] == last["hidden_states_path"]
    assert (last["status"], events[-1]["choices"][0]["finish_reason"]) == ("completed", "length")


def test_a_repeated_stream_comes_from_its_record(service: Service) -> None:
    body: dict[str, Any] = {"kv_transfer_params": {"idempotency_key": "stream"}, "stream_options": {"include_usage": True}}
    first, second = chunks(service, **body), chunks(service, **body)
    assert second[0]["object"] == "chat.completion.chunk"
    text = "".join(event["choices"][0]["delta"].get("content", "") for event in first[:-1])
    assert second[0]["choices"][0]["delta"] == {"role": "assistant", "content": text}
    assert second[-1]["usage"]["completion_tokens"] == 20


def test_the_openai_client_reads_the_stream(service: Service) -> None:
    with OpenAI(base_url=f"{service.url}/v1", api_key="EMPTY", max_retries=0) as client:
        with client.chat.completions.create(
            model="tiny", messages=[{"role": "user", "content": "Hi"}], max_tokens=5, temperature=0, stream=True,
            stream_options={"include_usage": True}, extra_body={"kv_transfer_params": {}},
        ) as events:  # fmt: skip
            read = list(events)
        assert read[0].choices[0].delta.role == "assistant"
        text = "".join(event.choices[0].delta.content or "" for event in read[:-1])
        assert text == service.chatted(max_tokens=5)["choices"][0]["message"]["content"]
        assert read[-1].usage is not None
        assert read[-1].usage.completion_tokens == 5


@pytest.mark.usefixtures("slow_steps")
@pytest.mark.parametrize("route", ["/v1/completions", "/v1/chat/completions"])
def test_silence_is_filled_with_comments_that_clients_skip(service: Service, route: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream, "HEARTBEAT_SECONDS", 0.002)
    prompt: dict[str, Any] = {"messages": HI} if "chat" in route else {"prompt": "Hi"}
    response = service.client.post(route, json=prompt | BODY | {"stream": True})
    events = [event for event in response.text.split("\n\n") if event]
    assert events.count(": keep-alive") > 10
    assert [event for event in events if not event.startswith(("data: ", ": keep-alive"))] == []
    assert events[-1] == "data: [DONE]"
    with OpenAI(base_url=f"{service.url}/v1", api_key="EMPTY", max_retries=0) as client:
        text = "".join(
            event.choices[0].text for event in client.completions.create(model="tiny", prompt="Hi", stream=True, extra_body=BODY)
        )
        assert text == service.completed(prompt="Hi", **BODY)["choices"][0]["text"]


def test_a_reader_that_takes_its_time_gets_everything(service: Service) -> None:
    wanted = {"prompt": "Hi", "n": 32, "max_tokens": 200, "ignore_eos": True, "temperature": 1, "seed": 1, "logprobs": 20, "stream": True}
    whole = service.completed(**wanted | {"stream": False, "logprobs": None})
    with slow_reader(service, wanted) as connection:
        service.settled()  # the engine has not waited for the reader
        assert service.completed(prompt="other")["choices"][0]["finish_reason"] in ("length", "stop")
        received = read_all(connection)
    events = [json.loads(line[6:]) for line in received.split("\n") if line.startswith("data: {")]
    assert "data: [DONE]" in received
    for choice in whole["choices"]:
        parts = [event["choices"][0] for event in events if event["choices"][0]["index"] == choice["index"]]
        assert "".join(part["text"] for part in parts) == choice["text"]


def slow_reader(service: Service, body: dict[str, Any]) -> socket.socket:
    """A connection with a small buffer that has sent a request and reads nothing."""
    host, port = service.url.removeprefix("http://").split(":")
    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    connection.connect((host, int(port)))
    content = json.dumps(body).encode()
    lines = [
        "POST /v1/completions HTTP/1.1",
        "Host: x",
        "Connection: close",
        "Content-Type: application/json",
        f"Content-Length: {len(content)}",
    ]
    connection.sendall("\r\n".join([*lines, "", ""]).encode() + content)
    events = service.runtime.services(for_new_work=True).events
    while not events.attached:
        time.sleep(0.01)
    return connection


def read_all(connection: socket.socket) -> str:
    """The body of an answer in chunks, joined."""
    raw = b""
    while data := connection.recv(65536):
        raw += data
    body, pieces = raw.partition(b"\r\n\r\n")[2], []
    while body:
        size, _, body = body.partition(b"\r\n")
        pieces.append(body[: int(size, 16)])
        body = body[int(size, 16) + 2 :]
    return b"".join(pieces).decode()
