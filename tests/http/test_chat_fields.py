"""`POST /v1/chat/completions`: the prompt that messages make, the form of the answer, and what is refused."""

from __future__ import annotations

import json
import shutil
import time
from typing import TYPE_CHECKING, Any

import pytest
from openai import BadRequestError, OpenAI
from safetensors import safe_open

if TYPE_CHECKING:
    from pathlib import Path

    from tests.http.conftest import Service, Services

BOS = 256
MAX_MODEL_LEN = 256
HI = [{"role": "user", "content": "Hi"}]
PROMPT = [BOS, *b"[user]Hi;[assistant]"]  # only its length is used: the vocabulary has bytes in another order
LAYERS = [1, 6]
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}


NULL_TOOL = {**TOOL, "function": {"name": "f", "description": None, "parameters": {"type": "object", "properties": {}}, "strict": None}}


def part(text: str) -> dict[str, str]:
    return {"type": "text", "text": text}


def said(content: object, **fields: object) -> dict[str, object]:
    return {"role": "assistant", "content": content, **fields}


def byte_ids(service: Service, text: str) -> list[int]:
    """The model's tokens of a text, one per byte."""
    response = service.client.post("/tokenize", json={"prompt": text, "add_special_tokens": False})
    ids: list[int] = response.json()["tokens"]
    assert len(ids) == len(text.encode())
    return ids


def prompt_ids(service: Service, text: str) -> list[int]:
    return [BOS, *byte_ids(service, text)]


def refused(service: Service, status: int = 400, **body: Any) -> dict[str, Any]:  # noqa: ANN401 - any JSON value
    response = service.chat(**body)
    assert response.status_code == status, response.text
    error: dict[str, Any] = response.json()["error"]
    return error


def test_the_answer_is_an_openai_chat_completion(service: Service) -> None:
    answer = service.chatted()
    of_vllm = {"system_fingerprint", "prompt_token_ids", "prompt_logprobs"}
    assert set(answer) == {"id", "object", "created", "model", "choices", "usage"} | of_vllm
    assert {answer[name] for name in of_vllm} == {None}
    assert answer["object"] == "chat.completion"
    assert answer["id"].startswith("chatcmpl-")
    [choice] = answer["choices"]
    assert set(choice) == {"index", "message", "logprobs", "finish_reason", "stop_reason", "token_ids"}
    assert (choice["stop_reason"], choice["token_ids"]) == (None, None)
    assert set(choice["message"]) == {"role", "content"}
    assert (choice["message"]["role"], choice["finish_reason"], choice["logprobs"]) == ("assistant", "length", None)


def test_messages_are_run_as_the_template_writes_them(service: Service) -> None:
    chat = service.chatted(return_token_ids=True)
    ids = prompt_ids(service, "[user]Hi;[assistant]")
    assert chat["prompt_token_ids"] == ids
    assert "prompt_token_ids" not in chat["choices"][0]
    plain = service.completed(prompt=ids, return_token_ids=True)
    assert chat["choices"][0]["token_ids"] == plain["choices"][0]["token_ids"]
    assert chat["choices"][0]["message"]["content"] == plain["choices"][0]["text"]
    names = ("prompt_tokens", "completion_tokens", "total_tokens")
    assert [chat["usage"][name] for name in names] == [plain["usage"][name] for name in names] == [len(ids), 4, len(ids) + 4]


