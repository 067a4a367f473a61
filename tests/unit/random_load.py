"""Random loads on a core with the fake device: copies land late, memory runs out, requests abort and turn bad, disks pause."""

from __future__ import annotations

import logging
import random
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Literal

from engine.errors import InvalidRequest, StepFailed
from engine.layers import LayerId
from engine.saves.selection import RowSelection
from tests.unit.core_fakes import MAX_MODEL_LEN, VOCAB, Bench, FakeRunner
from tests.unit.faulty_runner import FaultyRunner, StagedFaultyRunner
from tests.unit.staged_runner import StagedRunner

LAYERS: Sequence[tuple[LayerId, ...] | None] = (None, None, (0,), (1,), (1, 2), (3,), (0, 1, 2, 3, "norm"), (2, "norm"))
PAIRS = (((0, None),), ((0, None),), ((-1, None),), ((0, 2), (-3, -1)), ((1, 4),), ((2, -2),), ((3, 5), (8, None)), ((-9, None),))
MAX_OPEN = 10
STARVED_AFTER = 120
"""Steps without progress of a request, on a disk that writes now and then, after which it counts as starved."""

RING_ROWS = 24
"""Of a text whose last rows are saved: 8 tokens and 17 more, the last of which has none. Nothing is certain before its end."""

Kind = Literal["mixed", "rings", "crowd"]
"""What a load is of: requests of all kinds; texts whose last rows are saved, in pages that are just enough for two, beside plain ones; or
one such text now and then among a crowd of small saves."""


