"""Scheduler, caches and capture under random loads: see `core_fakes` for how a wrong row shows."""

from __future__ import annotations

from contextlib import suppress

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

from engine.errors import InvalidRequest
from engine.layers import LayerId
from engine.saves.selection import RowSelection
from tests.unit.core_fakes import MAX_MODEL_LEN, VOCAB, Bench, FakeRunner, next_token
from tests.unit.staged_runner import StagedRunner

BASES = ([0, 1, 1, 0, 2, 3, 1, 4] * 3, [0, 1, 1, 0, 4, 4, 2, 0, 3, 3, 1, 2] * 2)
"""Few, and with a common beginning, so that prefixes are hit often."""
LAYERS: tuple[tuple[LayerId, ...] | None, ...] = (None, (0,), (1,), (1, 2), (2,), (3,), (0, 1, 2, 3, "norm"), (2, "norm"))
PAIRS = (((0, None),), ((-1, None),), ((0, 2), (-3, -1)), ((1, 4),), ((2, -2),), ((3, 5), (8, None)))


class CoreMachine(RuleBasedStateMachine):
    """Requests come, are computed, aborted and written in any order."""

    runner: type[FakeRunner] = FakeRunner
    overlap = False

    @initialize(
        sizes=st.sampled_from([(1, 1, 4), (2, 2, 4), (2, 2, 2), (4, 2, 2), (2, 3, 1), (2, 1, 3), (4, 4, 4)]),
        spare=st.integers(0, 6),
        pages=st.integers(6, 24),
        budget=st.integers(1, 24),
        running=st.integers(1, 4),
        prefix_cache=st.sampled_from([True, True, True, False]),
        max_rows=st.sampled_from([None, 5, 9]),
    )
    def build(
        self,
        sizes: tuple[int, int, int],
        spare: int,
        pages: int,
        budget: int,
        running: int,
        prefix_cache: bool,
        max_rows: int | None,
    ) -> None:
        full, sliding, page = sizes
        self.bench = Bench(
            full_size=full,
            full_blocks=-(-MAX_MODEL_LEN // full) + spare,
            sliding_size=sliding,
            sliding_blocks=9 + spare,
            page_size=page,
            pages=pages,
            budget=budget,
            max_running=running,
            prefix_cache=prefix_cache,
            max_rows=max_rows,
            runner=self.runner,
            overlap=self.overlap,
        )
        self.num_added = 0
        self.aborted: set[str] = set()

    @rule(
        base=st.sampled_from(BASES),
        length=st.sampled_from([1, 3, 4, 8, 8, 12, 17, 20]),
        tail=st.sampled_from([[], [], [1], [4, 2], [0, 0, 3]]),
        max_tokens=st.sampled_from([0, 0, 0, 1, 2, 5, 8]),
        stop=st.frozensets(st.integers(0, VOCAB - 1), max_size=1),
        layers=st.sampled_from(LAYERS),
        kind=st.sampled_from(["prompt", "output", "last"]),
        pairs=st.sampled_from(PAIRS),
        priority=st.integers(0, 1),
        salt=st.sampled_from(["", "", "", "other"]),
    )
    def add(
        self,
        base: list[int],
        length: int,
        tail: list[int],
        max_tokens: int,
        stop: frozenset[int],
        layers: tuple[LayerId, ...] | None,
        kind: str,
        pairs: tuple[tuple[int, int | None], ...],
        priority: int,
        salt: str,
    ) -> None:
        self._add(base[:length] + tail, max_tokens, stop, layers, kind, pairs, priority, salt)

    @rule(data=st.data(), max_tokens=st.sampled_from([0, 1, 3]), layers=st.sampled_from(LAYERS), kind=st.sampled_from(["output", "last"]))
    def add_again(self, data: st.DataObject, max_tokens: int, layers: tuple[LayerId, ...] | None, kind: str) -> None:
        """An earlier prompt, once its first run is over, to another depth and with other layers."""
        if self.bench.requests:
            earlier = self.bench.requests[data.draw(st.sampled_from(sorted(self.bench.requests)))]
            self.bench.run()
            self._add(list(earlier.prompt_token_ids), max_tokens, frozenset(), layers, kind, ((0, None),), 0, earlier.cache_salt)

    @rule(data=st.data(), num_more=st.integers(1, 4), max_tokens=st.integers(0, 4), layers=st.sampled_from(LAYERS))
    def add_next_turn(self, data: st.DataObject, num_more: int, max_tokens: int, layers: tuple[LayerId, ...] | None) -> None:
        """Goes on with an earlier request's prompt and the text that follows it, so that generated blocks are hit too."""
        if self.bench.requests:
            earlier = self.bench.requests[data.draw(st.sampled_from(sorted(self.bench.requests)))]
            tokens = list(earlier.prompt_token_ids)
            for _ in range(min(earlier.sampling.max_tokens + num_more, 30 - len(tokens))):
                tokens.append(next_token(tokens))
            self._add(tokens, max_tokens, frozenset(), layers, "output", ((0, None),), 0, earlier.cache_salt)

    def _add(
        self,
        prompt: list[int],
        max_tokens: int,
        stop: frozenset[int],
        layers: tuple[LayerId, ...] | None,
        kind: str,
        pairs: tuple[tuple[int, int | None], ...],
        priority: int,
        salt: str,
    ) -> None:
        self.num_added += 1
        with suppress(InvalidRequest):
            self.bench.add(
                f"r{self.num_added}",
                prompt,
                max_tokens,
                layers,
                output=kind == "output",
                last=kind == "last",
                rows=RowSelection(pairs),
                stop=stop,
                priority=priority,
                salt=salt,
            )

    @rule()
    def step(self) -> None:
        self.bench.step()

    @rule()
    def step_often(self) -> None:
        for _ in range(5):
            self.bench.step()

    @rule()
    def catch_up(self) -> None:
        """The caches fill, and nothing runs."""
        self.bench.run()

    @rule(data=st.data())
    def write(self, data: st.DataObject) -> None:
        busy = [job for job in self.bench.jobs.values() if job.chunks]
        if busy:
            data.draw(st.sampled_from(busy)).write_one()

    @rule()
    def take_pages_back(self) -> None:
        self.bench.take_pages_back()

    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        if self.bench.requests:
            name = data.draw(st.sampled_from(sorted(self.bench.requests)))
            self.bench.core.abort(name)
            self.aborted.add(name)

    @rule()
    def check(self) -> None:
        self.bench.core.check_integrity()

    def teardown(self) -> None:
        if hasattr(self, "bench"):
            self.bench.run()
            self.bench.check_results(but=frozenset(self.aborted))


CoreMachine.TestCase.settings = settings(
    max_examples=250, stateful_step_count=40, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large]
)
TestCoreMachine = CoreMachine.TestCase


class StagedMachine(CoreMachine):
    """The same, where captured rows are long on their way to their pages."""

    runner = StagedRunner

    @rule(count=st.integers(1, 3))
    def device_gets_on(self, count: int) -> None:
        runner = self.bench.runner
        assert isinstance(runner, StagedRunner)
        runner.stream.advance(count)

    @rule(fast=st.booleans())
    def device_turns_fast_or_slow(self, fast: bool) -> None:
        runner = self.bench.runner
        assert isinstance(runner, StagedRunner)
        runner.lands_midway = fast


StagedMachine.TestCase.settings = settings(CoreMachine.TestCase.settings, max_examples=150)
TestStagedMachine = StagedMachine.TestCase


class AheadMachine(StagedMachine):
    """The same, where the next step of text is computed before the last one's tokens are looked at."""

    overlap = True


AheadMachine.TestCase.settings = StagedMachine.TestCase.settings
TestAheadMachine = AheadMachine.TestCase