@pytest.mark.parametrize(
    ("body", "text"),
    [
        ({"add_generation_prompt": False}, "[user]Hi;"),
        ({"chat_template_kwargs": {"speaker": "model"}}, "[user]Hi;[model]"),
        ({"messages": [*HI, {"role": "assistant", "content": "Good d"}], "continue_final_message": True}, "[user]Hi;[assistant]Good d"),
        ({"messages": [{"role": "system", "content": "S"}, *HI]}, "[system]S;[user]Hi;[assistant]"),
        ({"messages": [{"role": "user", "content": [part("a"), part("b")]}]}, "[user]a\nb;[assistant]"),
        ({"tools": None, "documents": None, "chat_template_kwargs": None}, "[user]Hi;[assistant]"),
        ({"tools": [NULL_TOOL]}, f"<{json.dumps([TOOL])}>[user]Hi;[assistant]"),
        ({"messages": [{"role": "tool", "content": [{"type": "input_text", "text": "a"}, part("b")]}]}, "[tool]a\nb;[assistant]"),
        ({"messages": [said([{"type": "refusal", "refusal": "No."}])]}, "[assistant]No.;[assistant]"),
        ({"messages": [said(None, refusal="No.")]}, "[assistant]No.;[assistant]"),
        ({"messages": [said("A", refusal=None, tool_calls=[])]}, "[assistant]A;[assistant]"),
        ({"messages": [*HI, {"role": "function", "name": "f", "content": None}]}, "[user]Hi;[function];[assistant]"),
        ({"messages": [*HI, {"role": "assistant", "content": None}]}, "[user]Hi;[assistant];[assistant]"),
        ({"messages": [*HI, {"role": "assistant"}]}, "[user]Hi;[assistant];[assistant]"),
        ({"tools": []}, "[user]Hi;[assistant]"),
        ({"reasoning_effort": "low"}, "(low)[user]Hi;[assistant]"),
        ({"reasoning_effort": "low", "chat_template_kwargs": {"reasoning_effort": "high"}}, "(low)[user]Hi;[assistant]"),
        ({"reasoning_effort": None, "chat_template_kwargs": {"reasoning_effort": "high"}}, "(high)[user]Hi;[assistant]"),
        ({"tools": [TOOL]}, f"<{json.dumps([TOOL])}>[user]Hi;[assistant]"),
        ({"messages": [{"role": "user", "content": "<s>é🤷"}]}, None),
    ],
)  # fmt: skip
def test_fields_that_make_the_prompt(service: Service, body: dict[str, Any], text: str | None) -> None:
    ids = service.chatted(**body, max_tokens=0, return_token_ids=True)["prompt_token_ids"]
    expected = prompt_ids(service, text) if text else prompt_ids(service, "[user]@;[assistant]")
    if text is None:  # a special token that a client writes out is one, as in transformers
        at = expected.index(byte_ids(service, "@")[0])
        expected = [*expected[:at], BOS, *byte_ids(service, "é🤷"), *expected[at + 1 :]]
    assert ids == expected


def test_special_tokens_are_never_added_twice(service: Service) -> None:
    ids = service.chatted(add_special_tokens=True, return_token_ids=True)["prompt_token_ids"]
    assert ids.count(BOS) == 1


def test_the_prompt_can_be_cut(service: Service) -> None:
    whole = prompt_ids(service, "[user]Hi;[assistant]")
    assert service.chatted(truncate_prompt_tokens=5, return_token_ids=True)["prompt_token_ids"] == whole[-5:]
    assert service.chatted(truncate_prompt_tokens=-1, return_token_ids=True)["prompt_token_ids"] == whole
    long = {"messages": [{"role": "user", "content": "x" * 400}], "truncate_prompt_tokens": -1}
    assert service.chatted(**long, max_tokens=1)["usage"]["prompt_tokens"] == MAX_MODEL_LEN
    rendered = service.client.post("/v1/chat/completions/render", json=long).json()["token_ids"]
    assert len(rendered) == MAX_MODEL_LEN


def test_absent_max_tokens_is_all_the_room_that_is_left(service: Service) -> None:
    answer = service.chatted(max_tokens=None, ignore_eos=True, truncate_prompt_tokens=20)
    assert answer["usage"]["completion_tokens"] == MAX_MODEL_LEN - 20 + 1


def test_max_completion_tokens_is_another_name_of_max_tokens(service: Service) -> None:
    assert service.chatted(max_tokens=None, max_completion_tokens=3, ignore_eos=True)["usage"]["completion_tokens"] == 3
    assert service.chatted(max_tokens=3, max_completion_tokens=3, ignore_eos=True)["usage"]["completion_tokens"] == 3
    error = refused(service, max_tokens=3, max_completion_tokens=4)
    assert error["param"] == "max_completion_tokens"
    assert "3" in error["message"]
    assert "4" in error["message"]


def test_n_choices_count_their_prompt_once(service: Service) -> None:
    answer = service.chatted(n=3, temperature=1, seed=5, max_tokens=6, ignore_eos=True)
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2]
    assert len({choice["message"]["content"] for choice in answer["choices"]}) == 3
    assert answer["usage"] | {"prompt_tokens_details": None} == {
        "prompt_tokens": len(PROMPT),
        "completion_tokens": 18,
        "total_tokens": len(PROMPT) + 18,
        "prompt_tokens_details": None,
    }


