"""Fields of the OpenAI and vLLM APIs that would change tokens or output and that Strata doesn't have."""

from collections.abc import Mapping

from engine.errors import InvalidRequest

Table = Mapping[str, tuple[object, ...]]
"""Name of a field, and the values beside null that ask for nothing."""

LONGEST_NAME = 80
GUIDED_PREFIX = "guided_"
"""In a table: all fields that begin with it. They are those of guided decoding, of which other servers have many."""

COMMON: Table = {
    GUIDED_PREFIX: (),
    "custom_logit_processor": (),
    "early_stopping": (False,),
    "ebnf": (),
    "grammar": (),
    "json_schema": (),
    "length_penalty": (1, 1.0),
    "logits_processors": ([],),
    "logprob_token_ids": ([],),
    "lora": (),
    "lora_path": (),
    "lora_request": (),
    "max_new_tokens": (),
    "min_new_tokens": (0,),
    "no_repeat_ngram_size": (0,),
    "prompt_embeds": (),
    "prompt_logprob_token_ids": ([],),
    "regex": (),
    "repetition_detection": (),
    "response_format": ({"type": "text"},),
    "return_mm_kwargs": (True, False),
    "return_prompt_text": (False,),
    "return_token_offsets": (False,),
    "spaces_between_special_tokens": (True,),
    "stop_regex": (),
    "structural_tag": (),
    "structured_outputs": (),
    "suffix": ("",),
    "thinking_token_budget": (-1,),
    "typical_p": (1, 1.0),
    "use_beam_search": (False,),
    "vllm_xargs": ({},),
    "watermark": (False,),
    "watermarking": (False,),
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
    "verbosity": (),
}

CHAT: Table = {
    **COMMON,
    **MESSAGES,
    "audio": (),
    "include_reasoning": (True,),
    "modalities": (["text"],),
    "tool_choice": ("auto", "none"),
    "web_search_options": (),
}


def refuse_unsupported(fields: Mapping[str, object], table: Table) -> None:
    """Raises `InvalidRequest` for the first field that asks for something that isn't supported."""
    for name, value in fields.items():
        known = name in table or (name.startswith(GUIDED_PREFIX) and GUIDED_PREFIX in table)
        if value is None or not known:
            continue
        if not any(type(value) is type(neutral) and value == neutral for neutral in table.get(name, ())):
            raise InvalidRequest(f"{shown_name(name)} is not supported", shown_name(name))


def shown_name(name: str) -> str:
    """The name of a field that a client chose, as an error may repeat it."""
    return name[:LONGEST_NAME]
