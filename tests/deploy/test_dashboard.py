"""The dashboard: in Grafana's own terms, and in those of whoever reads it."""

from __future__ import annotations

import json
from collections import Counter
from itertools import combinations
from typing import TYPE_CHECKING, Any

import pytest
import yaml
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.cog.plugins import register_default_plugins
from grafana_foundation_sdk.models.dashboard import Dashboard

from tests.deploy.monitoring import DASHBOARD, DEPLOY, metrics_in, panels, queries

if TYPE_CHECKING:
    from collections.abc import Iterator

PROVISIONING = DEPLOY / "grafana" / "provisioning"
COLUMNS = 24
PLUGIN_FIELDS = {".annotations.list[0].titleFormat", ".annotations.list[0].textFormat"}
"""Prometheus' own, unknown to the schema that all kinds of annotations share."""
ASKED_FOR = {
    "traffic": "strata_requests_total",
    "latency": "strata_request_duration_seconds_bucket",
    "first token": "strata_time_to_first_token_seconds_bucket",
    "batches": "strata_batch_tokens_sum",
    "KV cache": "strata_kv_blocks",
    "state cache": "strata_state_pages",
    "recurrent states": "strata_recurrent_slots",
    "hit rate": "strata_prefix_cache_hit_tokens_total",
    "saves": "strata_saves_total",
    "why saves fail": "strata_save_failures_total",
    "bytes": "strata_written_bytes_total",
    "queue": "strata_requests_waiting",
    "writers": "strata_writer_queue_depth",
    "reserve": "strata_disk_reserve_bytes",
    "errors": "strata_http_answers_total",
}


def differences(ours: Any, theirs: Any, where: str = "") -> Iterator[str]:  # noqa: ANN401 - any JSON value
    """Places where `theirs` lacks or changes something of ours; what it adds are defaults."""
    if isinstance(ours, dict) and isinstance(theirs, dict):
        for key, value in ours.items():
            yield from differences(value, theirs[key], f"{where}.{key}") if key in theirs else [f"{where}.{key}"]
    elif isinstance(ours, list) and isinstance(theirs, list) and len(ours) == len(theirs):
        for index, (one, other) in enumerate(zip(ours, theirs, strict=True)):
            yield from differences(one, other, f"{where}[{index}]")
    elif ours != theirs:
        yield where


def cells(panel: dict[str, Any]) -> set[tuple[int, int]]:
    place = panel["gridPos"]
    return {(x, y) for x in range(place["x"], place["x"] + place["w"]) for y in range(place["y"], place["y"] + place["h"])}


def data_sources(value: Any) -> Iterator[dict[str, str]]:  # noqa: ANN401 - any JSON value
    if isinstance(value, dict):
        yield from [value["datasource"]] if "datasource" in value else []
        value = list(value.values())
    if isinstance(value, list):
        for item in value:
            yield from data_sources(item)


def test_grafanas_own_model_of_a_dashboard_keeps_every_field() -> None:
    register_default_plugins()
    read_and_written = json.loads(JSONEncoder().encode(Dashboard.from_json(DASHBOARD)))
    assert set(differences(DASHBOARD, read_and_written)) == PLUGIN_FIELDS


def test_a_field_that_grafana_does_not_know_would_be_found() -> None:
    register_default_plugins()
    panel = panels()[0]
    misspelled = DASHBOARD | {"panels": [panel | {"option": {}, "fieldConfig": panel["fieldConfig"] | {"override": []}}]}
    read_and_written = json.loads(JSONEncoder().encode(Dashboard.from_json(misspelled)))
    assert {".panels[0].option", ".panels[0].fieldConfig.override"} <= set(differences(misspelled, read_and_written))


def test_panels_have_ids_of_their_own() -> None:
    assert [number for number, count in Counter(panel["id"] for panel in DASHBOARD["panels"]).items() if count > 1] == []


def test_panels_lie_on_the_grid_and_beside_each_other() -> None:
    for panel in DASHBOARD["panels"]:
        place = panel["gridPos"]
        assert place["x"] >= 0, panel["title"]
        assert place["x"] + place["w"] <= COLUMNS, panel["title"]
    assert [(one["title"], other["title"]) for one, other in combinations(DASHBOARD["panels"], 2) if cells(one) & cells(other)] == []


def test_everything_is_asked_of_the_data_source_that_is_provisioned() -> None:
    (provisioned,) = yaml.safe_load((PROVISIONING / "datasources" / "prometheus.yml").read_text())["datasources"]
    found = list(data_sources(DASHBOARD))
    assert len(found) > len(panels())
    assert [source for source in found if source != {"type": provisioned["type"], "uid": provisioned["uid"]}] == []


def test_the_data_source_counts_in_the_interval_that_prometheus_scrapes_in() -> None:
    (provisioned,) = yaml.safe_load((PROVISIONING / "datasources" / "prometheus.yml").read_text())["datasources"]
    config = yaml.safe_load((DEPLOY / "prometheus" / "prometheus.yml").read_text())
    assert provisioned["jsonData"]["timeInterval"] == config["global"]["scrape_interval"]


def test_the_provider_reads_dashboards_from_a_folder() -> None:
    (provider,) = yaml.safe_load((PROVISIONING / "dashboards" / "strata.yml").read_text())["providers"]
    assert (provider["type"], provider["options"]["path"]) == ("file", "/var/lib/grafana/dashboards")


@pytest.mark.parametrize("panel", panels(), ids=lambda panel: panel["title"])
def test_a_panel_says_what_it_shows(panel: dict[str, Any]) -> None:
    assert panel["title"]
    assert panel["description"]
    assert panel["fieldConfig"]["defaults"]["unit"]
    assert [target for target in panel["targets"] if not target["legendFormat"]] == []
    legends = [target["legendFormat"] for target in panel["targets"]]
    assert len(set(legends)) == len(legends)


def test_every_query_goes_by_the_chosen_instance() -> None:
    for query in queries():
        bare = [selector for selector in query.expr.split("strata_")[1:] if 'instance=~"$instance"' not in selector]
        assert not bare, query


@pytest.mark.parametrize("subject", ASKED_FOR)
def test_what_a_person_on_call_asks_for_is_there(subject: str) -> None:
    assert ASKED_FOR[subject] in {name for query in queries() for name in metrics_in(query.expr)}
