"""What the image is made of, and what it promises to those who run it."""

from __future__ import annotations

import json
import subprocess
from typing import Any

import pytest

from tests.container.docker import ROOT, Docker


@pytest.fixture(scope="module")
def configuration(docker: Docker, image: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(docker("image", "inspect", "--format", "{{json .Config}}", image))
    return found


def test_it_runs_as_a_user_without_rights_behind_an_init(configuration: dict[str, Any]) -> None:
    assert configuration["User"] == "10001:10001"
    assert configuration["Entrypoint"] == ["tini", "--", "strata"]
    assert configuration["Cmd"] == ["serve"]


def test_it_says_how_to_stop_it_and_how_to_ask_whether_it_is_ready(configuration: dict[str, Any]) -> None:
    assert configuration["StopSignal"] == "SIGTERM"
    assert configuration["Healthcheck"]["Test"] == ["CMD", "python", "-m", "service.cli.healthcheck"]


def test_its_labels_say_what_it_is_and_of_what_it_was_made(configuration: dict[str, Any], base_image: str) -> None:
    labels = {name.removeprefix("org.opencontainers.image."): value for name, value in configuration["Labels"].items()}
    assert labels["title"] == "Strata"
    assert labels["licenses"] == "Apache-2.0"
    assert (labels["version"], labels["revision"]) == ("0.0.0-test", "abcdef")
    assert labels["base.name"] == base_image


def test_it_holds_no_compiler_and_nothing_that_only_builds_and_tests_need(docker: Docker, image: str) -> None:
    script = """
        for name in cc gcc g++ c++ clang tcc as ld make; do command -v $name; done
        find / -xdev \\( -path '*/site-packages/tests' -o -path '*/torch/include' -o -name '.cache' \\) -print 2>/dev/null
        ls /var/lib/apt/lists
    """
    found = docker("run", "--rm", "--network", "none", "--user", "0:0", "--entrypoint", "sh", image, "-c", script)
    assert found == ""


def test_its_torch_is_the_build_without_cuda(docker: Docker, image: str) -> None:
    script = "import torch; print(torch.__version__, torch.version.cuda)"
    version, cuda = docker("run", "--rm", "--entrypoint", "python", image, "-c", script).split()
    pinned = [
        line.removeprefix("torch==") for line in (ROOT / "constraints-cpu.txt").read_text().splitlines() if line.startswith("torch==")
    ]
    assert [version.partition("+")[0]] == pinned
    assert cuda == "None"


def test_its_compiled_kernels_are_those_of_its_sources(docker: Docker, image: str) -> None:
    script = (
        "import torch; from engine.native import compiler, kernels; "
        "kernels.load_kernels(torch.float32, 1); print(compiler.find_library().parent)"
    )
    found = docker("run", "--rm", "--read-only", "--user", "4321:8765", "--entrypoint", "python", image, "-c", script)
    assert found.endswith("/site-packages/engine/native/prebuilt")


def test_every_command_can_be_run_in_it(docker: Docker, image: str) -> None:
    assert docker("run", "--rm", image, "version").startswith("strata ")


def test_its_size_is_told_layer_by_layer(docker: Docker, image: str, capsys: pytest.CaptureFixture[str]) -> None:
    told = subprocess.run([ROOT / "scripts" / "image-size", image], capture_output=True, text=True, check=True).stdout
    with capsys.disabled():
        print(f"\n{told}")
    sizes = {what.strip(): float(size) for size, _, what in (line.partition(" MB  ") for line in told.splitlines() if " MB  " in line)}
    size = int(docker("image", "inspect", "--format", "{{.Size}}", image)) / 1e6
    assert sizes["in all"] == pytest.approx(size, rel=0.01)
    assert {"the base image", "Strata", "the default model", "torch and the other dependencies, in a virtual environment"} <= sizes.keys()
