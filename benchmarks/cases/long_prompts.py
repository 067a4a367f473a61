"""W5: one prompt of 8k tokens and one of 32k, on a small random model: how long after its last token a file stands, and memory."""

import statistics
from dataclasses import dataclass

from benchmarks import machine
from benchmarks.bench import Bench, Result
from benchmarks.client import run_round, saving_body
from benchmarks.edge_model import write_small_model
from benchmarks.metrics import increase, scrape
from benchmarks.targets import Row, Target, at_most
from benchmarks.verify import check_and_remove
from benchmarks.workload import Workload, random_prompt
from service.cli.launcher import ServiceProcess

NAME = "W5"
LENGTHS = (8192, 32768)
WIDTH, LAYERS, CONTEXT = 256, 4, 33024
KV_TOKENS, STATE_BYTES = 33280, 64 << 20
WARM_UP_TOKENS = 1024
BLOCK_ROWS = 32
TAIL_MS = 50.0
MEMORY_SHARE = 1.1


@dataclass(frozen=True)
class Long:
    """One long prompt."""

    tail_seconds: float
    """From the last computed token to the published file, as the service counts it."""
    seconds: float
    peak_rss_bytes: int


def run(bench: Bench) -> Result:
    """Memory is held against what the process has when it is ready, weights included, plus its caches as configured."""
    model = bench.directory / "long-model"
    write_small_model(model, bench.vocab_size, bench.model, WIDTH, LAYERS, CONTEXT)
    caches = ("--kv-cache-tokens", str(KV_TOKENS), "--state-cache-memory", str(STATE_BYTES))
    lengths = LENGTHS[: bench.options.limit]
    with bench.service(*caches, model=model) as service:
        ready = machine.rss_bytes(service.pid)
        _measure(bench, service, WARM_UP_TOKENS, seed=0)
        found = {length: [_measure(bench, service, length, seed=seed + 1) for seed in range(bench.options.rounds)] for length in lengths}
    block_ms = 1000 * machine.synced_write_seconds(bench.directory, _row_bytes() * BLOCK_ROWS)
    allowed = ready + KV_TOKENS * 2 * LAYERS * WIDTH * bench.dtype.itemsize + STATE_BYTES
    lines = [f"  {LAYERS} layers of width {WIDTH}; writing and syncing one block of rows takes {block_ms:.1f} ms"]
    rows = []
    for length, each in found.items():
        tail_ms = 1000 * statistics.median(one.tail_seconds for one in each)
        peak = max(one.peak_rss_bytes for one in each)
        seconds = statistics.median(one.seconds for one in each)
        lines.append(
            f"  {length:,} tokens: {seconds:.1f} s, {tail_ms:.1f} ms after the last token, peak {peak / 2**20:,.0f} MiB "
            f"of {allowed / 2**20:,.0f} ({ready / 2**20:,.0f} when ready, the rest caches as configured)"
        )
        wanted = length == LENGTHS[-1]
        rows.append(Row(NAME, f"{length:,} tokens: last token to published file", tail_ms, _only(wanted, TAIL_MS + block_ms), "ms"))
        what = f"{length:,} tokens: peak RSS / (RSS when ready + caches as configured)"
        rows.append(Row(NAME, what, peak / allowed, _only(wanted, MEMORY_SHARE)))
    measured = {str(length): [vars(one) for one in each] for length, each in found.items()}
    return Result(lines, rows, measured | {"block_write_ms": block_ms, "ready_rss_bytes": ready, "allowed_bytes": allowed})


def _only(wanted: bool, bound: float) -> Target | None:
    return at_most(bound) if wanted else None


def _measure(bench: Bench, service: ServiceProcess, length: int, seed: int) -> Long:
    prompt = random_prompt(length, bench.vocab_size, seed)
    workload = Workload("long", [prompt], tuple(range(1, LAYERS + 1)), max_tokens=1, concurrency=1)
    machine.reset_peak_rss(service.pid)
    before = scrape(service.url)
    measured = run_round(service.url, workload, [prompt], saving_body(workload))
    tail = increase(before, scrape(service.url), "strata_save_latency_seconds_sum")
    peak = machine.peak_rss_bytes(service.pid) or 0
    check_and_remove(measured.answers, [prompt], workload, WIDTH)
    bench.say(f"{length:,} tokens: {measured.wall_seconds:.1f} s")
    return Long(tail, measured.wall_seconds, peak)


def _row_bytes() -> int:
    return LAYERS * WIDTH * 2
