"""Clients that were written for vLLM's hidden-states connector: its requests, its lock files, its way of cleaning up."""

from __future__ import annotations

import fcntl
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from safetensors.torch import load_file

from service.cli.launcher import ServiceProcess

PROMPT = list(range(100, 160))
Json = dict[str, Any]


def load_hidden_states(path: str) -> dict[str, torch.Tensor]:
    """As that connector's clients do it: the lock file is there before the answer is, and whoever gets a shared lock may read."""
    with Path(f"{path}.lock").open("rb") as lock:
        fcntl.flock(lock, fcntl.LOCK_SH)
        return load_file(path)


def cleanup_hidden_states(path: str) -> None:
    Path(path).unlink()
    Path(f"{path}.lock").unlink()


@pytest.fixture(scope="module")
def http(extracting_service: ServiceProcess) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=extracting_service.url, timeout=None, trust_env=False) as client:
        yield client


def posted(http: httpx.Client, route: str = "/v1/completions", **body: Any) -> Json:  # noqa: ANN401 - any JSON value
    response = http.post(route, json=body)
    assert response.status_code == 200, response.text
    answer: Json = response.json()
    return answer


def path_of(answer: Json) -> str:
    path: str = answer["kv_transfer_params"]["hidden_states_path"]
    return path


def test_a_request_that_says_nothing_is_saved_with_the_layers_of_the_service(http: httpx.Client, model_id: str) -> None:
    answer = posted(http, model=model_id, prompt=PROMPT, max_tokens=1)
    loaded = load_hidden_states(path_of(answer))
    assert loaded["hidden_states"].shape == (60, 4, 576)
    assert loaded["token_ids"].tolist() == PROMPT
    cleanup_hidden_states(path_of(answer))


def test_both_files_are_the_clients_to_remove(http: httpx.Client, extracting_directory: Path) -> None:
    answer = posted(http, prompt=PROMPT, max_tokens=1)
    path = Path(path_of(answer))
    assert path.stat().st_uid == os.getuid()
    cleanup_hidden_states(str(path))
    assert list((extracting_directory / "saves").rglob(f"{path.name}*")) == []


def test_a_path_of_the_clients_is_used_as_it_is(http: httpx.Client, extracting_directory: Path) -> None:
    path = str((extracting_directory / "saves").resolve() / "chosen" / "by-client.safetensors")
    answer = posted(http, prompt=PROMPT, max_tokens=1, kv_transfer_params={"hidden_states_path": path})
    assert path_of(answer) == path
    assert len(load_hidden_states(path)["token_ids"]) == 60
    cleanup_hidden_states(path)


@pytest.mark.parametrize("ending", ["", "/"])
def test_a_folder_gets_files_with_names_of_their_own(http: httpx.Client, extracting_directory: Path, ending: str) -> None:
    folder = (extracting_directory / "saves").resolve() / "vllm-hidden-states"
    folder.mkdir(exist_ok=True)
    params = {"hidden_states_path": f"{folder}{ending}", "include_output_tokens": False}
    messages = [{"role": "user", "content": "Hello"}]
    paths = [
        path_of(posted(http, "/v1/chat/completions", messages=messages, max_tokens=1, kv_transfer_params=params)),
        path_of(posted(http, prompt=PROMPT, max_tokens=1, kv_transfer_params=params)),
    ]
    for path in paths:
        assert Path(path).parent == folder
        assert Path(path).suffix == ".safetensors"
        assert load_hidden_states(path)["hidden_states"].shape[1:] == (4, 576)
        cleanup_hidden_states(path)
    assert len(set(paths)) == 2
    assert list(folder.iterdir()) == []


def test_output_tokens_have_rows_but_for_the_last(http: httpx.Client) -> None:
    params = {"include_output_tokens": True}
    answer = posted(http, prompt=PROMPT, max_tokens=5, ignore_eos=True, return_token_ids=True, kv_transfer_params=params)
    loaded = load_hidden_states(path_of(answer))
    choice = answer["choices"][0]
    assert loaded["token_ids"].tolist() == PROMPT + choice["token_ids"][:-1]
    assert len(loaded["hidden_states"]) == 64
    cleanup_hidden_states(path_of(answer))


def test_fields_of_other_kv_transfers_change_nothing(http: httpx.Client) -> None:
    params = {"do_remote_decode": False, "do_remote_prefill": False}
    answer = posted(http, prompt=PROMPT, max_tokens=1, kv_transfer_params=params)
    assert answer["kv_transfer_params"]["layers"] == [2, 15, 27, 30]
    cleanup_hidden_states(path_of(answer))


def test_the_lock_is_held_until_the_file_is_there(http: httpx.Client) -> None:
    """Where the answer comes before the file, as in that connector, a client that waits for the lock never finds less than all of it."""
    prompts = [[number + 100] * 500 for number in range(4)]
    answers = [
        http.post("/v1/completions", json={"prompt": prompt, "max_tokens": 1, "kv_transfer_params": {"wait": "accepted"}})
        for prompt in prompts
    ]
    assert [answer.status_code for answer in answers] == [202] * 4
    paths = [path_of(answer.json()) for answer in answers]
    assert not Path(paths[-1]).exists()
    with Path(f"{paths[-1]}.lock").open("rb") as lock, pytest.raises(BlockingIOError):
        fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    for prompt, path in zip(prompts, paths, strict=True):
        assert load_hidden_states(path)["token_ids"].tolist() == prompt
        cleanup_hidden_states(path)


def test_many_clients_wait_for_their_own_files(http: httpx.Client) -> None:
    loaded: dict[int, int] = {}

    def one(number: int) -> None:
        answer = posted(http, prompt=[200 + number] * (10 + number), max_tokens=1, kv_transfer_params={"wait": False})
        loaded[number] = len(load_hidden_states(path_of(answer))["hidden_states"])
        cleanup_hidden_states(path_of(answer))

    threads = [threading.Thread(target=one, args=(number,)) for number in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert loaded == {number: 10 + number for number in range(16)}


def test_a_second_request_for_a_file_that_stands_is_refused(http: httpx.Client) -> None:
    params: Json = {"hidden_states_path": "twice.safetensors"}
    path = path_of(posted(http, prompt=PROMPT, max_tokens=1, kv_transfer_params=params))
    assert http.post("/v1/completions", json={"prompt": PROMPT, "max_tokens": 1, "kv_transfer_params": params}).status_code == 409
    cleanup_hidden_states(path)
    assert path_of(posted(http, prompt=PROMPT, max_tokens=1, kv_transfer_params=params)) == path
    cleanup_hidden_states(path)
