"""From the prompts of a body to token ids that fit the model."""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from typing import Any

from engine.errors import InvalidRequest
from service.errors import BadRequest
from service.schemas.chat import ChatRequest
from service.schemas.completions import CompletionRequest, Prompt
from service.schemas.generation import GenerationRequest
from service.schemas.messages import MessagesRequest
from service.text.chat_templates import ChatTemplates, Conversation
from service.text.tokenizer import Tokenizer

DEFAULT_MAX_TOKENS = 16
CUT_CONTEXTS = 4
"""How many times the context a text may be long that is cut to fit it."""
INLINE_TOKENS = 2**17
"""So many token ids are checked on the event loop: no thread is faster."""
Runner = Callable[..., Awaitable[Any]]
"""Calls a function with arguments on a thread."""


@dataclass(frozen=True)
class PreparedPrompt:
    """One prompt as the engine gets it."""

    token_ids: list[int]
    text: str | None
    """The client's own text, where all of it was kept."""
    max_tokens: int


@dataclass(frozen=True)
class Limits:
    """What the model can take."""

    vocab_size: int
    max_model_len: int


@dataclass(frozen=True)
class PromptMaker:
    """Turns what clients send into token ids. Everything here takes a while and runs off the event loop."""

    tokenizer: Tokenizer | None
    templates: ChatTemplates
    limits: Limits
    most_tokens: int | None = None
    """A text that must have more, by its characters alone, is refused before it is tokenized; None: texts that are not run."""

    def text(self, text: str, add_special_tokens: bool, continued: bool) -> list[int]:
        return self._checked("prompt", self.encode("prompt", text, add_special_tokens, continued))

    def encode(self, param: str, text: str, add_special_tokens: bool, continued: bool = True) -> list[int]:
        """The tokens of a text; one that is to be `continued` gets none of the template's behind it.

        Raises `BadRequest` for one that has too many, and `InvalidRequest` where there is no tokenizer.
        """
        if self.tokenizer is None:
            raise InvalidRequest(f"this model has no tokenizer: {param} must be token ids", param)
        if self.most_tokens is not None and (least := self.tokenizer.least_tokens(text)) > self.most_tokens:
            message = (
                f"{param} is a text of {len(text)} characters, which are at least {least} tokens, at most {self.most_tokens} are taken"
            )
            message += f": the context length is {self.limits.max_model_len}"
            raise BadRequest(message, param=param, code="context_length_exceeded")
        return self.tokenizer.encode(text, add_special_tokens, continued)

    def messages(self, body: MessagesRequest) -> list[int]:
        """Raises `InvalidRequest` with the template's own words where it refuses the messages."""
        if self.tokenizer is None:
            raise InvalidRequest("this model has no tokenizer, so it takes no messages", "messages")
        text = self.templates.render(_conversation(body))
        ids = self.encode("messages", text, add_special_tokens=False)
        begun = bool(ids) and ids[0] == self.tokenizer.bos_id
        if body.add_special_tokens and not begun:  # a template that writes the begin token has done all of it
            ids = self.tokenizer.encode(text, add_special_tokens=True, continued=True)
        return self._checked("messages", ids)

    def _checked(self, param: str, token_ids: list[int]) -> list[int]:
        if not token_ids:
            raise InvalidRequest(f"{param} must not be empty: it has no tokens", param)
        check_token_ids(param, token_ids, self.limits.vocab_size)
        return token_ids


def _conversation(body: MessagesRequest) -> Conversation:
    return Conversation(
        messages=body.messages,
        tools=body.tools,
        documents=body.documents,
        arguments=body.template_arguments,
        add_generation_prompt=body.add_generation_prompt,
        continue_final_message=body.continue_final_message,
    )


async def prepare_prompts(body: GenerationRequest, maker: PromptMaker, include_last_token: bool, run: Runner) -> list[PreparedPrompt]:
    """Tokenizes on a thread, by `run`, cuts and checks.

    Raises `InvalidRequest` for a prompt that is empty or out of the vocabulary, `BadRequest` for one that is too long.
    """
    if isinstance(body, CompletionRequest) and sum(map(len, body.prompts)) <= INLINE_TOKENS and str not in map(type, body.prompts):
        return _prepare_all(body, maker, include_last_token)
    prompts: list[PreparedPrompt] = await run(_prepare_all, body, maker, include_last_token)
    return prompts


def _prepare_all(body: GenerationRequest, maker: PromptMaker, include_last_token: bool) -> list[PreparedPrompt]:
    contexts = 1 if body.truncate_prompt_tokens is None else CUT_CONTEXTS
    maker = replace(maker, most_tokens=contexts * maker.limits.max_model_len)
    if isinstance(body, ChatRequest):
        return [_fitted(maker.messages(body), None, body, maker.limits, include_last_token)]
    assert isinstance(body, CompletionRequest)
    return [_prepare(prompt, body, maker, include_last_token) for prompt in body.prompts]


def _prepare(prompt: Prompt, body: CompletionRequest, maker: PromptMaker, include_last_token: bool) -> PreparedPrompt:
    if isinstance(prompt, str):
        ids = maker.text(prompt, body.add_special_tokens, continued=body.token_limit != 0)
        return _fitted(ids, prompt, body, maker.limits, include_last_token)
    check_token_ids("prompt", prompt, maker.limits.vocab_size)
    return _fitted(prompt, None, body, maker.limits, include_last_token)


def _fitted(ids: list[int], text: str | None, body: GenerationRequest, limits: Limits, include_last_token: bool) -> PreparedPrompt:
    kept = body.cut(ids, limits.max_model_len)
    default = None if isinstance(body, ChatRequest) else DEFAULT_MAX_TOKENS
    max_tokens = resolve_max_tokens(body.token_limit, default, len(kept), limits, include_last_token)
    if body.min_tokens > max_tokens:
        raise InvalidRequest(f"min_tokens is {body.min_tokens}, at most {max_tokens} tokens can be generated", "min_tokens")
    return PreparedPrompt(kept, text if len(kept) == len(ids) else None, max_tokens)


def check_token_ids(param: str, ids: list[int], vocab_size: int) -> None:
    """Raises `InvalidRequest` naming an id outside the vocabulary and the valid range."""
    if ids and not (min(ids) >= 0 and max(ids) < vocab_size):
        wrong = min(ids) if min(ids) < 0 else max(ids)
        raise InvalidRequest(f"{param} holds the token id {wrong}; ids of this model are 0 to {vocab_size - 1}", param)


def resolve_max_tokens(asked: int | None, default: int | None, num_prompt_tokens: int, limits: Limits, include_last_token: bool) -> int:
    """`max_tokens`, or where it is absent the default or what room is left. No default: all the room that is left.

    The positions fed to the model must fit: the prompt, the sampled tokens but the last one, and that one too with
    `include_last_token`. Raises an error that names both numbers.
    """
    last = 1 if include_last_token else 0
    room = max(limits.max_model_len - num_prompt_tokens + 1 - last, 0)
    wanted = asked if asked is not None else room if default is None else min(default, room)
    positions = num_prompt_tokens + (wanted - 1 + last if wanted else 0)
    if positions <= limits.max_model_len:
        return wanted
    parts = f"{num_prompt_tokens} of the prompt" + (
        f" and {positions - num_prompt_tokens} generated" if positions > num_prompt_tokens else ""
    )
    message = f"the request needs {positions} positions ({parts}), the context length is {limits.max_model_len}"
    param = "prompt" if num_prompt_tokens > limits.max_model_len else "max_tokens"
    raise BadRequest(message, param=param, code="context_length_exceeded")
