"""Calls of OpenAI's client. Each prints, as one JSON object, what the client made of the answer.

Run by the Python of the client's environment: `openai_calls.py CALL URL KEY MODEL [EXTRA]`, where CALL is the name of a function here
and EXTRA the `extra_body` of a call that takes one.
"""

import asyncio
import json
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any

import openai
from openai import AsyncOpenAI, OpenAI
from safetensors import safe_open

Json = dict[str, Any]
PROMPT = "The capital of France is"
MESSAGES: list[Any] = [{"role": "user", "content": "What is the capital of France?"}]
SAVE: Json = {"kv_transfer_params": {"include_output_tokens": True, "dtype": "float32"}}


def transfer_of(answer: Any) -> Json | None:  # noqa: ANN401 - the client's objects take fields they don't know
    """The answer's `kv_transfer_params`, with the shape that its file has: that must be there at once."""
    transfer: Json | None = getattr(answer, "kv_transfer_params", None)
    if transfer is None or transfer["status"] != "completed":
        return transfer
    with safe_open(transfer["hidden_states_path"], framework="np") as file:
        return transfer | {"shape_in_file": file.get_slice("hidden_states").get_shape()}


def summary(answer: Any) -> Json:  # noqa: ANN401 - of completions and of chats
    """What both kinds of answer have."""
    chat = answer.object.startswith("chat")
    choices = [
        {
            "index": choice.index,
            "text": choice.message.content if chat else choice.text,
            "role": choice.message.role if chat else None,
            "finish_reason": choice.finish_reason,
            "transfer": transfer_of(choice),
        }
        for choice in answer.choices
    ]
    usage = None if answer.usage is None else answer.usage.model_dump()
    return {"choices": choices, "usage": usage, "transfer": transfer_of(answer)}


def refusal(call: Callable[[], object]) -> Json:
    """The exception that a call ends with, as the client tells it."""
    try:
        call()
    except openai.APIStatusError as error:
        return {
            "exception": type(error).__name__,
            "status": error.status_code,
            "message": error.message,
            "param": error.param,
            "code": error.code,
            "request_id": error.request_id,
            "retry_after": error.response.headers.get("retry-after"),
        }
    except openai.APIError as error:
        return {"exception": type(error).__name__}
    return {"exception": None}


def version(client: OpenAI, model: str, extra: Json) -> Json:
    return {"version": openai.__version__}


def models(client: OpenAI, model: str, extra: Json) -> Json:
    return {"models": [known.id for known in client.models.list()]}


def models_or_refusal(client: OpenAI, model: str, extra: Json) -> Json:
    return refusal(lambda: client.models.list())


def completion(client: OpenAI, model: str, extra: Json) -> Json:
    return summary(client.completions.create(model=model, prompt=PROMPT, max_tokens=4, temperature=0, extra_body=extra or None))


def chat(client: OpenAI, model: str, extra: Json) -> Json:
    return summary(
        client.chat.completions.create(model=model, messages=MESSAGES, max_completion_tokens=4, temperature=0, extra_body=extra or None)
    )


def batch(client: OpenAI, model: str, extra: Json) -> Json:
    prompts = [[504, 3575, 282], [504, 3575, 282, 4649], [504]]
    return summary(client.completions.create(model=model, prompt=prompts, max_tokens=1, extra_body=extra or None))


def several(client: OpenAI, model: str, extra: Json) -> Json:
    return summary(client.completions.create(model=model, prompt=[PROMPT, "Hello"], n=2, max_tokens=3, seed=1, temperature=1))


def stream(client: OpenAI, model: str, extra: Json) -> Json:
    """The same completion whole and as a stream."""
    asked: Json = {"model": model, "prompt": PROMPT, "max_tokens": 8, "temperature": 0}
    whole = client.completions.create(**asked)
    events = client.completions.create(**asked, stream=True, stream_options={"include_usage": True}, extra_body=SAVE)
    *parts, last = events
    return {
        "whole": summary(whole),
        "text": "".join(part.choices[0].text for part in parts),
        "finish_reason": parts[-1].choices[0].finish_reason,
        "usage": last.usage.model_dump(),
        "first_transfer": transfer_of(parts[0]),
        "last_transfer": transfer_of(parts[-1]),
    }


def chat_helper(client: OpenAI, model: str, extra: Json) -> Json:
    """A chat whole, and put together by the client out of a stream."""
    asked: Json = {"model": model, "messages": MESSAGES, "max_tokens": 8, "temperature": 0}
    whole = client.chat.completions.create(**asked)
    with client.chat.completions.stream(**asked, extra_body=SAVE) as events:
        for _ in events:
            pass
        final = events.get_final_completion()
    return {"whole": summary(whole)["choices"], "final": summary(final)["choices"]}


