"""Whom a service answers by name: a page that points its own name to this machine gets nothing."""

import asyncio
import json
from typing import Any

import pytest
from starlette.types import Message, Receive, Scope, Send

from service.http.hosts import HostCheck, is_local


def answer(bound: str, allowed: tuple[str, ...], *hosts: str, kind: str = "http") -> tuple[int, Any]:
    """Status and body of a request with these Host headers; 200 where the application behind was reached."""
    sent: list[Message] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b'"reached"'})

    async def receive() -> Message:
        raise AssertionError("nothing of the body is needed")

    async def send(message: Message) -> None:
        sent.append(message)

    headers = [(b"host", host.encode()) for host in hosts]
    scope: Scope = {"type": kind, "method": "GET", "path": "/", "query_string": b"", "scheme": "http", "headers": headers}
    asyncio.run(HostCheck(app, bound, allowed)(scope, receive, send))
    start, body = sent
    return start["status"], json.loads(body["body"])


LOCAL = ["localhost", "localhost:8000", "LocalHost:1", "a.localhost", "127.0.0.1", "127.0.0.1:8000", "[::1]", "[::1]:8000"]
STRANGERS = [
    "evil.example",
    "evil.example:8000",
    "localhost.evil.example",
    "evil-localhost",
    "127.0.0.1.evil.example",
    "x",
    "",
    "a b",
    "[::1",
]
ADDRESSES = ["10.1.2.3", "10.1.2.3:8000", "[fd00::1]:8000", "[fd00::1]"]


@pytest.mark.parametrize("bound", ["127.0.0.1", "::1", "localhost", "127.0.0.5"])
class TestOnALoopbackAddress:
    @pytest.mark.parametrize("host", LOCAL)
    def test_names_of_this_machine_are_answered(self, bound: str, host: str) -> None:
        assert answer(bound, (), host) == (200, "reached")

    @pytest.mark.parametrize("host", [*STRANGERS, *ADDRESSES])
    def test_any_other_name_is_refused_with_an_error_body(self, bound: str, host: str) -> None:
        status, body = answer(bound, (), host)
        assert status == 421
        assert body["error"]["code"] == "unknown_host"
        assert body["error"]["type"] == "invalid_request_error"
        assert "--allowed-host" in body["error"]["message"]

    def test_the_bound_address_is_answered(self, bound: str) -> None:
        host = f"[{bound}]" if ":" in bound else bound
        assert answer(bound, (), f"{host}:8000") == (200, "reached")

    def test_no_name_at_all_is_refused(self, bound: str) -> None:
        assert answer(bound, ())[0] == 421

    def test_names_that_are_allowed_are_answered_beside_those_of_this_machine(self, bound: str) -> None:
        allowed = ("strata.example", "*.sub.example", "[fd00::1]")
        for host in ("strata.example", "strata.example:443", "a.sub.example", "[fd00::1]:8000", *LOCAL):
            assert answer(bound, allowed, host) == (200, "reached")
        for host in ("other.example", "a.strata.example", "sub.example", "10.1.2.3"):
            assert answer(bound, allowed, host)[0] == 421

    def test_all_names_can_be_allowed(self, bound: str) -> None:
        assert answer(bound, ("*",), "evil.example") == (200, "reached")


@pytest.mark.parametrize("bound", ["0.0.0.0", "::", "10.0.0.7", "strata.internal"])
class TestWhereOthersCanReachIt:
    @pytest.mark.parametrize("host", ["evil.example", "10.1.2.3", "localhost", "x"])
    def test_any_name_is_answered_unless_some_are_allowed(self, bound: str, host: str) -> None:
        assert answer(bound, (), host) == (200, "reached")

    @pytest.mark.parametrize("host", ["strata.example", "strata.example:8000", *LOCAL, *ADDRESSES])
    def test_allowed_names_this_machines_and_addresses_are_answered(self, bound: str, host: str) -> None:
        assert answer(bound, ("strata.example",), host) == (200, "reached")

    @pytest.mark.parametrize("host", STRANGERS)
    def test_other_names_are_refused_once_some_are_allowed(self, bound: str, host: str) -> None:
        assert answer(bound, ("strata.example",), host)[0] == 421

    def test_an_address_beside_another_name_is_refused(self, bound: str) -> None:
        assert answer(bound, ("strata.example",), "evil.example", "10.1.2.3")[0] == 421
        assert answer(bound, ("strata.example",), "10.1.2.3", "evil.example")[0] == 421

    def test_the_bound_address_is_answered_also_as_a_name(self, bound: str) -> None:
        host = f"[{bound}]" if ":" in bound else bound
        assert answer(bound, ("strata.example",), host) == (200, "reached")


def test_what_is_no_request_is_passed_on() -> None:
    assert answer("127.0.0.1", (), kind="lifespan") == (200, "reached")


@pytest.mark.parametrize(
    ("address", "local"),
    [
        *((address, True) for address in ("127.0.0.1", "127.9.9.9", "::1", "localhost")),
        *((address, False) for address in ("0.0.0.0", "::", "10.0.0.1", "", "strata.internal")),
    ],
)
def test_which_addresses_only_this_machine_reaches(address: str, local: bool) -> None:
    assert is_local(address) is local
