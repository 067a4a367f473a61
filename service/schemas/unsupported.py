"""Fields of the OpenAI and vLLM APIs that would change tokens or output and that Strata doesn't have."""

from collections.abc import Mapping

from engine.errors import InvalidRequest

# Name of the field, and the values beside null that ask for nothing.
NEUTRAL_VALUES: Mapping[str, tuple[object, ...]] = {
    "allowed_token_ids": (),
    "bad_words": ([],),
    "best_of": (1,),
    "continuous_usage_stats": (False,),
    "early_stopping": (False,),
    "guided_choice": (),
    "guided_decoding_backend": (),
    "guided_grammar": (),
    "guided_json": (),
    "guided_regex": (),
    "guided_whitespace_pattern": (),
    "include_stop_str_in_output": (False,),
    "length_penalty": (1, 1.0),
    "logits_processors": ([],),
    "logprob_token_ids": ([],),
    "lora": (),
    "lora_path": (),
    "lora_request": (),
    "max_completion_tokens": (),
    "max_new_tokens": (),
    "messages": (),
    "min_new_tokens": (0,),
    "min_tokens": (0,),
    "prompt_embeds": (),
    "prompt_logprobs": (),
    "repetition_detection": (),
    "response_format": ({"type": "text"},),
    "return_tokens_as_token_ids": (False,),
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True,),
    "stop_regex": (),
    "structured_outputs": (),
    "suffix": ("",),
    "thinking_token_budget": (),
    "tools": ([],),
    "top_logprobs": (),
    "typical_p": (1, 1.0),
    "use_beam_search": (False,),
    "vllm_xargs": ({},),
}


def refuse_unsupported(fields: Mapping[str, object]) -> None:
    """Raises `InvalidRequest` for the first field that asks for something that isn't supported."""
    for name, value in fields.items():
        if name not in NEUTRAL_VALUES or value is None:
            continue
        if not any(type(value) is type(neutral) and value == neutral for neutral in NEUTRAL_VALUES[name]):
            raise InvalidRequest(f"{name} is not supported", name)
