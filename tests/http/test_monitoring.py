"""What the figures of `/metrics` say about states, answers and failures, so that somebody can be woken by them."""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from engine.errors import SaveError
from engine.saves import builder
from service.errors import ServiceError
from service.http.auth import hashed_line, new_key
from service.http.limits import DEFAULT_LIMITS
from service.registry.registry import Registry
from tests.http.gate import LateStart
from tests.http.test_operations import metrics_of

if TYPE_CHECKING:
    from pathlib import Path

    from tests.http.conftest import Service, Services


def state_of(service: Service) -> set[str]:
    states = {name: value for name, value in metrics_of(service).items() if name.startswith("strata_service_state")}
    assert sorted(states.values()) == [0, 0, 0, 0, 1]
    return {name for name, value in states.items() if value}


def growth(service: Service, before: dict[str, float]) -> dict[str, float]:
    """What the saves' counters have gained."""
    now = metrics_of(service)
    return {
        name: now[name] - before[name] for name in now if name.startswith("strata_save") and "_total" in name and now[name] != before[name]
    }


def failing_publication(monkeypatch: pytest.MonkeyPatch, code: Any, *, from_call: int = 1) -> None:  # noqa: ANN401 - a save's code
    publish, calls = builder.publish_file, []

    def fail(*arguments: Any, **options: Any) -> None:  # noqa: ANN401 - passed on
        calls.append(arguments)
        if len(calls) >= from_call:
            raise SaveError(code, "as told")
        publish(*arguments, **options)

    monkeypatch.setattr(builder, "publish_file", fail)


def test_the_state_is_told_from_the_start(services: Services) -> None:
    start = LateStart()
    with services.run(start.engine, until_ready=False) as service, start:
        assert state_of(service) == {"strata_service_state{state=starting}"}
        start.open.set()
        while service.client.get("/health").status_code != 200:
            pass
        assert state_of(service) == {"strata_service_state{state=ok}"}


def test_the_bounds_are_told_beside_what_they_bound(services: Services) -> None:
    with services.run(max_running=7, max_queued=9) as service:
        found = metrics_of(service)
    assert (found["strata_max_running"], found["strata_max_queued"]) == (7, 9)


def test_the_process_tells_about_itself(service: Service) -> None:
    found = metrics_of(service)
    assert found["process_resident_memory_bytes"] > 2**20
    assert 0 < found["process_open_fds"] < found["process_max_fds"]


def test_answers_are_counted_by_status_but_not_those_of_probes(services: Services) -> None:
    with services.run() as service:
        service.completed()
        service.refused(400, temperature=-1)
        assert service.client.get("/nowhere").status_code == 404
        assert service.client.get("/v1/models", headers=[("x-many", "1")] * 1000).status_code == 431
        for path in ("/health", "/health/live", "/version"):
            service.client.get(path)
        answers = {name: value for name, value in metrics_of(service).items() if name.startswith("strata_http_answers_total")}
    assert {name for name, value in answers.items() if value} == {
        f"strata_http_answers_total{{status={code}}}" for code in (200, 400, 404, 431)
    }
    assert sum(answers.values()) == 4


def test_refusals_that_somebody_is_woken_by_are_shown_before_the_first(service: Service) -> None:
    found = metrics_of(service)
    assert {f"strata_http_answers_total{{status={code}}}" for code in (429, 500, 503, 507)} <= set(found)
    assert {f"strata_save_failures_total{{code={code}}}" for code in ("io_error", "no_space", "non_finite")} <= set(found)


def test_a_failed_save_is_counted_by_its_code(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    before = metrics_of(service)
    failing_publication(monkeypatch, "no_space")
    service.refused(507, kv_transfer_params={})
    assert growth(service, before) == {"strata_saves_total{outcome=failed}": 1, "strata_save_failures_total{code=no_space}": 1}


def test_a_save_whose_end_can_not_be_recorded_has_failed(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    """The client hears a 500, and so does whoever looks at the figures."""
    before = metrics_of(service)

    def fail(registry: Registry, changes: object) -> Future[Any]:
        failed: Future[Any] = Future()
        failed.set_exception(ServiceError("the registry can't be written", code="registry_error"))
        return failed

    monkeypatch.setattr(Registry, "end", fail)
    monkeypatch.setattr("service.saves.saver.COMMIT_TIMEOUT_SECONDS", 0.0)
    service.refused(500, kv_transfer_params={})
    assert growth(service, before) == {"strata_saves_total{outcome=failed}": 1, "strata_save_failures_total{code=io_error}": 1}


def test_a_file_that_was_taken_back_counts_as_its_record_says(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    before = metrics_of(service)
    failing_publication(monkeypatch, "conflict", from_call=2)
    service.refused(409, n=2, request_id="taken-back", kv_transfer_params={})
    records = service.client.get("/saves", params={"request_id": "taken-back"}).json()["data"]
    gained = growth(service, before)
    for status in ("failed", "cancelled", "completed"):
        assert gained.get(f"strata_saves_total{{outcome={status}}}", 0) == sum(record["status"] == status for record in records)
    assert gained["strata_save_failures_total{code=conflict}"] == 1


def test_refused_requests_are_those_to_compute_and_all_of_them(services: Services, tmp_path: Path) -> None:
    keys, key = tmp_path / "keys", new_key()
    keys.write_text(hashed_line(key))
    with services.run(api_keys_file=keys, limits=replace(DEFAULT_LIMITS, body_bytes=1000)) as service:
        ours, body = {"Authorization": f"Bearer {key}"}, {"prompt": "a", "max_tokens": 1}
        for path in ("/tokenize", "/detokenize", "/v1/chat/completions/render", "/saves", "/nowhere"):
            assert service.client.post(path, json={}, headers=ours).status_code in (400, 404, 405)
        assert service.client.post("/v1/completions", json=body, headers=ours).status_code == 200
        assert metrics_of(service)["strata_requests_total{outcome=rejected}"] == 0
        assert service.client.post("/v1/completions", json=body).status_code == 401
        assert service.client.post("/v1/chat/completions", json={}, headers=ours).status_code == 400
        assert service.client.post("/v1/completions", json=body | {"user": "u" * 2000}, headers=ours).status_code == 413
        assert service.client.post("/v1/completions", content=b"{", headers=ours | {"Content-Type": "application/json"}).status_code == 400
        assert metrics_of(service)["strata_requests_total{outcome=rejected}"] == 4
