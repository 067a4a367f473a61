"""W10: how long `/health/live` takes while bodies of every kind, as large as they may be, are read, parsed, tokenized and refused."""

import json
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from http.client import HTTPConnection
from typing import Any

from benchmarks.bench import Bench, Result
from benchmarks.client import TIMEOUT_SECONDS, BenchmarkError, connect
from benchmarks.targets import Row, at_most

NAME = "W10"
BOUND_MS = 250.0
CLIENTS = 2
"""That send the same body at one time."""
MIB = 2**20
MASK = MIB - 2**10
"""Truth values that a request's tensors may hold, with some room for their names."""


@dataclass(frozen=True)
class Kind:
    """One kind of body."""

    name: str
    path: str
    make: Callable[[], Any]


def _completion(**fields: Any) -> dict[str, Any]:  # noqa: ANN401 - any JSON value
    return {"prompt": "a", "max_tokens": 1, **fields}


def _tensors(values: list[Any]) -> dict[str, Any]:
    return _completion(kv_transfer_params={"tensors": {"a": values}, "layers": [1]})


KINDS = (
    Kind("nothing large", "/v1/completions", _completion),
    Kind("tensors: 1 Mi truth values", "/v1/completions", lambda: _tensors([True] * MASK)),
    Kind("tensors: 260,000 floats", "/v1/completions", lambda: _tensors([0.123456789 + i for i in range(260_000)])),
    Kind("token ids: 128 prompts of 8,000", "/v1/completions", lambda: _completion(prompt=[[9000] * 8000] * 128, max_tokens=0, n=16)),
    Kind("token ids: one prompt of 1.2 million", "/v1/completions", lambda: _completion(prompt=[9000] * 1_200_000)),
    Kind("ignored: 1.2 million floats", "/v1/completions", lambda: _completion(x=[0.5 + i for i in range(1_200_000)])),
    Kind("ignored: 70,000 objects", "/v1/completions", lambda: _completion(x=[{"a": i} for i in range(70_000)])),
    Kind("ignored: 130,000 names", "/v1/completions", lambda: _completion(x={str(i): i for i in range(130_000)})),
    Kind("unknown: 130,000 names", "/v1/completions", lambda: _completion(kv_transfer_params={str(i): i for i in range(130_000)})),
    Kind("ignored: 16 MiB of text", "/v1/completions", lambda: _completion(x='a,{"' * (3 * MIB))),
    Kind("too much: 8 million values", "/v1/completions", lambda: _completion(x=[1] * 8_000_000)),
    Kind("a text that is too long, 12 MiB", "/v1/completions", lambda: _completion(prompt="the river " * (12 * MIB // 10))),
    Kind("a text that is tokenized, 600 KiB", "/tokenize", lambda: {"prompt": "the river " * 60_000}),
    Kind("messages: 16,000", "/tokenize", lambda: {"messages": [{"role": "user", "content": "a"}] * 16_000}),
    Kind("tokens to a text: 500,000", "/detokenize", lambda: {"tokens": [9000] * 500_000}),
    Kind("tokens that are none: 500,000", "/detokenize", lambda: {"tokens": [""] * 500_000}),
)


def run(bench: Bench) -> Result:
    """Each kind by itself, sent by two clients at one time; health is asked all the while."""
    worst: dict[str, list[float]] = {kind.name: [] for kind in KINDS}
    answers: dict[str, str] = {}
    with bench.service() as service:
        for _ in range(bench.options.rounds):
            for kind in KINDS:
                statuses, longest = _beside(service.url, kind)
                worst[kind.name].append(longest)
                answers[kind.name] = ", ".join(sorted({str(status) for status in statuses}))
                bench.say(f"{kind.name}: {answers[kind.name]}, health within {1e3 * longest:.0f} ms")
    lines = [f"  {'body':<40}{'answered':>10}{'health ms, at most':>20}"]
    lines += [f"  {name:<40}{answers[name]:>10}{1e3 * max(each):>20.0f}" for name, each in worst.items()]
    longest = 1e3 * max(max(each) for each in worst.values())
    return Result(lines, [Row(NAME, "/health/live, the longest answer", longest, at_most(BOUND_MS), "ms")], {"seconds": worst})


def _beside(url: str, kind: Kind) -> tuple[list[int], float]:
    """What the clients were answered, and the longest time that health took meanwhile."""
    body, done = json.dumps(kind.make()).encode(), threading.Event()
    with ThreadPoolExecutor(CLIENTS + 1) as pool:
        health = pool.submit(lambda: max(_ask_health(url, done)))
        try:
            clients = [pool.submit(_send, url, kind.path, body) for _ in range(CLIENTS)]
            statuses = [client.result() for client in clients]
        finally:
            done.set()
        return statuses, health.result()


def _send(url: str, path: str, body: bytes) -> int:
    with closing(connect(url)) as connection:
        connection.request("POST", path, body, {"Content-Type": "application/json"})
        response = connection.getresponse()
        response.read()
        if response.status >= 500:
            raise BenchmarkError(f"HTTP {response.status} for a large body")
        return response.status


def _ask_health(url: str, done: threading.Event) -> Iterator[float]:
    """Seconds of one answer after the other, on one connection."""
    with closing(HTTPConnection(url.removeprefix("http://"), timeout=TIMEOUT_SECONDS)) as connection:
        while True:
            started = time.perf_counter()
            connection.request("GET", "/health/live")
            connection.getresponse().read()
            yield time.perf_counter() - started
            if done.is_set():
                return
            time.sleep(0.002)
