"""The bodies of `POST /tokenize` and `POST /detokenize`."""

from typing import Annotated, ClassVar, Self

from pydantic import FailFast, Field, model_validator

from engine.errors import InvalidRequest
from service.schemas.fields import Text
from service.schemas.generation import PromptRequest, TokenId
from service.schemas.messages import Messages, MessagesRequest
from service.schemas.unsupported import MESSAGES

MAX_TOKENS = 2**19


class TokenizeRequest(MessagesRequest):
    """A prompt, or messages with the fields that go with them."""

    unsupported: ClassVar = {name: values for name, values in MESSAGES.items() if name != "prompt"}

    messages: Messages = Field((), description="The conversation; content is a string or a list of text parts.")
    prompt: Text | None = Field(None, description="A text, instead of messages.")
    return_token_strs: bool = Field(False, description="Also the tokens as the vocabulary spells them.")

    @model_validator(mode="after")
    def _one_of_both(self) -> Self:
        if (self.prompt is None) is not bool(self.messages):
            raise InvalidRequest("exactly one of prompt and messages must be given", "prompt")
        return self


class DetokenizeRequest(PromptRequest):
    """Tokens to be turned into text."""

    tokens: Annotated[list[TokenId], FailFast()] = Field(max_length=MAX_TOKENS, description="Token ids.")
