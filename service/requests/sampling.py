"""From a body to the engine's sampling parameters, and what of a body can be refused once the model is known."""

from collections.abc import Sequence
from dataclasses import dataclass

from engine.errors import InvalidRequest
from engine.request import SamplingParams
from engine.sampling.prompt_logprobs import prompt_logprobs_bytes
from service.errors import BadRequest
from service.schemas.chat import ChatRequest
from service.schemas.generation import WHOLE_VOCABULARY, GenerationRequest
from service.services import Services
from service.text.prompts import PreparedPrompt, check_token_ids
from service.text.tokenizer import Tokenizer

OUTPUT_BYTES = 8 * 2**20
"""Of what a record keeps of one choice's text."""
OUTPUT_BYTES_PER_TOKEN = 64
OUTPUT_BYTES_PER_ALTERNATIVE = 96
"""Token, log-probability and bytes of the token or of one beside it, as JSON."""
SEED_RANGE = 2**64
LOWEST_SEED = -(2**63)
BadWords = tuple[tuple[int, ...], ...]
"""Sequences of tokens that may not be completed."""


@dataclass(frozen=True)
class Vocabulary:
    """What sampling knows of the model and of the service."""

    size: int
    eos_token_ids: frozenset[int]
    max_logprobs: int
    """Most log-probabilities per token; -1: all."""

    @classmethod
    def of(cls, services: Services) -> "Vocabulary":
        model = services.info.model
        return cls(model.vocab_size, frozenset(model.eos_token_ids), services.settings.max_logprobs)

    def resolved(self, count: int | None) -> int | None:
        """A number of log-probabilities; never more than there are tokens."""
        return None if count is None else self.size if count == WHOLE_VOCABULARY else min(count, self.size)


def sampling_params(
    body: GenerationRequest, max_tokens: int, choice: int, vocabulary: Vocabulary, bad_words: BadWords = ()
) -> SamplingParams:
    """`choice` counts the choices of one prompt: each has a seed of its own, the first one the client's."""
    return SamplingParams(
        max_tokens=max_tokens,
        min_tokens=body.min_tokens,
        temperature=body.temperature,
        top_p=body.top_p,
        top_k=body.top_k,
        min_p=body.min_p,
        seed=None if body.seed is None else (body.seed + choice - LOWEST_SEED) % SEED_RANGE + LOWEST_SEED,
        stop_token_ids=frozenset(body.stop_token_ids),
        ignore_eos=body.ignore_eos,
        logprobs=vocabulary.resolved(body.num_logprobs),
        prompt_logprobs=_prompt_logprobs(body, vocabulary),
        logit_bias=body.logit_bias,
        presence_penalty=body.presence_penalty,
        frequency_penalty=body.frequency_penalty,
        repetition_penalty=body.repetition_penalty,
        allowed_token_ids=body.allowed_token_ids or (),
        bad_words=bad_words,
    )


def _prompt_logprobs(body: GenerationRequest, vocabulary: Vocabulary) -> int | None:
    """For both reports of a prompt's log-probabilities: the echoed one, and the one of its own."""
    counts = [body.prompt_logprobs, body.num_logprobs if body.reports_echo else None]
    resolved = [count for count in map(vocabulary.resolved, counts) if count is not None]
    return max(resolved, default=None)


def check_sampling(body: GenerationRequest, vocabulary: Vocabulary) -> None:
    """Raises `InvalidRequest` for token ids outside the vocabulary and for too many log-probabilities."""
    check_token_ids("stop_token_ids", body.stop_token_ids, vocabulary.size)
    check_token_ids("logit_bias", list(body.logit_bias), vocabulary.size)
    check_token_ids("allowed_token_ids", body.allowed_token_ids or [], vocabulary.size)
    _check_logprobs("top_logprobs" if isinstance(body, ChatRequest) else "logprobs", body.num_logprobs, vocabulary)
    _check_logprobs("prompt_logprobs", body.prompt_logprobs, vocabulary)


