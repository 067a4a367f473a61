"""What a container engine asks of the service by command."""

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from service.cli import healthcheck


@pytest.mark.parametrize(
    ("environment", "url"),
    [
        ({}, "http://127.0.0.1:8000/health"),
        ({"STRATA_HOST": "0.0.0.0", "STRATA_PORT": "9000"}, "http://127.0.0.1:9000/health"),
        ({"STRATA_HOST": "::"}, "http://[::1]:8000/health"),
        ({"STRATA_HOST": "10.0.0.7", "STRATA_PORT": ""}, "http://10.0.0.7:8000/health"),
    ],
)
def test_the_service_is_asked_where_it_listens(environment: dict[str, str], url: str) -> None:
    assert healthcheck.health_url(environment) == url


class Service(ThreadingHTTPServer):
    """Answers `/health` with a status."""

    status = 200


class Answer(BaseHTTPRequestHandler):
    server: Service

    def do_GET(self) -> None:
        self.send_response(self.server.status if self.path == "/health" else 404)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - http.server's name
        pass


@pytest.fixture
def service(monkeypatch: pytest.MonkeyPatch) -> Iterator[Service]:
    with Service(("127.0.0.1", 0), Answer) as server:
        monkeypatch.setenv("STRATA_HOST", "0.0.0.0")
        monkeypatch.setenv("STRATA_PORT", str(server.server_port))
        monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")
        monkeypatch.delenv("no_proxy", raising=False)
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def test_a_service_that_is_ready_is_healthy_whatever_proxy_is_set(service: Service) -> None:
    assert healthcheck.main() == 0


def test_a_service_that_starts_or_drains_is_not(service: Service, capsys: pytest.CaptureFixture[str]) -> None:
    service.status = 503
    assert healthcheck.main() == 1
    assert "503" in capsys.readouterr().out


def test_a_service_that_is_not_there_is_not(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("STRATA_PORT", "1")
    assert healthcheck.main() == 1
    assert "refused" in capsys.readouterr().out