def test_tokens_from_the_cache_are_counted(service: Service) -> None:
    body: dict[str, Any] = {"messages": [{"role": "user", "content": "x" * 200}], "max_tokens": 1, "cache_salt": "chat"}
    counts = [service.chatted(**body)["usage"]["prompt_tokens_details"]["cached_tokens"] for _ in range(2)]
    assert counts[0] == 0
    assert 0 < counts[1] < 200 + len("[user];[assistant]") + 1


def test_logprobs_name_tokens_with_their_bytes(service: Service) -> None:
    plain = service.completed(prompt=prompt_ids(service, "[user]Hi;[assistant]"), logprobs=2, max_tokens=5, ignore_eos=True)
    report = service.chatted(logprobs=True, top_logprobs=2, max_tokens=5, ignore_eos=True)["choices"][0]["logprobs"]
    expected = plain["choices"][0]["logprobs"]
    assert report["refusal"] is None
    assert [entry["token"] for entry in report["content"]] == expected["tokens"]
    assert [entry["logprob"] for entry in report["content"]] == pytest.approx(expected["token_logprobs"], abs=1e-5)
    for entry, top in zip(report["content"], expected["top_logprobs"], strict=True):
        assert {other["token"]: other["logprob"] for other in entry["top_logprobs"]} == pytest.approx(top, abs=1e-5)
        assert len(entry["bytes"]) == 1
        assert entry["top_logprobs"][0]["bytes"] == entry["bytes"]  # greedy: the likeliest one was taken
    assert service.chatted(logprobs=True)["choices"][0]["logprobs"]["content"][0]["top_logprobs"] == []
    assert service.chatted(logprobs=False, top_logprobs=0)["choices"][0]["logprobs"] is None


def test_a_stop_string_ends_the_text_before_it(service: Service) -> None:
    whole = service.chatted(max_tokens=20, ignore_eos=True)["choices"][0]["message"]["content"]
    stop = whole[5:7]
    cut = service.chatted(max_tokens=20, ignore_eos=True, stop=stop)["choices"][0]
    assert (cut["message"]["content"], cut["finish_reason"], cut["stop_reason"]) == (whole[: whole.index(stop)], "stop", stop)


OPEN = [*HI, {"role": "assistant", "content": "Good d"}]
IN_PARTS = [*HI, {"role": "assistant", "content": [{"type": "text", "text": "Good"}, {"type": "text", "text": "d"}]}]


@pytest.mark.parametrize(
    ("body", "echo"),
    [
        ({"messages": OPEN, "continue_final_message": True}, "Good d"),
        ({"messages": OPEN}, "Good d"),
        ({"messages": IN_PARTS}, "Good\nd"),
        ({"messages": HI}, ""),
        ({"messages": [*HI, {"role": "assistant", "content": None}]}, ""),
    ],
)
def test_echo_puts_the_assistants_last_message_before_the_text(service: Service, body: dict[str, Any], echo: str) -> None:
    plain = service.chatted(**body, n=2, logprobs=True)["choices"]
    echoed = service.chatted(**body, n=2, logprobs=True, echo=True)["choices"]
    assert [choice["message"]["content"] for choice in echoed] == [echo + choice["message"]["content"] for choice in plain]
    tokens = [[[entry["token"] for entry in choice["logprobs"]["content"]] for choice in choices] for choices in (echoed, plain)]
    assert tokens[0] == tokens[1]


def test_prompt_logprobs_stand_at_the_top_level(service: Service) -> None:
    answer = service.chatted(prompt_logprobs=1, return_token_ids=True, n=2)
    assert all("prompt_logprobs" not in choice for choice in answer["choices"])
    plain = service.completed(prompt=answer["prompt_token_ids"], prompt_logprobs=1)["choices"][0]["prompt_logprobs"]
    assert answer["prompt_logprobs"][0] is plain[0] is None
    for found, expected in zip(answer["prompt_logprobs"][1:], plain[1:], strict=True):
        assert {token: entry["rank"] for token, entry in found.items()} == {token: entry["rank"] for token, entry in expected.items()}
    body: dict[str, Any] = {"prompt_logprobs": 1, "kv_transfer_params": {"idempotency_key": "chat prompt"}}
    first, second = service.chatted(**body), service.chatted(**body)
    assert second["prompt_logprobs"] == first["prompt_logprobs"]
    assert second["prompt_logprobs"] is not None


