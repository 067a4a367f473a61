"""Calls of litellm; run by the client's own Python with a URL and a model's name. Prints what was answered."""

import json
import sys
from typing import Any

import litellm

Json = dict[str, Any]
CALL = {"id": "call00001", "type": "function", "function": {"name": "weather", "arguments": "{}"}}
HISTORY: list[Json] = [
    {"role": "user", "content": [{"type": "text", "text": "How is the weather?"}]},
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "call00001", "content": [{"type": "text", "text": "Rain."}]},
    {"role": "user", "content": "Thanks."},
]


def streamed(events: Any) -> str:  # noqa: ANN401 - the client's stream
    return "".join(event.choices[0].delta.content or "" for event in events if event.choices)


def main(url: str, model: str) -> None:
    asked: Json = {"api_base": f"{url}/v1", "api_key": "EMPTY", "temperature": 0, "max_tokens": 6, "num_retries": 0}
    chat: Json = {"model": f"openai/{model}", "messages": HISTORY, **asked}
    whole = litellm.completion(**chat)
    saved = litellm.completion(**chat, extra_body={"kv_transfer_params": {"layers": [2]}})
    text = litellm.text_completion(model=f"text-completion-openai/{model}", prompt="The capital of France is", **asked)
    try:
        litellm.completion(**{**chat, "model": "openai/another"})
        refused = None
    except litellm.NotFoundError as error:
        refused = error.status_code
    answer = {
        "content": whole.choices[0].message.content,
        "usage": whole.usage.model_dump(),
        "streamed_content": streamed(litellm.completion(**chat, stream=True, stream_options={"include_usage": True})),
        "transfer": saved.model_dump()["kv_transfer_params"],
        "text": text.choices[0].text,
        "refused": refused,
    }
    print(json.dumps(answer))


main(*sys.argv[1:])
