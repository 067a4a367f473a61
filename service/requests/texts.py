"""What a choice's text needs: where it stops, how it is written out and reported, and what stands before it."""

from service.requests.choice import Reports
from service.requests.sampling import Vocabulary
from service.schemas.chat import ChatRequest
from service.schemas.generation import GenerationRequest
from service.text.choice_text import ChoiceText, Echo, TokenNames, chat_logprobs, echo_of, logprobs_object
from service.text.prompts import PreparedPrompt
from service.text.stream import StopStrings, TextStream
from service.text.tokenizer import Tokenizer


def stop_checker(tokenizer: Tokenizer | None, body: GenerationRequest, prompt: PreparedPrompt) -> StopStrings | None:
    if tokenizer is None or not body.stop:
        return None
    return StopStrings(tokenizer, body.stop, body.skip_special_tokens, prompt.token_ids, body.min_tokens)


def choice_text(tokenizer: Tokenizer | None, body: GenerationRequest, prompt: PreparedPrompt) -> ChoiceText:
    if tokenizer is None:
        return ChoiceText(None)
    keeps_stop, skips = body.include_stop_str_in_output, body.skip_special_tokens
    return ChoiceText(TextStream(tokenizer, body.stop, keeps_stop, skips, prompt.token_ids, body.min_tokens))


def reports(tokenizer: Tokenizer | None, body: GenerationRequest, vocabulary: Vocabulary) -> Reports:
    names = TokenNames(tokenizer, body.return_tokens_as_token_ids)
    form = chat_logprobs if isinstance(body, ChatRequest) else logprobs_object
    return Reports(names, form, vocabulary.resolved(body.prompt_logprobs))


def echoes(tokenizer: Tokenizer | None, body: GenerationRequest, prompts: list[PreparedPrompt]) -> list[Echo]:
    """For each prompt what is repeated of it. Takes as long as the prompts are."""
    if isinstance(body, ChatRequest):
        return [Echo(body.last_answer, None)]
    return [echo_of(tokenizer, prompt.token_ids, prompt.text) for prompt in prompts]
