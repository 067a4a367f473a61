"""`python -m benchmarks.edge`: what HTTP costs per request, and what streams cost the engine.

First the engine is replaced by one that answers at once, so that the time of a request is all the service's. Then the real engine runs
a small model three ways in turn, with the same load: requests handed to it inside of its process, plain requests over HTTP, and streams.
"""

import argparse
import itertools
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import machine, report
from benchmarks.client import BenchmarkError
from benchmarks.edge_load import post, run_load
from benchmarks.edge_model import write_small_model
from benchmarks.edge_service import EdgeService, Step, greedy
from benchmarks.results import Answer, Round
from engine.errors import ModelError
from engine.models.checkpoints.prepared import Progress
from engine.models.checkpoints.source import default_cache, resolve_model
from service.text.tokenizer import Tokenizer

CONCURRENCIES = (1, 16, 64)
LENGTHS = (100, 1000)
WARM_UP_REQUESTS = 32
STREAM_PROMPT_TOKENS = 8
WARM_UP_TOKENS = 3
ALONE, PLAIN, STREAMED = "no HTTP", "plain", "streamed"
WORDS = ("the", "river", "carries", "small", "stones", "down", "to", "a", "quiet", "valley", "where", "people", "wait", "for", "rain")


@dataclass(frozen=True)
class Edge:
    """Requests of one kind at one concurrency, answered by an engine that takes no time."""

    label: str
    concurrency: int
    round: Round
    loop_seconds: float

    @property
    def requests_per_second(self) -> float:
        return len(self.round.answers) / self.round.wall_seconds


@dataclass(frozen=True)
class Decoding:
    """One round of one way of asking, all requests at once: the steps in which every request got a token, and nothing else ran."""

    label: str
    steps: list[Step]
    tokens_per_step: int
    loop_seconds: float
    all_steps: int
    events: int

    @property
    def step_seconds(self) -> float:
        return statistics.median(step.seconds for step in self.full_steps)

    @property
    def period_seconds(self) -> float:
        """From the end of a step to that of the next: what the engine does between steps is in it."""
        return statistics.median(later.ended - sooner.ended for sooner, later in itertools.pairwise(self.full_steps))

    @property
    def loop_seconds_per_step(self) -> float:
        return self.loop_seconds / self.all_steps

    @property
    def full_steps(self) -> list[Step]:
        """Steps that gave every request a token and did nothing else."""
        return [step for step in self.steps if step.num_tokens == step.num_outputs == self.tokens_per_step]


