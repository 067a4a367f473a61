"""The compose file as it stands, with a stand-in for Prometheus's image: one command, and all of it works."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import httpx
import pytest
from safetensors import safe_open

from tests.container.docker import GROUP, USER, Container, wait_until

PROMPT = "The capital of France is"


@pytest.fixture(scope="module")
def answer(stack: Container) -> dict[str, Any]:
    """Of a completion that is asked for from outside of the container."""
    return stack.complete(prompt=PROMPT, max_tokens=8, temperature=0, kv_transfer_params={"include_output_tokens": True})


def test_the_path_of_an_answer_can_be_opened_outside(stack: Container, answer: dict[str, Any]) -> None:
    save = answer["kv_transfer_params"]
    assert "Paris" in answer["choices"][0]["text"]
    assert Path(save["hidden_states_path"]).parent == stack.saves
    with safe_open(save["hidden_states_path"], framework="pt") as file:
        states = file.get_tensor("hidden_states")
        assert list(states.shape) == save["shape"] == [12, 2, 576]
        assert states.isfinite().all()
        assert file.metadata()["save_id"] == save["save_id"]


def test_files_belong_to_the_client_who_may_remove_them(stack: Container) -> None:
    path = Path(stack.complete(prompt=PROMPT, max_tokens=0, kv_transfer_params={})["kv_transfer_params"]["hidden_states_path"])
    found = path.stat()
    assert (found.st_uid, found.st_gid, found.st_mode & 0o7777) == (USER, GROUP, 0o644)
    script = 'cat "$0" > /dev/null && rm "$0" "$0.lock"'
    subprocess.run(["sh", "-c", script, path], check=True, user=USER, group=GROUP, extra_groups=[])
    assert not path.exists()


def test_settings_reach_the_service(stack: Container) -> None:
    assert stack.client.get(f"{stack.url}/v1/models").json()["data"][0]["default_layers"] == [3, "norm"]


def test_the_container_says_that_it_is_healthy(stack: Container) -> None:
    wait_until(lambda: stack.inspect(".State.Health.Status") == "healthy", "a good answer to the health check")


def test_the_container_has_no_rights_and_can_write_nowhere_else(stack: Container) -> None:
    status = dict(line.split(":\t", 1) for line in stack.execute("cat /proc/1/status").splitlines() if ":\t" in line)
    assert {int(status[name], 16) for name in ("CapPrm", "CapEff", "CapBnd", "CapAmb")} == {0}
    assert status["NoNewPrivs"] == "1"
    assert stack.execute("touch /x /opt/strata/x /etc/x 2>&1 | grep -c 'Read-only file system'") == "3"


def test_what_the_container_may_take_is_bounded(stack: Container) -> None:
    limits = stack.inspect(".HostConfig")
    assert (limits["Memory"], limits["PidsLimit"]) == (8 << 30, 1024)
    assert limits["ReadonlyRootfs"]
    assert stack.inspect(".Config.StopTimeout") == 30 + 15


def query(url: str, expression: str) -> list[float]:
    found = httpx.get(f"{url}/api/v1/query", params={"query": expression}, timeout=None).raise_for_status().json()
    return [float(series["value"][1]) for series in found["data"]["result"]]


def test_prometheus_answers_a_query_over_our_metrics(stack: Container, answer: dict[str, Any], prometheus_url: str) -> None:
    def completed() -> list[float]:
        try:
            return query(prometheus_url, 'strata_saves_total{job="strata", outcome="completed"}')
        except httpx.TransportError:
            return []  # it is starting

    wait_until(lambda: any(count >= 1 for count in completed()), "a scrape")
    assert query(prometheus_url, 'up{job="strata"}') == [1]


def test_prometheus_has_taken_the_alerts(stack: Container, prometheus_url: str) -> None:
    def rules() -> list[dict[str, Any]]:
        groups = httpx.get(f"{prometheus_url}/api/v1/rules", timeout=None).raise_for_status().json()["data"]["groups"]
        return [rule for group in groups for rule in group["rules"]]

    wait_until(lambda: all(rule["health"] != "unknown" for rule in rules()), "an evaluation of the alerts")
    assert {rule["health"] for rule in rules()} == {"ok"}
    assert "StrataDown" in {rule["name"] for rule in rules()}
