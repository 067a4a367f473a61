"""Models, health, version, metrics, and the description of the interface."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from openai import OpenAI
from prometheus_client.parser import text_string_to_metric_families

from engine.layers import LAYER_CONVENTION
from service.cli.openapi import openapi_yaml
from service.schemas.answers import ChatAnswer, CompletionAnswer, ErrorAnswer, ModelList, SaveAnswer, SaveList
from tests.http.gate import LateStart

if TYPE_CHECKING:
    from tests.http.conftest import Service, Services


def metrics_of(service: Service) -> dict[str, float]:
    text = service.client.get("/metrics").text
    samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
    return {sample.name + "".join(f"{{{key}={value}}}" for key, value in sorted(sample.labels.items())): sample.value for sample in samples}


def test_the_model_says_what_a_client_needs_to_ask_for_layers(service: Service) -> None:
    listed = service.client.get("/v1/models").json()
    card = listed["data"][0]
    expected = {
        "id": "tiny",
        "object": "model",
        "max_model_len": 256,
        "num_hidden_layers": 6,
        "hidden_size": 32,
        "default_layers": [2, 3, 6],
        "layer_convention": LAYER_CONVENTION,
        "dtype": "float32",
    }
    assert (listed["object"], len(listed["data"])) == ("list", 1)
    assert card.items() >= expected.items()


def test_the_served_name_is_the_model_as_given_where_no_other_is_set(services: Services) -> None:
    with services.run(served_model_name=None) as service:
        name = service.client.get("/v1/models").json()["data"][0]["id"]
        assert name == services.settings().model
        service.completed(model=name)


def test_layers_of_the_settings_are_the_default(services: Services) -> None:
    with services.run(layers=(-1, 0, "norm"), max_model_len=64) as service:
        card = service.client.get("/v1/models").json()["data"][0]
        assert (card["default_layers"], card["max_model_len"]) == ([0, 6, "norm"], 64)
        service.refused(400, prompt=[1] * 65, max_tokens=1)


def test_the_start_says_how_the_memory_is_shared_out(services: Services, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO), services.run(block_size=16, state_page_size=64, max_batch_tokens=128, native_kernels="off"):
        lines = [record.getMessage() for record in caplog.records]
    rows = 16 * 2**20 // (64 * 32 * 4) * 64
    assert f"the KV cache holds 4096 tokens in blocks of 16, the state cache {rows} rows in pages of 64, a step at most 128 tokens" in lines
    [grown] = [line for line in lines if line.startswith("attention's own buffers can grow to ")]
    assert grown.endswith(" MiB")
    assert "CUDA graphs: attention sdpa on cpu has none" in lines


def test_health_and_version_answer(service: Service) -> None:
    assert service.client.get("/health").json() == {"status": "ok"}
    assert service.client.get("/health/live").status_code == 200
    assert service.client.get("/version").json()["version"]


@pytest.mark.parametrize("path", ["/health", "/health/live", "/ping"])
def test_health_can_be_asked_for_without_a_body(service: Service, path: str) -> None:
    response = service.client.head(path)
    assert (response.status_code, response.content) == (200, b"")
    assert response.headers["content-length"] == str(len(service.client.get(path).content))


def test_ping_is_another_name_of_health(service: Service) -> None:
    for method in ("GET", "POST"):
        response = service.client.request(method, "/ping")
        assert (response.status_code, response.json()) == (200, {"status": "ok"})


def test_one_model_can_be_asked_for_by_its_id(services: Services) -> None:
    with services.run(served_model_name="owner/tiny model") as service:
        [card] = service.client.get("/v1/models").json()["data"]
        for path in ("/v1/models/owner/tiny%20model", "/v1/models/owner%2Ftiny%20model"):
            assert service.client.get(path).json() == card
        with OpenAI(base_url=f"{service.url}/v1", api_key="EMPTY", max_retries=0) as client:
            assert client.models.retrieve("owner/tiny model").id == "owner/tiny model"
        error = service.client.get("/v1/models/another").json()["error"]
        assert (error["code"], error["param"]) == ("model_not_found", "model")


@pytest.mark.usefixtures("slow_steps")
def test_the_load_is_what_the_engine_has_to_do(service: Service) -> None:
    service.settled()
    assert service.client.get("/load").json() == {"server_load": 0}
    accepted = service.complete(max_tokens=200, ignore_eos=True, n=3, kv_transfer_params={"wait": "accepted"}).json()
    assert service.client.get("/load").json() == {"server_load": 3}
    for choice in accepted["choices"]:
        service.client.delete(f"/saves/{choice['kv_transfer_params']['save_id']}")
    service.settled()
    assert service.client.get("/load").json() == {"server_load": 0}


def test_the_tokenizer_says_what_it_is(service: Service) -> None:
    info = service.client.get("/tokenizer_info").json()
    assert info.pop("chat_template").startswith("{{ bos_token }}")
    assert info == {"tokenizer_class": None, "bos_token": "<s>", "eos_token": "</s>"}


def test_before_the_model_is_loaded_health_is_503_and_requests_are_refused(services: Services) -> None:
    start = LateStart()
    with services.run(start.engine, until_ready=False) as service, start:
        health = service.client.get("/health")
        assert (health.status_code, health.json()) == (503, {"status": "starting"})
        assert service.client.get("/health/live").status_code == 200
        assert service.client.head("/health").status_code == service.client.post("/ping").status_code == 503
        assert service.client.get("/load").status_code == service.client.get("/tokenizer_info").status_code == 503
        assert service.refused(503)["code"] == "starting"
        assert service.client.get("/v1/models").status_code == 503
        assert service.client.get("/metrics").status_code == 200
        start.open.set()
        while service.client.get("/health").status_code != 200:
            pass
        service.completed()


def test_metrics_count_requests_tokens_and_saves(services: Services) -> None:
    with services.run() as service:
        service.completed(prompt=[5] * 100, max_tokens=6, ignore_eos=True, kv_transfer_params={"include_output_tokens": True})
        service.completed(prompt=[5] * 100, max_tokens=6, ignore_eos=True, kv_transfer_params={})
        service.refused(400, prompt=[10**6])
        service.refused(400, temperature=-1)
        service.settled()
        found = metrics_of(service)
    assert found["strata_requests_total{outcome=completed}"] == 2
    assert found["strata_requests_total{outcome=rejected}"] == 2
    assert found["strata_prompt_tokens_total"] == 200
    assert found["strata_generated_tokens_total"] == 12
    assert found["strata_saves_total{outcome=completed}"] == 2
    assert found["strata_saves_total{outcome=failed}"] == 0
    for histogram in ("time_to_first_token", "time_per_output_token", "request_duration", "save_latency"):
        assert found[f"strata_{histogram}_seconds_count"] == 2
    assert found["strata_batch_tokens_count"] >= 12
    assert found["strata_batch_tokens_sum"] == found["strata_computed_tokens_total"]
    assert 0 < found["strata_prefix_cache_hit_tokens_total"] <= found["strata_prefix_cache_queried_tokens_total"]
    assert found["strata_state_cache_hit_rows_total"] > 0
    assert found["strata_written_bytes_total"] > 2 * 100 * 3 * 32 * 4
    assert found["strata_write_seconds_total"] > 0
    assert found["strata_requests_running"] == found["strata_requests_waiting"] == found["strata_writer_queue_depth"] == 0
    assert found["strata_preemptions_total"] == 0
    for pool in ("kv_blocks", "state_pages"):
        assert found[f"strata_{pool}{{state=free}}"] > 0
        assert found[f"strata_{pool}{{state=referenced}}"] == 0


def test_answers_are_as_they_are_documented(service: Service) -> None:
    answer = service.completed(logprobs=1, prompt_logprobs=1, return_token_ids=True, kv_transfer_params={})
    CompletionAnswer.model_validate(answer)
    CompletionAnswer.model_validate(service.completed())
    ChatAnswer.model_validate(service.chatted(logprobs=True, prompt_logprobs=1, return_token_ids=True))
    ChatAnswer.model_validate(service.chat(kv_transfer_params={"wait": "accepted"}).json())
    accepted = service.complete(kv_transfer_params={"wait": "accepted"}).json()
    CompletionAnswer.model_validate(accepted)
    SaveAnswer.model_validate(service.record(accepted["kv_transfer_params"]["save_id"]))
    SaveList.model_validate(service.client.get("/saves").json())
    ModelList.model_validate(service.client.get("/v1/models").json())
    ErrorAnswer.model_validate(service.complete(n=0).json())
    for event in service.events(kv_transfer_params={}):
        CompletionAnswer.model_validate(event)


@pytest.fixture(scope="module")
def written() -> str:
    return openapi_yaml()


def test_openapi_yaml_is_what_the_code_says(written: str) -> None:
    stored = (Path(__file__).parents[2] / "openapi.yaml").read_text(encoding="utf-8")
    assert stored == written, "run `python -m service openapi > openapi.yaml`"


@pytest.mark.parametrize(
    "path",
    [
        "/v1/completions",
        "/saves",
        "/saves/{save_id}",
        "/saves/{save_id}/file",
        "/v1/models",
        "/v1/models/{model_id}",
        "/load",
        "/ping",
        "/tokenizer_info",
        "/health",
        "/health/live",
        "/version",
        "/metrics",
    ],
)
def test_every_route_is_documented(path: str, written: str) -> None:
    assert f"  {path}:\n" in written
