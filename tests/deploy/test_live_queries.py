"""Dashboard and alerts on a real Prometheus that watches a real service."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.deploy.monitoring import ALERTS, DASHBOARD, Query, metrics_in, queries

if TYPE_CHECKING:
    from tests.deploy.monitoring import Live


def test_every_metric_that_is_asked_for_is_one_that_the_service_exports(live: Live) -> None:
    exported = {name.partition("[")[0] for name in live.child.metrics()}
    asked = [query.expr for query in queries()] + [rule["expr"] for rule in ALERTS]
    asked += [variable["query"] for variable in DASHBOARD["templating"]["list"]]
    assert {name for expr in asked for name in metrics_in(expr)} - exported == set()


@pytest.mark.parametrize("query", queries(), ids=lambda query: query.where)
def test_a_query_of_the_dashboard_shows_something(live: Live, query: Query) -> None:
    assert live.shown(query)


def test_the_work_that_was_done_is_what_is_shown(live: Live) -> None:
    shown = {query.where: live.shown(query) for query in queries()}
    assert shown["State A"] == {'{"state": "ok"}': 1.0}
    assert sum(shown["Prefix hit rate A"].values()) > 0.5
    assert shown["Saves by outcome A"]['{"outcome": "completed"}'] > 0
    assert shown["Saves by outcome A"]['{"outcome": "failed"}'] == 0
    assert shown["Answers by status A"]['{"status": "400"}'] > 0
    assert shown["Requests by outcome A"]['{"outcome": "rejected"}'] > 0
    assert sum(shown["Bytes per second A"].values()) > 0
    (first, middle, last) = (sum(shown[f"Request duration {letter}"].values()) for letter in "ABC")
    assert 0 < first <= middle <= last


def test_prometheus_evaluates_every_alert_and_none_fires(live: Live) -> None:
    rules = [rule for group in live.prometheus.get("rules")["groups"] for rule in group["rules"]]
    assert {rule["name"] for rule in rules} == {rule["alert"] for rule in ALERTS}
    assert {rule["name"]: rule.get("lastError") for rule in rules if rule["health"] != "ok"} == {}
    assert [rule["name"] for rule in rules if rule["state"] == "firing"] == []
