"""`POST /tokenize` and `POST /detokenize`."""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from pathlib import Path

    from tests.http.conftest import Service, Services

BOS, EOS = 256, 257
MESSAGES = [{"role": "user", "content": "Hi"}]


def tokenize(service: Service, **body: Any) -> dict[str, Any]:  # noqa: ANN401 - any JSON value
    response = service.client.post("/tokenize", json=body)
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    assert answer["count"] == len(answer["tokens"])
    assert answer["max_model_len"] == 256
    return answer


def test_a_text_becomes_the_tokens_that_it_would_be_run_as(service: Service) -> None:
    answer = tokenize(service, prompt="Hello")
    assert set(answer) == {"count", "max_model_len", "tokens", "token_strs"}
    assert answer["token_strs"] is None
    assert answer["tokens"] == service.completed(return_token_ids=True)["choices"][0]["prompt_token_ids"]
    assert tokenize(service, prompt="Hello", add_special_tokens=False)["tokens"] == answer["tokens"][1:]
    assert tokenize(service, model="tiny", prompt="")["tokens"] == [BOS]


def test_messages_become_the_tokens_that_they_would_be_run_as(service: Service) -> None:
    ids = service.chatted(messages=MESSAGES, return_token_ids=True)["prompt_token_ids"]
    assert tokenize(service, messages=MESSAGES)["tokens"] == ids
    assert tokenize(service, messages=MESSAGES, add_special_tokens=True)["tokens"] == ids
    without = tokenize(service, messages=MESSAGES, add_generation_prompt=False)["tokens"]
    assert without == ids[: len(without)]


def test_tokens_can_be_shown_as_the_vocabulary_spells_them(service: Service) -> None:
    assert tokenize(service, prompt="a b", return_token_strs=True)["token_strs"] == ["<s>", "a", "Ġ", "b"]


@pytest.mark.parametrize("text", ["Hello", "naïve 🤷🏾‍♂️\n", " </s><s> "])
def test_tokens_become_the_text_again_with_its_special_tokens(service: Service, text: str) -> None:
    ids = tokenize(service, prompt=text, add_special_tokens=False)["tokens"]
    response = service.client.post("/detokenize", json={"tokens": ids})
    assert response.json() == {"prompt": text}


def test_no_tokens_are_no_text(service: Service) -> None:
    assert service.client.post("/detokenize", json={"tokens": []}).json() == {"prompt": ""}


@pytest.mark.parametrize(
    ("route", "body", "status", "param"),
    [
        ("/tokenize", {}, 400, "prompt"),
        ("/tokenize", {"prompt": "x", "messages": MESSAGES}, 400, "prompt"),
        ("/tokenize", {"prompt": ["x"]}, 400, "prompt"),
        ("/tokenize", {"prompt": "x", "model": "other"}, 404, "model"),
        ("/tokenize", {"messages": [{"role": "nobody", "content": "x"}]}, 400, "messages"),
        ("/tokenize", {"messages": []}, 400, "messages"),
        ("/tokenize", {"prompt": "x", "add_special_tokens": 1}, 400, "add_special_tokens"),
        ("/detokenize", {}, 400, "tokens"),
        ("/detokenize", {"tokens": "x"}, 400, "tokens"),
        ("/detokenize", {"tokens": [1, 258]}, 400, "tokens"),
        ("/detokenize", {"tokens": [-1]}, 400, "tokens.0"),
        ("/detokenize", {"tokens": [True]}, 400, "tokens.0"),
        ("/detokenize", {"tokens": [1], "model": "other"}, 404, "model"),
    ],
)
def test_what_is_wrong_is_refused(service: Service, route: str, body: dict[str, Any], status: int, param: str) -> None:
    response = service.client.post(route, json=body)
    assert (response.status_code, response.json()["error"]["param"]) == (status, param)


def test_a_model_without_a_tokenizer_has_no_text(services: Services, model_folder: Path, tmp_path: Path) -> None:
    folder = tmp_path / "no-tokenizer"
    shutil.copytree(model_folder, folder, ignore=shutil.ignore_patterns("tokenizer*"))
    with services.run(model=str(folder)) as service:
        for route, body in (("/tokenize", {"prompt": "x"}), ("/detokenize", {"tokens": [1]})):
            response = service.client.post(route, json=body)
            assert response.status_code == 400
            assert "no tokenizer" in response.json()["error"]["message"]
