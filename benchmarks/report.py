"""What is printed at the end, and the same as JSON."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

from benchmarks.machine import Machine
from benchmarks.results import Round, Summary, summarize
from benchmarks.workload import Workload

STRATA = "strata, saving"
STRATA_WITHOUT = "strata, not saving"
REFERENCE = "transformers, one at a time"
BUSY_LOAD = 0.5
RATIOS = ((STRATA, REFERENCE), (STRATA, STRATA_WITHOUT))


def machine_lines(machine: Machine, matrix_gflops_after: float) -> Iterator[str]:
    yield "Machine"
    yield f"  processor  {machine.processor}, {machine.cores} cores, {machine.torch_threads} torch threads"
    yield f"  memory     {machine.memory_bytes / 2**30:.1f} GiB"
    yield f"  matrices   {machine.matrix_gflops:.0f} GFLOP/s before, {matrix_gflops_after:.0f} after (float32, same process as this report)"
    yield f"  disk       {machine.disk_bytes_per_second / 1e6:.0f} MB/s (256 MiB written and synced)"
    busy = ": the machine was NOT IDLE, don't trust the figures" if machine.load_before > BUSY_LOAD else ""
    yield f"  load       {machine.load_before:.1f} before the benchmark began{busy}"
    yield f"  software   {', '.join(f'{name} {number}' for name, number in machine.versions.items())}"


def workload_lines(workload: Workload, compute_dtype: str, num_rounds: int) -> Iterator[str]:
    layers = ", ".join(str(layer) for layer in workload.layers)
    yield f"Workload {workload.name}"
    yield (
        f"  {len(workload.prompts)} prompts, {workload.num_prompt_tokens:,} tokens, max_tokens {workload.max_tokens}, "
        f"{workload.concurrency} at once, medians of {num_rounds} rounds in turn"
    )
    yield f"  layers {layers} saved as {workload.save_dtype}, computed in {compute_dtype}"


def table_lines(summaries: Sequence[Summary]) -> Iterator[str]:
    yield f"{'':<30}{'tokens/s':>10}{'slowest':>10}{'fastest':>10}{'p50 s':>9}{'p95 s':>9}{'peak RSS':>12}"
    for each in summaries:
        memory = f"{each.peak_rss_bytes / 2**20:,.0f} MiB" if each.peak_rss_bytes else "unknown"
        yield (
            f"{each.label:<30}{each.tokens_per_second:>10,.0f}{each.slowest:>10,.0f}{each.fastest:>10,.0f}"
            f"{each.p50_seconds:>9.3f}{each.p95_seconds:>9.3f}{memory:>12}"
        )


def ratio_lines(summaries: Sequence[Summary]) -> Iterator[str]:
    rates = {each.label: each.tokens_per_second for each in summaries}
    yield "Ratios of tokens per second"
    for above, below in RATIOS:
        if above in rates and below in rates:
            yield f"  {above} / {below}: {rates[above] / rates[below]:.3f}"


def write_json(path: Path, machine: Machine, matrix_gflops_after: float, workload: Workload, rounds: Mapping[str, Sequence[Round]]) -> None:
    """Everything that was measured, round by round."""
    measured = {
        label: {
            "summary": asdict(summarize(label, each)),
            "rounds": [
                {
                    "tokens_per_second": one.tokens_per_second,
                    "wall_seconds": one.wall_seconds,
                    "p50_seconds": one.latency(0.50),
                    "p95_seconds": one.latency(0.95),
                    "peak_rss_bytes": one.peak_rss_bytes,
                }
                for one in each
            ],
        }
        for label, each in rounds.items()
    }
    facts = {name: value for name, value in asdict(workload).items() if name != "prompts"}
    facts |= {"num_prompts": len(workload.prompts), "num_prompt_tokens": workload.num_prompt_tokens}
    document = {"machine": {**asdict(machine), "matrix_gflops_after": matrix_gflops_after}, "workload": facts, "measured": measured}
    path.write_text(json.dumps(document, indent=2) + "\n")