def test_tokens_can_be_named_by_their_ids(service: Service) -> None:
    choice = service.chatted(logprobs=True, top_logprobs=1, return_tokens_as_token_ids=True, return_token_ids=True)["choices"][0]
    assert [entry["token"] for entry in choice["logprobs"]["content"]] == [f"token_id:{token}" for token in choice["token_ids"]]
    assert all(entry["top_logprobs"][0]["token"].startswith("token_id:") for entry in choice["logprobs"]["content"])
    assert all(len(entry["bytes"]) == 1 for entry in choice["logprobs"]["content"])


def test_more_log_probabilities_than_the_service_gives_are_refused(service: Service) -> None:
    for count in (21, -1):
        error = refused(service, logprobs=True, top_logprobs=count)
        assert error["param"] == "top_logprobs"
        assert "at most 20" in error["message"]


def test_sampling_fields_of_completions_hold_for_chats(service: Service) -> None:
    body: dict[str, Any] = {"allowed_token_ids": [65, 70], "bad_words": ["zz"], "min_tokens": 2, "best_of": 1}
    assert set(service.chatted(**body, return_token_ids=True)["choices"][0]["token_ids"]) <= {65, 70}


def test_hidden_states_are_those_of_the_same_prompt_as_tokens(service: Service) -> None:
    save = {"layers": LAYERS, "include_output_tokens": True}
    answer = service.chatted(kv_transfer_params=save, return_token_ids=True)
    assert answer["kv_transfer_params"] == answer["choices"][0]["kv_transfer_params"]
    plain = service.completed(prompt=answer["prompt_token_ids"], kv_transfer_params=save)
    states = []
    for made in (answer, plain):
        with safe_open(made["kv_transfer_params"]["hidden_states_path"], "np") as file:
            states.append((file.get_tensor("hidden_states"), file.get_tensor("token_ids").tolist()))
    assert states[0][1] == states[1][1] == [*answer["prompt_token_ids"], *answer["choices"][0]["token_ids"][:-1]]
    assert abs(states[0][0] - states[1][0]).max() < 1e-5


def test_a_repeated_chat_with_a_key_is_answered_from_its_record(service: Service) -> None:
    body: dict[str, Any] = {"kv_transfer_params": {"idempotency_key": "chat"}, "return_token_ids": True, "logprobs": True}
    first, second = service.chatted(**body), service.chatted(**body)
    assert second["choices"] == first["choices"]
    assert second["object"] == "chat.completion"
    assert second["prompt_token_ids"] == first["prompt_token_ids"]
    record = service.record(first["choices"][0]["kv_transfer_params"]["save_id"])
    assert record["output"]["text"] == first["choices"][0]["message"]["content"]
    assert len(record["output"]["logprobs"]["content"]) == 4
    assert refused(service, 409, **body, max_tokens=5)["code"] == "idempotency_key_reused"


def test_an_accepted_chat_is_answered_at_once(service: Service) -> None:
    response = service.chat(kv_transfer_params={"wait": "accepted"})
    assert response.status_code == 202
    body = response.json()
    assert body["choices"][0]["message"] == {"role": "assistant", "content": ""}
    record = service.record(body["kv_transfer_params"]["save_id"])
    assert record["output"]["text"] == service.chatted()["choices"][0]["message"]["content"]


