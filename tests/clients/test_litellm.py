"""litellm as released, in an environment of its own: chats with a tool that was called, streams, completions, its exceptions."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from service.cli.launcher import ServiceProcess
from tests.clients.conftest import HERE, ClientPython, client_json

Json = dict[str, Any]


@pytest.fixture(scope="module")
def answer(client_python: ClientPython, service: ServiceProcess, model_id: str) -> Json:
    # It would download a list of prices otherwise.
    settings = {"LITELLM_LOCAL_MODEL_COST_MAP": "True"}
    answered: Json = client_json(client_python("litellm"), HERE / "litellm_calls.py", service.url, model_id, settings=settings)
    return answered


def test_a_chat_with_a_tool_that_was_called_is_answered(answer: Json) -> None:
    assert answer["content"]
    assert answer["usage"]["total_tokens"] == answer["usage"]["prompt_tokens"] + answer["usage"]["completion_tokens"]


def test_a_stream_is_the_same_answer(answer: Json) -> None:
    assert answer["streamed_content"] == answer["content"]


def test_a_completion_is_answered(answer: Json) -> None:
    assert answer["text"].startswith(" Paris")


def test_a_chat_has_its_save_as_a_field(answer: Json) -> None:
    assert answer["transfer"]["layers"] == [2]
    assert Path(answer["transfer"]["hidden_states_path"]).is_file()


def test_another_model_is_a_not_found_error(answer: Json) -> None:
    assert answer["refused"] == 404
