"""The fields of a body that holds `messages`, checked by hand: errors name the message and the field in it."""

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import Field, PlainValidator, WithJsonSchema, model_validator

from engine.errors import InvalidRequest
from service.schemas.fields import Text, shown
from service.schemas.generation import PromptRequest
from service.wire import Json

MAX_MESSAGES = 16384
MAX_TOOLS = 1024
TEXT_FIELDS: Mapping[object, str] = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}
"""The field of a part that holds its text, by the part's type. Other types are not text."""
SILENT_ROLES = ("assistant", "function")
"""Roles whose messages may have no content, by OpenAI's API: an assistant may only have called tools."""
RESERVED_ARGUMENTS = frozenset({"messages", "tools", "documents", "chat_template", "add_generation_prompt", "continue_final_message"})


def _objects(value: object, param: str, most: int) -> tuple[Json, ...]:
    if not isinstance(value, list):
        raise InvalidRequest(f"{param} must be a list of objects, got {shown(value)}", param)
    if len(value) > most:
        raise InvalidRequest(f"{param} holds {len(value)} items, at most {most} are allowed", param)
    for index, item in enumerate(value):
        if not isinstance(item, dict):
            raise InvalidRequest(f"{param}[{index}] must be an object, got {shown(item)}", f"{param}[{index}]")
    return tuple(value)


def _messages(value: object) -> tuple[Json, ...]:
    messages = _objects(value, "messages", MAX_MESSAGES)
    if not messages:
        raise InvalidRequest("messages must not be empty", "messages")
    for index, message in enumerate(messages):
        _check_message(message, f"messages[{index}]")
    return messages


def _check_message(message: Json, param: str) -> None:
    role = message.get("role")
    if not isinstance(role, str) or not role:
        raise InvalidRequest(f"{param}.role must be a string that is not empty, got {shown(role)}", f"{param}.role")
    _check_content(message.get("content"), role, f"{param}.content")
    if not isinstance(message.get("refusal"), str | None):
        raise InvalidRequest(f"{param}.refusal must be a string, got {shown(message['refusal'])}", f"{param}.refusal")
    if message.get("tool_calls") is not None:
        for index, call in enumerate(_objects(message["tool_calls"], f"{param}.tool_calls", MAX_TOOLS)):
            _check_function(call, f"{param}.tool_calls[{index}]")


def _check_content(content: object, role: str, param: str) -> None:
    if isinstance(content, list):
        for index, part in enumerate(content):
            _check_part(part, f"{param}[{index}]")
    elif content is None:
        # Anybody else has something to say, and a misspelt field must not swallow it.
        if role not in SILENT_ROLES:
            raise InvalidRequest(f"{param} is missing", param)
    elif not isinstance(content, str):
        raise InvalidRequest(f"{param} must be a string or a list of parts, got {shown(content)}", param)


def _check_part(part: object, param: str) -> None:
    if not isinstance(part, dict):
        raise InvalidRequest(f"{param} must be an object, got {shown(part)}", param)
    kind = part.get("type")
    name = TEXT_FIELDS.get(kind) if isinstance(kind, str) else None
    if name is None:
        known = ", ".join(f'"{text_type}"' for text_type in TEXT_FIELDS)
        raise InvalidRequest(f"{param}.type must be one of {known}: no other part is supported, got {shown(kind)}", f"{param}.type")
    if not isinstance(part.get(name), str):
        raise InvalidRequest(f"{param}.{name} must be a string, got {shown(part.get(name))}", f"{param}.{name}")


def _check_function(item: Json, param: str) -> None:
    if item.get("type") not in (None, "function"):
        raise InvalidRequest(f'{param}.type must be "function", got {shown(item["type"])}', f"{param}.type")
    function = item.get("function")
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise InvalidRequest(f"{param}.function must be an object with a name, got {shown(function)}", f"{param}.function")


def _tools(value: object) -> tuple[Json, ...]:
    tools = _objects(value, "tools", MAX_TOOLS)
    for index, tool in enumerate(tools):
        _check_function(tool, f"tools[{index}]")
    return tools


def _documents(value: object) -> tuple[Json, ...]:
    return _objects(value, "documents", MAX_TOOLS)


