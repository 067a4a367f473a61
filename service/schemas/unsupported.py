"""Fields of the OpenAI and vLLM APIs that would change tokens or output and that Strata doesn't have."""

from collections.abc import Mapping

from engine.errors import InvalidRequest

Table = Mapping[str, tuple[object, ...]]
"""Name of a field, and the values beside null that ask for nothing."""

COMMON: Table = {
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
    "max_new_tokens": (),
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
    "typical_p": (1, 1.0),
    "use_beam_search": (False,),
    "vllm_xargs": ({},),
}

COMPLETIONS: Table = {
    **COMMON,
    "max_completion_tokens": (),
    "messages": (),
    "tools": ([],),
    "top_logprobs": (),
}

# What would change how messages are written out.
MESSAGES: Table = {
    "chat_template": (),
    "function_call": ("auto", "none"),
    "functions": ([],),
    "media_io_kwargs": ({},),
    "mm_processor_kwargs": ({},),
    "prompt": (),
    "reasoning_effort": (),
    "verbosity": (),
}

CHAT: Table = {
    **COMMON,
    **MESSAGES,
    "audio": (),
    "echo": (False,),
    "include_reasoning": (True,),
    "modalities": (["text"],),
    "parallel_tool_calls": (True,),
    "tool_choice": ("auto", "none"),
    "web_search_options": (),
}


def refuse_unsupported(fields: Mapping[str, object], table: Table) -> None:
    """Raises `InvalidRequest` for the first field that asks for something that isn't supported."""
    for name, value in fields.items():
        if name not in table or value is None:
            continue
        if not any(type(value) is type(neutral) and value == neutral for neutral in table[name]):
            raise InvalidRequest(f"{name} is not supported", name)
