"""A long mixed load on one service, to see that nothing grows: `python -m benchmarks.soak --minutes 20`.

Memory, descriptors and threads of the service are sampled all the time; what they were in the second half of the run must be flat. Files
are deleted by their clients, by `DELETE` and by their time-to-live, and some clients leave before they are answered.
"""

import argparse
import asyncio
import contextlib
import os
import random
import shutil
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from service.cli.launcher import ServiceProcess

NUM_CLIENTS = 12
SMALL_CACHES = ["--kv-cache-tokens", "16384", "--state-cache-memory", "16MiB"]
"""Caches take memory as they fill, so they must be full before the second half begins."""
SAMPLE_SECONDS = 1.0
GROWTH_PERCENT = 2.0
"""How much more the last quarter's mean of resident memory may be than the third's; and as many descriptors and threads, rounded up."""
PREFIXES = tuple(f"This is the shared beginning number {number} of many prompts. " * 3 for number in range(8))
Body = dict[str, Any]


@dataclass(frozen=True)
class Sample:
    """What the service held at one moment."""

    seconds: float
    resident_bytes: int
    descriptors: int
    threads: int


@dataclass
class Soak:
    """One run: its clients share a client of the service and a counter of outcomes."""

    client: httpx.AsyncClient
    until: float
    outcomes: Counter[str] = field(default_factory=Counter)

    async def run_client(self, number: int) -> None:
        choose = random.Random(number)
        kinds = (self._text, self._save, self._save, self._group, self._stream, self._accepted, self._leave, self._refused)
        while time.monotonic() < self.until:
            await choose.choice(kinds)(choose)

    async def _text(self, choose: random.Random) -> None:
        self._count("text", await self._post(_body(choose)))

    async def _save(self, choose: random.Random) -> None:
        body = _body(choose, include_output_tokens=True, ttl_seconds=choose.choice((1, 10, 60)))
        response = await self._post(body)
        self._count("save", response)
        await self._use(choose, response.json()["kv_transfer_params"])

    async def _use(self, choose: random.Random, transfer: dict[str, Any]) -> None:
        """Some download the file, some take it, some delete it, some leave it until its time is over."""
        what = choose.choice(("download", "take", "delete", "leave it"))
        if what == "download":
            self._count("download", await self.client.get(f"/saves/{transfer['save_id']}/file"))
        elif what == "take":
            for path in (transfer["hidden_states_path"], transfer["hidden_states_path"] + ".lock"):
                Path(path).unlink(missing_ok=True)
        elif what == "delete":
            self._count("delete", await self.client.delete(f"/saves/{transfer['save_id']}"))

    async def _group(self, choose: random.Random) -> None:
        body = _body(choose, hidden_states_path=f"groups/{choose.randrange(4)}/", ttl_seconds=5)
        self._count("group", await self._post(body | {"n": 3}))

    async def _stream(self, choose: random.Random) -> None:
        async with self.client.stream("POST", "/v1/completions", json=_body(choose, ttl_seconds=5) | {"stream": True}) as response:
            async for _ in response.aiter_bytes():
                pass
        self._count("stream", response)

    async def _accepted(self, choose: random.Random) -> None:
        response = await self._post(_body(choose, wait="accepted", idempotency_key=f"{choose.getrandbits(64)}", ttl_seconds=5))
        record = await self.client.get(f"/saves/{response.json()['kv_transfer_params']['save_id']}", params={"wait": 60})
        self._count(f"accepted, {record.json()['status']}", response)

    async def _leave(self, choose: random.Random) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(choose.uniform(0.0, 0.2)):
                await self._post(_body(choose, include_output_tokens=True, ttl_seconds=5))
        self.outcomes["left"] += 1

    async def _refused(self, choose: random.Random) -> None:
        self._count("refused", await self._post(_body(choose, layers=[10_000])))

    async def _post(self, body: Body) -> httpx.Response:
        return await self.client.post("/v1/completions", json=body)

    def _count(self, kind: str, response: httpx.Response) -> None:
        self.outcomes[f"{kind}: {response.status_code}"] += 1


