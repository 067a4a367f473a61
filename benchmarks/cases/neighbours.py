"""W6: what plain completions lose to a heavy load of extraction beside them, beyond what the same load costs them without saving."""

import json
import statistics
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import replace
from itertools import count, cycle

from benchmarks.bench import Bench, Result
from benchmarks.client import Body, ask, connect, plain_body, run_round, saving_body, streamed
from benchmarks.metrics import increase, scrape
from benchmarks.results import Answer
from benchmarks.rounds import FIRST_TOKEN, in_turn
from benchmarks.targets import Row, at_most
from benchmarks.verify import check_and_remove
from benchmarks.workload import Prompts, Workload, extraction, generation, with_first_token
from service.cli.launcher import ServiceProcess

NAME = "W6"
ALONE, BESIDE, BESIDE_SAVING = "alone", "beside the load, not saving", "beside the load, saving"
PLAIN_AT_ONCE, PLAIN_TOKENS = 4, 32
LOAD_AT_ONCE = 8
SETTLING_ANSWERS = LOAD_AT_ONCE


class Load:
    """Clients that ask for one prompt after another until they are told to stop."""

    def __init__(self, url: str, workload: Workload, body: Body, first_tokens: Iterator[int]) -> None:
        self.answered: list[tuple[list[int], Answer]] = []
        self.settled = threading.Event()
        self._url = url
        self._body = body
        self._lock = threading.Lock()
        self._prompts = (with_first_token([prompt], next(first_tokens))[0] for prompt in cycle(workload.prompts))
        self._stopped = threading.Event()

    def work(self) -> None:
        """One client."""
        try:
            with closing(connect(self._url)) as connection:
                while not self._stopped.is_set():
                    with self._lock:
                        prompt = next(self._prompts)
                    answer = ask(connection, json.dumps(self._body(prompt)).encode())
                    self.answered.append((prompt, answer))
                    if len(self.answered) >= SETTLING_ANSWERS:
                        self.settled.set()
        finally:
            self.settled.set()

    def stop(self) -> None:
        self._stopped.set()


def run(bench: Bench) -> Result:
    """Plain streams alone, beside a load that doesn't save, and beside the same that does."""
    load = extraction(LOAD_AT_ONCE)
    bodies: dict[str, Body | None] = {ALONE: None, BESIDE: plain_body(load), BESIDE_SAVING: saving_body(load)}
    seconds: dict[str, list[float]] = {label: [] for label in bodies}
    rates: dict[str, list[float]] = {label: [] for label in bodies}
    first_tokens = count(FIRST_TOKEN)
    with bench.warm_service() as service:
        _plain(service, first_tokens)
        for number, label in in_turn(list(bodies), bench.options.rounds):
            with _beside(service, load, bodies[label], first_tokens, bench.width):
                before, started = scrape(service.url), time.monotonic()
                seconds[label].append(_plain(service, first_tokens))
                elapsed, after = time.monotonic() - started, scrape(service.url)
            rates[label].append(increase(before, after, "strata_computed_tokens_total") / elapsed)
            figures = f"{1000 * seconds[label][-1]:.0f} ms per token, {rates[label][-1]:.0f} tokens/s computed in all"
            bench.say(f"Round {number + 1} of {bench.options.rounds}, {label}: {figures}")
    lines = [f"  {PLAIN_AT_ONCE} plain streams of {PLAIN_TOKENS} tokens, {LOAD_AT_ONCE} clients of W1's prompts beside them"]
    for label, each in seconds.items():
        figures = f"{1000 * statistics.median(each):>8.1f} ms per token, {statistics.median(rates[label]):>6.0f} tokens/s computed in all"
        lines.append(f"  {label:<32}{figures}")
    pairs = zip(seconds[BESIDE_SAVING], seconds[BESIDE], strict=True)
    slowdown = statistics.median(saving / not_saving for saving, not_saving in pairs) - 1
    rows = [Row(NAME, "plain requests' time per token, load saving / not saving, minus 1", slowdown, at_most(0.05), "percent")]
    return Result(lines, rows, {"seconds_per_token": seconds, "computed_tokens_per_second": rates})


def _plain(service: ServiceProcess, first_tokens: Iterator[int]) -> float:
    """The mean time per token of plain streams, from each one's first token on."""
    workload = replace(generation(PLAIN_AT_ONCE, PLAIN_TOKENS).limited(PLAIN_AT_ONCE), include_output_tokens=False)
    prompts: Prompts = with_first_token([prompt[:64] for prompt in workload.prompts], next(first_tokens))
    measured = run_round(service.url, workload, prompts, streamed(plain_body(workload)))
    return statistics.mean(answer.seconds_per_token for answer in measured.answers)


@contextmanager
def _beside(service: ServiceProcess, workload: Workload, body: Body | None, first_tokens: Iterator[int], width: int) -> Iterator[None]:
    """Keeps the load up for as long as the block takes; checks its files afterwards."""
    if body is None:
        yield
        return
    load = Load(service.url, workload, body, first_tokens)
    with ThreadPoolExecutor(LOAD_AT_ONCE) as pool:
        clients: list[Future[None]] = [pool.submit(load.work) for _ in range(LOAD_AT_ONCE)]
        try:
            load.settled.wait()
            yield
        finally:
            load.stop()
    for client in clients:
        client.result()
    saved = [(prompt, answer) for prompt, answer in load.answered if answer.path is not None]
    check_and_remove([answer for _, answer in saved], [prompt for prompt, _ in saved], workload, width)
