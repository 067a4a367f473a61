"""A Docker daemon, the image under test and the services that are made of it.

`STRATA_TEST_BASE_IMAGE` names the base image, where it isn't to be the Dockerfile's own. Where it is set nothing may be missing: the
tests fail then instead of being skipped.
"""

from __future__ import annotations

import os
import re
import shutil
import socket
import subprocess
import tempfile
import uuid
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.container.docker import GROUP, ROOT, SMALL, USER, Container, Docker, client_program

if TYPE_CHECKING:
    from collections.abc import Iterator

HERE = Path(__file__).parent
UNAVAILABLE = 69
"""How `scripts/with-docker` ends where there can't be a daemon."""
IMAGE, PROMETHEUS_IMAGE = "strata-test", "strata-test-prometheus"


def unavailable(reason: str) -> None:
    if "STRATA_TEST_BASE_IMAGE" in os.environ:
        pytest.fail(reason, pytrace=False)
    pytest.skip(reason)


@pytest.fixture(scope="session")
def docker() -> Iterator[Docker]:
    """The client of a daemon that runs, or is started for the tests and ended after them."""
    holder = subprocess.Popen(
        [ROOT / "scripts" / "with-docker", "sh", "-c", "echo ready; exec cat"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert holder.stdin is not None
    assert holder.stdout is not None
    try:
        if holder.stdout.readline() != "ready\n":
            _, said = holder.communicate()
            if holder.returncode == UNAVAILABLE:
                unavailable(said.strip())
            pytest.fail(said, pytrace=False)
        program = client_program()
        assert program is not None
        yield Docker(program)
    finally:
        holder.communicate()  # the end of its input is the end of its command, and so of the daemon


@pytest.fixture(scope="session")
def base_image(docker: Docker) -> str:
    default = re.search(r"^ARG BASE_IMAGE=(\S+)$", (ROOT / "Dockerfile").read_text(), re.MULTILINE)
    assert default is not None
    name = os.environ.get("STRATA_TEST_BASE_IMAGE") or default[1]
    if docker.image_id(name) is None:
        try:
            docker("pull", "--quiet", name)
        except AssertionError as error:
            unavailable(f"the base image {name} is not here and can't be pulled; STRATA_TEST_BASE_IMAGE may name another\n{error}")
    return name


@pytest.fixture(scope="session")
def image(docker: Docker, base_image: str, pytestconfig: pytest.Config) -> str:
    """The image under test, with the default model inside. It takes minutes the first time, so the lines are shown."""
    capture = pytestconfig.pluginmanager.getplugin("capturemanager")
    with capture.global_and_fixture_disabled():
        docker.build(IMAGE, ROOT, ROOT / "Dockerfile", BASE_IMAGE=base_image, MODEL="embedded", VERSION="0.0.0-test", REVISION="abcdef")
    return IMAGE


@pytest.fixture(scope="session")
def prometheus_image(docker: Docker, base_image: str) -> str:
    docker.build(PROMETHEUS_IMAGE, HERE, HERE / "prometheus.Dockerfile", BASE_IMAGE=base_image)
    return PROMETHEUS_IMAGE


@pytest.fixture
def place() -> Iterator[Path]:
    """A folder that other users may enter, as pytest's own may not be."""
    with tempfile.TemporaryDirectory(prefix="strata-container-") as folder:
        Path(folder).chmod(0o755)
        yield Path(folder)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@pytest.fixture(scope="module")
def stack(docker: Docker, image: str, prometheus_image: str) -> Iterator[Container]:
    """Service and Prometheus as our compose file runs them. The save root doesn't exist before."""
    project = f"strata-test-{uuid.uuid4().hex[:8]}"
    place = Path(tempfile.mkdtemp(prefix="strata-compose-"))
    place.chmod(0o755)
    saves = place / "states" / "run-7"
    environment = SMALL | {
        "UID": str(USER),
        "GID": str(GROUP),
        "STRATA_SAVES": str(saves),
        "STRATA_IMAGE": image,
        "STRATA_PUBLISH": f"127.0.0.1:{free_port()}",
        "STRATA_LAYERS": "3,norm",
        "PROMETHEUS_IMAGE": prometheus_image,
        "PROMETHEUS_PUBLISH": f"127.0.0.1:{free_port()}",
    }
    try:
        docker.compose(project, environment, "up", "--detach", "--no-build", "strata", "prometheus")
        container = Container(docker, docker.compose(project, environment, "ps", "--quiet", "strata"), saves, str(saves))
        with container:
            container.wait_until_ready()
            yield container
    finally:
        try:
            docker.compose(project, environment, "down", "--volumes", "--timeout", "5")
        finally:
            shutil.rmtree(place)


@pytest.fixture
def prometheus_url(docker: Docker, stack: Container) -> str:
    project = stack.inspect('(index .Config.Labels "com.docker.compose.project")')
    filters = ["--filter", f"label=com.docker.compose.project={project}", "--filter", "label=com.docker.compose.service=prometheus"]
    name = docker("ps", "--quiet", *filters)
    return f"http://{docker('port', name, '9090/tcp').splitlines()[0]}"
