"""A LangChain chat with a tool it has called, whole and streamed; run by the client's own Python with a URL and a model's name.

Prints what was answered and what the client has sent.
"""

import json
import sys
from typing import Any

import httpx
from langchain_core.messages import AIMessage, HumanMessage, SystemMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI


@tool
def weather(place: str) -> str:
    """Tells the weather of a place."""
    return f"Rain in {place}."


HISTORY = [
    SystemMessage([{"type": "text", "text": "Be brief."}]),
    HumanMessage("How is the weather in Bern?"),
    AIMessage("", tool_calls=[{"name": "weather", "args": {"place": "Bern"}, "id": "call00001"}]),
    ToolMessage([{"type": "text", "text": "Rain"}, {"type": "text", "text": "in Bern."}], tool_call_id="call00001"),
    HumanMessage("Thanks."),
]


def main(url: str, model: str) -> None:
    sent: list[Any] = []
    hooks: dict[str, Any] = {"request": [lambda request: sent.append(json.loads(request.content))]}
    with httpx.Client(event_hooks=hooks) as http:
        plain = ChatOpenAI(
            model=model,
            base_url=f"{url}/v1",
            api_key="EMPTY",
            max_tokens=6,
            temperature=0,
            max_retries=0,
            http_client=http,
            stream_usage=True,
        )
        chat = plain.bind_tools([weather])
        whole = chat.invoke(HISTORY)
        parts = list(chat.stream(HISTORY))
    streamed = parts[0]
    for part in parts[1:]:
        streamed += part
    answer = {
        "content": whole.content,
        "usage": whole.usage_metadata,
        "finish_reason": whole.response_metadata["finish_reason"],
        "streamed_content": streamed.content,
        "streamed_usage": streamed.usage_metadata,
        "sent": sent[0],
    }
    print(json.dumps(answer))


main(*sys.argv[1:])
