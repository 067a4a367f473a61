"""A repeated idempotency key reads the work of the first request: all of it, and nothing is computed or removed for it."""

from __future__ import annotations

import errno
import json
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from engine.saves import builder
from engine.saves.retry import RetryPolicy
from service.saves.targets import Targets
from tests.http.gate import Gate

if TYPE_CHECKING:
    from concurrent.futures import Future

    import httpx

    from service.saves.targets import ClaimedTarget
    from tests.http.conftest import Service, Services

LONG: dict[str, Any] = {"prompt": "Hello", "max_tokens": 50, "ignore_eos": True, "temperature": 0}
Json = dict[str, Any]


def keyed(key: str, **params: Any) -> Json:  # noqa: ANN401 - fields of kv_transfer_params
    return {"kv_transfer_params": {"idempotency_key": key, "include_output_tokens": True} | params}


def fail_publication(monkeypatch: pytest.MonkeyPatch, *failing: int) -> None:
    """The disk is full for good when those files, counted from 1, are to get their names."""
    publish, numbers = builder.publish_file, count(1)

    def full(*arguments: Any, **options: Any) -> None:  # noqa: ANN401 - passed on
        if next(numbers) in failing:
            raise OSError(errno.ENOSPC, "no space")
        publish(*arguments, **options)

    monkeypatch.setattr(builder, "publish_file", full)
    monkeypatch.setattr(builder, "RetryPolicy", lambda seconds: RetryPolicy(0.0))


def computed_tokens(service: Service) -> int:
    return service.runtime.services(for_new_work=True).engine.stats().computed_tokens_total


def num_replays(service: Service) -> int:
    lines = service.client.get("/metrics").text.splitlines()
    return int(float(next(line for line in lines if line.startswith('strata_requests_total{outcome="replayed"}')).split()[1]))


def files(service: Service) -> set[Path]:
    return {path for path in service.root.rglob("*") if path.suffix != ".lock" and path.is_file()}


def until_replayed(service: Service, times: int) -> None:
    while num_replays(service) < times:
        pass


def stream_events(answer: httpx.Response) -> list[Json]:
    assert answer.status_code == 200, answer.text
    lines = [line.removeprefix("data: ") for line in answer.text.split("\n\n") if line]
    return [json.loads(line) for line in lines if line != "[DONE]" and not line.startswith(":")]


# Readers of work that is under way.


@pytest.mark.parametrize("first", [{}, {"stream": True}, {"n": 2}, {"stream": True, "n": 2}], ids=str)
def test_a_repeat_goes_on_when_the_first_attempt_leaves(services: Services, slow_steps: None, first: Json) -> None:
    with services.run() as service, ThreadPoolExecutor(1) as pool:
        body = LONG | first | keyed("shared")
        with service.send(**body) as connection:
            while not service.client.get("/saves").json()["data"]:
                pass
            repeat: Future[httpx.Response] = pool.submit(service.complete, **body)
            until_replayed(service, 1)
            if "stream" in first:
                connection.recv(300)
        answer = repeat.result()
        assert answer.status_code == 200, answer.text
        records = [service.record(record["id"]) for record in service.client.get("/saves").json()["data"]]
        assert [record["status"] for record in records] == ["completed"] * first.get("n", 1)
        records = [service.record(record["id"]) for record in records]
        assert [len(record["output"]["token_ids"]) for record in records] == [50] * len(records)
        texts = {record["output"]["text"] for record in records}
        assert all(json.dumps(text, ensure_ascii=False)[1:-1] in answer.text for text in texts)
        service.settled()
        assert service.runtime.services(for_new_work=True).events.attached == 0


def test_the_work_ends_when_nobody_is_left_who_waits_for_it(services: Services, slow_steps: None) -> None:
    with services.run() as service:
        body = LONG | keyed("left alone")
        with service.send(**body):
            while not service.client.get("/saves").json()["data"]:
                pass
            with service.send(**body):
                until_replayed(service, 1)
        save_id = service.client.get("/saves").json()["data"][0]["id"]
        assert service.record(save_id)["status"] == "cancelled"
        service.settled()
        assert files(service) == set()
        assert computed_tokens(service) < 50


