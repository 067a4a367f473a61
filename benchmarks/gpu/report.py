"""What `python -m benchmarks.gpu_check` prints."""

import os
import platform
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu.parity import Parity, describe
from benchmarks.gpu.rates import DecodeRate, PrefillRate, Rates
from engine.device.host import usable_cpus

SHARE_OF_MATRIX_RATE, OVERHEAD, SAMPLES_PER_SECOND = 0.60, 0.03, 110.0
"""What is aimed at; the last one on a card of an H200's class, with samples of 1,024 tokens."""


@dataclass(frozen=True)
class Card:
    """What the figures were measured on."""

    name: str
    memory_bytes: int
    torch_version: str
    cuda_version: str | None
    processor_cores: int
    files_in: str
    at: str

    @classmethod
    def of(cls, device: torch.device, folder: Path) -> "Card":
        if device.type == "cuda":
            properties = torch.cuda.get_device_properties(device)
            name, memory = properties.name, properties.total_memory
        else:
            name, memory = f"{platform.machine()} processor", os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        cores = usable_cpus()
        return cls(name, memory, torch.__version__, torch.version.cuda, cores, str(folder), f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC")


@dataclass(frozen=True)
class Report:
    """One run of the check."""

    card: Card
    model: str
    parities: list[Parity]
    not_run: dict[str, str]
    """Backends that can't run here, and why."""
    rates: Rates | None
    """None: parity failed, and nothing further was run."""

    @property
    def ok(self) -> bool:
        graphs = self.rates.graph_parity if self.rates else None
        return bool(self.parities) and all(parity.ok for parity in [*self.parities, *([graphs] if graphs else [])])

    def as_json(self) -> dict[str, Any]:
        return {"ok": self.ok, "targets": [{"target": name, "met": met} for name, met in self.targets()]} | asdict(self)

    def targets(self) -> list[tuple[str, bool]]:
        """None on a processor, whose rates mean nothing here."""
        if self.rates is None or self.card.cuda_version is None:
            return []
        met: list[tuple[str, bool]] = []
        for rate in self.rates.prefill:
            size = f"{rate.count} x {rate.length}"
            share, overhead = rate.share_of_matrix_rate, rate.overhead
            met.append(
                (f"prompts {size}: {share:.1%} of the matrix rate, aimed at {SHARE_OF_MATRIX_RATE:.0%}", share >= SHARE_OF_MATRIX_RATE)
            )
            met.append((f"prompts {size}: extraction adds {overhead:.1%}, at most {OVERHEAD:.0%} aimed at", overhead <= OVERHEAD))
        samples = self.rates.samples_per_second
        text = f"{samples:.1f} samples/s of {self.rates.sample_length} tokens, aimed at {SAMPLES_PER_SECOND:.0f} on an H200"
        return [*met, (text, samples >= SAMPLES_PER_SECOND)]

    def lines(self) -> list[str]:
        card = self.card
        memory = f"{card.memory_bytes / 2**30:.0f} GiB"
        lines = [f"{card.name}, {memory}, torch {card.torch_version}, CUDA {card.cuda_version}, {card.processor_cores} cores, {card.at}"]
        lines += [f"model: {self.model}; files in {card.files_in}", "", "Attention against dense attention in float32"]
        lines += describe(self.parities)
        if self.rates is not None and self.rates.graph_parity is not None:
            lines += describe([self.rates.graph_parity])
        lines += [f"{name}: not run, {why}" for name, why in self.not_run.items()]
        if self.rates is not None:
            lines += _rate_lines(self.rates)
            lines += ["", *(f"{'met   ' if met else 'MISSED'}  {name}" for name, met in self.targets())]
        return lines


def _rate_lines(rates: Rates) -> list[str]:
    memory = rates.memory
    return [
        "",
        f"Matrix products: {rates.matrix_flops / 1e12:.1f} TFLOP/s",
        "",
        *_table(
            ["prompts", "tokens/s", "with files", "copied only", "of matrix rate", "files add", "copies add"],
            map(_prefill_row, rates.prefill),
        ),
        "",
        f"Graphs: {rates.graphs}",
        "",
        *_table(["text, batch", "tokens/s", "with files", "graphs", "graphs, files"], map(_decode_row, rates.decode)),
        "",
        f"Peak memory on the device: {_gib(memory.plain)}, with extraction {_gib(memory.with_extraction)}",
        f"Samples of {rates.sample_length} tokens: {rates.samples_per_second:.1f}/s",
    ]


def _prefill_row(rate: PrefillRate) -> list[str]:
    rates = [f"{value:,.0f}" for value in (rate.plain, rate.with_files, rate.with_copies)]
    return [
        f"{rate.count} x {rate.length}",
        *rates,
        f"{rate.share_of_matrix_rate:.1%}",
        f"{rate.overhead:.1%}",
        f"{rate.copy_overhead:.1%}",
    ]


def _decode_row(rate: DecodeRate) -> list[str]:
    values = (rate.eager, rate.eager_with_files, rate.graphs, rate.graphs_with_files)
    return [str(rate.batch), *("not here" if value is None else f"{value:,.0f}" for value in values)]


def _gib(size: int | None) -> str:
    return "not measured on a processor" if size is None else f"{size / 2**30:.2f} GiB"


def _table(head: Sequence[str], rows: Iterable[list[str]]) -> list[str]:
    cells = [list(head), *rows]
    widths = [max(len(row[column]) for row in cells) for column in range(len(head))]
    return ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in cells]
