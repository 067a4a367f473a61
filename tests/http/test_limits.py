"""How much clients may send, how slowly, and how many at one time; and JSON that has only one meaning."""

from __future__ import annotations

import contextlib
import json
import resource
import select
import socket
import threading
import time
from contextlib import closing, contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

import httpx
import pytest
from uvicorn.protocols.http.auto import AutoHTTPProtocol
from uvicorn.protocols.http.h11_impl import H11Protocol

from engine.core import EngineCore
from service.http.limits import DEFAULT_LIMITS, MAX_BODY_BYTES
from service.http.server import limits_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.http.conftest import Service, Services

PROTOCOLS = [AutoHTTPProtocol] if AutoHTTPProtocol is H11Protocol else [AutoHTTPProtocol, H11Protocol]
QUICK = replace(DEFAULT_LIMITS, head_seconds=0.4, body_pause_seconds=0.4, body_grace_seconds=0.8, write_seconds=0.5)
POST = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
JSON = {"Content-Type": "application/json"}


@contextmanager
def connection(service: Service, receive_buffer: int | None = None) -> Iterator[socket.socket]:
    host, port = service.url.removeprefix("http://").split(":")
    with closing(socket.socket()) as made:
        if receive_buffer is not None:
            made.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
        made.connect((host, int(port)))
        yield made


def until_closed(made: socket.socket) -> bytes:
    """All that comes until the server closes."""
    answer = b""
    try:
        while data := made.recv(65536):
            answer += data
    except ConnectionResetError:
        pass
    return answer


def drip(made: socket.socket, piece: bytes) -> bytes:
    """Sends little by little until there is an answer, and returns that."""
    while not select.select([made], [], [], 0.05)[0]:
        with contextlib.suppress(OSError):  # cut just now
            made.sendall(piece)
    return until_closed(made)


def ask_version(made: socket.socket) -> bytes:
    """One request on a connection that stays open, and its whole answer."""
    made.sendall(b"GET /version HTTP/1.1\r\nHost: x\r\n\r\n")
    answer = b""
    while not answer.endswith(b"}"):
        data = made.recv(65536)
        if not data:
            break
        answer += data
    return answer


