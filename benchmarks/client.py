"""A load of completions over HTTP: a few threads, one kept-alive connection each, nothing but answer and file inside the clock."""

import json
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from http.client import HTTPConnection, HTTPResponse
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from benchmarks.files import wait_until_readable
from benchmarks.results import Answer, Round
from benchmarks.workload import Prompts, Workload

TIMEOUT_SECONDS = 1200.0
EVENT = b"data: "
Json = dict[str, Any]
Body = Callable[[list[int]], Json]
"""What is asked for one prompt."""


class BenchmarkError(Exception):
    """A system under test gave a wrong answer or none: the figures would mean nothing."""


def plain_body(workload: Workload) -> Body:
    """Nothing but text; the first of the OpenAI fields that all servers share."""
    common = {"max_tokens": workload.max_tokens, "temperature": 0, "ignore_eos": True}
    return lambda prompt: {"prompt": prompt, **common}


def saving_body(workload: Workload) -> Body:
    """Text and a file, as Strata is asked."""
    plain = plain_body(workload)
    transfer: Json = {"layers": list(workload.layers), "dtype": workload.save_dtype}
    if workload.include_output_tokens:
        transfer["include_output_tokens"] = True
    return lambda prompt: plain(prompt) | {"kv_transfer_params": transfer}


def vllm_body(workload: Workload) -> Body:
    """Text and a file, as vLLM is asked: its layers and dtype are the server's."""
    plain = plain_body(workload)
    return lambda prompt: plain(prompt) | {"kv_transfer_params": {"include_output_tokens": workload.include_output_tokens}}


def streamed(body: Body) -> Body:
    """The same as a stream, with token ids, so that every token has its time."""
    return lambda prompt: body(prompt) | {"stream": True, "return_token_ids": True}


def run_round(url: str, workload: Workload, prompts: Prompts, body: Body) -> Round:
    """Sends the prompts, `workload.concurrency` at a time, and waits until all are answered and their files can be read."""
    bodies = [json.dumps(body(prompt)).encode() for prompt in prompts]
    answers: list[Answer | None] = [None] * len(bodies)
    work = iter(enumerate(bodies))
    lock = threading.Lock()
    started = time.perf_counter()
    with ThreadPoolExecutor(workload.concurrency) as pool:
        threads = [pool.submit(_work_off, url, work, lock, answers) for _ in range(workload.concurrency)]
    wall = time.perf_counter() - started
    for thread in threads:
        thread.result()
    given = [answer for answer in answers if answer is not None]
    return Round(sum(len(prompt) for prompt in prompts), wall, given, None, len(prompts) * workload.max_tokens)


def connect(url: str) -> HTTPConnection:
    """A connection that is kept alive; close it."""
    address = urlsplit(url)
    assert address.hostname is not None
    return HTTPConnection(address.hostname, address.port, timeout=TIMEOUT_SECONDS)


def ask(connection: HTTPConnection, body: bytes) -> Answer:
    """One completion, whole or as a stream. Raises `BenchmarkError` where it is refused or fails."""
    started = time.perf_counter()
    connection.request("POST", "/v1/completions", body, {"Content-Type": "application/json"})
    response = connection.getresponse()
    if response.status != 200:
        raise BenchmarkError(f"HTTP {response.status}: {response.read()[:500].decode(errors='replace')}")
    if response.getheader("Content-Type", "").startswith("text/event-stream"):
        last, times = _read_stream(response)
    else:
        last, times = json.loads(response.read()), []
    saved = last.get("kv_transfer_params")
    path = Path(saved["hidden_states_path"]) if saved else None
    if path is not None:
        wait_until_readable(path, TIMEOUT_SECONDS)
    return Answer(time.perf_counter() - started, path, tuple(times))


def _work_off(url: str, work: Iterator[tuple[int, bytes]], lock: threading.Lock, answers: list[Answer | None]) -> None:
    with closing(connect(url)) as connection:
        while True:
            with lock:
                index, body = next(work, (-1, b""))
            if index < 0:
                return
            answers[index] = ask(connection, body)


def _read_stream(response: HTTPResponse) -> tuple[Json, list[float]]:
    """The last event with a body, and when each token came."""
    last: Json = {}
    times: list[float] = []
    for line in iter(response.readline, b""):
        if not line.startswith(EVENT) or line.startswith(EVENT + b"[DONE]"):
            continue
        last = json.loads(line[len(EVENT) :])
        if "error" in last:
            raise BenchmarkError(f"a stream ended with an error: {last['error']}")
        tokens = [token for choice in last["choices"] for token in choice.get("token_ids", ())]
        times += [time.perf_counter()] * len(tokens)
    response.read()  # what is left is nothing, but only then may the connection be used again
    return last, times
