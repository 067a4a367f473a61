"""OpenAI's Python client as released, in an environment of its own: answers, streams, batches, its exceptions and its retries."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from service.cli.launcher import ServiceProcess
from service.http.auth import hashed_line
from tests.clients.conftest import HERE, ClientPython, client_json, service_arguments

Json = dict[str, Any]
SAVE: Json = {"kv_transfer_params": {"include_output_tokens": True, "dtype": "float32"}}
KEY = "sk-a-key-that-only-these-tests-know"


@dataclass(frozen=True)
class OpenAIClient:
    """Runs a call of `openai_calls.py` with the client's own Python."""

    python: Path
    url: str
    model: str

    def __call__(self, call: str, extra: Json | None = None, *, key: str = "EMPTY") -> Json:
        answer: Json = client_json(self.python, HERE / "openai_calls.py", call, self.url, key, self.model, json.dumps(extra or {}))
        return answer


MakeClient = Callable[[str], OpenAIClient]


@pytest.fixture(scope="module")
def client_of(client_python: ClientPython, model_id: str) -> MakeClient:
    """A client of the service at a URL."""
    python = client_python("openai")
    return lambda url: OpenAIClient(python, url, model_id)


@pytest.fixture(scope="module")
def client(client_of: MakeClient, service: ServiceProcess) -> OpenAIClient:
    return client_of(service.url)


def saved_rows(transfer: Json) -> int:
    """How many rows the file of a save had when the client was answered."""
    assert transfer["status"] == "completed"
    assert transfer["shape_in_file"] == transfer["shape"]
    rows: int = transfer["shape"][0]
    return rows


def test_the_client_is_a_release_of_its_own_environment(client: OpenAIClient) -> None:
    major = int(client("version")["version"].partition(".")[0])
    assert major >= 2
    assert ".venv-clients" in client.python.parts


def test_a_completion_has_its_save_as_a_field(client: OpenAIClient) -> None:
    answer = client("completion", SAVE)
    [choice] = answer["choices"]
    assert choice["text"]
    assert (answer["usage"]["prompt_tokens"], answer["usage"]["completion_tokens"]) == (5, 4)
    assert choice["transfer"] == answer["transfer"]
    assert saved_rows(answer["transfer"]) == 5 + 4 - 1


def test_a_chat_has_its_save_as_a_field(client: OpenAIClient) -> None:
    answer = client("chat", SAVE)
    [choice] = answer["choices"]
    assert choice["role"] == "assistant"
    assert choice["text"]
    assert saved_rows(answer["transfer"]) == answer["usage"]["total_tokens"] - 1


def test_nothing_is_saved_unless_asked_for(client: OpenAIClient) -> None:
    answer = client("completion")
    assert answer["choices"][0]["text"]
    assert answer["transfer"] is None


def test_a_batch_of_prompts_is_a_batch_of_choices_with_a_file_each(client: OpenAIClient) -> None:
    answer = client("batch", SAVE)
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2]
    assert [saved_rows(choice["transfer"]) for choice in answer["choices"]] == [3, 4, 1]
    assert answer["transfer"] is None


def test_several_choices_of_a_prompt_are_counted_by_the_client(client: OpenAIClient) -> None:
    assert [choice["index"] for choice in client("several")["choices"]] == [0, 1, 2, 3]


def test_a_streamed_completion_is_the_whole_one_in_pieces(client: OpenAIClient) -> None:
    answer = client("stream")
    assert answer["usage"] == answer["whole"]["usage"]
    assert answer["text"] == answer["whole"]["choices"][0]["text"]
    assert answer["finish_reason"] == "length"
    assert answer["first_transfer"]["save_id"] == answer["last_transfer"]["save_id"]
    assert saved_rows(answer["last_transfer"]) == 5 + 8 - 1


def test_a_chat_streamed_through_the_clients_helper_is_put_together_again(client: OpenAIClient) -> None:
    answer = client("chat_helper")
    [whole], [final] = answer["whole"], answer["final"]
    assert final["text"]
    assert final["text"] == whole["text"]
    assert final["finish_reason"] == whole["finish_reason"]


