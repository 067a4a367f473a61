"""OpenAI's Python client as released: answers, streams, batches, its exceptions and its retries."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import openai
import pytest
from openai import AsyncOpenAI, OpenAI
from safetensors.torch import load_file

from service.auth import hashed_line
from service.launcher import ServiceProcess
from tests.clients.conftest import service_arguments

PROMPT = "The capital of France is"
MESSAGES: list[Any] = [{"role": "user", "content": "What is the capital of France?"}]
SAVE: dict[str, Any] = {"kv_transfer_params": {"include_output_tokens": True, "dtype": "float32"}}


@pytest.fixture
def client(service: ServiceProcess) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{service.url}/v1", api_key="EMPTY", max_retries=0) as client:
        yield client


def saved_rows(save: dict[str, Any]) -> int:
    """How many rows the file of a save has; it must be there at once."""
    assert save["status"] == "completed"
    states = load_file(save["hidden_states_path"])["hidden_states"]
    assert list(states.shape) == save["shape"]
    return len(states)


def transfer_of(answer: Any) -> dict[str, Any]:  # noqa: ANN401 - the client's objects take fields they don't know
    transfer: dict[str, Any] = answer.kv_transfer_params
    return transfer


def test_a_completion_has_its_save_as_a_field(client: OpenAI, model_id: str) -> None:
    answer = client.completions.create(model=model_id, prompt=PROMPT, max_tokens=4, temperature=0, extra_body=SAVE)
    assert answer.choices[0].text
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (5, 4)
    assert transfer_of(answer.choices[0]) == transfer_of(answer)
    assert saved_rows(transfer_of(answer)) == 5 + 4 - 1


def test_a_chat_has_its_save_as_a_field(client: OpenAI, model_id: str) -> None:
    answer = client.chat.completions.create(model=model_id, messages=MESSAGES, max_completion_tokens=4, temperature=0, extra_body=SAVE)
    assert answer.choices[0].message.role == "assistant"
    assert answer.choices[0].message.content
    assert answer.usage is not None
    assert saved_rows(transfer_of(answer)) == answer.usage.total_tokens - 1


def test_nothing_is_saved_unless_asked_for(client: OpenAI, model_id: str) -> None:
    answer = client.completions.create(model=model_id, prompt=PROMPT, max_tokens=1)
    assert not hasattr(answer, "kv_transfer_params")


def test_a_batch_of_prompts_is_a_batch_of_choices_with_a_file_each(client: OpenAI, model_id: str) -> None:
    prompts = [[504, 3575, 282], [504, 3575, 282, 4649], [504]]
    answer = client.completions.create(model=model_id, prompt=prompts, max_tokens=1, extra_body=SAVE)
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    assert [saved_rows(transfer_of(choice)) for choice in answer.choices] == [3, 4, 1]
    assert not hasattr(answer, "kv_transfer_params")


def test_several_choices_of_a_prompt_are_counted_by_the_client(client: OpenAI, model_id: str) -> None:
    answer = client.completions.create(model=model_id, prompt=[PROMPT, "Hello"], n=2, max_tokens=3, seed=1, temperature=1)
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]


def test_a_streamed_completion_is_the_whole_one_in_pieces(client: OpenAI, model_id: str) -> None:
    whole = client.completions.create(model=model_id, prompt=PROMPT, max_tokens=8, temperature=0)
    events = list(
        client.completions.create(
            model=model_id,
            prompt=PROMPT,
            max_tokens=8,
            temperature=0,
            stream=True,
            stream_options={"include_usage": True},
            extra_body=SAVE,
        )
    )
    *parts, last = events
    assert last.usage == whole.usage
    assert "".join(part.choices[0].text for part in parts) == whole.choices[0].text
    assert parts[-1].choices[0].finish_reason == "length"
    assert transfer_of(parts[0])["save_id"] == transfer_of(parts[-1])["save_id"]
    assert saved_rows(transfer_of(parts[-1])) == 5 + 8 - 1


def test_a_chat_streamed_through_the_clients_helper_is_put_together_again(client: OpenAI, model_id: str) -> None:
    whole = client.chat.completions.create(model=model_id, messages=MESSAGES, max_tokens=8, temperature=0)
    with client.chat.completions.stream(model=model_id, messages=MESSAGES, max_tokens=8, temperature=0, extra_body=SAVE) as stream:
        for _ in stream:
            pass
        final = stream.get_final_completion()
    assert final.choices[0].message.content == whole.choices[0].message.content
    assert final.choices[0].finish_reason == whole.choices[0].finish_reason


def test_the_async_client_runs_many_at_once(service: ServiceProcess, model_id: str) -> None:
    async def one(client: AsyncOpenAI, number: int) -> int:
        answer = await client.completions.create(model=model_id, prompt=[504] * (number + 1), max_tokens=1, extra_body=SAVE)
        return saved_rows(transfer_of(answer))

    async def streamed(client: AsyncOpenAI) -> str:
        events = await client.chat.completions.create(model=model_id, messages=MESSAGES, max_tokens=4, temperature=0, stream=True)
        return "".join([event.choices[0].delta.content or "" async for event in events])

    async def many() -> tuple[list[int], str]:
        async with AsyncOpenAI(base_url=f"{service.url}/v1", api_key="EMPTY") as client:
            *rows, text = await asyncio.gather(*(one(client, number) for number in range(16)), streamed(client))
            return rows, text

    rows, text = asyncio.run(many())
    assert rows == list(range(1, 17))
    assert text


def test_a_stream_can_be_left_early(client: OpenAI, model_id: str) -> None:
    with client.completions.create(model=model_id, prompt=PROMPT, max_tokens=2000, stream=True, extra_body={"ignore_eos": True}) as events:
        assert next(iter(events)).choices[0].text is not None
    assert client.completions.create(model=model_id, prompt=PROMPT, max_tokens=1).choices


def test_models_are_listed_and_found(client: OpenAI, model_id: str) -> None:
    assert [model.id for model in client.models.list()] == [model_id]


@pytest.mark.parametrize(
    ("error", "status", "body", "param", "code"),
    [
        (openai.BadRequestError, 400, {"kv_transfer_params": {"layers": [31]}}, "kv_transfer_params.layers", "invalid_value"),
        (openai.BadRequestError, 400, {"kv_transfer_params": {"layer": [3]}}, "kv_transfer_params.layer", "unknown_field"),
        (openai.PermissionDeniedError, 403, {"kv_transfer_params": {"hidden_states_path": "/etc/states.safetensors"}}, None, None),
        (openai.NotFoundError, 404, {"model": "another"}, "model", "model_not_found"),
    ],
)
def test_errors_are_the_clients_exceptions(
    client: OpenAI,
    model_id: str,
    error: type[openai.APIStatusError],
    status: int,
    body: dict[str, Any],
    param: str | None,
    code: str | None,
) -> None:
    with pytest.raises(error) as caught:
        client.completions.create(model=model_id, prompt=PROMPT, max_tokens=1, extra_body=body)
    assert caught.value.status_code == status
    assert caught.value.message
    assert param is None or caught.value.param == param
    assert code is None or caught.value.code == code
    assert caught.value.request_id is not None


def test_a_path_that_is_taken_is_a_conflict(client: OpenAI, model_id: str) -> None:
    body = {"kv_transfer_params": {"hidden_states_path": "taken-once.safetensors"}}
    client.completions.create(model=model_id, prompt=PROMPT, max_tokens=1, extra_body=body)
    with pytest.raises(openai.ConflictError) as caught:
        client.completions.create(model=model_id, prompt=PROMPT, max_tokens=1, extra_body=body)
    assert caught.value.status_code == 409


def test_a_service_that_is_not_there_is_a_connection_error() -> None:
    with OpenAI(base_url="http://127.0.0.1:9/v1", api_key="EMPTY", max_retries=0) as client, pytest.raises(openai.APIConnectionError):
        client.models.list()


@pytest.fixture(scope="module")
def strict(smollm2_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[ServiceProcess, str]]:
    """A service that takes one key, runs one request, lets one wait, and keeps no more than 1 MiB; and the key."""
    directory = tmp_path_factory.mktemp("strict")
    keys = directory / "keys"
    key = "sk-a-key-that-only-these-tests-know"
    keys.write_text(hashed_line(key) + "\n")
    limits = ["--api-keys-file", str(keys), "--max-running", "1", "--max-queued", "1", "--max-saved-bytes", "1MiB"]
    with ServiceProcess(service_arguments(smollm2_folder, directory, *limits), cwd=directory) as running:
        yield running, key


def test_a_missing_or_wrong_key_is_an_authentication_error(strict: tuple[ServiceProcess, str], model_id: str) -> None:
    service, key = strict
    for wrong in ("EMPTY", key + "x"):
        with OpenAI(base_url=f"{service.url}/v1", api_key=wrong) as client, pytest.raises(openai.AuthenticationError):
            client.models.list()
    with OpenAI(base_url=f"{service.url}/v1", api_key=key) as client:
        assert [model.id for model in client.models.list()] == [model_id]


def test_a_full_disk_is_an_internal_server_error_that_tells_why(strict: tuple[ServiceProcess, str], model_id: str) -> None:
    service, key = strict
    with OpenAI(base_url=f"{service.url}/v1", api_key=key, max_retries=0) as client, pytest.raises(openai.InternalServerError) as caught:
        client.completions.create(model=model_id, prompt=[504] * 1000, max_tokens=1, extra_body=SAVE)
    assert caught.value.status_code == 507
    assert caught.value.code == "quota_exceeded"


class Occupied:
    """Holds the one running and the one waiting place of the strict service until it is told to leave them."""

    def __init__(self, client: OpenAI, model_id: str) -> None:
        self._streams = [self._start(client, model_id)]
        next(iter(self._streams[0]))  # It runs.
        self._waiting = self._start(client, model_id)

    @staticmethod
    def _start(client: OpenAI, model_id: str) -> Any:  # noqa: ANN401 - the client's stream
        return client.completions.create(
            model=model_id, prompt=PROMPT, max_tokens=4000, stream=True, extra_body={"ignore_eos": True}, temperature=0
        )

    def leave(self) -> None:
        for stream in [*self._streams, self._waiting]:
            stream.close()


def test_a_full_queue_is_a_rate_limit_error_and_the_client_comes_back_after_the_time_it_is_told(
    strict: tuple[ServiceProcess, str], model_id: str
) -> None:
    service, key = strict
    with OpenAI(base_url=f"{service.url}/v1", api_key=key, max_retries=0) as client:
        occupied = Occupied(client, model_id)
        try:
            with pytest.raises(openai.RateLimitError) as caught:
                client.completions.create(model=model_id, prompt=PROMPT, max_tokens=1)
            assert caught.value.response.headers["retry-after"] == "1"
            sent, answers = retried(client, model_id, occupied)
        finally:
            occupied.leave()
    assert answers[0] == 429
    assert answers[-1] == 200
    # Of itself the client would come back after half a second at most.
    assert all(later - earlier >= 1.0 for earlier, later in pairwise(sent))


def retried(client: OpenAI, model_id: str, occupied: Occupied) -> tuple[list[float], list[int]]:
    """Sends a request that is refused, makes room, and lets the client retry: when it sent what, and what it got."""
    sent: list[float] = []
    answers: list[int] = []

    def on_response(response: Any) -> None:  # noqa: ANN401 - of the HTTP library that the client uses
        answers.append(response.status_code)
        if response.status_code == 429:
            occupied.leave()

    hooks: dict[str, Any] = {"request": [lambda request: sent.append(time.monotonic())], "response": [on_response]}
    with openai.DefaultHttpxClient(event_hooks=hooks) as http:
        patient = client.with_options(max_retries=4, http_client=http)
        assert patient.completions.create(model=model_id, prompt=PROMPT, max_tokens=1).choices
    return sent, answers
