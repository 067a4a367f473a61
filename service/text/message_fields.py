"""Messages and tools as OpenAI's API has them, brought into one form before a chat template sees them.

What that API allows to be null or empty is absent, as transformers leaves out fields that are null. `with_defaults` is for templates that
fail without a field: it says what absence means.
"""

from collections.abc import Mapping
from typing import Any

from service.schemas.messages import TEXT_FIELDS
from service.wire import Json

OPTIONAL_FIELDS = frozenset({"name", "refusal", "tool_calls", "function_call", "audio", "annotations"})
"""Fields of messages that say nothing when they are empty."""
REASONING_FIELDS = ("reasoning_content", "thinking", "reasoning")
"""Names under which clients send what a model has thought; templates read the first one, some the second."""
NO_PARAMETERS: Mapping[str, Any] = {"type": "object", "properties": {}}
"""What a function takes whose `parameters` are absent, by OpenAI's API."""


def normalized_message(message: Json) -> Json:
    """The message without fields that say nothing, with parts of type `text` and reasoning under the names that templates read."""
    fields = {name: value for name, value in _without_nulls(message).items() if value or name not in OPTIONAL_FIELDS}
    content = fields.pop("content", None)
    if isinstance(content, list):
        content = [_text_part(part) for part in content] or (None if fields.get("role") == "assistant" else "")
    if content is None:
        content = fields.get("refusal")
    if content is not None:
        fields["content"] = content
    if "tool_calls" in fields:
        fields["tool_calls"] = [_normalized_call(call) for call in fields["tool_calls"]]
    return _with_reasoning(fields)


def normalized_tool(tool: Json) -> Json:
    """The tool without fields that are null. What its parameters hold stays: null is a value in a JSON schema."""
    return _with_function(_without_nulls(tool), _without_nulls(tool["function"]))


def message_with_defaults(message: Json) -> Json:
    """For templates that fail without content, or without the type of a call."""
    filled = {**message, "content": message.get("content", "")}
    if "tool_calls" in message:
        filled["tool_calls"] = [{"type": "function", **call} for call in message["tool_calls"]]
    return filled


def tool_with_defaults(tool: Json) -> Json:
    """For templates that fail without a description or parameters."""
    function = tool["function"]
    absent = {"description": "", "parameters": dict(NO_PARAMETERS)}
    return _with_function(tool, {**function, **{name: value for name, value in absent.items() if name not in function}})


def _without_nulls(fields: Json) -> Json:
    return {name: value for name, value in fields.items() if value is not None}


def _text_part(part: Json) -> Json:
    field = TEXT_FIELDS[part["type"]]
    others = {name: value for name, value in _without_nulls(part).items() if name not in ("type", field)}
    return {"type": "text", "text": part[field], **others}


def _normalized_call(call: Json) -> Json:
    """A call whose function has arguments: none is an empty object."""
    function = _without_nulls(call["function"])
    arguments = function.get("arguments", "")
    if isinstance(arguments, str) and not arguments.strip():
        arguments = "{}"
    return _with_function(_without_nulls(call), {**function, "arguments": arguments})


def _with_function(holder: Json, function: Json) -> Json:
    return {**holder, "function": function}


def _with_reasoning(message: Json) -> Json:
    reasoning = next((message[name] for name in REASONING_FIELDS if name in message), None)
    return message if reasoning is None else {"thinking": reasoning, **message, "reasoning_content": reasoning}
