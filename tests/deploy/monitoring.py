"""What lies in `deploy/` for Prometheus and Grafana, the programs that read it, and a running pair to try it on."""

from __future__ import annotations

import json
import math
import os
import re
import shutil
import subprocess
import time
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import pytest
import yaml

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.faults.children import Child

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
PROMETHEUS = DEPLOY / "prometheus"
DASHBOARD: dict[str, Any] = json.loads((DEPLOY / "grafana" / "strata.json").read_text())
ALERTS: list[dict[str, Any]] = [
    rule for group in yaml.safe_load((PROMETHEUS / "alerts.yml").read_text())["groups"] for rule in group["rules"]
]
LISTENING = re.compile(r'msg="Listening on" address=(\S+)')
SCRAPE_INTERVAL = "500ms"


def program(name: str) -> str:
    """Where it is. Without it the test is skipped, or fails where continuous integration should have installed it."""
    found = shutil.which(name)
    if found is not None:
        return found
    reason = f"{name} is not installed; on Debian: apt-get install prometheus"
    if os.environ.get("CI"):
        pytest.fail(reason)
    pytest.skip(reason)


def promtool(*arguments: str, cwd: Path = PROMETHEUS) -> str:
    """What it said; fails where it found something wrong."""
    done = subprocess.run([program("promtool"), *arguments], capture_output=True, text=True, check=False, cwd=cwd)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@dataclass(frozen=True)
class Query:
    """One line of the dashboard."""

    where: str
    expr: str
    legend: str

    @property
    def runnable(self) -> str:
        """As Grafana sends it, with every instance chosen, over a time that all the work lies in."""
        return self.expr.replace("$__rate_interval", "10m").replace("$instance", ".*")


def panels() -> list[dict[str, Any]]:
    """Those that show something: all but the rows."""
    return [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]


def queries() -> list[Query]:
    return [
        Query(f"{panel['title']} {target['refId']}", target["expr"], target["legendFormat"])
        for panel in panels()
        for target in panel["targets"]
    ]


def metrics_in(expr: str) -> set[str]:
    """Names of our own metrics in a query: what stands between quotes is a label's value."""
    return set(re.findall(r"\b(?:strata|process)_[a-z_]+\b", re.sub(r'"[^"]*"', "", expr)))


@dataclass(frozen=True)
class Prometheus:
    url: str

    def get(self, path: str, **query: str) -> Any:  # noqa: ANN401 - any JSON value
        answer = httpx.get(f"{self.url}/api/v1/{path}", params=query, trust_env=False, timeout=None)
        assert answer.status_code == 200, answer.text
        return answer.json()["data"]

    def values(self, expr: str, at: float | None = None) -> dict[str, float]:
        """What a query gives at that time, or just now, by its labels; what is no number left out."""
        answer = self.get("query", query=expr, time=str(at or time.time()))
        found = {json.dumps(line["metric"]): float(line["value"][1]) for line in answer["result"]}
        return {labels: value for labels, value in found.items() if math.isfinite(value)}

    def wait_for(self, expr: str) -> None:
        """Loops for ever where it never gives anything."""
        while not self.values(expr):
            time.sleep(0.05)


@dataclass(frozen=True)
class Live:
    """A service that has done some work, all of which Prometheus has seen at that time."""

    child: Child
    prometheus: Prometheus
    at: float

    def shown(self, query: Query) -> dict[str, float]:
        return self.prometheus.values(query.runnable, self.at)


@contextmanager
def running_prometheus(target: str, place: Path) -> Iterator[Prometheus]:
    """The configuration of the repository, with another target and short intervals."""
    config = yaml.safe_load((PROMETHEUS / "prometheus.yml").read_text())
    config["global"] = {"scrape_interval": SCRAPE_INTERVAL, "evaluation_interval": SCRAPE_INTERVAL}
    config["rule_files"] = [str(PROMETHEUS / name) for name in config["rule_files"]]
    config["scrape_configs"][0]["static_configs"] = [{"targets": [target.removeprefix("http://")]}]
    (place / "prometheus.yml").write_text(yaml.safe_dump(config))
    options = ["--config.file=prometheus.yml", "--storage.tsdb.path=series", "--web.listen-address=127.0.0.1:0"]
    log = place / "prometheus.log"
    with (
        log.open("w") as output,
        subprocess.Popen([program("prometheus"), *options], stdout=output, stderr=subprocess.STDOUT, cwd=place) as process,
    ):
        try:
            while not (found := LISTENING.search(log.read_text())):
                assert process.poll() is None, log.read_text()
                time.sleep(0.05)
            prometheus = Prometheus(f"http://{found[1]}")
            while httpx.get(f"{prometheus.url}/-/ready", trust_env=False, timeout=None).status_code != 200:
                time.sleep(0.05)
            yield prometheus
        finally:
            process.terminate()


def work_through(child: Child) -> None:
    """Some of everything: saves, prefixes met again, several tokens each, and requests that are refused."""
    for number in range(12):
        save = {"include_output_tokens": True} if number % 3 else None
        answer = child.complete(prompt=[5] * 100 + [number % 4] * 20, max_tokens=8, kv_transfer_params=save)
        assert answer.status_code == 200, answer.text
    assert child.complete(prompt=[10**6]).status_code == 400
    assert child.client.get("/saves/unknown").status_code == 404