@dataclass
class RandomLoad:
    """One load, the same for the same seed."""

    seed: int
    overlap: bool = False
    kind: Kind = "mixed"
    runner: type[FakeRunner] = StagedFaultyRunner
    failed: set[str] = field(default_factory=set)
    """Aborted, or failed for reasons of their own."""

    def __post_init__(self) -> None:
        rng = self.rng = random.Random(self.seed)
        full, sliding, small_page = rng.choice([(1, 1, 4), (2, 2, 4), (2, 2, 2), (4, 2, 2), (2, 3, 1), (2, 1, 3), (4, 4, 4)])
        # Of pages as long as the text all that were promised are held from its first row on.
        page = {"mixed": small_page, "rings": RING_ROWS, "crowd": 8}[self.kind]
        spare = {"mixed": rng.randint(0, 8), "rings": 24 // full, "crowd": 80 // full}[self.kind]
        self.bench = Bench(
            full_size=full,
            full_blocks=-(-MAX_MODEL_LEN // full) + spare,
            sliding_size=sliding,
            sliding_blocks=9 + spare,
            page_size=page,
            pages={"mixed": rng.randint(8, 24), "rings": 4, "crowd": 6}[self.kind],
            budget=rng.randint(2, 24),
            max_running=rng.randint(1, 5) if self.kind == "mixed" else 5,
            prefix_cache=rng.random() < 0.75,
            max_rows=rng.choice([None, 5, 9]),
            runner=self.runner,
            overlap=self.overlap,
        )
        self.bases = [[rng.randrange(VOCAB) for _ in range(24)] for _ in range(3)]
        self.disk_is_paused = False
        self.num_added = 0
        self.without_progress: dict[str, tuple[int, int]] = {}
        """Per request how far it has come, and for how many steps not: but for those with a paused disk, or beside better priorities."""

    def run(self, num_steps: int) -> None:
        logging.disable()
        try:
            for number in range(num_steps):
                self.step(number)
            self.finish()
        finally:
            logging.disable(logging.NOTSET)

    def step(self, number: int) -> None:
        rng, bench = self.rng, self.bench
        if len(self.open) < MAX_OPEN and rng.random() < (0.4 if self.kind == "mixed" else 0.8):
            self.add()
        if self.open and rng.random() < 0.03:
            self.abort(rng.choice(self.open))
        self.set_device()
        if rng.random() < 0.05:
            self.disk_is_paused = not self.disk_is_paused
        if not self.disk_is_paused:
            self.write()
        bench.step()
        self.note_failures()
        self.watch()
        if number % 20 == 0:
            bench.core.check_integrity()

    def add(self) -> None:
        rng, name = self.rng, f"r{self.num_added}"
        self.num_added += 1
        prompt = rng.choice(self.bases)[: rng.choice([1, 3, 4, 8, 8, 12, 17, 20])] + rng.choice([[], [], [1], [4, 2], [0, 0, 3]])
        with suppress(InvalidRequest):
            {"mixed": self.add_any, "rings": self.add_ring_or_plain, "crowd": self.add_small_or_ring}[self.kind](name, prompt)

    def add_any(self, name: str, prompt: list[int]) -> None:
        rng = self.rng
        kind = rng.choice(["prompt", "output", "last"])
        self.bench.add(
            name,
            prompt,
            rng.choice([0, 0, 0, 1, 2, 5, 8, 14]),
            rng.choice(LAYERS),
            output=kind == "output",
            last=kind == "last",
            rows=RowSelection(rng.choice(PAIRS)),
            stop=frozenset(rng.sample(range(VOCAB), rng.randint(0, 1))),
            priority=rng.randint(0, 1),
            salt=rng.choice(["", "", "other"]),
        )

    def add_ring(self, name: str) -> None:
        ring = RowSelection(((-RING_ROWS, None),))
        self.bench.add(name, self.rng.choice(self.bases)[:8], 17, (1, 2), output=True, rows=ring, priority=1, salt=name)

    def add_ring_or_plain(self, name: str, prompt: list[int]) -> None:
        if self.rng.random() < 0.4:
            self.add_ring(name)
        else:
            self.bench.add(name, prompt, 14, priority=self.rng.randint(0, 1), salt=name)

    def add_small_or_ring(self, name: str, prompt: list[int]) -> None:
        if self.rng.random() < 0.1:
            self.add_ring(name)
        else:
            self.bench.add(name, prompt[:12], 0, (1,), priority=1, salt=name)

    def abort(self, name: str) -> None:
        self.bench.core.abort(name)
        self.failed.add(name)

    def set_device(self) -> None:
        """Its faults and its speed until the next step."""
        rng, runner = self.rng, self.bench.runner
        if isinstance(runner, FaultyRunner):
            runner.room = rng.choice([None] * 8 + [1, 3, 9])
            runner.bad = {rng.choice(self.open)} if self.open and rng.random() < 0.02 else set()
        if isinstance(runner, StagedRunner):
            runner.lands_midway = rng.random() < 0.2
            runner.fails_behind_another = rng.random() < 0.1
            runner.stream.loses_tokens = self.overlap and rng.random() < 0.03
            runner.stream.advance(rng.choice([0, 0, 1, 3]))

    def write(self) -> None:
        for job in self.bench.jobs.values():
            if job.chunks and self.rng.random() < (0.1 if self.kind == "crowd" else 0.3):
                job.write_one()
        if self.rng.random() < 0.7:
            self.bench.take_pages_back()

    @property
    def open(self) -> list[str]:
        """Requests that haven't ended."""
        return list(self.bench.core._sequences)

    def note_failures(self) -> None:
        for name, outputs in self.bench.listener.outputs.items():
            if outputs[-1].finish_reason == "error":
                assert isinstance(outputs[-1].error, StepFailed), outputs[-1].error
                self.failed.add(name)
        for name, job in self.bench.jobs.items():
            if job.error is not None and job.spec.include_last_token and name not in self.failed:
                assert job.error.code == "engine_error"  # of the last token's row: only the save hears of it, since the text is done
                self.failed.add(name)

    def watch(self) -> None:
        """Nobody is starved by requests of the same priority."""
        sequences = self.bench.core._sequences
        best = min((sequence.request.priority for sequence in sequences.values()), default=0)
        for name, sequence in sequences.items():
            progress = sequence.num_computed + sequence.num_output_tokens
            known, steps = self.without_progress.get(name, (-1, 0))
            counts = not self.disk_is_paused and sequence.request.priority == best
            steps = 0 if progress > known else steps + counts
            self.without_progress[name] = (max(known, progress), steps)
            assert steps < STARVED_AFTER, f"{name} is starved"

    def finish(self) -> None:
        """The faults end, and everything must come to its end."""
        runner = self.bench.runner
        if isinstance(runner, FaultyRunner):
            runner.room, runner.bad = None, set()
        if isinstance(runner, StagedRunner):
            runner.fails_behind_another = runner.stream.loses_tokens = False
        self.bench.run()
        self.note_failures()
        self.bench.check_results(but=frozenset(self.failed))
        for name in self.failed & set(self.bench.jobs):
            job = self.bench.jobs[name]
            assert job.failed or job.end is not None, "a save is never ended"
