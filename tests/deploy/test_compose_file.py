"""The compose file as a text: nothing can be forgotten in it. That it works is shown in `tests/container`."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from service.config.settings import ENV_PREFIX, Settings, load_settings
from service.saves.paths.protected import check_roots

DEPLOY = Path(__file__).parents[2] / "deploy"
TEXT = (DEPLOY / "compose.yaml").read_text()
COMPOSE: dict[str, Any] = yaml.safe_load(TEXT)
SERVICES: dict[str, dict[str, Any]] = COMPOSE["services"]
OURS = [service for name, service in SERVICES.items() if name in ("strata", "strata-gpu")]
EXAMPLE = dict(line.split("=", 1) for line in (DEPLOY / ".env.example").read_text().splitlines() if re.match(r"\w+=", line))
FIXED_IN_THE_IMAGE = {"host", "port", "state_dir"}
BY_ANOTHER_NAME = {"save_root": "STRATA_SAVES"}


def defaults() -> dict[str, set[str]]:
    """Of the variables that the file reads."""
    found: dict[str, set[str]] = {}
    for name, default in re.findall(r"\$\{(\w+):-([^}]*)\}", TEXT):
        found.setdefault(name, set()).add(default)
    return found


@pytest.mark.parametrize("service", OURS, ids=("cpu", "gpu"))
def test_every_setting_can_be_given_in_the_environment(service: dict[str, Any]) -> None:
    expected = {ENV_PREFIX + field.upper() for field in Settings.model_fields if field not in FIXED_IN_THE_IMAGE}
    assert set(service["environment"]) == expected
    for field, variable in BY_ANOTHER_NAME.items():
        assert f"${{{variable}:-" in service["environment"][ENV_PREFIX + field.upper()]


def test_no_variable_is_read_without_a_default() -> None:
    assert re.findall(r"(?<!\$)\$\{\w+\}|(?<!\$)\$\w+", TEXT) == []


def test_the_example_tells_every_variable_with_its_default() -> None:
    passed_on = {name for service in OURS for name, value in service["environment"].items() if value is None}
    assert {name: {value} for name, value in EXAMPLE.items() if name not in passed_on} == {
        # Without a number there is no bound for the CPUs; threads follow from the bound.
        name: {""} if name == "STRATA_CPUS" else values
        for name, values in defaults().items()
    }


def test_a_stop_leaves_fifteen_seconds_more_than_the_drain() -> None:
    assert int(EXAMPLE["STRATA_STOP_SECONDS"]) == int(EXAMPLE["STRATA_DRAIN_SECONDS"]) + 15
    assert {service["stop_grace_period"] for service in OURS} == {"${STRATA_STOP_SECONDS:-45}s"}


@pytest.mark.parametrize("name", SERVICES)
def test_no_container_can_write_to_its_image_or_has_rights(name: str) -> None:
    service = SERVICES[name]
    assert service["read_only"] is True
    assert service["cap_drop"] == ["ALL"]
    assert service["security_opt"] == ["no-new-privileges:true"]
    assert service.get("cap_add", []) == (["CHOWN"] if name == "folders" else [])


@pytest.mark.parametrize("name", [name for name in SERVICES if name != "folders"])
def test_memory_is_bounded_and_nothing_is_open_to_others(name: str) -> None:
    service = SERVICES[name]
    assert service["mem_limit"]
    assert [port.partition(":-")[2].rpartition(":")[0].partition(":")[0] for port in service["ports"]] == ["127.0.0.1"]


def test_the_save_root_has_one_name_inside_and_outside() -> None:
    saves = "${STRATA_SAVES:-/srv/strata/saves}"
    for service in OURS:
        assert f"{saves}:{saves}" in service["volumes"]
        assert service["environment"]["STRATA_SAVE_ROOT"] == saves


def test_the_gpu_service_differs_by_profile_image_and_device_only() -> None:
    differing = {key for key in SERVICES["strata-gpu"] if SERVICES["strata-gpu"][key] != SERVICES["strata"].get(key)}
    assert differing == {"profiles", "image", "build", "networks", "deploy"}
    assert SERVICES["strata-gpu"]["build"]["args"]["VARIANT"] == "cuda"


def test_files_that_are_mounted_exist() -> None:
    volumes = [volume for service in SERVICES.values() for volume in service.get("volumes", [])]
    mounted = [DEPLOY / volume.partition(":")[0] for volume in volumes if volume.startswith("./")]
    assert len(mounted) == 3
    assert [path for path in mounted if not path.exists()] == []


def test_no_folder_of_the_service_lies_in_the_save_root(monkeypatch: pytest.MonkeyPatch) -> None:
    image = (DEPLOY.parent / "Dockerfile").read_text()
    for name, value in re.findall(r"\b(STRATA_\w+|HOME)=(\S+)", image):
        monkeypatch.setenv(name, value)
    check_roots(load_settings({}))
    monkeypatch.setenv("STRATA_SAVE_ROOT", EXAMPLE["STRATA_SAVES"])
    check_roots(load_settings({}))


def grafana_starts(folder: Path, password: str) -> tuple[str | None, str]:
    """What Grafana's own start script would see as the password, and what stands in the log before it."""
    [script] = SERVICES["grafana"]["command"]
    (folder / "run.sh").write_text('#!/bin/sh\necho "starts with ${GF_SECURITY_ADMIN_PASSWORD-none}"\n')
    (folder / "run.sh").chmod(0o755)
    script = script.replace("$$", "$").replace("/run.sh", f"{folder}/run.sh").replace("/var/lib/grafana", str(folder))
    command = [*SERVICES["grafana"]["entrypoint"], script]
    environment = {"PATH": os.environ["PATH"], "GF_SECURITY_ADMIN_PASSWORD": password}
    said = subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout
    before, _, seen = said.partition("starts with ")
    return None if seen == "none\n" else seen.strip(), before


def test_grafana_has_no_password_that_others_know(tmp_path: Path) -> None:
    assert SERVICES["grafana"]["environment"]["GF_SECURITY_ADMIN_PASSWORD"] == "${GRAFANA_PASSWORD:-}"
    assert EXAMPLE["GRAFANA_PASSWORD"] == ""
    first, said = grafana_starts(tmp_path, "")
    other, _ = grafana_starts(tmp_path, "")
    assert first is not None
    assert len(first) >= 32
    assert first.isalnum()
    assert first != other
    assert said == f"Grafana: sign in as admin with the password {first}\n"


def test_grafana_takes_the_password_that_is_set_and_keeps_the_one_it_has(tmp_path: Path) -> None:
    assert grafana_starts(tmp_path, "mine") == ("mine", "")
    (tmp_path / "grafana.db").touch()
    assert grafana_starts(tmp_path, "mine") == ("mine", "")
    assert grafana_starts(tmp_path, "") == (None, "")