def _check_logprobs(param: str, count: int | None, vocabulary: Vocabulary) -> None:
    most = vocabulary.size if vocabulary.max_logprobs == WHOLE_VOCABULARY else vocabulary.max_logprobs
    asked = vocabulary.size if count == WHOLE_VOCABULARY else count
    if asked is not None and asked > most:
        meant = f" (the vocabulary, {asked} tokens)" if count == WHOLE_VOCABULARY else ""
        raise InvalidRequest(f"{param} is {count}{meant}, at most {most} log-probabilities per token are given (--max-logprobs)", param)


def check_prompt_logprobs(body: GenerationRequest, prompts: Sequence[PreparedPrompt], vocabulary: Vocabulary, most_bytes: int) -> None:
    """All choices are submitted together: what can never fit isn't told to come again. Raises `InvalidRequest`."""
    each = (
        prompt_logprobs_bytes(len(prompt.token_ids), sampling_params(body, prompt.max_tokens, 0, vocabulary), vocabulary.size)
        for prompt in prompts
    )
    needed = body.n * sum(each)
    if needed > most_bytes:
        param, count = ("logprobs", body.num_logprobs) if body.prompt_logprobs is None else ("prompt_logprobs", body.prompt_logprobs)
        of_prompts = f"the prompts of {body.n * len(prompts)} choices"
        raise InvalidRequest(f"{param} {count} of {of_prompts} take {needed} bytes, at most {most_bytes} can be kept", param)


def check_kept_output(body: GenerationRequest, prompts: Sequence[PreparedPrompt], vocabulary: Vocabulary) -> None:
    """Of records that keep the text. Raises `BadRequest` where its log-probabilities may become too large for one."""
    for prompt in prompts:
        sampling = sampling_params(body, prompt.max_tokens, 0, vocabulary)
        size = _kept_bytes(prompt.max_tokens, sampling.logprobs) + _kept_bytes(len(prompt.token_ids), sampling.prompt_logprobs)
        if size > OUTPUT_BYTES:
            message = f"the record would keep up to {size} bytes of log-probabilities, at most {OUTPUT_BYTES} are kept"
            param = "logprobs" if body.prompt_logprobs is None else "prompt_logprobs"
            raise BadRequest(f"{message}: ask for fewer, or without idempotency_key and wait 'accepted'", param=param)


def _kept_bytes(tokens: int, alternatives: int | None) -> int:
    """Without log-probabilities the context bounds the text, and so its record."""
    return 0 if alternatives is None else tokens * (OUTPUT_BYTES_PER_TOKEN + OUTPUT_BYTES_PER_ALTERNATIVE * (alternatives + 1))


def bad_word_tokens(words: Sequence[str], tokenizer: Tokenizer | None) -> BadWords:
    """What each word is as tokens: at the start of a text and, where a space before it only makes another first token, within one.

    That is what vLLM takes the field for. Raises `InvalidRequest`.
    """
    if words and tokenizer is None:
        raise InvalidRequest("this model has no tokenizer, so it takes no bad_words", "bad_words")
    return tuple(spelling for word in words for spelling in _spellings(word.lstrip(), tokenizer)) if tokenizer is not None else ()


def _spellings(word: str, tokenizer: Tokenizer) -> list[tuple[int, ...]]:
    plain, spaced = (tuple(tokenizer.encode(text, add_special_tokens=False)) for text in (word, f" {word}"))
    if not plain:
        raise InvalidRequest("bad_words holds a word that has no tokens", "bad_words")
    return [plain, spaced] if len(spaced) == len(plain) and spaced[0] != plain[0] else [plain]


def check_something_is_left(body: GenerationRequest, bad_words: BadWords, vocabulary: Vocabulary) -> None:
    """Raises `InvalidRequest` where a step may come in which no token can be chosen: the last tokens of all bad words count."""
    refused = {word[-1] for word in bad_words}
    if body.min_tokens:
        refused |= vocabulary.eos_token_ids | set(body.stop_token_ids)
    allowed = range(vocabulary.size) if body.allowed_token_ids is None else body.allowed_token_ids
    if refused and all(token_id in refused for token_id in allowed):
        param = "bad_words" if body.allowed_token_ids is None else "allowed_token_ids"
        raise InvalidRequest(f"{param} can leave no token to choose: bad_words and min_tokens refuse all that are allowed", param)
