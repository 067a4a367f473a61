"""Every field of `POST /v1/completions`: what it does, and what is refused."""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from pathlib import Path

    from tests.http.conftest import Service, Services

BOS, EOS = 256, 257
VOCAB_SIZE = 258
MAX_MODEL_LEN = 256


def test_the_answer_is_an_openai_completion(service: Service) -> None:
    answer = service.completed(max_tokens=4)
    assert set(answer) == {"id", "object", "created", "model", "system_fingerprint", "choices", "usage"}
    assert answer["object"] == "text_completion"
    assert answer["model"] == "tiny"
    assert answer["system_fingerprint"] is None
    of_vllm = {"stop_reason", "token_ids", "prompt_token_ids", "prompt_logprobs"}
    assert set(answer["choices"][0]) == {"index", "text", "logprobs", "finish_reason"} | of_vllm
    assert {answer["choices"][0][name] for name in of_vllm} == {None}
    assert answer["choices"][0]["finish_reason"] == "length"
    usage = {"prompt_tokens": 6, "completion_tokens": 4, "total_tokens": 10}
    assert answer["usage"].items() >= usage.items()


def test_text_and_its_token_ids_are_the_same_prompt(service: Service) -> None:
    from_text = service.completed(prompt="Hello", return_token_ids=True)
    ids = from_text["choices"][0]["prompt_token_ids"]
    assert ids[0] == BOS
    assert len(ids) == 6
    from_ids = service.completed(prompt=ids, return_token_ids=True)
    assert from_ids["choices"] == from_text["choices"]


def test_every_choice_of_a_list_of_texts_is_that_of_its_text_alone(service: Service) -> None:
    together = service.completed(prompt=["Hello", "World!"], n=2)
    alone = [service.completed(prompt=text)["choices"][0]["text"] for text in ("Hello", "World!")]
    assert [choice["index"] for choice in together["choices"]] == [0, 1, 2, 3]
    assert [choice["text"] for choice in together["choices"]] == [alone[0], alone[0], alone[1], alone[1]]
    assert together["usage"]["prompt_tokens"] == 6 + 7
    assert together["usage"]["completion_tokens"] == 16


def test_a_list_of_token_lists_is_a_list_of_prompts(service: Service) -> None:
    together = service.completed(prompt=[[1, 2, 3], [4]], return_token_ids=True)
    assert [choice["prompt_token_ids"] for choice in together["choices"]] == [[1, 2, 3], [4]]
    alone = service.completed(prompt=[4], return_token_ids=True)
    assert together["choices"][1]["token_ids"] == alone["choices"][0]["token_ids"]


@pytest.mark.parametrize("prompt", ["", [], [""], [[]], ["a", ""], [[1], []]])
def test_an_empty_prompt_is_refused(service: Service, prompt: object) -> None:
    error = service.refused(400, prompt=prompt)
    assert error["param"] == "prompt"
    assert "must not be empty" in error["message"]


@pytest.mark.parametrize("prompt", [5, True, {"a": 1}, [1, "a"], [[1], "a"], [1.5], [[1, True]], [True], "\ud800", None, [[[1]]]])
def test_a_prompt_of_another_form_is_refused(service: Service, prompt: object) -> None:
    # httpx would not encode half a surrogate pair: JSON writes it as an escape.
    assert service.refused(400, prompt=prompt)["param"] == "prompt"


@pytest.mark.parametrize("token", [-1, VOCAB_SIZE, 10**30])
def test_a_token_outside_the_vocabulary_is_refused_with_the_range(service: Service, token: int) -> None:
    error = service.refused(400, prompt=[1, token])
    assert str(token) in error["message"]
    assert "0 to 257" in error["message"]


def test_max_tokens_zero_runs_the_prompt_only(service: Service) -> None:
    answer = service.completed(max_tokens=0, return_token_ids=True)
    assert answer["choices"][0] | {"prompt_token_ids": None} == {
        "index": 0,
        "text": "",
        "logprobs": None,
        "finish_reason": "length",
        "stop_reason": None,
        "prompt_token_ids": None,
        "prompt_logprobs": None,
        "token_ids": [],
    }


def test_absent_max_tokens_is_16_or_the_room_that_is_left(service: Service) -> None:
    assert service.completed(max_tokens=None, ignore_eos=True)["usage"]["completion_tokens"] == 16
    prompt = [1] * (MAX_MODEL_LEN - 4)
    assert service.completed(prompt=prompt, max_tokens=None, ignore_eos=True)["usage"]["completion_tokens"] == 5