def _body(choose: random.Random, **transfer: Any) -> Body:  # noqa: ANN401 - any JSON value
    prompt = choose.choice(PREFIXES) + "".join(choose.choices("abcdefgh ", k=choose.randint(1, 60)))
    body: Body = {"prompt": prompt, "max_tokens": choose.randint(1, 24), "temperature": 1.0}
    return body | ({"kv_transfer_params": transfer} if transfer else {})


def _sample(pid: int, started: float) -> Sample:
    process = Path(f"/proc/{pid}")
    resident = int((process / "statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    counts = (sum(1 for _ in (process / name).iterdir()) for name in ("fd", "task"))
    return Sample(time.monotonic() - started, resident, *counts)


async def _watch(pid: int, until: float) -> list[Sample]:
    started, samples = time.monotonic(), list[Sample]()
    while time.monotonic() < until:
        samples.append(_sample(pid, started))
        await asyncio.sleep(SAMPLE_SECONDS)
    return samples


async def soak(service: ServiceProcess, minutes: float) -> tuple[list[Sample], Counter[str]]:
    """Loads the service for so long and returns what was seen."""
    until = time.monotonic() + 60 * minutes
    limits = httpx.Limits(max_connections=2 * NUM_CLIENTS)
    async with httpx.AsyncClient(base_url=service.url, timeout=300, trust_env=False, limits=limits) as client:
        run = Soak(client, until)
        watching = asyncio.create_task(_watch(service.pid, until))
        await asyncio.gather(*(run.run_client(number) for number in range(NUM_CLIENTS)))
        return await watching, run.outcomes


def quarters(samples: list[Sample]) -> list[Sample]:
    """The means of four equal parts of the run; `seconds` is where a part ends."""
    size = len(samples) // 4
    return [_mean(samples[size * part : size * (part + 1)]) for part in range(4)]


def _mean(samples: list[Sample]) -> Sample:
    means = (
        round(sum(getattr(sample, name) for sample in samples) / len(samples)) for name in ("resident_bytes", "descriptors", "threads")
    )
    return Sample(samples[-1].seconds, *means)


def grown(third: Sample, fourth: Sample) -> list[str]:
    """What was not flat in the second half."""
    allowed = 1 + GROWTH_PERCENT / 100
    names = ("resident_bytes", "descriptors", "threads")
    slack = {"resident_bytes": 0, "descriptors": 2 * NUM_CLIENTS, "threads": 1}
    return [name for name in names if getattr(fourth, name) > getattr(third, name) * allowed + slack[name]]


def report(samples: list[Sample], outcomes: Counter[str]) -> list[str]:
    """Prints the tables and returns what has grown."""
    parts = quarters(samples)
    print(f"{'until':>8}  {'RSS MiB':>8}  {'descriptors':>11}  {'threads':>7}")
    for part in parts:
        print(f"{part.seconds:7.0f}s  {part.resident_bytes / 2**20:8.1f}  {part.descriptors:11}  {part.threads:7}")
    for kind, count in sorted(outcomes.items()):
        print(f"{count:8}  {kind}")
    return grown(parts[2], parts[3])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=20.0)
    parser.add_argument("--model", help="as for strata serve; the embedded default if absent")
    options = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="strata-soak-"))
    arguments = ["--port", "0", "--save-root", str(folder / "saves"), "--state-dir", str(folder / "state"), "--log-level", "warning"]
    arguments += SMALL_CACHES
    arguments += ["--model", options.model] if options.model else []
    try:
        with ServiceProcess(arguments) as service:
            samples, outcomes = asyncio.run(soak(service, options.minutes))
            service.stop()
        has_grown = report(samples, outcomes)
    finally:
        shutil.rmtree(folder)
    print(f"grown in the second half: {', '.join(has_grown)}" if has_grown else "flat in the second half")
    return 1 if has_grown else 0


if __name__ == "__main__":
    sys.exit(main())
