"""Configuration and alerts, read by Prometheus' own tool, and held against the operations page and the service's defaults."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import pytest
import yaml

from service.config.settings import Settings
from tests.deploy.monitoring import ALERTS, DASHBOARD, PROMETHEUS, ROOT, promtool, queries

if TYPE_CHECKING:
    from pathlib import Path

FIRING = [test for case in yaml.safe_load((PROMETHEUS / "alerts_test.yml").read_text())["tests"] for test in case["alert_rule_test"]]


def anchors(page: Path) -> set[str]:
    """Of its headings, as they are linked to."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(), flags=re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_prometheus_takes_the_configuration() -> None:
    assert "1 rule files found" in promtool("check", "config", "prometheus.yml")


def test_the_service_is_scraped_at_its_default_port() -> None:
    (job,) = yaml.safe_load((PROMETHEUS / "prometheus.yml").read_text())["scrape_configs"]
    (targets,) = job["static_configs"]
    assert (job["job_name"], targets["targets"]) == ("strata", [f"strata:{Settings.model_fields['port'].default}"])
    assert job.get("metrics_path", "/metrics") == "/metrics"


def test_prometheus_takes_the_alerts() -> None:
    assert f"{len(ALERTS)} rules found" in promtool("check", "rules", "alerts.yml")


def test_alerts_fire_when_they_should_and_only_then() -> None:
    assert "SUCCESS" in promtool("test", "rules", "alerts_test.yml")


@pytest.mark.parametrize("rule", ALERTS, ids=lambda rule: rule["alert"])
def test_an_alert_is_proved_and_says_how_bad_what_and_what_to_do(rule: dict[str, Any]) -> None:
    assert [test for test in FIRING if test["alertname"] == rule["alert"] and test.get("exp_alerts")]
    assert rule["labels"]["severity"] in ("critical", "warning")
    assert rule["annotations"]["summary"]
    page, _, anchor = rule["annotations"]["runbook"].partition("#")
    assert anchor == rule["alert"].lower()
    assert anchor in anchors(ROOT / page)


def test_alerts_have_names_of_their_own() -> None:
    assert len({rule["alert"] for rule in ALERTS}) == len(ALERTS)


def test_every_query_of_the_dashboard_parses(tmp_path: Path) -> None:
    asked = [query.runnable for query in queries()] + [note["expr"] for note in DASHBOARD["annotations"]["list"]]
    rules = [{"record": f"query:{number}", "expr": expr} for number, expr in enumerate(asked)]
    (tmp_path / "queries.yml").write_text(yaml.safe_dump({"groups": [{"name": "dashboard", "rules": rules}]}))
    assert f"{len(rules)} rules found" in promtool("check", "rules", "queries.yml", cwd=tmp_path)
