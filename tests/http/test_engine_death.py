"""A service whose engine breaks, as a process of its own: what its callers hear, what is left on disk, and how it ends."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import httpx
import pytest

from engine.execution.executor import LaunchedStep, StepExecutor
from engine.scheduling.plan import Chunk
from tests.http.child import child

if TYPE_CHECKING:
    from pathlib import Path

    from tests.http.conftest import Services

BODY: dict[str, Any] = {"prompt": "Hello", "max_tokens": 60, "ignore_eos": True, "temperature": 0}
SAVES: dict[str, Any] = {"kv_transfer_params": {"include_output_tokens": True}}

BREAKS_LATER = """
import sys, time
from {module} import {owner}
calls, method = 0, {owner}.{name}
def breaking(*arguments):
    global calls
    calls += 1
    time.sleep(0.02)
    if calls > 12:
        raise {error}
    return method(*arguments)
{owner}.{name} = breaking
"""
WAYS = {
    "the model": ("engine.execution.runner", "ModelRunner", "run", "RuntimeError('the device is lost')"),
    "the memory": ("engine.execution.runner", "ModelRunner", "run", "MemoryError()"),
    "the scheduler": ("engine.scheduling.scheduler", "Scheduler", "schedule", "AssertionError('the books do not agree')"),
    "the pages": ("engine.capture.row_capture", "RowCapture", "commit", "AssertionError('the books do not agree')"),
    "the listener": ("service.engine_events", "EngineEvents", "on_step", "RuntimeError('no loop')"),
}

RARER = ("the memory", "the pages")
"""Tried in the full run only: each takes seconds."""


def has_failed(response: httpx.Response) -> bool:
    """Whether the caller heard an error, with a status of the server's or in its stream; asserts that it was one or the other."""
    if response.headers["content-type"].startswith("text/event-stream"):
        assert response.text.endswith("data: [DONE]\n\n")
        return '"error"' in response.text
    if response.status_code == 200:
        return False
    assert response.status_code in (500, 503)
    assert response.json()["error"]["code"]
    return True


@pytest.mark.parametrize("way", [pytest.param(way, marks=pytest.mark.slow) if way in RARER else way for way in WAYS])
def test_when_the_engine_breaks_everybody_is_answered_and_the_process_ends_with_an_error(
    services: Services, tmp_path: Path, way: str
) -> None:
    module, owner, name, error = WAYS[way]
    patch = BREAKS_LATER.format(module=module, owner=owner, name=name, error=error)
    bodies: list[dict[str, Any]] = [{}, SAVES, {"stream": True}, SAVES | {"n": 2}, {}, SAVES, {"stream": True} | SAVES]
    with child(services, BODY, patch, "--max-running", "3") as broken, ThreadPoolExecutor(len(bodies)) as pool:
        answers = [pool.submit(broken.post, **body) for body in bodies]
        failed = [has_failed(answer.result()) for answer in answers]
        assert all(fails for fails, body in zip(failed, bodies, strict=True) if "kv_transfer_params" in body)
        assert way == "the pages" or all(failed)  # without a save one may have gone through before that broke
        health = broken.client.get("/health")
        assert (health.status_code, health.json()) == (503, {"status": "dead"})
        assert broken.post().status_code == 503
        assert broken.process.wait() == 1
    with services.run() as service:
        records = service.client.get("/saves").json()["data"]
        assert {record["status"] for record in records} <= {"failed", "cancelled"}
        assert [path for path in (tmp_path / "saves").rglob("*") if path.is_file()] == []


def stumble_over_prompts_of_eight(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every step fails that a prompt of eight tokens, "Goodbye", is part of."""
    launch = StepExecutor.launch

    def stumbles(executor: StepExecutor, planned: Sequence[Chunk], before: LaunchedStep | None = None) -> LaunchedStep:
        if any(len(chunk.sequence.request.prompt_token_ids) == 8 for chunk in planned):
            raise RuntimeError("the model stumbled")
        return launch(executor, planned, before)

    monkeypatch.setattr(StepExecutor, "launch", stumbles)


def test_one_bad_request_hears_a_500_and_its_neighbours_their_text(services: Services, monkeypatch: pytest.MonkeyPatch) -> None:
    stumble_over_prompts_of_eight(monkeypatch)
    with services.run() as service, ThreadPoolExecutor(6) as pool:
        good = [pool.submit(service.complete, **BODY | SAVES) for _ in range(5)]
        bad = service.complete(**BODY | SAVES | {"prompt": "Goodbye"})
        assert bad.status_code == 500
        error = bad.json()["error"]
        assert error["code"] == "engine_error"
        record = service.record(error["save_id"])
        assert (record["status"], record["error"]["code"]) == ("failed", "engine_error")
        texts = {answer.result().json()["choices"][0]["text"] for answer in good}
        assert len(texts) == 1
        assert service.client.get("/health").status_code == 200
        service.settled()
        assert "strata_step_failures_total 1.0" in service.client.get("/metrics").text
        assert len(list(service.root.rglob("*.safetensors"))) == 5


def test_bad_requests_in_a_row_each_hear_a_500_and_the_service_stays_healthy(services: Services, monkeypatch: pytest.MonkeyPatch) -> None:
    stumble_over_prompts_of_eight(monkeypatch)
    with services.run() as service:
        answers = [service.complete(**BODY | SAVES | {"prompt": "Goodbye"}) for _ in range(6)]
        assert [(answer.status_code, answer.json()["error"]["code"]) for answer in answers] == [(500, "engine_error")] * 6
        assert service.client.get("/health").status_code == 200
        assert service.complete(**BODY | SAVES).status_code == 200
        service.settled()
        assert "strata_step_failures_total 6.0" in service.client.get("/metrics").text