def test_a_prompt_of_exactly_the_context_length_gets_one_token(service: Service) -> None:
    assert service.completed(prompt=[1] * MAX_MODEL_LEN, max_tokens=1)["usage"]["completion_tokens"] == 1


@pytest.mark.parametrize(
    ("length", "max_tokens", "needed", "save"),
    [
        (MAX_MODEL_LEN, 2, 257, None),
        (MAX_MODEL_LEN + 1, 0, 257, None),
        (MAX_MODEL_LEN + 1, None, 257, None),
        (MAX_MODEL_LEN, 1, 257, {"include_last_token": True}),
        (100, 158, 257, None),
    ],
)
def test_what_does_not_fit_the_context_is_refused_with_both_numbers(
    service: Service, length: int, max_tokens: int | None, needed: int, save: dict[str, Any] | None
) -> None:
    error = service.refused(400, prompt=[1] * length, max_tokens=max_tokens, kv_transfer_params=save)
    assert error["code"] == "context_length_exceeded"
    assert str(needed) in error["message"]
    assert str(MAX_MODEL_LEN) in error["message"]


def test_n_choices_with_a_seed_differ_and_are_reproduced(service: Service) -> None:
    body = {"n": 3, "temperature": 1.0, "seed": 7, "max_tokens": 12}
    first, second = (service.completed(**body)["choices"] for _ in range(2))
    assert [choice["text"] for choice in first] == [choice["text"] for choice in second]
    assert len({choice["text"] for choice in first}) == 3
    alone = service.completed(**body | {"n": 1})["choices"]
    assert alone[0]["text"] == first[0]["text"]


def test_a_stop_string_ends_the_text_before_it(service: Service) -> None:
    whole = service.completed(max_tokens=24, ignore_eos=True, return_token_ids=True)["choices"][0]
    position = next(i for i in range(4, len(whole["text"]) - 2) if whole["text"].index(whole["text"][i : i + 2]) == i)
    stop = whole["text"][position : position + 2]
    for form in (stop, ["never in there", stop]):
        cut = service.completed(max_tokens=24, ignore_eos=True, stop=form, return_token_ids=True)["choices"][0]
        assert cut["text"] == whole["text"][:position]
        assert (cut["finish_reason"], cut["stop_reason"]) == ("stop", stop)
        kept = service.completed(max_tokens=24, ignore_eos=True, stop=form, include_stop_str_in_output=True)["choices"][0]
        assert (kept["text"], kept["stop_reason"]) == (whole["text"][: position + 2], stop)
        count = len(cut["token_ids"])
        assert cut["token_ids"] == whole["token_ids"][:count]
        assert count < 24


def test_a_stop_token_ends_the_text_and_has_no_text(service: Service) -> None:
    whole = service.completed(max_tokens=8, ignore_eos=True, return_token_ids=True)["choices"][0]
    token = whole["token_ids"][3]
    end = whole["token_ids"].index(token)
    cut = service.completed(max_tokens=8, ignore_eos=True, stop_token_ids=[token], return_token_ids=True)["choices"][0]
    assert cut["token_ids"] == whole["token_ids"][: end + 1]
    assert (cut["finish_reason"], cut["stop_reason"]) == ("stop", token)
    assert whole["text"].startswith(cut["text"])
    kept = service.completed(max_tokens=8, ignore_eos=True, stop_token_ids=[token], include_stop_str_in_output=True)["choices"][0]
    assert whole["text"].startswith(kept["text"])
    assert len(kept["text"]) > len(cut["text"])


def test_the_end_token_ends_the_text_unless_it_is_ignored(service: Service) -> None:
    bias = {"logit_bias": {"257": 100}, "max_tokens": 5, "return_token_ids": True}
    ended = service.completed(**bias)["choices"][0]
    assert (ended["token_ids"], ended["text"], ended["finish_reason"], ended["stop_reason"]) == ([EOS], "", "stop", None)
    named = service.completed(**bias, stop_token_ids=[EOS], skip_special_tokens=False, include_stop_str_in_output=True)["choices"][0]
    assert (named["text"], named["finish_reason"], named["stop_reason"]) == ("</s>", "stop", EOS)
    ignored = service.completed(**bias, ignore_eos=True)["choices"][0]
    assert (ignored["token_ids"], ignored["finish_reason"]) == ([257] * 5, "length")


