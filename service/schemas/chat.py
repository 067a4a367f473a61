"""The bodies of `POST /v1/chat/completions` and of its `/render`."""

from typing import ClassVar, Self

from pydantic import Field, model_validator

from engine.errors import InvalidRequest
from service.schemas.generation import CutRequest, GenerationRequest
from service.schemas.messages import MessagesRequest
from service.schemas.unsupported import CHAT, MESSAGES


class ChatRequest(MessagesRequest, GenerationRequest):
    """An OpenAI chat completion, with what Strata adds. null is the same as an absent field."""

    unsupported: ClassVar = CHAT

    max_tokens: int | None = Field(None, ge=0, le=2**31 - 1, description="Absent: what room is left. 0: only the prompt is run.")
    max_completion_tokens: int | None = Field(None, ge=0, le=2**31 - 1, description="Another name of max_tokens.")
    logprobs: bool = Field(False, description="Log-probabilities of the sampled tokens.")
    top_logprobs: int = Field(
        0, ge=-1, le=2**31 - 1, description="This many likeliest tokens beside each, at most --max-logprobs; -1: all. Only with logprobs."
    )
    echo: bool = Field(False, description="The last message stands before the text, where it is the assistant's.")
    parallel_tool_calls: bool = Field(True, description="Not used: the text is not searched for calls.")

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.top_logprobs and not self.logprobs:
            raise InvalidRequest("top_logprobs is only allowed with logprobs: true", "top_logprobs")
        limits = {self.max_tokens, self.max_completion_tokens} - {None}
        if len(limits) > 1:
            message = (
                f"max_tokens is {self.max_tokens} and max_completion_tokens {self.max_completion_tokens}: they are two names of one limit"
            )
            raise InvalidRequest(message, "max_completion_tokens")
        return self

    @property
    def last_answer(self) -> str:
        """The text of the last message, where it is the assistant's as the answer is; else nothing."""
        last = self.messages[-1]
        content = last.get("content") if last["role"] == "assistant" else None
        if isinstance(content, list):
            return "\n".join(part.get("text") or part.get("refusal") or "" for part in content)
        return content or ""

    @property
    def token_limit(self) -> int | None:
        return self.max_completion_tokens if self.max_tokens is None else self.max_tokens

    @property
    def num_logprobs(self) -> int | None:
        return self.top_logprobs if self.logprobs else None


class RenderRequest(MessagesRequest, CutRequest):
    """Messages to be turned into tokens; the other fields of a chat completion are ignored."""

    unsupported: ClassVar = MESSAGES