def status_of(answer: bytes) -> tuple[int, str]:
    """Status and code; asserts that the body is OpenAI's error body."""
    head, _, body = answer.partition(b"\r\n\r\n")
    error = json.loads(body)["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return int(head.split()[1]), error["code"]


@pytest.fixture(params=PROTOCOLS, ids=lambda protocol: protocol.__name__)
def quick(services: Services, request: pytest.FixtureRequest) -> Iterator[Service]:
    """A service without patience, on each of uvicorn's protocols."""
    with services.run(limits=QUICK, protocol=request.param) as service:
        yield service


def test_a_connection_that_says_nothing_is_closed(quick: Service) -> None:
    with connection(quick) as made:
        assert status_of(until_closed(made)) == (408, "too_slow")


def test_headers_that_drip_are_cut_however_steadily(quick: Service) -> None:
    with connection(quick) as made:
        made.sendall(b"GET /saves HTTP/1.1\r\nHost: x\r\n")
        assert status_of(drip(made, b"x")) == (408, "too_slow")


def test_the_second_request_of_a_connection_has_the_same_bound(quick: Service) -> None:
    with connection(quick) as made:
        assert ask_version(made).startswith(b"HTTP/1.1 200")
        time.sleep(2 * QUICK.head_seconds)  # an idle connection is no slow one
        assert ask_version(made).startswith(b"HTTP/1.1 200")
        made.sendall(b"GET /ver")
        assert status_of(until_closed(made)) == (408, "too_slow")


@pytest.mark.parametrize(
    "framing", [b"Content-Length: 1000\r\n\r\n{", b"Transfer-Encoding: chunked\r\n\r\n1\r\n{\r\n"], ids=["sized", "chunked"]
)
def test_a_body_that_pauses_is_cut(quick: Service, framing: bytes) -> None:
    with connection(quick) as made:
        made.sendall(POST + framing)
        assert status_of(until_closed(made)) == (408, "too_slow")


def test_a_body_that_drips_is_cut_however_steadily(quick: Service) -> None:
    with connection(quick) as made:
        made.sendall(POST + b"Content-Length: 100000\r\n\r\n")
        assert status_of(drip(made, b" ")) == (408, "too_slow")


def test_a_request_may_take_longer_than_its_body(quick: Service, slow_steps: None) -> None:
    started = time.monotonic()
    answer = quick.completed(max_tokens=100, ignore_eos=True)
    assert answer["usage"]["completion_tokens"] == 100
    assert time.monotonic() - started > 2 * QUICK.body_grace_seconds


def test_the_rest_of_a_refused_body_may_come_but_not_for_ever(quick: Service) -> None:
    with connection(quick) as made:
        made.sendall(POST.replace(b"/v1/completions", b"/nowhere") + b"Transfer-Encoding: chunked\r\n\r\n")
        answer = made.recv(65536)
        assert answer.startswith(b"HTTP/1.1 404")
        try:
            while True:
                made.sendall(b"5\r\nhello\r\n")
                time.sleep(0.05)
        except OSError:
            pass  # cut


def test_a_client_that_stops_reading_its_stream_is_cut_and_its_request_ends(quick: Service) -> None:
    content = json.dumps({"prompt": [[5] * 100] * 60, "max_tokens": 150, "ignore_eos": True, "logprobs": 20, "stream": True}).encode()
    engine = quick.runtime.services(for_new_work=True)
    with connection(quick, receive_buffer=4096) as made:
        made.sendall(POST + b"Content-Length: %d\r\n\r\n%s" % (len(content), content))
        made.recv(10)
        while 'outcome="aborted"} 1.0' not in quick.client.get("/metrics").text:
            time.sleep(0.05)
    quick.settled()
    assert engine.events.attached == 0
    quick.completed()


def test_a_client_that_reads_slowly_but_steadily_is_not_cut(services: Services) -> None:
    with services.run(limits=QUICK) as service:
        body = {"prompt": [[5] * 100] * 20, "max_tokens": 100, "ignore_eos": True, "logprobs": 20, "stream": True}
        content = json.dumps(body).encode()
        with connection(service, receive_buffer=4096) as made:
            made.sendall(POST + b"Connection: close\r\nContent-Length: %d\r\n\r\n%s" % (len(content), content))
            received, finished = 0, False
            while data := made.recv(64 * 1024):
                received, finished = received + len(data), finished or b"[DONE]" in data
                time.sleep(0.01)
        assert finished
        assert received > 10**6


def test_headers_above_the_bound_are_431(quick: Service) -> None:
    with httpx.Client(base_url=quick.url, timeout=None, trust_env=False) as client:
        many = client.get("/saves", headers=[(f"x-{number}", "y") for number in range(DEFAULT_LIMITS.head_count)])
        assert (many.status_code, many.json()["error"]["code"]) == (431, "headers_too_large")
        assert client.get("/saves", headers=[(f"x-{number}", "y") for number in range(60)]).status_code == 200


@pytest.mark.parametrize("end", [b"", b"\r\n\r\n"], ids=["endless", "complete"])
def test_headers_that_are_too_large_are_refused_before_they_are_held(quick: Service, end: bytes) -> None:
    with connection(quick) as made:
        try:
            made.sendall(b"GET /saves HTTP/1.1\r\nHost: x\r\nX-Long: ")
            for _ in range(16 if end else 10**6):
                made.sendall(b"a" * 65536)
            made.sendall(end)
        except OSError:
            pass  # cut while it was still sending
        answer = until_closed(made)
    # What was sent after the refusal may take its answer away.
    assert answer == b"" or status_of(answer) in ((431, "headers_too_large"), (400, "invalid_http"))


@pytest.mark.parametrize(
    "garbage", [b"\x16\x03\x01\x02\x00\x01\x00", b"GET\r\n\r\n", b"GET / HTTP/1.1\r\nBad Header\r\n\r\n", b"\r\n" * 3 + b"?"]
)
def test_what_is_no_http_is_400_with_a_body(quick: Service, garbage: bytes) -> None:
    with connection(quick) as made:
        made.sendall(garbage + b"\r\n\r\n")
        assert status_of(until_closed(made)) == (400, "invalid_http")
    assert quick.client.get("/health").status_code == 200


def test_connections_above_the_bound_are_429_and_room_comes_back(services: Services) -> None:
    with services.run(limits=replace(DEFAULT_LIMITS, connections=3)) as service:  # one is the fixture's client
        with connection(service) as one, connection(service) as two:
            for made in (one, two):
                assert ask_version(made).startswith(b"HTTP/1.1 200")
            with connection(service) as three:
                answer = until_closed(three)
            assert status_of(answer) == (429, "too_many_connections")
            assert b"\r\nretry-after: 1\r\n" in answer.lower()
        while True:
            with connection(service) as made:
                if ask_version(made).startswith(b"HTTP/1.1 200"):
                    return


def test_requests_above_the_bound_are_429_but_health_is_answered(services: Services, slow_steps: None) -> None:
    with services.run(limits=replace(DEFAULT_LIMITS, requests=1)) as service:
        held = threading.Thread(target=lambda: service.completed(max_tokens=100, ignore_eos=True))
        held.start()
        while "strata_requests_running 1.0" not in service.client.get("/metrics").text:
            pass
        refused = service.client.get("/saves")
        assert (refused.status_code, refused.json()["error"]["code"]) == (429, "too_many_requests")
        assert int(refused.headers["retry-after"]) >= 1
        assert service.client.get("/health").status_code == 200
        held.join()
        assert service.client.get("/saves").status_code == 200


def test_exactly_as_many_wait_as_may(services: Services, slow_steps: None) -> None:
    with services.run(max_running=2, max_queued=3) as service:
        accepted = {"max_tokens": 100, "ignore_eos": True, "kv_transfer_params": {"wait": "accepted"}}
        for _ in range(2):
            assert service.complete(**accepted).status_code == 202
        while "strata_requests_running 2.0" not in service.client.get("/metrics").text:
            pass
        statuses = [service.complete(**accepted).status_code for _ in range(5)]
        assert statuses == [202, 202, 202, 429, 429]
        refused = service.complete(**accepted)
        assert refused.json()["error"]["code"] == "queue_full"
        assert refused.headers["retry-after"].isdigit()
        assert int(refused.headers["retry-after"]) >= 1


SCORED = {"prompt": [5] * 100, "echo": True, "logprobs": 5, "ignore_eos": True}
SCORED_BYTES = 99 * 4 * (3 + 2 * 5)
"""What the engine keeps for one choice of that."""


@pytest.fixture
def scoring(services: Services) -> Iterator[Service]:
    """Has room for the log-probabilities of just one such prompt."""
    with services.run(prompt_logprobs_memory=SCORED_BYTES) as service:
        yield service


@pytest.mark.parametrize("too_much", [{"logprobs": 6}, {"prompt": [5] * 101}, {"n": 2}, {"prompt": [[5] * 51, [6] * 51]}])
def test_echoed_logprobs_that_never_fit_their_memory_are_refused_by_name(scoring: Service, too_much: dict[str, object]) -> None:
    error = scoring.refused(400, **SCORED | too_much)
    assert error["param"] == "logprobs"
    assert f"at most {SCORED_BYTES} can be kept" in error["message"]


def test_echoed_logprobs_fit_up_to_their_memory_and_others_take_none_of_it(scoring: Service) -> None:
    assert len(scoring.completed(**SCORED)["choices"][0]["logprobs"]["top_logprobs"]) == 104
    assert len(scoring.completed(**SCORED | {"logprobs": 20, "echo": False, "n": 3})["choices"]) == 3


def test_echoed_logprobs_that_do_not_fit_beside_others_are_told_to_come_again(services: Services, monkeypatch: pytest.MonkeyPatch) -> None:
    step, may_run = EngineCore.step, threading.Event()

    def held_step(core: EngineCore) -> bool:
        may_run.wait()
        return step(core)

    monkeypatch.setattr(EngineCore, "step", held_step)
    with services.run(prompt_logprobs_memory=SCORED_BYTES) as service:
        try:
            assert service.complete(**SCORED, kv_transfer_params={"wait": "accepted"}).status_code == 202
            refused = service.complete(**SCORED)
        finally:
            may_run.set()
        assert (refused.status_code, refused.json()["error"]["code"]) == (429, "queue_full")
        assert int(refused.headers["retry-after"]) >= 1
        service.settled()
        service.completed(**SCORED)


def test_a_list_of_more_prompts_than_can_wait_is_refused_before_any_is_tokenized(
    services: Services, monkeypatch: pytest.MonkeyPatch
) -> None:
    with services.run(max_queued=4) as service:

        def never(*_: object) -> None:
            raise AssertionError("tokenized")

        monkeypatch.setattr("service.text.tokenizer.Tokenizer.encode", never)
        error = service.refused(400, prompt=["a"] * 5)
        assert "5 choices, at most 4" in error["message"]
        assert "6 choices, at most 4" in service.refused(400, prompt=["a", "b"], n=3)["message"]


def test_a_body_without_a_length_is_counted_while_it_is_read(services: Services) -> None:
    with services.run(limits=replace(DEFAULT_LIMITS, body_bytes=1000)) as service:

        def pieces(count: int) -> Iterator[bytes]:
            yield b'{"prompt": "'
            for _ in range(count):
                yield b"a" * 100
            yield b'", "max_tokens": 1}'

        too_large = service.client.post("/v1/completions", content=pieces(11), headers=JSON)
        assert (too_large.status_code, too_large.json()["error"]["code"]) == (413, "body_too_large")
        assert service.client.post("/v1/completions", content=pieces(2), headers=JSON).status_code == 200


def test_bodies_of_all_requests_together_are_bounded_and_are_given_back(services: Services) -> None:
    with services.run(limits=replace(DEFAULT_LIMITS, all_bodies_bytes=100_000)) as service:
        content = json.dumps({"prompt": "a", "max_tokens": 1, "user": "u" * 60_000}).encode()
        first: httpx.Response | None = None
        while first is None:  # either of two may be the one that is refused
            with connection(service) as made:
                made.sendall(POST + b"Content-Length: %d\r\n\r\n%s" % (len(content), content[:-1]))
                time.sleep(0.05)
                response = service.client.post("/v1/completions", content=content, headers=JSON)
                if response.status_code == 429:
                    first = response
                    made.sendall(content[-1:])
                    assert made.recv(65536).startswith(b"HTTP/1.1 200")
        assert (first.json()["error"]["type"], first.json()["error"]["code"]) == ("rate_limit_error", "too_many_requests")
        assert int(first.headers["retry-after"]) >= 1
        for _ in range(5):
            assert service.client.post("/v1/completions", content=content, headers=JSON).status_code == 200


NOT_JSON = {
    "NaN": b'{"prompt": "a", "x": NaN}',
    "Infinity": b'{"prompt": "a", "temperature": -Infinity}',
    "a name twice": b'{"prompt": "a", "max_tokens": 1, "max_tokens": 2}',
    "a name twice in an ignored field": b'{"prompt": "a", "x": [{"y": 1, "y": 1}]}',
    "not UTF-8": b'{"prompt": "\xff"}',
    "a surrogate in UTF-8": b'{"prompt": "\xed\xa0\x80"}',
    "UTF-16": '{"prompt": "a"}'.encode("utf-16"),
    "a byte order mark": b'\xef\xbb\xbf{"prompt": "a"}',
    "too many digits": b'{"prompt": "a", "x": ' + b"9" * 5000 + b"}",
    "deep": b'{"prompt": "a", "x": ' + b"[" * 64 + b"]" * 64 + b"}",
    "very deep": b'{"prompt": "a", "x": ' + b'{"a":' * 20_000,
    "very deep and large": b'{"prompt": "a", "x": ' + b'{"a":' * 60_000,
    "beyond all floats": b'{"prompt": "a", "max_tokens": 1, "x": [1e999]}',
    "beyond all floats, in a large body": b'{"prompt": "a", "max_tokens": 1, "x": [-1e999], "user": "' + b"u" * 2**18 + b'"}',
    "half a pair in an ignored field": b'{"prompt": "a", "max_tokens": 1, "x": ["\\ud800"]}',
    "half a pair in an ignored name": b'{"prompt": "a", "max_tokens": 1, "\\udfff": 1}',
}


@pytest.mark.parametrize("content", NOT_JSON.values(), ids=NOT_JSON)
def test_json_that_readers_may_take_differently_is_400(service: Service, content: bytes) -> None:
    response = service.client.post("/v1/completions", content=content, headers=JSON)
    assert response.status_code == 400, response.text
    assert response.json()["error"]["code"] == "invalid_json"


def test_whole_pairs_and_moderate_depth_are_json(service: Service) -> None:
    content = b'{"prompt": "a", "max_tokens": 1, "x": ' + b"[" * 63 + b'"\\ud83d\\ude00"' + b"]" * 63 + b"}"
    assert service.client.post("/v1/completions", content=content, headers=JSON).status_code == 200


HALF = "\ud800"
STRINGS = [{"model": HALF}, {"prompt": HALF}, {"prompt": ["a", HALF]}, {"stop": HALF}, {"stop": ["a", HALF]}, {"user": HALF}]
STRINGS += [{"request_id": HALF}, {"cache_salt": HALF}, {"truncation_side": HALF}, {"logit_bias": {HALF: 1}}]
STRINGS += [{"stream": True, "stream_options": {HALF: True}}, {"kv_transfer_params": {HALF: 1}}]
STRINGS += [
    {"kv_transfer_params": {name: value}}
    for name, value in {
        "hidden_states_path": HALF,
        "metadata": {"a": HALF},
        "tensors": {HALF: [1]},
        "idempotency_key": HALF,
        "layers": [HALF],
        "positions": HALF,
        "pooling": HALF,
        "dtype": HALF,
        "wait": HALF,
        "on_conflict": HALF,
    }.items()
]
STRINGS += [{"kv_transfer_params": {"metadata": {HALF: "a"}}}, {"response_format": {"type": HALF}}, {"tools": [HALF]}]


@pytest.mark.parametrize("fields", STRINGS, ids=ascii)
def test_half_a_surrogate_pair_is_400_wherever_it_stands(service: Service, fields: dict[str, object]) -> None:
    service.refused(400, **fields)


NUMBERS = ["max_tokens", "temperature", "top_p", "top_k", "min_p", "n", "seed", "logprobs", "presence_penalty", "frequency_penalty"]
NUMBERS += ["repetition_penalty", "truncate_prompt_tokens", "priority"]


@pytest.mark.parametrize("value", [10**30, -(10**30), 10**400, 1e308 * 10, float("nan")], ids=["1e30", "-1e30", "1e400", "inf", "nan"])
def test_numbers_beyond_all_bounds_are_400(service: Service, value: float) -> None:
    for name in NUMBERS:
        service.refused(400, **{name: value})
    for fields in ({"prompt": [value]}, {"stop_token_ids": [value]}, {"logit_bias": {"1": value}}):
        service.refused(400, **fields)
    for params in ({"layers": [value]}, {"positions": [[value, None]]}, {"positions": [[0, value]]}, {"tensors": {"a": [value]}}):
        service.refused(400, kv_transfer_params=params)


def test_connections_leave_descriptors_for_saves_and_requests_are_as_many_as_the_engine_takes(services: Services) -> None:
    limits = limits_of(services.settings())
    assert 0 < limits.connections <= resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 2
    assert limits.body_bytes == MAX_BODY_BYTES
    assert limits_of(services.settings(max_queued=10_000)).requests > 10_000
