"""The service as a process of its own, which runs a patch before it starts."""

from __future__ import annotations

import subprocess
import sys
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import httpx

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.http.conftest import Services

RUN = "import sys\nfrom service.cli.main import main\nsys.exit(main(sys.argv[1:]))\n"


@dataclass
class Child:
    """A running child; `body` is what its completions have in common."""

    process: subprocess.Popen[str]
    client: httpx.Client
    body: dict[str, Any]

    def post(self, **body: Any) -> httpx.Response:  # noqa: ANN401 - any JSON value
        return self.client.post("/v1/completions", json=self.body | body)

    def until_running(self) -> None:
        """Waits until a request is being computed."""
        while "strata_requests_running 1.0" not in self.client.get("/metrics").text:
            assert self.process.poll() is None


@contextmanager
def child(services: Services, body: dict[str, Any], patch: str, *flags: str) -> Iterator[Child]:
    command = [sys.executable, "-c", patch + RUN, "serve", *services.flags(), *flags]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        try:
            assert process.stdout is not None
            line = process.stdout.readline()
            assert line.startswith("Strata is ready at http://127.0.0.1:")
            with httpx.Client(base_url=line.split()[-1], timeout=None, trust_env=False) as client:
                yield Child(process, client, body)
        finally:
            process.kill()
