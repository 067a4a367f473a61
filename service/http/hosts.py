"""The names that a service answers to.

A web page can point a name of its own to 127.0.0.1 (DNS rebinding); a browser then lets it read what a service on that address answers.
It can't change the Host header, which still has the page's name. So a service that listens on this machine only answers to the names of
this machine and to those of `--allowed-host`. One that others can reach answers to any name unless `--allowed-host` says which: it can't
know under what names a proxy, a cluster or a network knows it.
"""

import ipaddress
from collections.abc import Sequence
from urllib.parse import urlsplit

from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from service.errors import UnknownHost
from service.http.errors import error_response

LOCAL_NAMES = ("localhost", "*.localhost", "127.0.0.1", "[::1]")


def is_local(address: str) -> bool:
    """Whether only this machine reaches a service that listens there. False for a name that has to be looked up, but for `localhost`."""
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:
        return address == "localhost"


class HostCheck:
    """Answers 421 to requests whose Host header is none of the service's names.

    Where others can reach the service and `allowed` says which names it has, addresses count as known: probes and scrapers ask by them, and
    it takes a name to rebind.
    """

    def __init__(self, app: ASGIApp, bound: str, allowed: Sequence[str]) -> None:
        """`bound`: the address that the service listens on."""
        self._app = app
        self._by_address = not is_local(bound)
        any_name = self._by_address and not allowed
        names = ["*"] if any_name else [*LOCAL_NAMES, f"[{bound}]" if ":" in bound else bound, *allowed]
        self._check = TrustedHostMiddleware(_accept, names, www_redirect=False)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        known = scope["type"] != "http" or await self._is_known(scope, receive)
        await (self._app if known else error_response(UnknownHost()))(scope, receive, send)

    async def _is_known(self, scope: Scope, receive: Receive) -> bool:
        """As starlette's middleware sees it, whose own answer to strangers isn't the error body of this service."""
        said: list[Message] = []

        async def listen(message: Message) -> None:
            said.append(message)

        await self._check(scope, receive, listen)
        return _ACCEPTED in said or (self._by_address and _is_address(scope))


_ACCEPTED: Message = {"type": "accepted"}


async def _accept(_scope: Scope, _receive: Receive, send: Send) -> None:
    """The application behind the check, which the check's answers to strangers come in the place of."""
    await send(_ACCEPTED)


def _is_address(scope: Scope) -> bool:
    hosts = [value for name, value in scope["headers"] if name == b"host"]
    try:
        ipaddress.ip_address(urlsplit(f"//{hosts[0].decode()}").hostname or "")
    except (IndexError, ValueError):
        return False
    return len(hosts) == 1
