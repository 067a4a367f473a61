"""Blocks of steps in flight are given to nobody: a device that reads them as late as it can reads what it wrote."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from engine.execution.executor import ComputedStep, LaunchedStep
from engine.execution.runner import StepOutput
from engine.execution.step_input import StepInput
from engine.scheduling.plan import Chunk
from tests.unit.core_fakes import Bench, _Keys, next_token
from tests.unit.faulty_runner import StagedFaultyRunner
from tests.unit.random_load import RandomLoad

PROMPT = [0, 1, 2, 3, 4, 1, 0, 3]


class LateReader(StagedFaultyRunner):
    """Looks at every key that a step sees once more when the step is finished: the next one has been planned and launched by then."""

    num_read_late = 0

    def compute(self, step: StepInput, chunks: Sequence[Chunk], sampled_before: torch.Tensor | None) -> StepOutput:
        output = super().compute(step, chunks, sampled_before)
        contexts = self._contexts(step, chunks, sampled_before)
        self.seen = getattr(self, "seen", {})
        for place, chunk in enumerate(chunks):
            groups = [(self.kv.groups[number], given) for number, given in step.groups.items()]
            salt = chunk.sequence.request.cache_salt
            keys = [_Keys(group, given.tables[place], chunk.depth, salt) for group, given in groups if group.spec.layers[0] < chunk.depth]
            self.seen[chunk] = keys, contexts[place]
        return output

    def read_late(self, chunks: Sequence[Chunk]) -> None:
        for chunk in chunks:
            keys, tokens = self.seen.pop(chunk)
            for of_group in keys:
                of_group.check(tokens, chunk)
                self.num_read_late += 1


def read_late(bench: Bench) -> LateReader:
    """Has the bench's device do so."""
    steps, runner = bench.core._steps, bench.runner
    assert isinstance(runner, LateReader)
    finish = steps.finish

    def finish_late(step: LaunchedStep) -> ComputedStep:
        try:
            runner.read_late(step.chunks)
        except AssertionError as error:
            runner.broken = error
        return finish(step)

    steps.finish = finish_late  # type: ignore[method-assign]  # a late device
    return runner


def late_bench(**settings: int | bool) -> tuple[Bench, LateReader]:
    bench = Bench(runner=LateReader, overlap=True, **settings)  # type: ignore[arg-type]  # settings of a test
    return bench, read_late(bench)


@pytest.mark.parametrize("sliding_size", [1, 2, 3])
def test_a_window_that_moves_on_keeps_what_the_step_in_flight_sees(sliding_size: int) -> None:
    bench, runner = late_bench(sliding_size=sliding_size, prefix_cache=False)
    bench.add("a", PROMPT, 20)
    bench.add("b", PROMPT[3:], 12, (1,), output=True)
    bench.run()
    bench.check_results()
    assert runner.num_read_late > 40


def test_a_prompt_in_chunks_keeps_the_window_of_its_chunk_in_flight() -> None:
    bench, _ = late_bench(budget=4, prefix_cache=False)
    for number in range(3):
        bench.add(f"r{number}", [*PROMPT, *PROMPT, number], 4, salt=f"{number}")
    bench.run()
    bench.check_results()


def test_where_blocks_of_windows_are_short_nobody_gives_up_those_of_its_step_in_flight() -> None:
    bench, _ = late_bench(sliding_size=1, sliding_blocks=12, prefix_cache=False)
    for number in range(4):
        bench.add(f"r{number}", [*PROMPT[: 3 + number], number], 14, salt=f"{number}")
    bench.run()
    bench.check_results()


def test_a_request_that_has_stopped_keeps_its_blocks_until_its_step_in_flight_has_ended() -> None:
    tokens = list(PROMPT)
    for _ in range(3):
        tokens.append(next_token(tokens))
    bench, _ = late_bench(prefix_cache=False)
    bench.add("a", PROMPT, 20, stop=frozenset({tokens[-1]}))
    for number in range(6):
        bench.add(f"r{number}", PROMPT, 9, salt=f"{number}")
    bench.run()
    bench.check_results()


def test_an_aborted_request_keeps_its_blocks_until_its_step_in_flight_has_ended() -> None:
    bench, _ = late_bench(full_blocks=20, sliding_blocks=20, prefix_cache=False)
    for number in range(5):
        bench.add(f"r{number}", PROMPT, 9, salt=f"{number}")
    for _ in range(4):
        bench.step()
    bench.core.abort("r1")
    bench.run()
    bench.check_results(but=frozenset({"r1"}))


@pytest.mark.parametrize("seed", range(12))
def test_any_load_with_preemptions_aborts_and_failures(seed: int) -> None:
    load = RandomLoad(seed, overlap=True, runner=LateReader)
    runner = read_late(load.bench)
    load.run(100)
    assert runner.num_read_late > 0