BAD_MESSAGES: list[tuple[Any, str]] = [
    ([], "messages"),
    (None, "messages"),
    ("Hi", "messages"),
    ({}, "messages"),
    (["Hi"], "messages[0]"),
    ([{"content": "x"}], "messages[0].role"),
    ([{"role": "", "content": "x"}], "messages[0].role"),
    ([{"role": 5, "content": "x"}], "messages[0].role"),
    ([*HI, {"role": "user"}], "messages[1].content"),
    ([{"role": "user", "contents": "x"}], "messages[0].content"),
    ([{"role": "user", "content": 5}], "messages[0].content"),
    ([{"role": "user", "content": {"type": "text", "text": "x"}}], "messages[0].content"),
    ([{"role": "user", "content": ["x"]}], "messages[0].content[0]"),
    ([{"role": "user", "content": [{"type": "text"}]}], "messages[0].content[0].text"),
    ([{"role": "user", "content": [part("x"), {"type": "image_url", "image_url": {"url": "x"}}]}], "messages[0].content[1].type"),
    ([{"role": "user", "content": [{"type": "input_audio"}]}], "messages[0].content[0].type"),
    ([{"role": "user", "content": [{"type": ["text"], "text": "x"}]}], "messages[0].content[0].type"),
    ([{"role": "assistant", "content": [{"type": "refusal", "text": "x"}]}], "messages[0].content[0].refusal"),
    ([{"role": "assistant", "content": None, "refusal": ["x"]}], "messages[0].refusal"),
    ([{"role": "assistant", "tool_calls": [{"type": "custom"}]}], "messages[0].tool_calls[0].type"),
    ([{"role": "assistant", "tool_calls": [{"function": {}}]}], "messages[0].tool_calls[0].function"),
    ([{"role": "assistant", "tool_calls": 5}], "messages[0].tool_calls"),
]  # fmt: skip


@pytest.mark.parametrize(("messages", "param"), BAD_MESSAGES)
def test_bad_messages_are_refused_by_the_name_of_the_field(service: Service, messages: object, param: str) -> None:
    error = refused(service, messages=messages)
    assert error["param"] == param
    assert param in error["message"]


def test_the_template_can_refuse_in_its_own_words(service: Service) -> None:
    error = refused(service, messages=[{"role": "nobody", "content": "x"}])
    assert error["param"] == "messages"
    assert "nobody may not speak" in error["message"]


@pytest.mark.parametrize("text", ["\ud800", "x\udfff"])
def test_half_a_surrogate_pair_is_refused_wherever_it_stands(service: Service, text: str) -> None:
    refused(service, messages=[{"role": "user", "content": text}])
    refused(service, messages=[{"role": "user", "content": [{"type": "text", "text": text}]}])
    refused(service, chat_template_kwargs={"speaker": text})
    refused(service, tools=[{**TOOL, "x": text}])


@pytest.mark.parametrize(
    ("field", "values"),
    [
        ("add_generation_prompt", [1, "true"]),
        ("continue_final_message", [1, "true"]),
        ("chat_template_kwargs", [[], "x", {"messages": []}, {"tools": []}, {"add_generation_prompt": True}, {"not a name": 1}]),
        ("tools", [{}, ["f"], [{"type": "custom", "function": {"name": "f"}}], [{"type": "function"}], [{"function": {"name": 5}}]]),
        ("documents", [{}, ["x"]]),
        ("logprobs", [1, "true"]),
        ("top_logprobs", [-1, 21, True, 3]),
        ("max_completion_tokens", [-1, "5", True]),
        ("add_special_tokens", [1]),
        ("truncation_side", ["middle"]),
        ("reasoning_effort", [5, "", "x" * 65]),
        ("parallel_tool_calls", [1, "true"]),
        ("echo", [1, "true"]),
        ("best_of", [2]),
        ("return_something", [True, False]),
        ("temperature", [-1, 3]),
        ("kv_transfer_params", [{"no_such_field": 1}, 5]),
    ],
)
def test_invalid_values_are_refused_by_the_name_of_the_field(service: Service, field: str, values: list[Any]) -> None:
    for value in values:
        error = refused(service, **{field: value})
        assert error["param"].split(".")[0].split("[")[0] == field
        assert field in error["message"]


def test_a_message_is_either_gone_on_with_or_followed_by_a_new_one(service: Service) -> None:
    open_answer = [*HI, {"role": "assistant", "content": "x"}]
    error = refused(service, messages=open_answer, continue_final_message=True, add_generation_prompt=True)
    assert error["param"] == "continue_final_message"
    empty = [*HI, {"role": "assistant"}]
    assert refused(service, messages=empty, continue_final_message=True)["param"] == "continue_final_message"


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("tool_choice", "required"),
        ("tool_choice", {"type": "function", "function": {"name": "f"}}),
        ("response_format", {"type": "json_object"}),
        ("functions", [{"name": "f"}]),
        ("function_call", {"name": "f"}),
        ("modalities", ["text", "audio"]),
        ("audio", {"voice": "x"}),
        ("verbosity", "low"),
        ("web_search_options", {}),
        ("chat_template", "{{ x }}"),
        ("prompt", "x"),
        ("guided_json", {}),
        ("guided_choice", ["a"]),
        ("structured_outputs", {"choice": ["a"]}),
        ("use_beam_search", True),
        ("watermarking", True),
        ("mm_processor_kwargs", {"x": 1}),
    ],
)
def test_known_fields_that_are_not_supported_are_refused(service: Service, field: str, value: object) -> None:
    error = refused(service, **{field: value})
    assert (error["param"], error["message"]) == (field, f"{field} is not supported")


