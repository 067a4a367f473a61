"""Who may ask, and whose saves are whose."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import TYPE_CHECKING

import httpx
import pytest

from service.cli.launcher import LaunchError, ServiceProcess
from service.http.auth import hashed_line, new_key

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.http.conftest import Service, Services

BODY = {"prompt": "Hello", "max_tokens": 2, "temperature": 0}
OPEN = ["/health", "/health/live", "/metrics", "/ping", "/version"]
CLOSED = [("POST", "/v1/completions"), ("GET", "/v1/models"), ("GET", "/saves"), ("GET", "/saves/x"), ("DELETE", "/saves/x")]
CLOSED += [
    ("GET", "/saves/x/file"),
    ("GET", "/openapi.json"),
    ("GET", "/nowhere"),
    ("POST", "/health/"),
    ("GET", "/version/../saves"),
    ("GET", "/load"),
]
CLOSED += [("GET", "/v1/models/tiny"), ("GET", "/tokenizer_info")]


class Keys:
    """A keys file and the keys of its owners."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.alice, self.bob = new_key(), new_key()
        self.write(f"{hashed_line(self.alice, 'alice')}\n{hashed_line(self.bob, 'bob')}\n")

    def write(self, text: str) -> None:
        self.path.write_text(text)


@pytest.fixture
def keys(tmp_path: Path) -> Keys:
    return Keys(tmp_path / "keys")


@pytest.fixture
def guarded(services: Services, keys: Keys) -> Iterator[Service]:
    with services.run(api_keys_file=keys.path) as service:
        yield service


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


def save(service: Service, key: str, **params: object) -> str:
    response = service.client.post("/v1/completions", json=BODY | {"kv_transfer_params": params}, headers=bearer(key))
    assert response.status_code == 200, response.text
    save_id: str = response.json()["kv_transfer_params"]["save_id"]
    return save_id


@pytest.mark.parametrize("headers", [{}, bearer("wrong"), bearer("EMPTY"), {"Authorization": "Basic eDp5"}, {"Authorization": "Bearer"}])
def test_without_a_valid_key_everything_but_health_is_401(guarded: Service, headers: dict[str, str]) -> None:
    for method, path in CLOSED:
        response = guarded.client.request(method, path, headers=headers)
        assert response.status_code == 401, (method, path)
        error = response.json()["error"]
        assert (error["type"], error["code"], error["param"]) == ("authentication_error", "invalid_api_key", None)
        assert response.headers["www-authenticate"] == "Bearer"
        assert response.headers["x-request-id"]
    for path in OPEN:
        assert guarded.client.get(path, headers=headers).status_code == 200


@pytest.mark.parametrize("salt", [None, "shared"])
def test_no_owner_learns_of_anothers_prompts_from_the_prefix_cache(guarded: Service, keys: Keys, salt: str | None) -> None:
    """Neither from what is counted as cached nor from what is computed: keys and values, and rows of hidden states."""
    engine = guarded.runtime.services(for_new_work=True).engine

    def asked(key: str, **more: object) -> tuple[int, int, int]:
        """Tokens counted as cached, tokens computed, rows taken from the cache."""
        before = engine.stats()
        body = {"prompt": [7] * 200, "max_tokens": 1, "cache_salt": salt} | more
        answer = guarded.client.post("/v1/completions", json=body, headers=bearer(key)).json()
        guarded.settled()
        after = engine.stats()
        computed, rows = (
            after.computed_tokens_total - before.computed_tokens_total,
            after.state_hit_rows_total - before.state_hit_rows_total,
        )
        return answer["usage"]["prompt_tokens_details"]["cached_tokens"], computed, rows

    only_rows = {"max_tokens": 0, "kv_transfer_params": {}}
    cold = asked(keys.alice)
    assert cold == (0, 200, 0)
    assert asked(keys.alice)[1] < 100
    assert asked(keys.bob) == cold
    first = asked(keys.alice, **only_rows)
    assert asked(keys.alice, **only_rows)[2] > 0
    assert asked(keys.bob, **only_rows)[2] == first[2] == 0
    assert asked(keys.alice, cache_salt="another")[0] == 0


def test_two_keys_of_one_owner_share_cached_prefixes(services: Services, keys: Keys) -> None:
    other = new_key()
    keys.write(f"{hashed_line(keys.alice, 'alice')}\n{hashed_line(other, 'alice')}\n")
    with services.run(api_keys_file=keys.path) as service:
        body = {"prompt": [7] * 200, "max_tokens": 1}
        answers = [service.client.post("/v1/completions", json=body, headers=bearer(key)).json() for key in (keys.alice, other)]
        cached = [answer["usage"]["prompt_tokens_details"]["cached_tokens"] for answer in answers]
        assert cached[0] == 0
        assert cached[1] > 0


def test_two_keys_in_one_request_are_401(guarded: Service, keys: Keys) -> None:
    headers = [("Authorization", f"Bearer {keys.alice}"), ("Authorization", f"Bearer {keys.bob}")]
    assert guarded.client.get("/saves", headers=headers).status_code == 401


def test_without_a_keys_file_any_key_is_ignored(service: Service) -> None:
    for headers in ({}, bearer("EMPTY"), bearer(new_key())):
        assert service.client.get("/saves", headers=headers).status_code == 200
        assert service.client.post("/v1/completions", json=BODY, headers=headers).status_code == 200


