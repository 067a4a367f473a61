"""The demonstration's view of the service: one completion, its save, the metrics. Uses the `openai` client where it is installed."""

import importlib
import importlib.util
import json
import time
import urllib.error
import urllib.request
from dataclasses import dataclass

from service.wire import Json

TIMEOUT_SECONDS = 600.0
POLL_SECONDS = 0.05


class RequestFailed(Exception):
    """The service answered something else than 200; the message is its own."""


@dataclass(frozen=True)
class Completion:
    """One answer of `POST /v1/completions`."""

    body: Json
    seconds: float
    client: str

    @property
    def text(self) -> str:
        return str(self.body["choices"][0]["text"])

    @property
    def save_id(self) -> str:
        return str(self.body["kv_transfer_params"]["save_id"])

    @property
    def prompt_tokens(self) -> int:
        return int(self.body["usage"]["prompt_tokens"])

    @property
    def completion_tokens(self) -> int:
        return int(self.body["usage"]["completion_tokens"])


def complete(url: str, body: Json) -> Completion:
    """Sends one completion. Raises `RequestFailed`."""
    with_openai = importlib.util.find_spec("openai") is not None
    if with_openai:
        importlib.import_module("openai")  # takes a second, which is not the service's
    send = _complete_with_openai if with_openai else _complete_with_urllib
    started = time.perf_counter()
    answer = send(url, body)
    return Completion(answer, time.perf_counter() - started, "openai" if with_openai else "urllib")


def wait_for_save(url: str, save_id: str) -> Json:
    """Polls `/saves/<id>` until the save has ended. Raises `RequestFailed` unless it is completed."""
    deadline = time.monotonic() + TIMEOUT_SECONDS
    while time.monotonic() < deadline:
        record: Json = json.loads(_fetch(f"{url}/saves/{save_id}"))
        if record["status"] == "completed":
            return record
        if record["status"] not in ("queued", "running", "writing"):
            raise RequestFailed(f"save {save_id} is {record['status']}: {record.get('error')}")
        time.sleep(POLL_SECONDS)
    raise RequestFailed(f"save {save_id} did not end within {TIMEOUT_SECONDS:.0f} s")


def get_json(url: str) -> Json:
    """A GET that answers with JSON. Raises `RequestFailed`."""
    answer: Json = json.loads(_fetch(url))
    return answer


def get_text(url: str) -> str:
    """A GET that answers with text. Raises `RequestFailed`."""
    return _fetch(url).decode()


def _complete_with_openai(url: str, body: Json) -> Json:
    import openai  # optional

    extension = {"kv_transfer_params": body["kv_transfer_params"]}
    fields = {name: value for name, value in body.items() if name not in extension}
    try:
        with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=TIMEOUT_SECONDS) as client:
            answer: Json = client.completions.create(**fields, extra_body=extension).model_dump()
    except openai.OpenAIError as error:
        raise RequestFailed(str(error)) from error
    return answer


def _complete_with_urllib(url: str, body: Json) -> Json:
    request = urllib.request.Request(
        f"{url}/v1/completions", data=json.dumps(body).encode(), headers={"Content-Type": "application/json"}, method="POST"
    )
    answer: Json = json.loads(_fetch(request))
    return answer


def _fetch(request: str | urllib.request.Request) -> bytes:
    # A proxy named in the environment must not be asked for an address on this machine.
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(request, timeout=TIMEOUT_SECONDS) as response:
            content: bytes = response.read()
    except urllib.error.HTTPError as error:
        raise RequestFailed(f"HTTP {error.code}: {error.read().decode(errors='replace')}") from error
    except OSError as error:
        raise RequestFailed(str(error)) from error
    return content
