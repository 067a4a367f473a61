"""Messages written out as the text of a prompt, by a model's chat template, as transformers does it."""

import json
import secrets
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from jinja2 import Template, TemplateError
from jinja2.exceptions import SecurityError

from engine.errors import InvalidRequest, ModelError
from service.text.message_fields import (
    message_with_defaults,
    normalized_message,
    normalized_tool,
    tool_with_defaults,
)
from service.text.template_probes import TemplateProbes
from service.text.template_sandbox import TemplateSandbox
from service.wire import Json

DEFAULT, TOOL_USE = "default", "tool_use"
LONGEST_MESSAGE = 500


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
        self._probes = TemplateProbes(source, lambda messages, tools: self._render(messages, Conversation(messages, tools)))

    def render(self, conversation: Conversation) -> str:
        """The text of the prompt. Raises `InvalidRequest` with the template's own words where it refuses the messages."""
        refusal: Exception | None = None
        for reading in _readings(conversation):
            try:
                return self._attempt(reading)
            except InvalidRequest:
                raise
            except Exception as error:  # whatever a template does with what a client sent
                refusal = error
                if isinstance(error, SecurityError):
                    break
        assert refusal is not None
        raise InvalidRequest(f"the chat template refuses the messages: {_words(refusal)}", "messages") from refusal

    def _attempt(self, conversation: Conversation) -> str:
        """Raises whatever the template raises."""
        messages = [self._fitted(message) for message in conversation.messages]
        if conversation.continue_final_message:
            return self._render_open(messages, conversation)
        return self._render(messages, conversation)

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
        """A message in the forms that this template takes."""
        fitted = dict(message)
        if "content" in message:
            fitted["content"] = self._fitted_content(message["role"], message["content"])
        if "tool_calls" in message and self._probes.takes_objects:
            fitted["tool_calls"] = [_with_arguments(call) for call in message["tool_calls"]]
        return fitted

    def _fitted_content(self, role: str, content: str | list[Json]) -> str | list[Json]:
        if isinstance(content, list):
            if self._probes.takes_parts(role):
                return content
            content = "\n".join(part["text"] for part in content)
        if self._probes.takes_text(role) or not self._probes.takes_one_part(role):
            return content
        return [{"type": "text", "text": content}]


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


def _readings(conversation: Conversation) -> Iterator[Conversation]:
    """The conversation with nothing that is null or empty; then, for a template that fails without, with what that means."""
    messages = [normalized_message(message) for message in conversation.messages]
    tools = [normalized_tool(tool) for tool in conversation.tools]
    plain = replace(conversation, messages=messages, tools=tools)
    with_content = replace(plain, messages=[message_with_defaults(message) for message in messages])
    with_tools = replace(with_content, tools=[tool_with_defaults(tool) for tool in tools])
    yield plain
    if with_content != plain:
        yield with_content
    if with_tools != with_content:
        yield with_tools


def _with_arguments(call: Json) -> Json:
    """A tool call whose arguments are an object: the OpenAI API has them as JSON text, templates write that themselves."""
    arguments = call["function"].get("arguments")
    if not isinstance(arguments, str):
        return call
    try:
        parsed = json.loads(arguments)
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
