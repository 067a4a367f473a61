"""Server-sent events of `POST /v1/completions`."""

from __future__ import annotations

import errno
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from openai import OpenAI

from engine.saves import builder

if TYPE_CHECKING:
    from tests.http.conftest import Service

BODY: dict[str, Any] = {"max_tokens": 20, "ignore_eos": True}


def joined(events: list[dict[str, Any]], index: int = 0) -> str:
    return "".join(choice["text"] for event in events for choice in event["choices"] if choice["index"] == index)


def test_the_chunks_joined_are_the_whole_answer(service: Service) -> None:
    whole = service.completed(**BODY, n=2, prompt=["Hello", "World"], logprobs=1, echo=True, return_token_ids=True)
    events = service.events(**BODY, n=2, prompt=["Hello", "World"], logprobs=1, echo=True, return_token_ids=True)
    assert {event["id"] for event in events} == {events[0]["id"]}
    for expected in whole["choices"]:
        parts = [choice for event in events for choice in event["choices"] if choice["index"] == expected["index"]]
        assert "".join(part["text"] for part in parts) == expected["text"]
        assert [token for part in parts for token in part["token_ids"]] == expected["token_ids"]
        assert parts[0]["prompt_token_ids"] == expected["prompt_token_ids"]
        reports = [part["logprobs"] for part in parts if part["logprobs"] is not None]
        for name in ("tokens", "text_offset"):
            assert [item for report in reports for item in report[name]] == expected["logprobs"][name]
        assert [part["finish_reason"] for part in parts] == [None] * (len(parts) - 1) + ["length"]


def test_text_comes_piece_by_piece(service: Service) -> None:
    events = service.events(**BODY)
    assert len(events) > 5
    assert all(event["object"] == "text_completion" for event in events)


def test_usage_comes_last_where_it_is_asked_for(service: Service) -> None:
    events = service.events(**BODY, stream_options={"include_usage": True})
    assert all(event["usage"] is None for event in events[:-1])
    assert events[-1]["choices"] == []
    assert events[-1]["usage"]["completion_tokens"] == 20
    assert all("usage" not in event for event in service.events(**BODY))


def test_usage_comes_with_every_chunk_where_it_is_asked_for(service: Service) -> None:
    events = service.events(**BODY, n=2, stream_options={"include_usage": True, "continuous_usage_stats": True})
    counts = [event["usage"]["completion_tokens"] for event in events]
    assert counts == sorted(counts)
    assert 0 < counts[0] < 40, "an event may have the tokens of several steps"
    assert counts[-1] == 40
    assert all(event["usage"]["prompt_tokens"] == 6 for event in events)
    assert all(event["usage"]["total_tokens"] == 6 + count for event, count in zip(events, counts, strict=True))
    assert events[-1]["choices"] == []
    assert all("usage" not in event for event in service.events(**BODY, stream_options={"continuous_usage_stats": True}))


@pytest.mark.parametrize("field", ["include_usage", "continuous_usage_stats"])
def test_an_error_within_the_options_names_them(service: Service, field: str) -> None:
    error = service.refused(400, stream=True, stream_options={field: "yes"})
    assert error["param"] == f"stream_options.{field}"
    assert f"stream_options.{field}" in error["message"]


def test_chunks_have_the_fields_of_vllm(service: Service) -> None:
    stop = service.completed(**BODY)["choices"][0]["text"][6:9]
    events = service.events(**BODY, stop=stop)
    for event in events:
        assert event["system_fingerprint"] is None
        assert {event["choices"][0][name] for name in ("token_ids", "prompt_token_ids")} == {None}
    assert [event["choices"][0]["stop_reason"] for event in events] == [None] * (len(events) - 1) + [stop]


def test_a_stop_string_is_never_sent_even_in_part(service: Service) -> None:
    whole = service.completed(**BODY)["choices"][0]["text"]
    stop = whole[6:9]
    events = service.events(**BODY, stop=stop)
    assert joined(events) == whole[: whole.index(stop)]
    assert events[-1]["choices"][0]["finish_reason"] == "stop"


