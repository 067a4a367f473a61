"""From the prompts of a body to token ids that fit the model."""

import asyncio
from dataclasses import dataclass
from typing import Protocol

from engine.errors import InvalidRequest
from service.errors import BadRequest
from service.schemas.completions import CompletionRequest, Prompt

DEFAULT_MAX_TOKENS = 16


class Encoder(Protocol):
    """The part of the tokenizer that is needed here."""

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]: ...


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


async def prepare_prompts(
    body: CompletionRequest, encoder: Encoder | None, limits: Limits, include_last_token: bool
) -> list[PreparedPrompt]:
    """Tokenizes on a thread, cuts and checks. Raises `InvalidRequest` for a prompt that is empty, out of the vocabulary or too long."""
    check_token_ids("stop_token_ids", body.stop_token_ids, limits.vocab_size)
    check_token_ids("logit_bias", list(body.logit_bias), limits.vocab_size)
    if any(isinstance(prompt, str) for prompt in body.prompts):
        return await asyncio.to_thread(_prepare_all, body, encoder, limits, include_last_token)
    return _prepare_all(body, encoder, limits, include_last_token)


def _prepare_all(body: CompletionRequest, encoder: Encoder | None, limits: Limits, include_last_token: bool) -> list[PreparedPrompt]:
    return [_prepare(prompt, body, encoder, limits, include_last_token) for prompt in body.prompts]


def _prepare(prompt: Prompt, body: CompletionRequest, encoder: Encoder | None, limits: Limits, include_last_token: bool) -> PreparedPrompt:
    ids = _encode(prompt, body, encoder) if isinstance(prompt, str) else prompt
    if not ids:
        raise InvalidRequest("prompt must not be empty: it has no tokens", "prompt")
    check_token_ids("prompt", ids, limits.vocab_size)
    kept = _cut(ids, body)
    text = prompt if isinstance(prompt, str) and len(kept) == len(ids) else None
    return PreparedPrompt(kept, text, resolve_max_tokens(body.max_tokens, len(kept), limits.max_model_len, include_last_token))


def _encode(text: str, body: CompletionRequest, encoder: Encoder | None) -> list[int]:
    if encoder is None:
        raise InvalidRequest("this model has no tokenizer: prompt must be token ids", "prompt")
    return encoder.encode(text, add_special_tokens=body.add_special_tokens)


def check_token_ids(param: str, ids: list[int], vocab_size: int) -> None:
    """Raises `InvalidRequest` naming an id outside the vocabulary and the valid range."""
    if ids and not (min(ids) >= 0 and max(ids) < vocab_size):
        wrong = min(ids) if min(ids) < 0 else max(ids)
        raise InvalidRequest(f"{param} holds the token id {wrong}; ids of this model are 0 to {vocab_size - 1}", param)


def _cut(ids: list[int], body: CompletionRequest) -> list[int]:
    keep = body.truncate_prompt_tokens
    if keep is None or len(ids) <= keep:
        return ids
    return ids[-keep:] if body.truncation_side == "left" else ids[:keep]


def resolve_max_tokens(asked: int | None, num_prompt_tokens: int, max_model_len: int, include_last_token: bool) -> int:
    """`max_tokens`, or 16 or what room is left where it is absent.

    The positions fed to the model must fit: the prompt, the sampled tokens but the last one, and that one too with
    `include_last_token`. Raises an error that names both numbers.
    """
    last = 1 if include_last_token else 0
    room = max_model_len - num_prompt_tokens + 1 - last
    wanted = asked if asked is not None else min(DEFAULT_MAX_TOKENS, max(room, 0))
    positions = num_prompt_tokens + (wanted - 1 + last if wanted else 0)
    if positions <= max_model_len:
        return wanted
    parts = f"{num_prompt_tokens} of the prompt" + (
        f" and {positions - num_prompt_tokens} generated" if positions > num_prompt_tokens else ""
    )
    message = f"the request needs {positions} positions ({parts}), the context length is {max_model_len}"
    raise BadRequest(message, param="prompt" if num_prompt_tokens > max_model_len else "max_tokens", code="context_length_exceeded")