def left_early(client: OpenAI, model: str, extra: Json) -> Json:
    """A stream that is closed after its first event, and another call after it."""
    with client.completions.create(model=model, prompt=PROMPT, max_tokens=2000, stream=True, extra_body={"ignore_eos": True}) as events:
        first = next(iter(events))
    after = client.completions.create(model=model, prompt=PROMPT, max_tokens=1)
    return {"first": first.choices[0].text, "after": summary(after)}


def many(client: OpenAI, model: str, extra: Json) -> Json:
    """Sixteen completions with 1 to 16 tokens and a stream, all at once."""

    async def one(client: AsyncOpenAI, number: int) -> Json | None:
        answer = await client.completions.create(model=model, prompt=[504] * (number + 1), max_tokens=1, extra_body=SAVE)
        return transfer_of(answer)

    async def streamed(client: AsyncOpenAI) -> str:
        events = await client.chat.completions.create(model=model, messages=MESSAGES, max_tokens=4, temperature=0, stream=True)
        return "".join([event.choices[0].delta.content or "" async for event in events])

    async def run() -> Json:
        async with AsyncOpenAI(base_url=client.base_url, api_key=client.api_key) as asynchronous:
            *transfers, text = await asyncio.gather(*(one(asynchronous, number) for number in range(16)), streamed(asynchronous))
            return {"transfers": transfers, "text": text}

    return asyncio.run(run())


def refused(client: OpenAI, model: str, extra: Json) -> Json:
    return refusal(lambda: client.completions.create(model=model, prompt=PROMPT, max_tokens=1, extra_body=extra))


def twice(client: OpenAI, model: str, extra: Json) -> Json:
    client.completions.create(model=model, prompt=PROMPT, max_tokens=1, extra_body=extra)
    return refusal(lambda: client.completions.create(model=model, prompt=PROMPT, max_tokens=1, extra_body=extra))


def too_large(client: OpenAI, model: str, extra: Json) -> Json:
    return refusal(lambda: client.completions.create(model=model, prompt=[504] * 1000, max_tokens=1, extra_body=SAVE))


class Occupied:
    """Holds the one running and the one waiting place of a service until it is told to leave them."""

    def __init__(self, client: OpenAI, model: str) -> None:
        self._running = self._start(client, model)
        next(iter(self._running))  # It runs.
        self._waiting = self._start(client, model)

    @staticmethod
    def _start(client: OpenAI, model: str) -> Any:  # noqa: ANN401 - the client's stream
        asked: Json = {"model": model, "prompt": PROMPT, "max_tokens": 4000, "stream": True, "temperature": 0}
        return client.completions.create(**asked, extra_body={"ignore_eos": True})

    def leave(self) -> None:
        for stream in (self._running, self._waiting):
            stream.close()


def full_queue(client: OpenAI, model: str, extra: Json) -> Json:
    """What a full queue answers, and when a client that retries comes back to it: when it sent what, and what it got."""
    occupied = Occupied(client, model)
    try:
        error = refusal(lambda: client.completions.create(model=model, prompt=PROMPT, max_tokens=1))
        return error | retried(client, model, occupied)
    finally:
        occupied.leave()


def retried(client: OpenAI, model: str, occupied: Occupied) -> Json:
    """Sends a request that is refused, makes room, and lets the client retry."""
    sent: list[float] = []
    answers: list[int] = []

    def on_response(response: Any) -> None:  # noqa: ANN401 - of the HTTP library that the client uses
        answers.append(response.status_code)
        if response.status_code == 429:
            occupied.leave()

    hooks: Json = {"request": [lambda request: sent.append(time.monotonic())], "response": [on_response]}
    with openai.DefaultHttpxClient(event_hooks=hooks) as http:
        patient = client.with_options(max_retries=4, http_client=http)
        answer = patient.completions.create(model=model, prompt=PROMPT, max_tokens=1)
    return {"sent": sent, "answers": answers, "answer": summary(answer)}


CALLS: Mapping[str, Callable[[OpenAI, str, Json], Json]] = {
    call.__name__: call
    for call in (
        version, models, models_or_refusal, completion, chat, batch, several, stream, chat_helper,
        left_early, many, refused, twice, too_large, full_queue,
    )
}  # fmt: skip


def main(name: str, url: str, key: str, model: str, extra: str = "{}") -> None:
    with OpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0) as client:
        print(json.dumps(CALLS[name](client, model, json.loads(extra))))


main(*sys.argv[1:])
