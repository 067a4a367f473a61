"""`/saves`, saves that fail, and keys that make requests repeatable."""

from __future__ import annotations

import errno
import hashlib
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from engine.saves import builder
from engine.saves.retry import RetryPolicy
from tests.http.gate import PublishingGate

if TYPE_CHECKING:
    from tests.http.conftest import Service, Services

RECORD_FIELDS = {
    "id",
    "object",
    "status",
    "hidden_states_path",
    "request_id",
    "model",
    "layers",
    "dtype",
    "shape",
    "num_tokens",
    "bytes",
    "bytes_written",
    "created",
    "finished",
    "expires",
}


def fail_publication(monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    """The disk is full when that file, counted from 1, is to get its name."""
    publish, numbers = builder.publish_file, count(1)

    def full_once(*arguments: Any, **options: Any) -> None:  # noqa: ANN401 - passed on
        if next(numbers) == number:
            raise OSError(errno.ENOSPC, "no space")
        publish(*arguments, **options)

    monkeypatch.setattr(builder, "publish_file", full_once)
    # A full disk is tried again for some seconds; here it has failed for good.
    monkeypatch.setattr(builder, "RetryPolicy", lambda seconds: RetryPolicy(0.0))


def transfer_of(answer: dict[str, Any]) -> dict[str, Any]:
    transfer: dict[str, Any] = answer["kv_transfer_params"]
    return transfer


def test_a_record_says_all_about_its_save(service: Service) -> None:
    transfer = transfer_of(service.completed(request_id="rec-1", kv_transfer_params={"layers": [1, "norm"]}))
    record = service.record(transfer["save_id"])
    assert set(record) == RECORD_FIELDS
    expected = {
        "id": transfer["save_id"],
        "status": "completed",
        "hidden_states_path": transfer["hidden_states_path"],
        "request_id": "rec-1",
        "model": "tiny",
        "layers": [1, "norm"],
        "dtype": "float32",
        "shape": [6, 2, 32],
        "num_tokens": 6,
        "bytes": transfer["bytes"],
        "bytes_written": transfer["bytes"],
        "expires": None,
    }
    assert record.items() >= expected.items()
    assert record["created"] <= record["finished"]


def test_an_unknown_save_is_404(service: Service) -> None:
    for wait in (0, 5):
        response = service.client.get("/saves/nothing", params={"wait": wait})
        assert (response.status_code, response.json()["error"]["code"]) == (404, "not_found")


@pytest.mark.parametrize("wait", ["-1", "61", "x", "nan", "inf"])
def test_waiting_is_bounded(service: Service, wait: str) -> None:
    response = service.client.get("/saves/nothing", params={"wait": wait})
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "wait"


def test_waiting_holds_the_answer_until_the_save_ends(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    with ThreadPoolExecutor(1) as pool, PublishingGate(monkeypatch) as gate:
        save_id = transfer_of(service.completed(kv_transfer_params={"wait": False}))["save_id"]
        assert service.record(save_id, wait=0.05)["status"] == "writing"
        waiting = pool.submit(service.record, save_id)
        gate.open.set()
        assert waiting.result()["status"] == "completed"


def test_the_list_is_newest_first_filtered_and_paged(service: Service) -> None:
    made = [
        transfer_of(service.completed(request_id=f"list-{i % 2}", kv_transfer_params={"hidden_states_path": f"list/{i}.st"}))["save_id"]
        for i in range(5)
    ]
    newest_first = made[::-1]

    def listed(**query: Any) -> dict[str, Any]:  # noqa: ANN401 - query values
        response = service.client.get("/saves", params=query)
        assert response.status_code == 200
        page: dict[str, Any] = response.json()
        return page

    def ids(**query: Any) -> list[str]:  # noqa: ANN401 - query values
        return [record["id"] for record in listed(**query)["data"]]

    assert ids(limit=5) == newest_first
    assert ids(request_id="list-1") == newest_first[1::2]
    assert ids(prefix="list/") == ids(prefix=f"{service.root}/list/") == newest_first
    assert ids(prefix="list/3") == [made[3]]
    assert ids(status="failed", prefix="list/") == []
    assert ids(status="completed", limit=2) == newest_first[:2]
    assert ids(after=newest_first[1], limit=2) == newest_first[2:4]
    assert listed(limit=2, prefix="list/")["has_more"] is True
    assert listed(limit=5, prefix="list/")["has_more"] is False


@pytest.mark.parametrize(("query", "status"), [("limit=0", 400), ("limit=x", 400), ("status=done", 400), ("after=nothing", 404)])
def test_bad_queries_are_refused_by_the_name_of_the_field(service: Service, query: str, status: int) -> None:
    response = service.client.get(f"/saves?{query}")
    assert response.status_code == status
    assert response.json()["error"]["param"] == query.split("=")[0]


def test_a_failed_save_fails_the_request_and_leaves_nothing(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    fail_publication(monkeypatch, 1)
    path = service.new_path()
    error = service.refused(507, kv_transfer_params={"hidden_states_path": path})
    assert error["code"] == "no_space"
    record = service.record(error["save_id"])
    assert (record["status"], record["error"]["code"]) == ("failed", "no_space")
    assert [name for name in service.root.rglob("*") if path in name.name] == []


def test_a_file_that_appears_meanwhile_is_a_conflict_and_stays(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    path = service.new_path()
    with ThreadPoolExecutor(1) as pool, PublishingGate(monkeypatch) as gate:
        waiting = pool.submit(service.refused, 409, kv_transfer_params={"hidden_states_path": path})
        gate.reached.wait()
        (service.root / path).write_text("somebody else's")
        gate.open.set()
        error = waiting.result()
    assert error["code"] == "conflict"
    assert (service.root / path).read_text() == "somebody else's"
    assert service.record(error["save_id"])["status"] == "failed"


def test_an_in_flight_path_is_a_conflict_even_for_a_replacement(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    path = service.new_path()
    with PublishingGate(monkeypatch):
        first = transfer_of(service.completed(kv_transfer_params={"hidden_states_path": path, "wait": False}))
        error = service.refused(409, kv_transfer_params={"hidden_states_path": path, "on_conflict": "replace"})
        assert error["code"] == "path_conflict"
    assert service.record(first["save_id"])["status"] == "completed"
    assert not any(record["status"] == "failed" for record in service.client.get("/saves", params={"prefix": path}).json()["data"])


@pytest.mark.parametrize("body", [{"n": 3}, {"prompt": ["a", "b", "c"]}])
def test_if_one_of_several_saves_fails_all_files_are_removed(
    service: Service, monkeypatch: pytest.MonkeyPatch, body: dict[str, Any]
) -> None:
    before = sorted(service.root.rglob("*"))
    fail_publication(monkeypatch, 2)
    error = service.refused(507, **body, request_id="group", kv_transfer_params={})
    service.settled()
    assert sorted(service.root.rglob("*")) == before
    records = service.client.get("/saves", params={"request_id": "group", "limit": 3}).json()["data"]
    assert error["save_id"] in [record["id"] for record in records]
    assert {record["status"] for record in records} <= {"failed", "cancelled"}


def test_no_save_of_a_group_is_completed_before_all_are_published(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    with ThreadPoolExecutor(1) as pool, PublishingGate(monkeypatch) as gate:
        waiting = pool.submit(service.completed, n=3, request_id="held", kv_transfer_params={})
        gate.reached.wait()
        records = service.client.get("/saves", params={"request_id": "held"}).json()["data"]
        assert not any(record["status"] == "completed" for record in records)
        gate.open.set()
        answer = waiting.result()
    assert all(choice["kv_transfer_params"]["status"] == "completed" for choice in answer["choices"])


def test_files_of_a_group_are_taken_back_when_the_client_leaves(services: Services, monkeypatch: pytest.MonkeyPatch) -> None:
    with services.run() as service, PublishingGate(monkeypatch) as gate:
        with service.send(prompt="Hello", n=3, kv_transfer_params={}):
            gate.reached.wait()
        while 'outcome="aborted"} 1.0' not in service.client.get("/metrics").text:
            pass
        gate.open.set()
        records = [service.record(record["id"]) for record in service.client.get("/saves").json()["data"]]
        assert len(records) == 3
        assert {record["status"] for record in records} <= {"failed", "cancelled"}
        assert list(service.root.iterdir()) == []


def test_a_repeated_key_with_the_same_body_computes_nothing(service: Service) -> None:
    body = {"kv_transfer_params": {"idempotency_key": "once"}, "return_token_ids": True, "logprobs": 1}
    first = service.completed(**body)
    computed = service.runtime.services(for_new_work=True).engine.stats().computed_tokens_total
    second = service.completed(**body)
    assert service.runtime.services(for_new_work=True).engine.stats().computed_tokens_total == computed
    assert second["choices"] == first["choices"]
    assert transfer_of(second) == transfer_of(first)
    assert 'strata_requests_total{outcome="replayed"}' in service.client.get("/metrics").text
    assert second["created"] == first["created"]


def test_a_repeated_key_with_another_body_is_a_conflict(service: Service) -> None:
    service.completed(kv_transfer_params={"idempotency_key": "twice"})
    error = service.refused(409, max_tokens=3, kv_transfer_params={"idempotency_key": "twice"})
    assert error["code"] == "idempotency_key_reused"
    assert error["param"] == "kv_transfer_params.idempotency_key"


def test_a_repeated_key_waits_for_the_running_save(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    body = {"kv_transfer_params": {"idempotency_key": "running", "hidden_states_path": service.new_path()}}
    with ThreadPoolExecutor(3) as pool, PublishingGate(monkeypatch) as gate:
        answers = [pool.submit(service.completed, **body) for _ in range(3)]
        gate.reached.wait()
        gate.open.set()
        results = [answer.result() for answer in answers]
    assert len({transfer_of(result)["save_id"] for result in results}) == 1
    assert len({result["choices"][0]["text"] for result in results}) == 1


def test_a_key_of_several_choices_returns_all_of_them(service: Service) -> None:
    body = {"n": 2, "prompt": ["a", "b"], "kv_transfer_params": {"idempotency_key": "group"}}
    assert service.completed(**body)["choices"] == service.completed(**body)["choices"]


def test_a_repeated_key_can_be_streamed(service: Service) -> None:
    body = {"kv_transfer_params": {"idempotency_key": "stream"}, "stream_options": {"include_usage": True}}
    first, second = service.events(**body), service.events(**body)
    texts = ["".join(choice["text"] for event in events for choice in event["choices"]) for events in (first, second)]
    assert texts[0] == texts[1]
    assert second[0]["kv_transfer_params"] == first[-2]["kv_transfer_params"]
    assert second[-1]["usage"]["completion_tokens"] == first[-1]["usage"]["completion_tokens"]


def test_a_repeated_key_of_an_accepted_request_is_accepted_again(service: Service) -> None:
    body = {"kv_transfer_params": {"idempotency_key": "accepted", "wait": "accepted"}}
    first, second = service.complete(**body), service.complete(**body)
    assert first.status_code == second.status_code == 202
    assert transfer_of(first.json())["save_id"] == transfer_of(second.json())["save_id"]
    assert service.record(transfer_of(first.json())["save_id"])["status"] == "completed"


def test_the_key_of_a_failed_save_can_be_used_again(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    fail_publication(monkeypatch, 1)
    body = {"kv_transfer_params": {"idempotency_key": "retry"}}
    service.refused(507, **body)
    assert transfer_of(service.completed(**body))["status"] == "completed"


def test_a_checksum_of_the_file_is_in_the_record(services: Services) -> None:
    with services.run(checksum="sha256") as service:
        transfer = transfer_of(service.completed(kv_transfer_params={}))
        digest = hashlib.sha256(Path(transfer["hidden_states_path"]).read_bytes()).hexdigest()
        assert service.record(transfer["save_id"])["sha256"] == digest


def test_without_lock_files_there_are_none(services: Services) -> None:
    with services.run(lock_files=False) as service:
        service.completed(kv_transfer_params={})
        assert {path.suffix for path in service.root.iterdir()} == {".safetensors"}


def test_clients_see_paths_under_their_own_names(services: Services, tmp_path: Path) -> None:
    with services.run(client_path_map=(("/mnt/states", str(tmp_path / "saves")),)) as service:
        transfer = transfer_of(service.completed(kv_transfer_params={"hidden_states_path": "/mnt/states/x.safetensors"}))
        assert transfer["hidden_states_path"] == "/mnt/states/x.safetensors"
        assert (tmp_path / "saves" / "x.safetensors").exists()
        assert service.record(transfer["save_id"])["hidden_states_path"] == "/mnt/states/x.safetensors"
        listed = service.client.get("/saves", params={"prefix": "/mnt/states/"}).json()["data"]
        assert [record["id"] for record in listed] == [transfer["save_id"]]


def test_records_and_keys_survive_a_restart(services: Services) -> None:
    body = {"kv_transfer_params": {"idempotency_key": "kept"}}
    with services.run() as service:
        first = service.completed(**body)
    with services.run() as service:
        assert service.record(transfer_of(first)["save_id"])["status"] == "completed"
        assert service.completed(**body)["choices"] == first["choices"]


def test_the_umask_decides_the_mode_of_files(services: Services) -> None:
    with services.run(umask=0o027) as service:
        path = Path(transfer_of(service.completed(kv_transfer_params={"hidden_states_path": "d/x.safetensors"}))["hidden_states_path"])
        assert (path.stat().st_mode & 0o777, path.parent.stat().st_mode & 0o777) == (0o640, 0o750)


OUTPUT = {"wait": "accepted", "layers": [1]}


def test_lists_carry_no_outputs_and_a_record_does(service: Service) -> None:
    accepted = service.complete(max_tokens=5, logprobs=5, request_id="listed", kv_transfer_params=OUTPUT).json()
    save_id = accepted["kv_transfer_params"]["save_id"]
    assert len(service.record(save_id)["output"]["token_ids"]) == 5
    (listed,) = service.client.get("/saves", params={"request_id": "listed"}).json()["data"]
    assert listed["id"] == save_id
    assert "output" not in listed


def test_an_output_that_no_record_would_hold_is_refused_before_it_is_computed(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("service.requests.sampling.OUTPUT_BYTES", 10_000)
    error = service.refused(400, max_tokens=100, logprobs=20, kv_transfer_params=OUTPUT)
    assert error["param"] == "logprobs"
    service.completed(max_tokens=100, logprobs=20, kv_transfer_params={"layers": [1]})  # which no record keeps
    assert service.complete(max_tokens=4, logprobs=20, kv_transfer_params=OUTPUT).status_code == 202