def test_echo_puts_the_prompt_before_the_text(service: Service) -> None:
    plain = service.completed()["choices"][0]["text"]
    assert service.completed(echo=True)["choices"][0]["text"] == "Hello" + plain
    assert service.completed(echo=True, max_tokens=0)["choices"][0]["text"] == "Hello"
    ids = service.completed(return_token_ids=True)["choices"][0]["prompt_token_ids"]
    assert service.completed(prompt=ids, echo=True)["choices"][0]["text"] == "<s>Hello" + plain


def test_logprobs_describe_the_sampled_tokens(service: Service) -> None:
    choice = service.completed(logprobs=3, max_tokens=6, ignore_eos=True)["choices"][0]
    report = choice["logprobs"]
    assert {len(report[name]) for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset")} == {6}
    for token, logprob, top in zip(report["tokens"], report["token_logprobs"], report["top_logprobs"], strict=True):
        assert len(top) == 3
        assert top[token] == logprob == max(top.values())  # greedy: the likeliest token was taken
        assert logprob <= 0


def test_echo_with_logprobs_gives_those_of_the_prompt_too(service: Service) -> None:
    choice = service.completed(echo=True, logprobs=0, max_tokens=3, ignore_eos=True)["choices"][0]
    report = choice["logprobs"]
    assert len(report["tokens"]) == 6 + 3
    assert report["tokens"][:6] == ["<s>", "H", "e", "l", "l", "o"]
    assert report["token_logprobs"][0] is None
    assert report["top_logprobs"][0] is None
    assert all(logprob < 0 for logprob in report["token_logprobs"][1:])
    assert report["text_offset"][:7] == [0, 0, 1, 2, 3, 4, 5]
    without = service.completed(echo=True, logprobs=0, max_tokens=0)["choices"][0]["logprobs"]
    assert without["token_logprobs"][1:] == pytest.approx(report["token_logprobs"][1:6], abs=1e-4)


def test_the_offsets_of_an_echo_are_where_its_tokens_begin(service: Service) -> None:
    """For a prompt of ids, special tokens included, and for a text that spells some out."""
    ids = service.completed(return_token_ids=True)["choices"][0]["prompt_token_ids"]
    for prompt, text, offsets in ((ids, "<s>Hello", [0, 3, 4, 5, 6, 7, 8]), ("a</s>b", "a</s>b", [0, 0, 1, 5, 6])):
        choice = service.completed(prompt=prompt, echo=True, logprobs=0, max_tokens=2, ignore_eos=True)["choices"][0]
        assert choice["text"].startswith(text)
        report = choice["logprobs"]
        assert report["text_offset"][: len(offsets)] == offsets
        for token, offset in zip(report["tokens"], report["text_offset"], strict=True):
            assert choice["text"].startswith(token, offset) or (token == "<s>" and offset == 0) or token.startswith("bytes:")


def test_more_log_probabilities_than_the_service_gives_are_refused(services: Services) -> None:
    with services.run(max_logprobs=3) as service:
        assert len(service.completed(logprobs=3)["choices"][0]["logprobs"]["top_logprobs"][0]) == 3
        for field in ("logprobs", "prompt_logprobs"):
            error = service.refused(400, **{field: 4})
            assert error["param"] == field
            assert f"{field} is 4, at most 3" in error["message"]
            error = service.refused(400, **{field: -1})
            assert f"{VOCAB_SIZE}" in error["message"]
            assert "at most 3" in error["message"]


def test_minus_one_means_the_whole_vocabulary(services: Services) -> None:
    for bound in (VOCAB_SIZE, -1):
        with services.run(max_logprobs=bound) as service:
            choice = service.completed(logprobs=-1, prompt_logprobs=-1, max_tokens=1, return_tokens_as_token_ids=True)["choices"][0]
            assert set(choice["logprobs"]["top_logprobs"][0]) == {f"token_id:{token}" for token in range(VOCAB_SIZE)}
            assert set(choice["prompt_logprobs"][1]) == {str(token) for token in range(VOCAB_SIZE)}
            assert sorted(entry["rank"] for entry in choice["prompt_logprobs"][1].values()) == list(range(1, VOCAB_SIZE + 1))


def test_prompt_logprobs_are_those_of_an_echo_with_ranks(service: Service) -> None:
    echoed = service.completed(echo=True, logprobs=2, max_tokens=0)["choices"][0]["logprobs"]
    choice = service.completed(prompt_logprobs=2, max_tokens=3, return_token_ids=True)["choices"][0]
    assert choice["logprobs"] is None
    assert choice["prompt_logprobs"][0] is None
    ids = choice["prompt_token_ids"]
    assert len(choice["prompt_logprobs"]) == len(ids) == 6
    for place in range(1, 6):
        scored = choice["prompt_logprobs"][place]
        own = scored[str(ids[place])]
        assert own["logprob"] == pytest.approx(echoed["token_logprobs"][place], abs=1e-4)
        assert own["decoded_token"] == echoed["tokens"][place]
        assert {entry["rank"] for entry in scored.values()} == {1, 2, own["rank"]}
        assert len(scored) == 2 + (own["rank"] > 2)
        assert [next(iter(scored)), max(scored.values(), key=lambda entry: entry["logprob"])["rank"]] == [str(ids[place]), 1]
    alone = service.completed(prompt_logprobs=2, max_tokens=0)["choices"][0]["prompt_logprobs"]
    assert [list(scored) for scored in alone[1:]] == [list(scored) for scored in choice["prompt_logprobs"][1:]]
    both = service.completed(prompt_logprobs=0, echo=True, logprobs=2, max_tokens=1)["choices"][0]
    assert [len(scored) for scored in both["prompt_logprobs"][1:]] == [1] * 5
    assert [len(top) >= 2 for top in both["logprobs"]["top_logprobs"][1:]] == [True] * 6
    wide = service.completed(prompt_logprobs=9, echo=True, logprobs=0, max_tokens=1)["choices"][0]["logprobs"]
    assert [len(top) for top in wide["top_logprobs"][1:]] == [1] * 6


def test_prompt_logprobs_are_kept_for_whoever_asks_again(service: Service) -> None:
    body: dict[str, Any] = {"prompt_logprobs": 1, "stop": "x", "kv_transfer_params": {"idempotency_key": "prompt logprobs"}}
    first, second = service.completed(**body), service.completed(**body)
    assert second["choices"] == first["choices"]
    assert second["choices"][0]["prompt_logprobs"][1]


def test_prompt_logprobs_are_not_streamed(service: Service) -> None:
    assert service.refused(400, prompt_logprobs=1, stream=True)["param"] == "prompt_logprobs"


def test_tokens_can_be_named_by_their_ids(service: Service) -> None:
    choice = service.completed(logprobs=2, echo=True, return_tokens_as_token_ids=True, return_token_ids=True)["choices"][0]
    names = [f"token_id:{token}" for token in (*choice["prompt_token_ids"], *choice["token_ids"])]
    assert choice["logprobs"]["tokens"] == names
    assert all(name in top for name, top in zip(names[1:], choice["logprobs"]["top_logprobs"][1:], strict=True))


def test_a_text_is_at_least_as_long_as_asked(service: Service) -> None:
    """No end token before that, no stop token, and no stop string that ends in it."""
    ending = {"logit_bias": {"257": 100}, "max_tokens": 9, "return_token_ids": True}
    choice = service.completed(**ending, min_tokens=5)["choices"][0]
    assert len(choice["token_ids"]) == 6
    assert choice["token_ids"].index(EOS) == 5
    assert choice["finish_reason"] == "stop"
    stopping = {"logit_bias": {"65": 100}, "max_tokens": 9, "return_token_ids": True, "stop_token_ids": [65]}
    choice = service.completed(**stopping, min_tokens=5)["choices"][0]
    assert (choice["token_ids"].index(65), choice["stop_reason"]) == (5, 65)
    same = {
        "logit_bias": {"65": 100},
        "max_tokens": 9,
        "return_token_ids": True,
        "stop": service.completed(logit_bias={"65": 100}, max_tokens=1)["choices"][0]["text"],
    }
    choice = service.completed(**same, min_tokens=5)["choices"][0]
    assert (len(choice["token_ids"]), len(choice["text"]), choice["finish_reason"]) == (6, 5, "stop")
    error = service.refused(400, min_tokens=5, max_tokens=4)
    assert error["param"] == "min_tokens"
    assert "5" in error["message"]
    assert "4" in error["message"]


def test_only_allowed_tokens_are_sampled(service: Service) -> None:
    choice = service.completed(allowed_token_ids=[70, 65], temperature=1.5, max_tokens=24, seed=1, return_token_ids=True)["choices"][0]
    assert set(choice["token_ids"]) == {65, 70}


def test_bad_words_are_never_generated(service: Service) -> None:
    plain = service.completed(max_tokens=24, ignore_eos=True)["choices"][0]["text"]
    pairs = [plain[at : at + 2] for at in range(len(plain) - 1)]
    word = next(pair for pair in pairs if pair.isascii() and pair.isprintable() and " " not in pair)
    spared = service.completed(max_tokens=24, ignore_eos=True, bad_words=[word])["choices"][0]["text"]
    assert word not in spared
    assert spared[: plain.index(word) + 1] == plain[: plain.index(word) + 1]


@pytest.mark.parametrize(
    "body",
    [
        {"allowed_token_ids": [EOS], "min_tokens": 1},
        {"allowed_token_ids": [65, EOS], "min_tokens": 1, "stop_token_ids": [65]},
    ],
)
def test_what_leaves_no_token_to_choose_is_refused(service: Service, body: dict[str, Any]) -> None:
    assert service.refused(400, **body)["param"] == "allowed_token_ids"


def test_special_tokens_are_shown_on_request(service: Service) -> None:
    body: dict[str, Any] = {"logit_bias": {"256": 100}, "max_tokens": 3, "ignore_eos": True}
    assert service.completed(**body)["choices"][0]["text"] == ""
    assert service.completed(**body, skip_special_tokens=False)["choices"][0]["text"] == "<s><s><s>"
    stopped = service.completed(**body, skip_special_tokens=False, stop="s><")["choices"][0]
    assert (stopped["text"], stopped["stop_reason"]) == ("<", "s><")


def test_two_spellings_of_a_token_are_not_two_biases(service: Service) -> None:
    error = service.refused(400, logit_bias={"7": 1, "07": 2})
    assert error["param"] == "logit_bias"
    assert "'07'" in error["message"]
    service.completed(logit_bias={"0": 1})


def test_sampling_fields_change_the_text(service: Service) -> None:
    plain = service.completed(max_tokens=12, ignore_eos=True, return_token_ids=True)["choices"][0]["token_ids"]
    biased = service.completed(max_tokens=12, ignore_eos=True, logit_bias={"65": 100}, return_token_ids=True)["choices"][0]
    assert biased["token_ids"] == [65] * 12
    penalised = service.completed(
        max_tokens=12, ignore_eos=True, logit_bias={"65": 100}, frequency_penalty=2, presence_penalty=2, return_token_ids=True
    )
    assert penalised["choices"][0]["token_ids"][0] == 65
    repeated = service.completed(max_tokens=12, ignore_eos=True, repetition_penalty=50, return_token_ids=True)["choices"][0]["token_ids"]
    assert len(set(repeated)) >= len(set(plain))
    for only_one in ({"top_k": 1}, {"top_p": 1e-9}, {"min_p": 1.0}):
        greedy = service.completed(max_tokens=12, ignore_eos=True, temperature=1.0, seed=3, return_token_ids=True, **only_one)
        assert greedy["choices"][0]["token_ids"] == plain


def test_special_tokens_are_left_out_on_request(service: Service) -> None:
    ids = service.completed(add_special_tokens=False, return_token_ids=True)["choices"][0]["prompt_token_ids"]
    assert len(ids) == 5
    assert BOS not in ids


def test_truncation_keeps_the_end_or_the_beginning(service: Service) -> None:
    ids = list(range(10, 20))
    left = service.completed(prompt=ids, truncate_prompt_tokens=4, return_token_ids=True)["choices"][0]
    assert left["prompt_token_ids"] == ids[-4:]
    right = service.completed(prompt=ids, truncate_prompt_tokens=4, truncation_side="right", return_token_ids=True)["choices"][0]
    assert right["prompt_token_ids"] == ids[:4]
    short = service.completed(prompt=ids, truncate_prompt_tokens=40, return_token_ids=True)["choices"][0]
    assert short["prompt_token_ids"] == ids
    long = service.completed(prompt=[1] * 1000, truncate_prompt_tokens=10, max_tokens=1)
    assert long["usage"]["prompt_tokens"] == 10
    fitted = service.completed(prompt=[1] * 1000, truncate_prompt_tokens=-1, max_tokens=1)
    assert fitted["usage"]["prompt_tokens"] == MAX_MODEL_LEN


def test_the_model_may_be_named_or_left_out_but_not_be_another(service: Service) -> None:
    service.completed(model="tiny")
    service.completed(model=None)
    error = service.refused(404, model="huge")
    assert (error["code"], error["param"]) == ("model_not_found", "model")
    assert "'tiny'" in error["message"]


def test_the_request_id_of_the_body_wins_over_that_of_the_header(service: Service) -> None:
    def ids(body: dict[str, Any], headers: dict[str, str]) -> tuple[str, str]:
        response = service.client.post("/v1/completions", json={"prompt": [1], "max_tokens": 1} | body, headers=headers)
        assert response.status_code == 200
        return response.headers["x-request-id"], response.json()["id"]

    assert ids({"request_id": "mine"}, {"X-Request-Id": "header"}) == ("mine", "cmpl-mine")
    assert ids({}, {"X-Request-Id": "header"}) == ("header", "cmpl-header")
    generated, answer_id = ids({}, {"X-Request-Id": "not valid"})
    assert generated != "not valid"
    assert answer_id == f"cmpl-{generated}"


def test_a_cache_salt_keeps_prefixes_apart(service: Service) -> None:
    def cached(salt: str) -> int:
        answer = service.completed(prompt=[7] * 200, max_tokens=1, cache_salt=salt)
        tokens: int = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
        return tokens

    assert cached("a") == 0
    assert cached("a") > 0
    assert cached("b") == 0


def test_fields_without_an_effect_on_the_answer_are_taken(service: Service) -> None:
    service.completed(user="somebody", priority=-5, stream_options=None, metadata={"any": "thing"}, store=False, best_of=1, suffix=None)


VALID_AND_INVALID: list[tuple[str, list[Any], list[Any]]] = [
    ("model", ["tiny"], [5, ["tiny"]]),
    ("max_tokens", [0, 1], [-1, 1.0, "5", True, 2**31]),
    ("temperature", [0, 0.5, 2], [-0.1, 2.1, "1", True, [1]]),
    ("top_p", [0.01, 1], [0, 1.01, "1", True]),
    ("top_k", [-1, 0, 5], [-2, 1.5, "1", True]),
    ("min_p", [0, 1], [-0.1, 1.1, "0", False]),
    ("n", [1, 2], [0, -1, 129, 1.0, "1", True]),
    ("seed", [0, -(2**63), 2**63 - 1], [2**63, 0.5, "1", True]),
    ("stop", ["x", ["x", "y"], []], [5, [5], [""], "", ["x"] * 65, "x" * 1025, True]),
    ("stop_token_ids", [[], [1, 2]], [5, ["1"], [-1], [VOCAB_SIZE], [True], [1.0]]),
    ("ignore_eos", [True, False], [1, "true"]),
    ("echo", [True, False], [0, "false"]),
    ("logprobs", [0, 20], [-1, -2, 21, True, 1.0, "1"]),
    ("prompt_logprobs", [0, 20], [-1, -2, 21, True, 1.0, "1"]),
    ("logit_bias", [{}, {"5": -100, "6": 0.5}], [[], {"x": 1}, {"-1": 1}, {"258": 1}, {"5": 101}, {"5": "1"}, {"5": True}, {"05": 1}]),
    ("min_tokens", [0, 4], [-1, 5, 1.0, "1", True]),
    ("best_of", [1], [0, 2, "1", True]),
    ("allowed_token_ids", [[1, 2], [5, 5]], [[], [VOCAB_SIZE], [-1], ["1"], 5, [True]]),
    ("bad_words", [[], ["no", "not this"]], [[""], [" "], "no", [5], ["x" * 257], ["x"] * 129, ["\ud800"]]),
    ("skip_special_tokens", [True, False], [0, "no"]),
    ("include_stop_str_in_output", [True, False], [1, "yes"]),
    ("return_tokens_as_token_ids", [True, False], [1, "yes"]),
    ("presence_penalty", [-2, 2], [-2.1, 2.1, "0", True]),
    ("frequency_penalty", [-2, 2], [-2.1, 2.1, "0", True]),
    ("repetition_penalty", [0.5, 2], [0, -1, 101, "1", True]),
    ("stream", [False], [1, "true"]),
    ("stream_options", [None], [{}, {"include_usage": True}, 5]),
    ("user", ["me"], [5]),
    ("request_id", ["a-b_c/d"], ["", "with space", "é", "x" * 129, "line\nbreak", 5]),
    ("return_token_ids", [True, False], [1, "yes"]),
    ("add_special_tokens", [True, False], [1, "no"]),
    ("truncate_prompt_tokens", [1, 100, -1], [0, -2, 1.5, "1", True]),
    ("truncation_side", ["left", "right"], ["middle", 5]),
    ("cache_salt", ["", "salt"], [5, "x" * 1025]),
    ("priority", [-5, 0, 5], [1.5, "1", True, 2**31]),
    ("kv_transfer_params", [{}], [5, [], "all", True]),
]


@pytest.mark.parametrize(("field", "value"), [(field, value) for field, valid, _ in VALID_AND_INVALID for value in valid])
def test_valid_values_are_taken(service: Service, field: str, value: object) -> None:
    service.completed(**{field: value})


@pytest.mark.parametrize(("field", "value"), [(field, value) for field, _, invalid in VALID_AND_INVALID for value in invalid])
def test_invalid_values_are_refused_by_the_name_of_the_field(service: Service, field: str, value: object) -> None:
    error = service.refused(400, **{field: value})
    assert error["param"].split(".")[0] == field
    assert field in error["message"]
    assert error["type"] == "invalid_request_error"


def test_null_is_the_same_as_an_absent_field(service: Service) -> None:
    body = {field: None for field, _, _ in VALID_AND_INVALID}
    assert service.completed(**body | {"temperature": 0, "max_tokens": 4})["choices"] == service.completed()["choices"]


@pytest.mark.parametrize(("value", "bound"), [(-1, "greater than or equal to 0"), (3, "less than or equal to 2")])
def test_the_message_names_field_bound_and_value(service: Service, value: int, bound: str) -> None:
    assert service.refused(400, temperature=value)["message"] == f"temperature: must be {bound}, got {value}"


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("suffix", "end"),
        ("use_beam_search", True),
        ("length_penalty", 0.5),
        ("response_format", {"type": "json_object"}),
        ("guided_json", {}),
        ("guided_regex", "a*"),
        ("guided_choice", ["a"]),
        ("structured_outputs", {"regex": "a"}),
        ("prompt_embeds", "AAAA"),
        ("guided_grammar", "root ::= x"),
        ("guided_decoding_backend", "outlines"),
        ("guided_by_something_new", {}),
        ("grammar", "root ::= x"),
        ("response_format", {"type": "json_schema", "json_schema": {}}),
        ("watermarking", True),
        ("logprob_token_ids", [1]),
        ("logits_processors", ["x"]),
        ("lora_request", {"name": "x"}),
        ("max_completion_tokens", 5),
    ],
)
def test_known_fields_that_are_not_supported_are_refused(service: Service, field: str, value: object) -> None:
    error = service.refused(400, **{field: value})
    assert (error["param"], error["message"]) == (field, f"{field} is not supported")