def main(argv: Sequence[str]) -> int:
    """Runs both parts; 1 when the service failed or refused a request."""
    options = _parse(argv)
    try:
        with tempfile.TemporaryDirectory(prefix="strata-edge-") as directory:
            _benchmark(options, Path(directory).resolve())
    except (BenchmarkError, ModelError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.edge", description=__doc__, allow_abbrev=False)
    parser.add_argument("--model", help="model folder or hub id whose tokenizer is used (default: the embedded model)")
    parser.add_argument("--requests", type=int, default=400, help="per line of the first table (default: %(default)s)")
    parser.add_argument("--streams", type=int, default=256, help="at once (default: %(default)s)")
    parser.add_argument("--max-tokens", type=int, default=24, help="of each stream (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=5, help="of streams; 0: none (default: %(default)s)")
    return parser.parse_args(argv)


def _benchmark(options: argparse.Namespace, directory: Path) -> None:
    facts = machine.look(directory)
    source = resolve_model(options.model, cache=default_cache(), progress=Progress(_say)).folder
    tokenizer = Tokenizer.from_folder(source)
    small = directory / "model"
    write_small_model(small, tokenizer.vocab_size, source)
    edges = list(measure_edge(small, directory, tokenizer, options.requests))
    rounds = list(measure_streams(small, directory, options.streams, options.max_tokens, options.rounds))
    parts = [report.machine_lines(facts, machine.matrix_gflops()), edge_lines(edges), stream_lines(rounds) if rounds else ()]
    for line in itertools.chain.from_iterable(parts):
        _say(line)
    _say(f"Load of the last minute at the end: {os.getloadavg()[0]:.1f}")


def measure_edge(model: Path, directory: Path, tokenizer: Tokenizer, num_requests: int) -> Iterator[Edge]:
    """Texts and token ids of two lengths, at three concurrencies. Every prompt differs."""
    with _service(model, directory / "edge", instant=True) as service:
        for number, (label, length, concurrency) in enumerate(itertools.product(("text", "ids"), LENGTHS, CONCURRENCIES)):
            texts = [_text(length, seed=number * num_requests + index) for index in range(num_requests)]
            prompts: Sequence[str | list[int]] = texts if label == "text" else [tokenizer.encode(text) for text in texts]
            requests = [post({"prompt": prompt, "max_tokens": 1, "temperature": 0}) for prompt in prompts]
            run_load(service.port, requests[:WARM_UP_REQUESTS], concurrency)
            yield _edge(service, f"{label}, {length} tokens", requests, concurrency)


def _edge(service: EdgeService, label: str, requests: Sequence[bytes], concurrency: int) -> Edge:
    service.take()
    started = time.perf_counter()
    replies = run_load(service.port, requests, concurrency)
    wall = time.perf_counter() - started
    answers = [Answer(reply.seconds, None) for reply in replies]
    edge = Edge(label, concurrency, Round(0, wall, answers, None), service.take().loop_seconds)
    _say(f"{label}, {concurrency} at once: {edge.requests_per_second:,.0f} requests/s")
    return edge


def measure_streams(model: Path, directory: Path, streams: int, max_tokens: int, rounds: int) -> Iterator[Decoding]:
    """Rounds in turn, another way of asking first each time."""
    ways = (ALONE, PLAIN, STREAMED)
    if not rounds:
        return
    length = max_tokens + 2 * STREAM_PROMPT_TOKENS
    sizes = {"max_model_len": length, "kv_cache_tokens": streams * (length + 16), "prefix_cache": False}
    with _service(model, directory / "streams", instant=False, **sizes) as service:
        for label in ways:
            _decode(service, label, -1, streams, WARM_UP_TOKENS)
        for number in range(rounds):
            shift = number % len(ways)
            for label in (*ways[shift:], *ways[:shift]):
                decoding = _checked(_decode(service, label, number, streams, max_tokens))
                _say(f"Round {number + 1} of {rounds}, {label}: {1e3 * decoding.step_seconds:.1f} ms a step")
                yield decoding


def _decode(service: EdgeService, label: str, number: int, streams: int, max_tokens: int) -> Decoding:
    chosen = random.Random(f"{number}")
    prompts = [[chosen.randrange(1000, 8000) for _ in range(STREAM_PROMPT_TOKENS)] for _ in range(streams)]
    service.take()
    events = 0
    if label == ALONE:
        taken = service.run_without_http([greedy(f"alone-{number}-{i}", prompt, max_tokens) for i, prompt in enumerate(prompts)])
    else:
        common: dict[str, Any] = {"max_tokens": max_tokens, "temperature": 0, "ignore_eos": True, "stream": label == STREAMED}
        events = sum(reply.events for reply in run_load(service.port, [post(common | {"prompt": each}) for each in prompts], streams))
        taken = service.take()
    return Decoding(label, taken.steps, streams, taken.loop_seconds, len(taken.steps), events)


def _checked(decoding: Decoding) -> Decoding:
    if len(decoding.full_steps) < 2:
        raise BenchmarkError(f"{decoding.label}: hardly any step had all {decoding.tokens_per_step} requests; ask for more tokens")
    return decoding


def edge_lines(edges: Sequence[Edge]) -> Iterator[str]:
    yield "HTTP, engine mocked away"
    yield f"  {'prompt':<22}{'at once':>8}{'requests/s':>12}{'p50 ms':>9}{'p95 ms':>9}{'loop ms/request':>17}"
    for each in edges:
        loop = 1e3 * each.loop_seconds / len(each.round.answers)
        p50, p95 = 1e3 * each.round.latency(0.5), 1e3 * each.round.latency(0.95)
        yield f"  {each.label:<22}{each.concurrency:>8}{each.requests_per_second:>12,.0f}{p50:>9.2f}{p95:>9.2f}{loop:>17.2f}"


def stream_lines(rounds: Sequence[Decoding]) -> Iterator[str]:
    """Medians over rounds; ratios are taken within a round, between ways that ran one after the other."""
    by_way = {label: [each for each in rounds if each.label == label] for label in (ALONE, PLAIN, STREAMED)}
    yield f"Engine steps with {rounds[0].tokens_per_step} requests at once, medians of {len(by_way[PLAIN])} rounds in turn"
    yield f"  {'':<12}{'step ms':>9}{'period ms':>11}{'loop ms/step':>14}{'events/round':>14}{'/ plain':>9}{'lowest':>8}{'highest':>9}"
    for label, each in by_way.items():
        ratios = sorted(one.step_seconds / plain.step_seconds for one, plain in zip(each, by_way[PLAIN], strict=True))
        step = 1e3 * statistics.median(one.step_seconds for one in each)
        period = 1e3 * statistics.median(one.period_seconds for one in each)
        loop = 1e3 * statistics.median(one.loop_seconds_per_step for one in each)
        events = statistics.median(one.events for one in each)
        yield (
            f"  {label:<12}{step:>9.1f}{period:>11.1f}{loop:>14.1f}{events:>14,.0f}"
            f"{statistics.median(ratios):>9.3f}{ratios[0]:>8.3f}{ratios[-1]:>9.3f}"
        )


@contextmanager
def _service(model: Path, directory: Path, *, instant: bool, **settings: Any) -> Iterator[EdgeService]:  # noqa: ANN401 - settings
    known = {"model": str(model), "save_root": (directory / "saves",), "state_dir": directory / "state", "device": "cpu"}
    with EdgeService(known | {"dtype": "float32", "threads": 1} | settings, instant=instant) as service:
        yield service


def _text(num_tokens: int, seed: int) -> str:
    """Words at random, of about so many tokens."""
    chosen = random.Random(seed)
    return " ".join(chosen.choice(WORDS) for _ in range(num_tokens))


def _say(line: str) -> None:
    print(line, flush=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