def test_the_first_chunk_names_the_file_and_the_last_one_finds_it_complete(service: Service) -> None:
    path = service.new_path()
    events = service.events(**BODY, kv_transfer_params={"hidden_states_path": path, "include_output_tokens": True})
    first, last = events[0]["kv_transfer_params"], events[-1]["kv_transfer_params"]
    assert first["hidden_states_path"] == last["hidden_states_path"] == str(service.root / path)
    assert first["save_id"] == last["save_id"]
    assert first["status"] in ("queued", "running")
    assert last["status"] == "completed"
    assert last["num_tokens"] == 6 + 20 - 1
    assert events[-1]["choices"][0]["finish_reason"] == "length"
    assert all("kv_transfer_params" not in event for event in events[1:-1])
    assert Path(last["hidden_states_path"]).stat().st_size == last["bytes"]


def test_without_waiting_the_last_chunk_says_writing(service: Service) -> None:
    last = service.events(**BODY, kv_transfer_params={"wait": False})[-1]
    assert last["kv_transfer_params"]["status"] in ("writing", "completed")
    assert service.record(last["kv_transfer_params"]["save_id"])["status"] == "completed"


def test_a_bad_request_is_refused_before_the_stream_begins(service: Service) -> None:
    assert service.refused(400, stream=True, temperature=-1)["param"] == "temperature"
    assert service.refused(403, stream=True, kv_transfer_params={"hidden_states_path": "/etc/x"})


def test_a_failed_save_ends_the_stream_with_an_error_event_and_done(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "no space")

    monkeypatch.setattr(builder, "publish_file", full)
    path = service.new_path()
    events = service.events(max_tokens=3, kv_transfer_params={"hidden_states_path": path})
    error = events[-1]["error"]
    assert error["code"] == "no_space"
    assert error["save_id"] == events[0]["kv_transfer_params"]["save_id"]
    assert all(choice["finish_reason"] is None for event in events[:-1] for choice in event["choices"])
    assert not (service.root / path).exists()


def test_a_stream_reports_failures_per_choice(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    publish, calls = builder.publish_file, []

    def full_once(*arguments: Any, **options: Any) -> None:  # noqa: ANN401 - passed on
        calls.append(arguments)
        if len(calls) == 1:
            raise OSError(errno.EROFS, "read-only")
        publish(*arguments, **options)

    monkeypatch.setattr(builder, "publish_file", full_once)
    events = service.events(max_tokens=3, n=2, kv_transfer_params={})
    failed = events[-1]["error"]
    completed = [event for event in events if "choices" in event and event["choices"][0]["finish_reason"] == "length"]
    assert len(completed) == 1
    transfer = completed[0]["kv_transfer_params"]
    assert completed[0]["choices"][0]["index"] == 1 - failed["index"]
    assert Path(transfer["hidden_states_path"]).exists()
    assert service.record(failed["save_id"])["status"] == "failed"


def test_the_openai_client_reads_answers_and_streams(service: Service) -> None:
    with OpenAI(base_url=f"{service.url}/v1", api_key="EMPTY", max_retries=0) as client:
        assert client.models.list().data[0].id == "tiny"
        extra = {"kv_transfer_params": {}, "return_token_ids": True}
        whole = client.completions.create(model="tiny", prompt=[1, 2, 3], max_tokens=5, temperature=0, extra_body=extra)
        assert whole.model_dump()["kv_transfer_params"]["status"] == "completed"
        chunks = list(client.completions.create(model="tiny", prompt=[1, 2, 3], max_tokens=5, temperature=0, extra_body=extra, stream=True))
        assert "".join(chunk.choices[0].text for chunk in chunks) == whole.choices[0].text
        assert chunks[-1].model_dump()["kv_transfer_params"]["status"] == "completed"
