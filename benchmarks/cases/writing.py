"""W8: the engine's writer alone, fed from pages that are there already, against plain writing of the same bytes to the same disk.

Plain writing is `dd conv=fsync` for one large file. For many small ones it is a loop that writes and syncs one after the other, since
starting `dd` for each would take as long as writing does.
"""

import os
import shutil
import statistics
import subprocess
import threading
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from benchmarks.bench import Bench, Result
from benchmarks.client import BenchmarkError
from benchmarks.results import Answer
from benchmarks.rounds import in_turn
from benchmarks.targets import Row, at_least
from benchmarks.verify import check_and_remove
from benchmarks.workload import Workload
from engine.offline import LocalTarget
from engine.saves.chunk import RowChunk, SaveEnd
from engine.saves.spec import SaveEvent, SaveSpec
from engine.saves.writer import SaveWriter

NAME = "W8"
WRITER, PLAIN = "writer", "plain"
PAGE_ROWS, WIDTH, LAYERS = 32, 576, (2, 15, 28, 30)
CHUNK_BLOCKS = 16
"""Blocks handed over at once: the 512 rows of a step."""
TOTAL_BYTES = 256 << 20
ROW_BYTES = len(LAYERS) * WIDTH * 2


@dataclass(frozen=True)
class Shape:
    """So many files of so many rows each."""

    label: str
    num_files: int
    plain: str

    @property
    def rows(self) -> int:
        step = PAGE_ROWS * CHUNK_BLOCKS
        return -(-TOTAL_BYTES // ROW_BYTES // self.num_files // step) * step  # rounded up

    @property
    def num_bytes(self) -> int:
        return self.num_files * self.rows * ROW_BYTES


SHAPES = (Shape("one file", 1, "dd conv=fsync"), Shape("64 files", 64, "write and fsync"))


def run(bench: Bench) -> Result:
    """Files are written to the disk that the benchmark's folder is on, and removed after each round."""
    bench_folder = bench.directory / "writing"
    pages = torch.randn(1 + CHUNK_BLOCKS * len(LAYERS), PAGE_ROWS, WIDTH).to(bench.dtype)
    lines, rows, measured = [], [], {}
    for shape in SHAPES:
        seconds = _measure(bench, shape, pages, bench_folder)
        rates = {label: shape.num_bytes / statistics.median(each) for label, each in seconds.items()}
        ratio = statistics.median(plain / writer for plain, writer in zip(seconds[PLAIN], seconds[WRITER], strict=True))
        size = f"{shape.num_bytes / 2**20:,.0f} MiB"
        lines.append(f"  {shape.label}, {size}: writer {rates[WRITER] / 1e6:,.0f} MB/s, {shape.plain} {rates[PLAIN] / 1e6:,.0f} MB/s")
        rows.append(Row(NAME, f"{shape.label}: writer / {shape.plain}, bytes per second", ratio, at_least(0.9), "percent"))
        measured[shape.label] = {"seconds": seconds, "bytes": shape.num_bytes}
    return Result(lines, rows, measured)


def _measure(bench: Bench, shape: Shape, pages: torch.Tensor, folder: Path) -> dict[str, list[float]]:
    seconds: dict[str, list[float]] = {WRITER: [], PLAIN: []}
    source = bench.directory / "written-before"
    for number, label in in_turn([WRITER, PLAIN], bench.options.rounds + 1):
        folder.mkdir()
        paths = [folder / f"{index}.safetensors" for index in range(shape.num_files)]
        took = write_files(pages, paths, shape.rows) if label == WRITER else _plainly(source, paths)
        if label == WRITER:
            _check(paths, shape.rows, source)
        shutil.rmtree(folder)
        if number:  # the first pair warms up
            seconds[label].append(took)
    source.unlink()
    return seconds


def write_files(pages: torch.Tensor, paths: list[Path], rows: int) -> float:
    """Has the writer make the files, all begun at once and fed in turn; returns the seconds until the last is published.

    `pages` is `[pages, page_rows, width]`; the same ones are handed in again and again.
    """
    ended, events = threading.Event(), list[SaveEvent]()

    def on_event(event: SaveEvent) -> None:
        if event.status in ("completed", "failed", "cancelled"):
            events.append(event)
            if len(events) == len(paths):
                ended.set()

    writer = SaveWriter(pages, on_event)
    numbers = np.arange(CHUNK_BLOCKS)
    page_ids = 1 + numbers[:, None] + np.arange(len(LAYERS)) * CHUNK_BLOCKS  # [blocks, layers]
    started = time.perf_counter()
    jobs = [writer.begin(_spec(path), num_rows=rows, max_rows=rows) for path in paths]
    for block in range(0, rows // PAGE_ROWS, CHUNK_BLOCKS):
        ranges = [(block * PAGE_ROWS, (block + CHUNK_BLOCKS) * PAGE_ROWS)]
        for job in jobs:
            job.append(RowChunk(ranges, block + numbers, page_ids, lambda: None))
    for job in jobs:
        job.finish(SaveEnd(range(rows), None, rows, rows))
    ended.wait()
    took = time.perf_counter() - started
    writer.close()
    failed = [event for event in events if event.status != "completed"]
    if failed:
        raise BenchmarkError(f"a save failed: {failed[0].error}")
    return took


def _spec(path: Path) -> SaveSpec:
    return SaveSpec(path.name, LocalTarget(path), LAYERS, "bfloat16")


def _check(paths: list[Path], rows: int, source: Path) -> None:
    """Checks the files as those of other workloads are; one of them becomes what is written plainly."""
    shutil.copyfile(paths[0], source)
    prompts = [list(range(rows))] * len(paths)
    workload = Workload("writing", prompts, LAYERS, max_tokens=1, concurrency=1)
    check_and_remove([Answer(0.0, path) for path in paths], prompts, workload, WIDTH)


def _plainly(source: Path, paths: list[Path]) -> float:
    """`source` lies in memory, so only writing takes time."""
    if len(paths) == 1:
        started = time.perf_counter()
        subprocess.run(["dd", f"if={source}", f"of={paths[0]}", "bs=1M", "conv=fsync", "status=none"], check=True)
        return time.perf_counter() - started
    content = source.read_bytes()
    started = time.perf_counter()
    for path in paths:
        with path.open("wb", buffering=0) as file:
            file.write(content)
            os.fsync(file.fileno())
    return time.perf_counter() - started