def _arguments(value: object) -> Json:
    param = "chat_template_kwargs"
    if not isinstance(value, dict):
        raise InvalidRequest(f"{param} must be an object, got {shown(value)}", param)
    for name in value:
        if name in RESERVED_ARGUMENTS:
            raise InvalidRequest(f"{param} holds {name!r}, which is a field of the body itself", f"{param}.{name}")
        if not name.isidentifier():
            raise InvalidRequest(f"{param} holds {shown(name)}, which is not the name of a variable", param)
    return value


_PART_SCHEMA = {
    "type": "object",
    "required": ["type"],
    "properties": {"type": {"enum": list(TEXT_FIELDS)}, "text": {"type": "string"}, "refusal": {"type": "string"}},
}
_CONTENT_SCHEMA = {"anyOf": [{"type": "string"}, {"type": "array", "items": _PART_SCHEMA}, {"type": "null"}]}
_FUNCTION_SCHEMA = {
    "type": "object",
    "required": ["function"],
    "properties": {
        "type": {"enum": ["function", None]},
        "function": {"type": "object", "required": ["name"], "properties": {"name": {"type": "string"}}},
    },
}
_MESSAGE_SCHEMA: Json = {
    "type": "object",
    "required": ["role"],
    "properties": {
        "role": {"type": "string", "minLength": 1},
        "content": _CONTENT_SCHEMA,
        "refusal": {"anyOf": [{"type": "string"}, {"type": "null"}]},
        "tool_calls": {"anyOf": [{"type": "array", "maxItems": MAX_TOOLS, "items": _FUNCTION_SCHEMA}, {"type": "null"}]},
    },
}
_MESSAGES_SCHEMA = {"type": "array", "minItems": 1, "maxItems": MAX_MESSAGES, "items": _MESSAGE_SCHEMA}
_TOOLS_SCHEMA = {"type": "array", "maxItems": MAX_TOOLS, "items": _FUNCTION_SCHEMA, "default": []}
_DOCUMENTS_SCHEMA = {"type": "array", "maxItems": MAX_TOOLS, "items": {"type": "object"}, "default": []}

Messages = Annotated[tuple[Json, ...], PlainValidator(_messages), WithJsonSchema(_MESSAGES_SCHEMA)]
Tools = Annotated[tuple[Json, ...], PlainValidator(_tools), WithJsonSchema(_TOOLS_SCHEMA)]
Documents = Annotated[tuple[Json, ...], PlainValidator(_documents), WithJsonSchema(_DOCUMENTS_SCHEMA)]
Arguments = Annotated[Mapping[str, Any], PlainValidator(_arguments), WithJsonSchema({"type": "object", "default": {}})]


class MessagesRequest(PromptRequest):
    """A body whose prompt is made of messages by the model's chat template."""

    messages: Messages = Field(description="The conversation; content is a string or a list of text parts.")
    add_generation_prompt: bool = Field(True, description="End with the header of the assistant's next message.")
    continue_final_message: bool = Field(False, description="Leave the last message open, for the model to go on with it.")
    chat_template_kwargs: Arguments = Field({}, description="Further variables for the chat template.")
    reasoning_effort: Text | None = Field(None, min_length=1, max_length=64, description="Given to the chat template.")
    tools: Tools = Field((), description="Functions that the template tells the model of; the text is not searched for calls.")
    documents: Documents = Field((), description="Documents that the template tells the model of.")
    add_special_tokens: bool | None = Field(
        None, description="Add the tokenizer's special tokens; absent: not to messages, whose template writes them itself."
    )

    @property
    def template_arguments(self) -> Mapping[str, Any]:
        """Further variables for the chat template."""
        effort = {} if self.reasoning_effort is None else {"reasoning_effort": self.reasoning_effort}
        return {**self.chat_template_kwargs, **effort}

    @model_validator(mode="before")
    @classmethod
    def _either_continued_or_new(cls, value: Any) -> Any:  # noqa: ANN401 - any JSON value
        if not isinstance(value, dict) or value.get("continue_final_message") is not True:
            return value
        if value.get("add_generation_prompt") is True:
            message = "continue_final_message and add_generation_prompt exclude each other"
            raise InvalidRequest(message, "continue_final_message")
        return {**value, "add_generation_prompt": False} if value.get("add_generation_prompt") is None else value