@pytest.mark.parametrize(
    "body",
    [
        {"tools": [TOOL], "tool_choice": "auto"},
        {"tools": [TOOL], "parallel_tool_calls": False},
        {"tool_choice": "none", "response_format": {"type": "text"}, "modalities": ["text"], "parallel_tool_calls": True},
        {"store": False, "metadata": {"a": "b"}, "service_tier": "auto", "user": "u", "anything": [1]},
    ],
)
def test_fields_that_ask_for_nothing_are_taken(service: Service, body: dict[str, Any]) -> None:
    service.chatted(**body)


def test_a_model_without_a_template_takes_no_messages(services: Services, model_folder: Path, tmp_path: Path) -> None:
    for name, ignored in (("no-template", "tokenizer_config.json"), ("no-tokenizer", "tokenizer*")):
        folder = tmp_path / name
        shutil.copytree(model_folder, folder, ignore=shutil.ignore_patterns(ignored))
        with services.run(model=str(folder)) as service:
            error = refused(service)
            assert error["param"] == "messages"
            assert ("no chat template" if name == "no-template" else "no tokenizer") in error["message"]
            service.completed(prompt=[1, 2])


def test_a_broken_template_does_not_keep_the_service_from_starting(services: Services, model_folder: Path, tmp_path: Path) -> None:
    folder = tmp_path / "broken"
    shutil.copytree(model_folder, folder)
    (folder / "chat_template.jinja").write_text("{% for %}")
    with services.run(model=str(folder)) as service:
        refused(service)
        service.completed()


def test_the_openai_client_chats(service: Service) -> None:
    with OpenAI(base_url=f"{service.url}/v1", api_key="EMPTY", max_retries=0) as client:
        extra = {"kv_transfer_params": {}, "return_token_ids": True}
        answer = client.chat.completions.create(
            model="tiny",
            messages=[{"role": "user", "content": "Hi"}],
            max_completion_tokens=5,
            logprobs=True,
            temperature=0,
            extra_body=extra,
        )
        assert answer.choices[0].message.role == "assistant"
        assert answer.choices[0].logprobs is not None
        assert answer.model_dump()["kv_transfer_params"]["status"] == "completed"
        assert answer.model_dump()["prompt_token_ids"] == prompt_ids(service, "[user]Hi;[assistant]")
        with pytest.raises(BadRequestError) as caught:
            client.chat.completions.create(model="tiny", messages=[{"role": "user", "content": "Hi"}], tool_choice="required")
        assert caught.value.param == "tool_choice"


@pytest.mark.parametrize("route", ["/v1/chat/completions", "/v1/completions"])
def test_answers_say_when_they_were_made(service: Service, route: str) -> None:
    before = int(time.time())
    body = {"messages": HI} if "chat" in route else {"prompt": "Hi"}
    created = service.client.post(route, json=body | {"max_tokens": 1}).json()["created"]
    assert isinstance(created, int)
    assert before <= created <= time.time()


@pytest.mark.parametrize("route", ["/v1/chat/completions", "/v1/completions"])
def test_a_request_id_is_answered_and_never_becomes_part_of_a_path(service: Service, route: str) -> None:
    body = {"messages": HI} if "chat" in route else {"prompt": "Hi"}
    sent = "../../../etc/passwd"
    for own, headers in (({"request_id": sent}, {}), ({}, {"X-Request-Id": sent})):
        response = service.client.post(route, json=body | own | {"max_tokens": 1, "kv_transfer_params": {}}, headers=headers)
        assert response.status_code == 200
        assert response.headers["x-request-id"] == sent
        assert response.json()["id"].endswith(f"cmpl-{sent}")
        save = response.json()["kv_transfer_params"]
        assert save["hidden_states_path"].startswith(f"{service.root}/")
        assert "passwd" not in save["hidden_states_path"]
        assert service.record(save["save_id"])["request_id"] == sent
