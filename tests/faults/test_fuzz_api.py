"""Requests made from the description of the API, good and bad ones, against a running service.

`STRATA_FUZZ_CASES` says how many; a full run has 5,000 or more.
"""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import pytest
import schemathesis
import yaml
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from schemathesis import GenerationMode
from schemathesis.checks import load_all_checks, not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from service.cli.launcher import ServiceProcess
from tests.faults.children import flags, number_from_environment

if TYPE_CHECKING:
    from collections.abc import Iterator

    from schemathesis import APIOperation, Case

DEFAULT_CASES = 400
CASES = number_from_environment("STRATA_FUZZ_CASES", DEFAULT_CASES)
CHECKS = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
]
HEAVY = 4
"""Operations with a body get this many times the cases of the others."""
MAX_KNOWN = 20

load_all_checks()
DOCUMENT = yaml.safe_load((Path(__file__).parents[2] / "openapi.yaml").read_text(encoding="utf-8"))
OPERATIONS = [(method.upper(), path) for path, methods in DOCUMENT["paths"].items() for method in methods]


@dataclass
class Fuzzed:
    """The service, ids of saves that it has, and what has been answered so far."""

    url: str
    client: httpx.Client
    lines: list[str]
    statuses: Counter[tuple[str, int]] = field(default_factory=Counter)
    known: list[str] = field(default_factory=list)

    def new_saves(self) -> None:
        """Some saves of each kind for the routes that name one."""
        for params in ({}, {"pooling": "mean"}, {"wait": "accepted"}):
            body = {"prompt": "Hello", "max_tokens": 3, "kv_transfer_params": params}
            answer = self.client.post("/v1/completions", json=body)
            assert answer.status_code in (200, 202)
            self.known.append(answer.json()["kv_transfer_params"]["save_id"])
        del self.known[:-MAX_KNOWN]


@pytest.fixture(scope="module")
def fuzzed(model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fuzzed]:
    folder, lines = tmp_path_factory.mktemp("fuzz"), list[str]()
    arguments = flags(model_folder, folder / "saves", folder / "state", "--min-free-bytes", "0")
    with ServiceProcess(arguments, on_line=lines.append) as service:
        with httpx.Client(base_url=service.url, timeout=None, trust_env=False) as client:
            made = Fuzzed(service.url, client, lines)
            yield made
        service.stop()
    assert [line for line in lines if "Traceback" in line or " ERROR " in line] == []
    assert sorted(folder.rglob("*.part")) == []
    print(f"{sum(made.statuses.values())} cases: {sorted(made.statuses.items())}")


def num_cases(method: str) -> int:
    shares = sum(HEAVY if other == "POST" else 1 for other, _ in OPERATIONS)
    return max(5, CASES * (HEAVY if method == "POST" else 1) // shares)


def requests_to(operation: APIOperation, known: list[str]) -> st.SearchStrategy[Case]:
    """Valid and invalid requests; half of those that name a save name one that there is."""

    def with_known(case: Case, name_one: bool) -> Case:
        if name_one and known and "save_id" in (case.path_parameters or {}):
            case.path_parameters["save_id"] = known[len(repr(case.query)) % len(known)]
        return case

    modes = st.sampled_from([GenerationMode.POSITIVE, GenerationMode.NEGATIVE])
    cases = modes.flatmap(lambda mode: operation.as_strategy(generation_mode=mode))
    return st.builds(with_known, cases, st.booleans())


def check(fuzzed: Fuzzed, case: Case) -> None:
    response = case.call(base_url=fuzzed.url, timeout=3600)
    fuzzed.statuses[case.operation.label, response.status_code] += 1
    case.validate_response(response, checks=CHECKS)
    assert b"Traceback" not in response.content
    assert b'File "' not in response.content
    if response.headers.get("content-type", [""])[0].startswith("text/event-stream"):
        check_events(response.text)
    if response.status_code >= 400 and response.content and case.operation.path not in ("/health", "/health/live", "/ping"):
        error: dict[str, Any] = response.json()["error"]
        assert set(error) >= {"message", "type", "param", "code"}


def check_events(text: str) -> None:
    """Chunks and no errors. Schemathesis reads so many events and leaves, so the end may be missing."""
    events = [event.removeprefix("data: ") for event in text.split("\n\n") if event and not event.startswith(":")]
    assert events
    assert all(event == "[DONE]" or "choices" in json.loads(event) for event in events)


@pytest.mark.parametrize(("method", "path"), OPERATIONS, ids=lambda part: part)
def test_whatever_is_sent_the_answer_is_documented(fuzzed: Fuzzed, method: str, path: str) -> None:
    fuzzed.new_saves()
    operation = schemathesis.openapi.from_dict(DOCUMENT)[path][method]

    @settings(
        max_examples=num_cases(method),
        deadline=None,
        database=None,
        derandomize=CASES <= DEFAULT_CASES,
        phases=[Phase.generate, Phase.shrink],
        suppress_health_check=list(HealthCheck),
    )
    @given(requests_to(operation, fuzzed.known))
    def run(case: Case) -> None:
        check(fuzzed, case)

    run()