def test_a_key_sees_its_own_saves_and_nobody_elses(guarded: Service, keys: Keys) -> None:
    client = guarded.client
    hers, his = save(guarded, keys.alice), save(guarded, keys.bob)
    for key, own, other in ((keys.alice, hers, his), (keys.bob, his, hers)):
        assert [record["id"] for record in client.get("/saves", headers=bearer(key)).json()["data"]] == [own]
        assert client.get(f"/saves/{own}", headers=bearer(key)).status_code == 200
        assert client.get(f"/saves/{own}/file", headers=bearer(key)).status_code == 200
        unknown = client.get("/saves/0123456789abcdef0123456789abcdef", headers=bearer(key))
        for path in (f"/saves/{other}", f"/saves/{other}?wait=30", f"/saves/{other}/file"):
            response = client.get(path, headers=bearer(key))
            assert (response.status_code, response.json()) == (404, unknown.json())


def test_nobody_deletes_anothers_save(guarded: Service, keys: Keys) -> None:
    hers = save(guarded, keys.alice)
    unknown = guarded.client.delete("/saves/0123456789abcdef0123456789abcdef", headers=bearer(keys.bob))
    response = guarded.client.delete(f"/saves/{hers}", headers=bearer(keys.bob))
    assert (response.status_code, response.text) == (unknown.status_code, unknown.text)
    record = guarded.client.get(f"/saves/{hers}", headers=bearer(keys.alice)).json()
    assert Path(record["hidden_states_path"]).exists()
    assert guarded.client.delete(f"/saves/{hers}", headers=bearer(keys.alice)).status_code == 204
    assert not Path(record["hidden_states_path"]).exists()


def test_a_file_that_was_saved_with_another_key_is_not_replaced(guarded: Service, keys: Keys) -> None:
    hers = save(guarded, keys.alice, hidden_states_path="hers.safetensors")
    content = (guarded.root / "hers.safetensors").read_bytes()
    params = {"hidden_states_path": "hers.safetensors", "on_conflict": "replace"}
    refused = guarded.client.post("/v1/completions", json=BODY | {"kv_transfer_params": params}, headers=bearer(keys.bob))
    assert (refused.status_code, refused.json()["error"]["code"]) == (409, "path_conflict")
    assert (guarded.root / "hers.safetensors").read_bytes() == content
    assert guarded.client.get(f"/saves/{hers}/file", headers=bearer(keys.alice)).content == content
    save(guarded, keys.alice, **params)
    (guarded.root / "nobodys.safetensors").write_text("not saved by the service")
    save(guarded, keys.bob, hidden_states_path="nobodys.safetensors", on_conflict="replace")


def test_idempotency_keys_are_each_owners_own(guarded: Service, keys: Keys) -> None:
    hers, his = (save(guarded, key, idempotency_key="same") for key in (keys.alice, keys.bob))
    assert hers != his
    assert save(guarded, keys.alice, idempotency_key="same") == hers
    assert save(guarded, keys.bob, idempotency_key="same") == his


def test_a_file_that_holds_a_plain_key_stops_the_start_with_one_line(services: Services, keys: Keys) -> None:
    keys.write(keys.alice)
    with pytest.raises(LaunchError) as failed, ServiceProcess([*services.flags(), "--api-keys-file", str(keys.path)]):
        pass
    lines = str(failed.value).splitlines()
    assert [line for line in lines if line.startswith(f"strata: --api-keys-file {keys.path}: line 1 ")]
    assert "Traceback" not in str(failed.value)
    assert keys.alice not in str(failed.value)


def test_a_hang_up_signal_reads_the_keys_again(services: Services, keys: Keys) -> None:
    lines: list[str] = []

    def said(text: str) -> bool:
        return any(text in line for line in list(lines))

    with ServiceProcess([*services.flags(), "--api-keys-file", str(keys.path)], on_line=lines.append) as process:

        def status(key: str) -> int:
            return httpx.get(f"{process.url}/saves", headers=bearer(key), trust_env=False, timeout=None).status_code

        def reload(text: str, answer: str) -> None:
            keys.write(text)
            os.kill(process.pid, signal.SIGHUP)
            while not said(answer):
                time.sleep(0.01)
            lines.clear()

        assert (status(keys.alice), status(keys.bob)) == (200, 200)
        reload(hashed_line(keys.bob, "bob"), "1 API keys were read")
        assert (status(keys.alice), status(keys.bob)) == (401, 200)
        reload("nonsense", "the keys stay as they were")
        assert (status(keys.alice), status(keys.bob)) == (401, 200)
        process.stop()


def test_pages_of_an_allowed_origin_may_call_and_read_refusals_and_others_may_not(services: Services, keys: Keys) -> None:
    page = "https://example.org"
    with services.run(api_keys_file=keys.path, cors_origin=(page, "https://two.example:8443")) as service:
        asked = {"Access-Control-Request-Method": "DELETE", "Access-Control-Request-Headers": "authorization,content-type"}
        preflight = service.client.options("/saves/x", headers={"Origin": page, **asked})
        assert preflight.status_code == 200
        assert preflight.headers["access-control-allow-origin"] == page
        assert "authorization" in preflight.headers["access-control-allow-headers"]
        assert "DELETE" in preflight.headers["access-control-allow-methods"]
        assert service.client.options("/saves/x", headers={"Origin": "https://evil.example", **asked}).status_code == 400
        refused = service.client.get("/saves", headers={"Origin": page})
        assert (refused.status_code, refused.headers["access-control-allow-origin"]) == (401, page)
        assert "access-control-allow-origin" not in service.client.get("/health", headers={"Origin": "https://evil.example"}).headers


def test_without_origins_no_page_may_call(service: Service) -> None:
    response = service.client.get("/health", headers={"Origin": "https://example.org"})
    assert "access-control-allow-origin" not in response.headers
