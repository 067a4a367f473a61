"""Messages written out as the text of a prompt, by a model's chat template, as transformers does it."""

import json
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from jinja2 import Template, TemplateError

from engine.errors import InvalidRequest, ModelError
from service.text.template_sandbox import TemplateSandbox
from service.wire import Json

DEFAULT, TOOL_USE = "default", "tool_use"
LONGEST_MESSAGE = 500
REASONING_FIELDS = ("reasoning_content", "thinking", "reasoning")
"""Names under which clients send what a model has thought; templates read the first one, some the second."""
PROBE = "probe-7f3a"


@dataclass(frozen=True)
class Conversation:
    """What a prompt is made of."""

    messages: Sequence[Json]
    tools: Sequence[Json] = ()
    documents: Sequence[Json] = ()
    arguments: Mapping[str, Any] = field(default_factory=dict)
    """Further variables for the template; they win over the special tokens."""
    add_generation_prompt: bool = True
    continue_final_message: bool = False


class ChatTemplate:
    """One compiled template."""

    def __init__(self, source: str, sandbox: TemplateSandbox, special_tokens: Mapping[str, str]) -> None:
        """Raises `ModelError` where the template is not valid."""
        self._source = source
        self._sandbox = sandbox
        self._special_tokens = dict(special_tokens)
        try:
            self._template: Template = sandbox.from_string(source)
        except TemplateError as error:
            raise ModelError(f"the chat template is not valid: {error}") from error

    def render(self, conversation: Conversation) -> str:
        """The text of the prompt. Raises `InvalidRequest` with the template's own words where it refuses the messages."""
        messages = [self._fitted(message) for message in conversation.messages]
        try:
            if conversation.continue_final_message:
                return self._render_open(messages, conversation)
            return self._render(messages, conversation)
        except InvalidRequest:
            raise
        except Exception as error:  # whatever a template does with what a client sent
            raise InvalidRequest(f"the chat template refuses the messages: {_words(error)}", "messages") from error

    def _render(self, messages: Sequence[Json], conversation: Conversation) -> str:
        variables = {
            **self._special_tokens,
            **conversation.arguments,
            "messages": list(messages),
            "tools": list(conversation.tools) or None,
            "documents": list(conversation.documents) or None,
            "add_generation_prompt": conversation.add_generation_prompt,
        }
        return self._sandbox.render(self._template, variables)

    def _render_open(self, messages: list[Json], conversation: Conversation) -> str:
        """The text up to the end of the last message, found by a mark behind it.

        The mark ends with a space: where the template has taken that away, it trims messages, and so is the text before it.
        """
        if "content" not in self._source:
            raise InvalidRequest(
                "continue_final_message: the chat template doesn't write the content of messages", "continue_final_message"
            )
        mark = f"continue-{secrets.token_hex(8)} "
        *before, final = messages
        marked, text = _marked(final, mark)
        rendered = self._render([*before, marked], conversation)
        place = rendered.rfind(mark.strip())
        if place < 0 or text.strip() not in rendered:
            message = "continue_final_message: the chat template doesn't write the last message as it is"
            raise InvalidRequest(message, "continue_final_message")
        return rendered[:place] if rendered.startswith(mark, place) else rendered[:place].rstrip()

    def _fitted(self, message: Json) -> Json:
        """A message as this template takes it. Fields that are null are left out, as transformers does."""
        fitted = {name: value for name, value in message.items() if value is not None}
        fitted = _with_reasoning(fitted)
        content = fitted.get("content")
        if isinstance(content, list) and not self._takes_parts:
            fitted["content"] = "\n".join(part["text"] for part in content)
        elif isinstance(content, str) and self._takes_parts and not self._takes_text:
            fitted["content"] = [{"type": "text", "text": content}]
        if "tool_calls" in fitted and self._takes_objects:
            fitted["tool_calls"] = [_with_arguments(call) for call in fitted["tool_calls"]]
        return fitted

    @cached_property
    def _takes_text(self) -> bool:
        return PROBE in self._probed({"role": "user", "content": PROBE})

    @cached_property
    def _takes_parts(self) -> bool:
        """Whether the template writes the text of a part, and not the part as Python shows it."""
        text = self._probed({"role": "user", "content": [{"type": "text", "text": PROBE}]})
        return PROBE in text and not any(f"{quote}{PROBE}{quote}" in text for quote in "'\"")

    @cached_property
    def _takes_objects(self) -> bool:
        """Whether arguments of tool calls may be objects. Most templates write those as JSON; a few only take text."""

        def fails(arguments: object) -> bool:
            call = {"id": PROBE, "type": "function", "function": {"name": PROBE, "arguments": arguments}}
            return not self._probed({"role": "user", "content": PROBE}, {"role": "assistant", "content": "", "tool_calls": [call]})

        return not fails({}) or fails("{}")

    def _probed(self, *messages: Json) -> str:
        """What the template makes of messages; nothing where it refuses them."""
        try:
            return self._render(messages, Conversation(messages))
        except Exception:  # whatever a template does with messages that it wasn't made for
            return ""


class ChatTemplates:
    """A model's templates by name: one for all, or one for conversations with tools and one for those without."""

    def __init__(self, sources: Mapping[str, str], special_tokens: Mapping[str, str], sandbox: TemplateSandbox | None = None) -> None:
        """Raises `ModelError` where a template is not valid."""
        sandbox = sandbox or TemplateSandbox()
        self._templates = {name: ChatTemplate(source, sandbox, special_tokens) for name, source in sources.items()}

    def render(self, conversation: Conversation) -> str:
        """The text of the prompt. Raises `InvalidRequest`."""
        name = TOOL_USE if conversation.tools and TOOL_USE in self._templates else DEFAULT
        if name not in self._templates:
            known = ", ".join(sorted(self._templates))
            message = f"this model has no chat template for all messages, only {known}" if known else "this model has no chat template"
            raise InvalidRequest(message, "messages")
        return self._templates[name].render(conversation)


def _words(error: Exception) -> str:
    """What a template's failure says to a client."""
    text = str(error)
    if not isinstance(error, TemplateError):
        text = f"{type(error).__name__}: {text}"
    return text if len(text) <= LONGEST_MESSAGE else text[:LONGEST_MESSAGE] + "…"


def _with_reasoning(message: Json) -> Json:
    reasoning = next((message[name] for name in REASONING_FIELDS if name in message), None)
    return message if reasoning is None else {"thinking": reasoning, **message, "reasoning_content": reasoning}


def _with_arguments(call: Json) -> Json:
    """A tool call whose arguments are an object: the OpenAI API has them as JSON text, templates write that themselves."""
    arguments = call["function"].get("arguments")
    if not isinstance(arguments, str):
        return call
    try:
        parsed = json.loads(arguments) if arguments.strip() else {}
    except ValueError:
        return call
    return {**call, "function": {**call["function"], "arguments": parsed}} if isinstance(parsed, dict) else call


def _marked(message: Json, mark: str) -> tuple[Json, str]:
    """The message with a mark behind its text, and that text."""
    content = message.get("content")
    if isinstance(content, str):
        return {**message, "content": content + mark}, content
    if isinstance(content, list) and content:
        *parts, last = content
        return {**message, "content": [*parts, {**last, "text": last["text"] + mark}]}, last["text"]
    raise InvalidRequest("continue_final_message: the last message has no content to go on with", "continue_final_message")
