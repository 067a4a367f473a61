"""LangChain's chat model as released, in an environment of its own, with a history in which a tool was called."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from service.cli.launcher import ServiceProcess
from tests.clients.conftest import HERE, ClientPython, client_json

Json = dict[str, Any]


@pytest.fixture(scope="module")
def answer(client_python: ClientPython, service: ServiceProcess, model_id: str) -> Json:
    answered: Json = client_json(client_python("langchain"), HERE / "langchain_calls.py", service.url, model_id)
    return answered


def test_the_client_sends_null_beside_calls_and_parts_in_system_and_tool_messages(answer: Json) -> None:
    contents = {message["role"]: message["content"] for message in answer["sent"]["messages"]}
    assert contents["assistant"] is None
    assert isinstance(contents["system"], list)
    assert isinstance(contents["tool"], list)


def test_the_history_is_read_as_if_all_of_it_were_text(answer: Json, service: ServiceProcess) -> None:
    body = answer["sent"]
    texts = {"system": "Be brief.", "assistant": "", "tool": "Rain\nin Bern."}
    messages = [{**message, "content": texts.get(message["role"], message["content"])} for message in body["messages"]]
    plain = httpx.post(f"{service.url}/v1/chat/completions", json={**body, "messages": messages}, timeout=None, trust_env=False).json()
    assert answer["content"] == plain["choices"][0]["message"]["content"]
    assert answer["content"]
    assert answer["usage"]["input_tokens"] == plain["usage"]["prompt_tokens"]
    assert answer["finish_reason"] == plain["choices"][0]["finish_reason"]


def test_a_stream_is_the_same_answer(answer: Json) -> None:
    assert answer["streamed_content"] == answer["content"]
    assert answer["streamed_usage"]["output_tokens"] == answer["usage"]["output_tokens"]