def test_a_repeat_that_leaves_does_not_end_the_work_of_the_first(services: Services, slow_steps: None) -> None:
    with services.run() as service, ThreadPoolExecutor(1) as pool:
        body = LONG | keyed("mine")
        first = pool.submit(service.completed, **body)
        while not service.client.get("/saves").json()["data"]:
            pass
        with service.send(**body):
            until_replayed(service, 1)
        assert first.result()["kv_transfer_params"]["status"] == "completed"


def test_a_key_whose_work_is_just_being_aborted_is_computed_anew(services: Services, slow_steps: None) -> None:
    with services.run() as service:
        body = LONG | keyed("again")
        for _ in range(5):
            with service.send(**body):
                while not [record for record in service.client.get("/saves").json()["data"] if record["status"] in ("queued", "running")]:
                    pass
        assert service.completed(**body)["kv_transfer_params"]["status"] == "completed"


def test_a_key_whose_disk_hangs_holds_up_no_other(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    claim = Targets.claim

    def claim_late(targets: Targets, path: str | None, *arguments: Any, **options: Any) -> ClaimedTarget:  # noqa: ANN401 - passed on
        if path == "hangs.safetensors":
            gate.pass_through()
        return claim(targets, path, *arguments, **options)

    monkeypatch.setattr(Targets, "claim", claim_late)
    with ThreadPoolExecutor(1) as pool, Gate() as gate:
        hanging = pool.submit(service.completed, **keyed("hangs", hidden_states_path="hangs.safetensors"))
        gate.reached.wait()
        service.completed(**keyed("goes on"))
        assert not hanging.done()
        gate.open.set()
        hanging.result()


# Parts.


@pytest.mark.parametrize("mode", [{}, {"stream": True}], ids=str)
def test_a_key_of_which_a_choice_was_deleted_is_gone_and_the_rest_stays(service: Service, mode: Json) -> None:
    body = {"n": 2} | keyed(f"deleted {mode}")
    assert service.complete(**body, **mode).status_code == 200
    made = service.client.get("/saves", params={"limit": 2}).json()["data"]
    assert service.client.delete(f"/saves/{made[0]['id']}").status_code == 204
    before = computed_tokens(service)
    error = service.refused(410, **body, **mode)
    assert (error["code"], error["param"]) == ("gone", "kv_transfer_params.idempotency_key")
    assert Path(made[1]["hidden_states_path"]).exists()
    assert service.record(made[1]["id"])["status"] == "completed"
    assert computed_tokens(service) == before


def test_a_key_is_free_once_all_of_its_choices_were_deleted(service: Service) -> None:
    body = {"n": 2} | keyed("freed")
    for choice in service.completed(**body)["choices"]:
        service.client.delete(f"/saves/{choice['kv_transfer_params']['save_id']}")
    assert len(service.completed(**body, max_tokens=2)["choices"]) == 2


def test_a_repeated_stream_reports_each_choice_as_it_is(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    fail_publication(monkeypatch, 2)
    body = {"n": 2, "stream": True} | keyed("streamed parts")
    events = stream_events(service.complete(**body))
    failed = next(event["error"] for event in events if "error" in event)
    kept, before = files(service), computed_tokens(service)
    repeated = stream_events(service.complete(**body))
    assert (files(service), computed_tokens(service)) == (kept, before)
    transfers = [choice["kv_transfer_params"] for event in repeated for choice in event.get("choices", [])]
    assert [transfer["status"] for transfer in transfers] == ["completed"]
    assert Path(transfers[0]["hidden_states_path"]).exists()
    again = next(event["error"] for event in repeated if "error" in event)
    assert (again["code"], again["save_id"], again["index"]) == ("no_space", failed["save_id"], failed["index"])


def test_a_repeated_accepted_request_reports_each_choice_as_it_is(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    fail_publication(monkeypatch, 2)
    body = {"n": 2} | keyed("accepted parts", wait="accepted")
    first = service.complete(**body).json()
    ended = {service.record(choice["kv_transfer_params"]["save_id"])["status"] for choice in first["choices"]}
    assert ended == {"completed", "failed"}
    kept, before = files(service), computed_tokens(service)
    repeated = service.complete(**body)
    assert repeated.status_code == 202
    transfers = [choice["kv_transfer_params"] for choice in repeated.json()["choices"]]
    assert {transfer["status"] for transfer in transfers} == {"completed", "failed"}
    assert [transfer["save_id"] for transfer in transfers] == [choice["kv_transfer_params"]["save_id"] for choice in first["choices"]]
    assert (files(service), computed_tokens(service)) == (kept, before)


def test_a_cancelled_key_with_another_body_is_a_conflict(services: Services, slow_steps: None) -> None:
    with services.run() as service:
        accepted = service.complete(**LONG, **keyed("cancelled", wait="accepted")).json()["kv_transfer_params"]
        service.client.delete(f"/saves/{accepted['save_id']}")
        assert service.record(accepted["save_id"])["status"] == "cancelled"
        error = service.refused(409, **LONG | {"max_tokens": 3}, **keyed("cancelled", wait="accepted"))
        assert error["code"] == "idempotency_key_reused"
        again = service.complete(**LONG, **keyed("cancelled", wait="accepted"))
        assert again.status_code == 202
        assert again.json()["kv_transfer_params"]["save_id"] != accepted["save_id"]


# Files that are not there any more.


def test_a_key_whose_file_is_gone_is_computed_anew(service: Service) -> None:
    first = service.completed(**keyed("gone file"))["kv_transfer_params"]
    Path(first["hidden_states_path"]).unlink()
    second = service.completed(**keyed("gone file"))["kv_transfer_params"]
    assert second["status"] == "completed"
    assert Path(second["hidden_states_path"]).exists()


def test_a_key_of_which_one_file_is_gone_does_not_say_completed(service: Service) -> None:
    body = {"n": 2} | keyed("one file gone")
    transfers = [choice["kv_transfer_params"] for choice in service.completed(**body)["choices"]]
    Path(transfers[0]["hidden_states_path"]).unlink()
    assert service.refused(410, **body)["code"] == "gone"
    assert Path(transfers[1]["hidden_states_path"]).exists()


def test_of_an_accepted_request_the_choice_whose_file_is_gone_does_not_say_completed(service: Service) -> None:
    body = {"n": 2} | keyed("accepted file gone", wait="accepted")
    transfers = [choice["kv_transfer_params"] for choice in service.complete(**body).json()["choices"]]
    for transfer in transfers:
        assert service.record(transfer["save_id"])["status"] == "completed"
    Path(transfers[0]["hidden_states_path"]).unlink()
    repeated = [choice["kv_transfer_params"] for choice in service.complete(**body).json()["choices"]]
    assert [transfer["status"] for transfer in repeated] == ["expired", "completed"]
    assert "url" not in repeated[0]


@pytest.mark.parametrize("body", [{"prompt": "Hello" * 40}, {"prompt": ["a" * 90, "bc" * 80], "n": 2}], ids=("one", "lists"))
def test_a_repeat_has_the_usage_of_the_first_answer(service: Service, body: Json) -> None:
    service.completed(**body, kv_transfer_params={})
    key = f"usage {body['prompt'][0]}"
    first = service.completed(**body, **keyed(key))
    assert first["usage"]["prompt_tokens_details"]["cached_tokens"] > 0
    assert service.completed(**body, **keyed(key))["usage"] == first["usage"]


# Without waiting.


def test_without_waiting_no_choice_is_completed_before_all_are_published(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    fail_publication(monkeypatch, 2)
    before = files(service)
    body = {"n": 2, "kv_transfer_params": {"wait": False}}
    answer = service.complete(**body)
    if answer.status_code == 200:
        transfers = [choice["kv_transfer_params"] for choice in answer.json()["choices"]]
        assert not [transfer for transfer in transfers if transfer["status"] == "completed"]
        assert {service.record(transfer["save_id"])["status"] for transfer in transfers} <= {"failed", "cancelled"}
    else:
        assert answer.status_code == 507
    service.settled()
    assert files(service) == before
