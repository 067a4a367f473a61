"""`POST /v1/chat/completions/render`: the tokens of messages without running them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from tests.http.conftest import Service

MESSAGES = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]


def render(service: Service, **body: Any) -> list[int]:  # noqa: ANN401 - any JSON value
    response = service.client.post("/v1/chat/completions/render", json={"messages": MESSAGES} | body)
    assert response.status_code == 200, response.text
    assert set(response.json()) == {"token_ids"}
    ids: list[int] = response.json()["token_ids"]
    return ids


def text(service: Service, ids: list[int]) -> str:
    response = service.client.post("/detokenize", json={"tokens": ids})
    prompt: str = response.json()["prompt"]
    return prompt


def test_the_tokens_are_those_that_a_chat_would_be_run_as(service: Service) -> None:
    for body in ({}, {"add_generation_prompt": False}, {"continue_final_message": True}, {"chat_template_kwargs": {"speaker": "x"}}):
        chat = service.chatted(messages=MESSAGES, **body, max_tokens=0, return_token_ids=True)
        assert render(service, **body) == chat["prompt_token_ids"]


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ({}, "<s>[user]Hi;[assistant]Hello;[assistant]"),
        ({"add_generation_prompt": True}, "<s>[user]Hi;[assistant]Hello;[assistant]"),
        ({"add_generation_prompt": False}, "<s>[user]Hi;[assistant]Hello;"),
        ({"add_generation_prompt": False, "continue_final_message": True}, "<s>[user]Hi;[assistant]Hello"),
        ({"tools": [{"type": "function", "function": {"name": "f"}}], "add_generation_prompt": False, "messages": MESSAGES[:1]},
         '<s><[{"type": "function", "function": {"name": "f"}}]>[user]Hi;'),
    ],
)  # fmt: skip
def test_the_text_of_the_tokens(service: Service, body: dict[str, Any], expected: str) -> None:
    assert text(service, render(service, **body)) == expected


@pytest.mark.parametrize("side", ["left", "right"])
def test_truncation_keeps_one_end(service: Service, side: str) -> None:
    ids = render(service)
    cut = render(service, truncate_prompt_tokens=7, truncation_side=side)
    assert cut == (ids[-7:] if side == "left" else ids[:7])
    assert render(service, truncate_prompt_tokens=1000, truncation_side=side) == ids


def test_a_longer_text_than_the_context_can_be_rendered(service: Service) -> None:
    assert len(render(service, messages=[{"role": "user", "content": "x" * 5000}])) > 5000


def test_fields_of_a_chat_that_do_not_change_the_prompt_are_ignored(service: Service) -> None:
    assert render(service, model="tiny", temperature=7, max_tokens="x", stream=True, tool_choice="required") == render(service)
    assert render(service, guided_json={}, return_token_ids=True, return_anything=True, best_of=3) == render(service)
    assert render(service, reasoning_effort="low") != render(service)


@pytest.mark.parametrize(
    ("body", "status", "param"),
    [
        ({"messages": []}, 400, "messages"),
        ({"messages": [{"role": "nobody", "content": "x"}]}, 400, "messages"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, 400, "messages[0].content[0].type"),
        ({"truncate_prompt_tokens": 0}, 400, "truncate_prompt_tokens"),
        ({"truncation_side": "middle"}, 400, "truncation_side"),
        ({"chat_template": "{{ x }}"}, 400, "chat_template"),
        ({"model": "other"}, 404, "model"),
    ],
)
def test_what_is_wrong_is_refused(service: Service, body: dict[str, Any], status: int, param: str) -> None:
    response = service.client.post("/v1/chat/completions/render", json={"messages": MESSAGES} | body)
    assert (response.status_code, response.json()["error"]["param"]) == (status, param)