def test_unsupported_fields_with_their_neutral_value_are_taken(service: Service) -> None:
    service.completed(best_of=1, min_tokens=0, skip_special_tokens=True, response_format={"type": "text"}, length_penalty=1.0)


@pytest.mark.parametrize("value", [True, False, 3])
def test_unknown_reports_are_refused(service: Service, value: object) -> None:
    error = service.refused(400, return_hidden_things=value)
    assert (error["param"], error["message"]) == ("return_hidden_things", "return_hidden_things is not a known field")
    service.completed(return_hidden_things=None, unknown_of_another_kind=value)


def test_a_model_without_a_tokenizer_takes_token_ids_only(services: Services, model_folder: Path, tmp_path: Path) -> None:
    folder = tmp_path / "no-tokenizer"
    shutil.copytree(model_folder, folder, ignore=shutil.ignore_patterns("tokenizer*"))
    with services.run(model=str(folder)) as service:
        choice = service.completed(prompt=[1, 2], logprobs=1, echo=True, return_token_ids=True)["choices"][0]
        assert choice["text"] == ""
        assert choice["logprobs"]["tokens"] == [f"token_id:{token}" for token in [1, 2, *choice["token_ids"]]]
        assert service.refused(400, prompt="text")["param"] == "prompt"
        assert service.refused(400, prompt=[1], stop="x")["param"] == "stop"
        assert service.refused(400, prompt=[1], bad_words=["x"])["param"] == "bad_words"
        assert service.completed(prompt=[1, 2], prompt_logprobs=0)["choices"][0]["prompt_logprobs"][1]["2"]["decoded_token"] == ""
        assert "tokenizer" in service.client.get("/tokenizer_info").json()["error"]["message"]
