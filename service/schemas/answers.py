"""Bodies of answers, as they are documented in openapi.yaml. A field that was not set is left out of the answer."""

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

from engine.layers import LayerId
from service.wire import Json

SaveStatusName = Literal["queued", "running", "writing", "completed", "failed", "cancelled", "expired"]


class Answer(BaseModel):
    model_config = ConfigDict(frozen=True)


class ErrorDetail(Answer):
    message: str
    type: str
    param: str | None
    code: str
    save_id: str | None = None
    """Where a save failed."""


class ErrorAnswer(Answer):
    error: ErrorDetail


class SaveTransfer(Answer):
    """`kv_transfer_params` of an answer. The last four fields come with the status `completed`."""

    hidden_states_path: str
    save_id: str
    status: SaveStatusName
    layers: list[LayerId]
    dtype: str
    num_tokens: int | None = None
    shape: list[int] | None = None
    bytes: int | None = None
    url: str | None = None
    """Of the file, on this server."""


class Logprobs(Answer):
    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class TokenLogprob(Answer):
    token: str
    logprob: float
    bytes: list[int]


class ScoredToken(TokenLogprob):
    top_logprobs: list[TokenLogprob]


class ChatLogprobs(Answer):
    content: list[ScoredToken]
    refusal: None = None


StopReason = str | int | None
"""The stop string or the token of `stop_token_ids` that ended a text."""


class RankedLogprob(Answer):
    logprob: float
    rank: int
    decoded_token: str


PromptLogprobs = list[dict[str, RankedLogprob] | None]
"""None for the first token; then the prompt's token and the likeliest ones, by token id."""


class CompletionChoice(Answer):
    index: int
    text: str
    logprobs: Logprobs | None
    finish_reason: Literal["stop", "length"] | None
    stop_reason: StopReason
    prompt_token_ids: list[int] | None
    token_ids: list[int] | None
    prompt_logprobs: PromptLogprobs | None = None
    """Not in the chunks of a stream."""
    kv_transfer_params: SaveTransfer | None = None


class PromptTokensDetails(Answer):
    cached_tokens: int


class Usage(Answer):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails | None = None


class CompletionAnswer(Answer):
    """Also the form of a stream's chunks."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    system_fingerprint: None = None
    choices: list[CompletionChoice]
    usage: Usage | None = None
    kv_transfer_params: SaveTransfer | None = None


class ChatMessage(Answer):
    role: Literal["assistant"] = "assistant"
    content: str = ""


class ChatChoice(Answer):
    """`message` in whole answers, `delta` in the chunks of a stream."""

    index: int
    message: ChatMessage | None = None
    delta: ChatMessage | None = None
    logprobs: ChatLogprobs | None
    finish_reason: Literal["stop", "length"] | None
    stop_reason: StopReason
    token_ids: list[int] | None
    kv_transfer_params: SaveTransfer | None = None


class ChatAnswer(Answer):
    """Also the form of a stream's chunks."""

    id: str
    object: Literal["chat.completion", "chat.completion.chunk"]
    created: int
    model: str
    system_fingerprint: None = None
    choices: list[ChatChoice]
    usage: Usage | None = None
    prompt_token_ids: list[int] | None = None
    """Of a stream in its first chunk."""
    prompt_logprobs: PromptLogprobs | None = None
    """Not in the chunks of a stream."""
    kv_transfer_params: SaveTransfer | None = None


class RenderAnswer(Answer):
    token_ids: list[int]


class TokenizeAnswer(Answer):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str | None] | None


class TokenizerInfo(Answer):
    """tokenizer_config.json as it is, with the chat template of wherever it stands."""

    model_config = ConfigDict(extra="allow")

    tokenizer_class: str | None
    chat_template: str | None


class DetokenizeAnswer(Answer):
    prompt: str


class SaveError(Answer):
    code: str
    message: str | None


class SaveOutput(Answer):
    text: str
    token_ids: list[int]
    finish_reason: str | None
    stop_reason: StopReason = None
    logprobs: Logprobs | ChatLogprobs | None = None
    prompt_logprobs: PromptLogprobs | None = None


class SaveAnswer(Answer):
    """The record of a save. Times are RFC 3339."""

    id: str
    object: Literal["save"] = "save"
    status: SaveStatusName
    hidden_states_path: str
    request_id: str
    model: str
    layers: list[LayerId]
    dtype: str
    shape: list[int] | None
    num_tokens: int | None
    bytes: int | None
    bytes_written: int
    created: str
    finished: str | None
    expires: str | None
    sha256: str | None = None
    xxh3: str | None = None
    error: SaveError | None = None
    output: SaveOutput | None = None


class SaveList(Answer):
    object: Literal["list"] = "list"
    data: list[SaveAnswer]
    has_more: bool


class ModelCard(Answer):
    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "strata"
    revision: str
    max_model_len: int
    num_hidden_layers: int
    hidden_size: int
    vocab_size: int
    default_layers: list[LayerId]
    layer_convention: str
    dtype: str


class ModelList(Answer):
    object: Literal["list"] = "list"
    data: list[ModelCard]


class Load(Answer):
    server_load: int


class Health(Answer):
    status: Literal["ok", "starting", "draining", "dead", "stopped"]


class Front(Answer):
    """What stands on the front page; `model` is null until the model is loaded."""

    version: str
    status: Literal["ok", "starting", "draining", "dead", "stopped"]
    model: dict[str, Any] | None
    links: dict[str, str]


class Version(Answer):
    version: str


COMMON_ERRORS: dict[int | str, Json] = {
    401: {"model": ErrorAnswer, "description": "No API key, or one that isn't valid."},
    408: {"model": ErrorAnswer, "description": "The request took too long to arrive."},
    413: {"model": ErrorAnswer, "description": "The body is too large."},
    421: {"model": ErrorAnswer, "description": "The Host header names a host that the service doesn't answer to."},
    429: {"model": ErrorAnswer, "description": "Too much is being asked at one time; see Retry-After."},
    431: {"model": ErrorAnswer, "description": "Too many or too large headers."},
}
"""What any route that needs a key may answer."""
ERRORS: dict[int | str, Json] = {
    400: {"model": ErrorAnswer, "description": "A bad value: the message names the field and the bound."},
    503: {"model": ErrorAnswer, "description": "Starting, draining or dead."},
}
WRONG_MODEL: dict[int | str, Json] = {404: {"model": ErrorAnswer, "description": "Another model than the served one."}}
