"""What is printed of a run, and the same as JSON."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from benchmarks.machine import Machine
from benchmarks.results import Round, Summary, summarize
from benchmarks.workload import Workload

BUSY_LOAD = 0.5
Json = dict[str, Any]


def machine_lines(machine: Machine, matrix_gflops_after: float) -> Iterator[str]:
    yield "Machine"
    yield f"  processor  {machine.processor}, {machine.cores} cores, {machine.torch_threads} torch threads"
    yield f"  memory     {machine.memory_bytes / 2**30:.1f} GiB, read at {machine.memory_bytes_per_second / 1e9:.1f} GB/s"
    yield f"  matrices   {machine.matrix_gflops:.0f} GFLOP/s before, {matrix_gflops_after:.0f} after (float32, same process as this report)"
    yield f"  disk       {machine.disk_bytes_per_second / 1e6:.0f} MB/s (256 MiB written and synced)"
    busy = ": the machine was NOT IDLE, don't trust the figures" if machine.load_before > BUSY_LOAD else ""
    yield f"  load       {machine.load_before:.1f} before the benchmark began{busy}"
    yield f"  software   {', '.join(f'{name} {number}' for name, number in machine.versions.items())}"


def workload_lines(workload: Workload, compute_dtype: str, num_rounds: int) -> Iterator[str]:
    layers = ", ".join(str(layer) for layer in workload.layers)
    yield (
        f"  {len(workload.prompts)} prompts, {workload.num_prompt_tokens:,} tokens, max_tokens {workload.max_tokens}, "
        f"{workload.concurrency} at once, medians of {num_rounds} rounds in turn"
    )
    yield f"  layers {layers} saved as {workload.save_dtype}, computed in {compute_dtype}"


def table_lines(summaries: Sequence[Summary]) -> Iterator[str]:
    yield f"  {'':<30}{'prompt t/s':>11}{'slowest':>10}{'fastest':>10}{'output t/s':>11}{'p50 s':>9}{'p95 s':>9}{'peak RSS':>12}"
    for each in summaries:
        memory = f"{each.peak_rss_bytes / 2**20:,.0f} MiB" if each.peak_rss_bytes else "unknown"
        yield (
            f"  {each.label:<30}{each.tokens_per_second:>11,.0f}{each.slowest:>10,.0f}{each.fastest:>10,.0f}"
            f"{each.output_tokens_per_second:>11,.1f}{each.p50_seconds:>9.3f}{each.p95_seconds:>9.3f}{memory:>12}"
        )


def workload_facts(workload: Workload) -> Json:
    """A workload without its prompts."""
    facts = {name: value for name, value in asdict(workload).items() if name != "prompts"}
    return facts | {"num_prompts": len(workload.prompts), "num_prompt_tokens": workload.num_prompt_tokens}


def rounds_facts(rounds: Mapping[str, Sequence[Round]]) -> Json:
    """Everything that was measured of each system, round by round."""
    return {
        label: {"summary": asdict(summarize(label, each)), "rounds": [_round_facts(one) for one in each]} for label, each in rounds.items()
    }


def _round_facts(one: Round) -> Json:
    return {
        "tokens_per_second": one.tokens_per_second,
        "output_tokens_per_second": one.output_tokens_per_second,
        "wall_seconds": one.wall_seconds,
        "p50_seconds": one.latency(0.50),
        "p95_seconds": one.latency(0.95),
        "peak_rss_bytes": one.peak_rss_bytes,
    }
