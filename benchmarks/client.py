"""A load of completions over HTTP: a few threads, one kept-alive connection each, nothing but the answer inside the clock."""

import json
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from http.client import HTTPConnection
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from benchmarks.results import Answer, Round
from benchmarks.workload import Prompts, Workload

TIMEOUT_SECONDS = 1200.0


class BenchmarkError(Exception):
    """A system under test gave a wrong answer or none: the figures would mean nothing."""


def run_round(url: str, workload: Workload, prompts: Prompts, save: bool) -> Round:
    """Sends the prompts, `workload.concurrency` at a time, and waits for all answers."""
    bodies = [json.dumps(_body(workload, prompt, save)).encode() for prompt in prompts]
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
    return Round(sum(len(prompt) for prompt in prompts), wall, given, peak_rss_bytes=None)


def _work_off(url: str, work: Iterator[tuple[int, bytes]], lock: threading.Lock, answers: list[Answer | None]) -> None:
    address = urlsplit(url)
    assert address.hostname is not None
    with closing(HTTPConnection(address.hostname, address.port, timeout=TIMEOUT_SECONDS)) as connection:
        while True:
            with lock:
                index, body = next(work, (-1, b""))
            if index < 0:
                return
            answers[index] = _ask(connection, body)


def _ask(connection: HTTPConnection, body: bytes) -> Answer:
    started = time.perf_counter()
    connection.request("POST", "/v1/completions", body, {"Content-Type": "application/json"})
    response = connection.getresponse()
    content = response.read()
    seconds = time.perf_counter() - started
    if response.status != 200:
        raise BenchmarkError(f"HTTP {response.status}: {content[:500].decode(errors='replace')}")
    saved = json.loads(content).get("kv_transfer_params")
    return Answer(seconds, Path(saved["hidden_states_path"]) if saved else None)


def _body(workload: Workload, prompt: list[int], save: bool) -> dict[str, Any]:
    body: dict[str, Any] = {"prompt": prompt, "max_tokens": workload.max_tokens, "temperature": 0, "ignore_eos": True}
    if save:
        body["kv_transfer_params"] = {"layers": list(workload.layers), "dtype": workload.save_dtype}
    return body