def test_the_async_client_runs_many_at_once(client: OpenAIClient) -> None:
    answer = client("many")
    assert [saved_rows(transfer) for transfer in answer["transfers"]] == list(range(1, 17))
    assert answer["text"]


def test_a_stream_can_be_left_early(client: OpenAIClient) -> None:
    answer = client("left_early")
    assert answer["first"] is not None
    assert answer["after"]["choices"]


def test_models_are_listed_and_found(client: OpenAIClient, model_id: str) -> None:
    assert client("models")["models"] == [model_id]


@pytest.mark.parametrize(
    ("exception", "status", "extra", "param", "code"),
    [
        ("BadRequestError", 400, {"kv_transfer_params": {"layers": [31]}}, "kv_transfer_params.layers", "invalid_value"),
        ("BadRequestError", 400, {"kv_transfer_params": {"layer": [3]}}, "kv_transfer_params.layer", "unknown_field"),
        ("PermissionDeniedError", 403, {"kv_transfer_params": {"hidden_states_path": "/etc/states.safetensors"}}, None, None),
        ("NotFoundError", 404, {"model": "another"}, "model", "model_not_found"),
    ],
)
def test_errors_are_the_clients_exceptions(
    client: OpenAIClient, exception: str, status: int, extra: Json, param: str | None, code: str | None
) -> None:
    error = client("refused", extra)
    assert (error["exception"], error["status"]) == (exception, status)
    assert error["message"]
    assert param is None or error["param"] == param
    assert code is None or error["code"] == code
    assert error["request_id"]


def test_a_path_that_is_taken_is_a_conflict(client: OpenAIClient) -> None:
    error = client("twice", {"kv_transfer_params": {"hidden_states_path": "taken-once.safetensors"}})
    assert (error["exception"], error["status"]) == ("ConflictError", 409)


def test_a_service_that_is_not_there_is_a_connection_error(client_of: MakeClient) -> None:
    assert client_of("http://127.0.0.1:9")("models_or_refusal")["exception"] == "APIConnectionError"


@pytest.fixture(scope="module")
def strict(client_of: MakeClient, smollm2_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[OpenAIClient]:
    """A client of a service that takes one key, runs one request, lets one wait, and keeps no more than 1 MiB."""
    directory = tmp_path_factory.mktemp("strict")
    keys = directory / "keys"
    keys.write_text(hashed_line(KEY) + "\n")
    limits = ["--api-keys-file", str(keys), "--max-running", "1", "--max-queued", "1", "--max-saved-bytes", "1MiB"]
    with ServiceProcess(service_arguments(smollm2_folder, directory, *limits), cwd=directory) as running:
        yield client_of(running.url)


@pytest.mark.parametrize("wrong", ["EMPTY", KEY + "x"])
def test_a_wrong_key_is_an_authentication_error(strict: OpenAIClient, wrong: str) -> None:
    error = strict("models_or_refusal", key=wrong)
    assert (error["exception"], error["status"]) == ("AuthenticationError", 401)


def test_the_right_key_is_let_in(strict: OpenAIClient, model_id: str) -> None:
    assert strict("models", key=KEY)["models"] == [model_id]


def test_a_full_disk_is_an_internal_server_error_that_tells_why(strict: OpenAIClient) -> None:
    error = strict("too_large", key=KEY)
    assert (error["exception"], error["status"], error["code"]) == ("InternalServerError", 507, "quota_exceeded")


def test_a_full_queue_is_a_rate_limit_error_and_the_client_comes_back_after_the_time_it_is_told(strict: OpenAIClient) -> None:
    answer = strict("full_queue", key=KEY)
    assert (answer["exception"], answer["status"], answer["retry_after"]) == ("RateLimitError", 429, "1")
    assert answer["answers"][0] == 429
    assert answer["answers"][-1] == 200
    assert answer["answer"]["choices"]
    # Of itself the client would come back after half a second at most.
    assert all(later - earlier >= 1.0 for earlier, later in pairwise(answer["sent"]))
