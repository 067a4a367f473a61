"""Docker as an operator uses it: builds, containers of the image under test, and the files that they leave behind."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import time
import uuid
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import httpx

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

ROOT = Path(__file__).parents[2]
USER, GROUP = 4321, 8765
"""Of no list of users, neither here nor in the image."""
HARDENED = ("--read-only", "--cap-drop", "ALL", "--security-opt", "no-new-privileges", "--user", f"{USER}:{GROUP}")
SMALL = {"STRATA_KV_CACHE_TOKENS": "16384", "STRATA_STATE_CACHE_MEMORY": "256MiB", "OMP_WAIT_POLICY": "PASSIVE"}
"""Settings of services that are tested."""
PATIENCE_SECONDS = 600.0
"""For what has to happen at some time; a machine may be busy."""


def wait_until(condition: Callable[[], bool], what: str, seconds: float = PATIENCE_SECONDS) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, f"{what} did not happen"
        time.sleep(0.1)


def client_program() -> str | None:
    """Debian's client first: it speaks BuildKit by itself, others in the path may lack the plugin for that."""
    return shutil.which("docker", path=f"/usr/bin{os.pathsep}{os.environ.get('PATH', '')}")


class Docker:
    """The client. Calls return what was printed on standard output and raise with the rest where a command fails."""

    def __init__(self, program: str) -> None:
        self._program = program
        self._environment = {**os.environ, "DOCKER_BUILDKIT": "1", "BUILDKIT_PROGRESS": "plain"}

    def __call__(self, *arguments: str) -> str:
        return self._run(self._program, *arguments)

    def build(self, tag: str, context: Path, file: Path, **build_arguments: str) -> None:
        """Builds the image and removes the one that had the tag before, but for the layers that they share."""
        before = self.image_id(tag)
        options = [part for name, value in build_arguments.items() for part in ("--build-arg", f"{name}={value}")]
        command = [self._program, "build", "--network", "host", "--tag", tag, "--file", str(file), *options, str(context)]
        subprocess.run(command, check=True, env=self._environment)
        if before is not None and before != self.image_id(tag):
            subprocess.run([self._program, "image", "rm", before], check=False, capture_output=True)

    def image_id(self, image: str) -> str | None:
        found = subprocess.run(
            [self._program, "image", "inspect", "--format", "{{.Id}}", image], capture_output=True, text=True, check=False
        )
        return found.stdout.strip() if found.returncode == 0 else None

    def compose(self, project: str, environment: Mapping[str, str], *arguments: str) -> str:
        """The command of our compose file, with the settings of `.env.example` where `environment` has no others."""
        files = ["--project-name", project, "--file", str(ROOT / "deploy" / "compose.yaml")]
        files += ["--env-file", str(ROOT / "deploy" / ".env.example")]
        return self._run(*self._compose_program(), *files, *arguments, environment=environment)

    def _compose_program(self) -> list[str]:
        plugin = subprocess.run([self._program, "compose", "version"], capture_output=True, check=False)
        return [self._program, "compose"] if plugin.returncode == 0 else ["docker-compose"]

    def _run(self, *command: str, environment: Mapping[str, str] | None = None) -> str:
        done = subprocess.run(command, capture_output=True, text=True, check=False, env={**self._environment, **(environment or {})})
        assert done.returncode == 0, f"{' '.join(command)}\n{done.stdout}\n{done.stderr}"
        return done.stdout.strip()


@dataclass
class Container:
    """A container in which a service runs."""

    docker: Docker
    name: str
    saves: Path
    """The folder of this machine that is its save root."""
    save_root: str
    """The same folder as it sees it."""
    client: httpx.Client = field(default_factory=lambda: httpx.Client(timeout=PATIENCE_SECONDS))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.client.close()

    @property
    def url(self) -> str:
        """Another one after every start."""
        return f"http://{self.docker('port', self.name, '8000/tcp').splitlines()[0]}"

    def inspect(self, template: str) -> Any:  # noqa: ANN401 - whatever JSON stands there
        return json.loads(self.docker("inspect", "--format", f"{{{{json {template}}}}}", self.name))

    def execute(self, script: str) -> str:
        return self.docker("exec", self.name, "sh", "-c", script)

    def logs(self) -> str:
        done = subprocess.run([client_program() or "docker", "logs", self.name], capture_output=True, text=True, check=False)
        return done.stdout + done.stderr

    def wait_until_ready(self) -> None:
        def ready() -> bool:
            try:
                return self.client.get(f"{self.url}/health").status_code == 200
            except (httpx.TransportError, AssertionError):  # not yet, or not any more
                assert self.inspect(".State.Running"), f"the service has ended:\n{self.logs()}"
                return False

        wait_until(ready, f"a start of {self.name}")

    def complete(self, **body: Any) -> dict[str, Any]:  # noqa: ANN401 - any field
        answer = self.client.post(f"{self.url}/v1/completions", json=body)
        assert answer.is_success, answer.text
        result: dict[str, Any] = answer.json()
        return result

    def record(self, save_id: str) -> dict[str, Any]:
        answer = self.client.get(f"{self.url}/saves/{save_id}")
        assert answer.is_success, answer.text
        result: dict[str, Any] = answer.json()
        return result

    def start_save(self, num_tokens: int) -> str:
        """Asks for a save of many tokens and returns its id once it is being computed and its file is being written."""
        save = {"include_output_tokens": True, "wait": "accepted"}
        body = self.complete(prompt="Once upon a time", max_tokens=num_tokens, ignore_eos=True, kv_transfer_params=save)
        save_id: str = body["kv_transfer_params"]["save_id"]

        def under_way() -> bool:
            record = self.record(save_id)
            assert record["status"] in ("queued", "running"), record
            return record["status"] == "running" and self.unfinished() != []

        wait_until(under_way, "the beginning of a save")
        return save_id

    def unfinished(self) -> list[Path]:
        return [path for path in self.saves.rglob("*") if path.suffix == ".part"]

    def finished(self) -> list[Path]:
        return sorted(self.saves.rglob("*.safetensors"))

    def here(self, path: str) -> Path:
        """Where a file of an answer lies on this machine."""
        return self.saves / Path(path).relative_to(self.save_root)


@contextmanager
def running(docker: Docker, image: str, saves: Path, *options: str, settings: Mapping[str, str] | None = None) -> Iterator[Container]:
    """A service as the image runs it without more, but for a save root that is a folder of this machine."""
    saves.mkdir()
    os.chown(saves, USER, GROUP)
    name = f"strata-test-{uuid.uuid4().hex[:8]}"
    variables = [part for item in {**SMALL, **(settings or {})}.items() for part in ("--env", "=".join(item))]
    publish = ("--publish", "127.0.0.1::8000", "--volume", f"{saves}:/saves")
    docker("run", "--detach", "--name", name, *HARDENED, *publish, *variables, *options, image)
    container = Container(docker, name, saves, "/saves")
    try:
        with container:
            container.wait_until_ready()
            yield container
    finally:
        docker("rm", "--force", "--volumes", name)
