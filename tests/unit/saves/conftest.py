"""A bench for the writer: pages poisoned with NaN, targets that count their locks, files read back with the safetensors library."""

import json
import os
import tempfile
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import safe_open

from engine.layers import LayerId
from engine.saves.selection import ALL_ROWS, Range, RowSelection
from engine.saves.spec import SaveEvent, SaveSpec
from engine.saves.writer import RowChunk, SaveEnd, SaveJob, SaveWriter

METADATA = {
    "format": "strata.hidden_states.v1",
    "model": "tiny",
    "model_revision": "none",
    "num_hidden_layers": "8",
    "layer_convention": "as the layers are numbered",
    "compute_dtype": "float32",
    "request_id": "request",
    "created": "2026-01-01T00:00:00Z",
    "engine": "test 1",
    "user.note": 'quotes " and ünïcode 😀',
}


@dataclass
class Target:
    """A directory and a name, and how often the save has let go of them."""

    directory_fd: int
    name: str
    path: str
    replace: bool = False
    calls: list[str] = field(default_factory=list)

    def published(self) -> None:
        self.calls.append("published")

    def abandoned(self) -> None:
        self.calls.append("abandoned")


@dataclass(frozen=True)
class SavedTensors:
    tensors: dict[str, torch.Tensor]
    metadata: dict[str, str]


class Bench:
    """A writer over poisoned pages, in a folder of its own."""

    def __init__(self, folder: Path, *, page_size: int = 4, width: int = 8, dtype: torch.dtype = torch.float32, **options: object) -> None:
        self.folder = folder
        self.page_size = page_size
        self.pages = torch.full((1024 if page_size < 100 else 64, page_size, width), float("nan"), dtype=dtype)
        self.free_pages = list(range(len(self.pages)))
        self.events: list[SaveEvent] = []
        self.releases: Counter[int] = Counter()
        self.releasing_threads: set[str] = set()
        self.chunks_made = 0
        self.directory_fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        self.ended = threading.Condition()
        self.pages_came_back = threading.Condition()
        self.writer = SaveWriter(self.pages, self._on_event, **options)

    def _on_event(self, event: SaveEvent) -> None:
        with self.ended:
            self.events.append(event)
            self.ended.notify_all()

    def target(self, name: str = "a.safetensors", *, replace: bool = False) -> Target:
        return Target(self.directory_fd, name, str(self.folder / name), replace)

    def spec(
        self, target: Target, layers: Sequence[LayerId] = (2, "norm"), rows: RowSelection = ALL_ROWS, save_id: str = "id", **fields: object
    ) -> SaveSpec:
        facts = {
            "hidden_size": str(self.pages.shape[2]),
            "layers": json.dumps(list(layers)),
            "final_norm": "true" if "norm" in layers else "false",
        }
        values: dict[str, object] = {"dtype": "float32", "metadata": {**METADATA, **facts}, **fields}
        return SaveSpec(save_id=save_id, target=target, layers=tuple(layers), rows=rows, **values)

    def begin(self, spec: SaveSpec, *, num_rows: int | None, max_rows: int, end: SaveEnd | None = None) -> SaveJob:
        """`end`: of a save that is known to end so."""
        job = self.writer.begin(spec, num_rows=num_rows, max_rows=max_rows, end=None if end is None else lambda: end)
        job.start()
        return job

    def chunk(self, rows: torch.Tensor, position: int) -> RowChunk:
        """Rows of consecutive positions, see `chunk_of`."""
        return self.chunk_of(rows, [(position, position + len(rows))])

    def chunk_of(self, rows: torch.Tensor, ranges: Sequence[Range]) -> RowChunk:
        """Puts `[rows, layers, width]` into pages of their own. All else in them is NaN, and once released they are NaN throughout."""
        number, self.chunks_made = self.chunks_made, self.chunks_made + 1
        positions = [position for low, high in ranges for position in range(low, high)]
        blocks = sorted({position // self.page_size for position in positions})
        with self.pages_came_back:
            self.pages_came_back.wait_for(lambda: len(self.free_pages) >= len(blocks) * rows.shape[1])
            pages = {block: [self.free_pages.pop() for _ in range(rows.shape[1])] for block in blocks}
        for position, row in zip(positions, rows, strict=True):
            self.pages[pages[position // self.page_size], position % self.page_size] = row

        def release() -> None:
            self.releases[number] += 1
            self.releasing_threads.add(threading.current_thread().name)
            with self.pages_came_back:
                for ids in pages.values():
                    self.pages[ids] = float("nan")
                    self.free_pages.extend(ids)
                self.pages_came_back.notify_all()

        return RowChunk(ranges, np.array(blocks), np.array([*pages.values()]), release)

    def save_all(self, rows: torch.Tensor, job: SaveJob, step: int = 3, *, end_later: bool = False) -> None:
        """Hands in all rows of a sequence, `step` at a time, and the end: `end_later`, once the rows have been written."""
        for start in range(0, len(rows), step):
            job.append(self.chunk(rows[start : start + step], start))
        if end_later:
            assert self.writer.wait_idle(60)
        job.finish(self.end_of(len(rows)))

    def end_of(self, count: int) -> SaveEnd:
        """All rows of a prompt of `count` tokens."""
        return SaveEnd(list(range(100, 100 + count)), None, count, count)

    def rows(self, count: int, layers: int = 2) -> torch.Tensor:
        return torch.randn(count, layers, self.pages.shape[2]).to(self.pages.dtype)

    def wait_for_end(self, save_id: str = "id") -> SaveEvent:
        """The save's last event, once it and all that follows from it has been done."""
        with self.ended:
            while not self.last_events(save_id):
                self.ended.wait()
        while not self.writer.wait_idle(1.0):
            pass
        (event,) = self.last_events(save_id)
        return event

    def last_events(self, save_id: str = "id") -> list[SaveEvent]:
        return [event for event in self.events if event.save_id == save_id and event.status not in ("running", "writing")]

    def statuses(self, save_id: str = "id") -> list[str]:
        return [event.status for event in self.events if event.save_id == save_id]

    def names(self) -> list[str]:
        return sorted(path.name for path in self.folder.iterdir())

    def read(self, name: str = "a.safetensors") -> SavedTensors:
        with safe_open(self.folder / name, "pt") as file:
            return SavedTensors({key: file.get_tensor(key) for key in file.keys()}, file.metadata())  # noqa: SIM118 — not a dict

    def close(self) -> None:
        """Every page must have come back exactly once by now, from a writer thread."""
        self.writer.close()
        os.close(self.directory_fd)
        assert self.writer.queue_depth == 0
        assert self.releases == Counter(range(self.chunks_made))
        assert sorted(self.free_pages) == list(range(len(self.pages)))
        assert all(name.startswith("save-writer") for name in self.releasing_threads)


@pytest.fixture(scope="session")
def make_bench() -> Iterator[Callable[..., Bench]]:
    """Makes benches; for tests that need more than one (each is closed by the caller)."""
    with tempfile.TemporaryDirectory() as root:
        yield lambda **options: Bench(Path(tempfile.mkdtemp(dir=root)), **options)


@pytest.fixture
def bench(make_bench: Callable[..., Bench]) -> Iterator[Bench]:
    """Closed, and its pages counted, after the test."""
    made = make_bench(retry_seconds=0.2)
    yield made
    made.close()
