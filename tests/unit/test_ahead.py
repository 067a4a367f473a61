"""The next step of text, given to the device before the last one's tokens are known: nobody can tell from the results."""

from __future__ import annotations

import logging
import random
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from benchmarks.gpu.model import TINY
from engine.cache.chain import HashChain
from engine.capture.sink import StagedSink
from engine.errors import StepFailed
from engine.offline import OfflineEngine
from engine.request import SamplingParams
from engine.saves.selection import RowSelection
from tests.unit.core_fakes import Bench, next_token
from tests.unit.decode_bench import CPU, DecodeBench, FakeRecorder
from tests.unit.deferred_stream import DeferredStream
from tests.unit.faulty_runner import StagedFaultyRunner
from tests.unit.small_engine import make_request, save_tiny_llama, small_config
from tests.unit.staged_runner import StagedRunner

PROMPT = [0, 1, 2, 3, 4, 1, 0, 3]


@pytest.fixture(autouse=True)
def quiet(caplog: pytest.LogCaptureFixture) -> None:
    """Tracebacks of faults on purpose need not be kept."""
    caplog.set_level(logging.CRITICAL + 1)


def ahead(**settings: object) -> tuple[Bench, StagedRunner]:
    bench = Bench(**{"runner": StagedRunner} | settings, overlap=True)  # type: ignore[arg-type]  # settings of a test
    assert isinstance(bench.runner, StagedRunner)
    return bench, bench.runner


def text(prompt: list[int], count: int) -> list[int]:
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(next_token(tokens))
    return tokens[len(prompt) :]


def test_a_step_is_launched_before_the_tokens_of_the_last_one_are_heard() -> None:
    bench, runner = ahead()
    bench.add("a", PROMPT, 5)
    bench.step()
    assert (len(runner.steps), bench.tokens("a")) == (1, [])
    bench.step()
    assert (len(runner.steps), bench.tokens("a")) == (2, text(PROMPT, 1))
    bench.step()
    assert (len(runner.steps), bench.tokens("a")) == (3, text(PROMPT, 2))
    bench.run()
    assert len(runner.steps) == 5, "the length was known, and still a step was computed too many"
    bench.check_results()


@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("layers", [None, (1, 2)])
def test_what_is_computed_behind_a_stop_is_in_no_text_no_file_and_no_cache(last: bool, layers: tuple[int, ...] | None) -> None:
    stop = text(PROMPT, 3)[2]
    bench, runner = ahead()
    bench.add("a", PROMPT, 12, layers, output=not last and layers is not None, last=last and layers is not None, stop=frozenset({stop}))
    bench.run()
    bench.check_results()
    generated = len(bench.tokens("a"))
    computed_end = max(end for chunks in runner.steps for _, _, end in chunks)
    assert computed_end == len(PROMPT) + generated, "nothing was computed ahead of the stop"
    behind_the_text = HashChain([*PROMPT, *bench.tokens("a"), 0, 0], 2).link((len(PROMPT) + generated) // 2)
    assert bench.kv.groups[0].pool.find([behind_the_text]).tolist() == [[0]]


@pytest.mark.parametrize("last", [False, True])
def test_a_device_that_is_faster_than_the_host_makes_no_difference(last: bool) -> None:
    """Rows of the step ahead may have landed before it is known whether the request has that position."""
    stop = text(PROMPT, 3)[2]
    bench, runner = ahead()
    runner.lands_midway = True
    bench.add("a", PROMPT, 12, (1, 2), output=not last, last=last, stop=frozenset({stop}))
    bench.run()
    bench.check_results()


def test_blocks_of_a_request_that_ended_go_back_when_the_step_that_uses_them_has_ended() -> None:
    stop = text(PROMPT, 2)[1]
    bench, _ = ahead(prefix_cache=False)
    bench.add("a", PROMPT, 12, stop=frozenset({stop}))
    while not any(output.finish_reason for output in bench.listener.outputs.get("a", [])):
        bench.step()
    assert bench.core.has_work
    assert bench.kv.stats().referenced > 0
    bench.step()
    assert bench.kv.stats().referenced == 0


def test_a_request_that_comes_meanwhile_is_taken_in_with_the_next_step() -> None:
    bench, runner = ahead()
    bench.add("a", PROMPT, 9)
    for _ in range(3):
        bench.step()
    bench.add("b", PROMPT[:3], 4, salt="other")
    for _ in range(2):
        bench.step()
    assert "b" in {name for name, _, _ in runner.steps[-1]}
    bench.run()
    bench.check_results()


def test_a_request_that_lacked_pages_goes_on_as_soon_as_there_are_some() -> None:
    bench, runner = ahead(pages=2, prefix_cache=False)
    bench.add("a", PROMPT[:2], 30)
    bench.add("b", PROMPT, layers=(1,))
    for _ in range(4):
        bench.step()
    bench.write()
    before = len(runner.steps)
    for _ in range(3):
        bench.step()
    assert "b" in {name for chunks in runner.steps[before:] for name, _, _ in chunks}
    bench.run()
    bench.check_results()


def test_an_aborted_request_gets_no_further_token_and_its_name_can_be_used_again() -> None:
    bench, _ = ahead()
    bench.add("a", PROMPT, 9, (1,), output=True)
    bench.add("b", PROMPT[1:], 9, (1,), output=True)
    for _ in range(3):
        bench.step()
    bench.core.abort("a")
    before = bench.tokens("a")
    bench.run()
    assert bench.tokens("a") == before
    del bench.listener.outputs["a"], bench.requests["a"]
    bench.add("a", PROMPT[2:], 4)
    bench.run()
    bench.check_results()


def test_a_step_that_can_not_be_launched_ahead_is_computed_when_the_one_before_it_has_ended() -> None:
    bench, runner = ahead()
    bench.add("a", PROMPT, 9, (1, 2), output=True)
    for _ in range(3):
        bench.step()
    runner.fails_behind_another = True
    bench.run()
    bench.check_results()
    assert bench.core.num_step_failures == 0


def lose_tokens_once(bench: Bench, runner: StagedRunner) -> None:
    """A step in which the host doesn't hear of the last step's tokens, but does hear of those that are computed again."""
    runner.stream.num_losses = 1
    bench.step()
    assert not runner.stream.num_losses


@pytest.mark.parametrize("lands_midway", [False, True])
@pytest.mark.parametrize("num_steps", range(1, 7))
def test_a_step_whose_tokens_are_lost_is_computed_in_parts_and_nobody_fails(num_steps: int, lands_midway: bool) -> None:
    bench, runner = ahead()
    runner.lands_midway = lands_midway
    bench.add("a", PROMPT, 9, (1,), output=True)
    bench.add("b", PROMPT[2:], 6, (2, "norm"), last=True, salt="b")
    bench.add("c", PROMPT[1:], 4, salt="c", stop=frozenset({text(PROMPT[1:], 3)[2]}))
    for _ in range(num_steps):
        bench.step()
    lose_tokens_once(bench, runner)
    bench.run()
    assert bench.core.num_step_failures == 1
    bench.check_results()


def test_a_request_that_is_alone_in_a_lost_step_fails_like_in_any_other_step_that_raises() -> None:
    bench, runner = ahead()
    bench.add("a", PROMPT, 9, (1,), output=True)
    bench.step()
    lose_tokens_once(bench, runner)
    assert type(bench.listener.outputs["a"][-1].error) is StepFailed
    assert bench.tokens("a") == []
    assert bench.kv.stats().referenced == 0
    bench.run()


def test_the_step_behind_a_lost_one_is_withdrawn_and_its_rows_are_captured_again() -> None:
    bench, runner = ahead()
    bench.add("a", PROMPT, 9, (1,), output=True)
    bench.add("b", PROMPT[1:], 9, (1,), output=True, salt="b")
    bench.step()
    lose_tokens_once(bench, runner)
    prompts = [("a", 0, 8), ("b", 0, 7)]
    singles = [("a", 8, 9), ("b", 7, 8)]
    assert runner.steps == [prompts, singles, prompts[:1], prompts[1:]]
    assert bench.tokens("a") == text(PROMPT, 1)
    bench.step()
    assert runner.steps[-1] == singles
    bench.run()
    bench.check_results()


def test_a_step_that_goes_on_being_lost_fails_its_requests_and_no_others() -> None:
    bench, runner = ahead()
    bench.add("a", PROMPT, 9, (1,), output=True)
    bench.add("b", PROMPT[1:], 9, (1,), output=True, salt="b")
    for _ in range(3):
        bench.step()
    runner.stream.loses_tokens = True
    bench.step()
    for name in "ab":
        output = bench.listener.outputs[name][-1]
        assert (output.finish_reason, type(output.error)) == ("error", StepFailed)
        assert bench.jobs[name].error is not None
    runner.stream.loses_tokens = False
    bench.add("c", PROMPT, 4, (1,), output=True)
    bench.run()
    bench.check_results(but=frozenset("ab"))


@pytest.mark.parametrize("num_steps", range(1, 6))
def test_one_bad_request_fails_alone_whatever_is_launched_behind_its_step(num_steps: int) -> None:
    bench, runner = ahead(runner=StagedFaultyRunner)
    assert isinstance(runner, StagedFaultyRunner)
    for number, name in enumerate("abcd"):
        bench.add(name, PROMPT[number:], 8, (1,), output=True, salt=name)
    for _ in range(num_steps):
        bench.step()
    runner.bad = {"c"}
    bench.run()
    assert type(bench.listener.outputs["c"][-1].error) is StepFailed
    bench.check_results(but=frozenset("c"))


def test_rows_counted_from_the_end_are_those_of_the_real_end() -> None:
    stop = text(PROMPT, 4)[3]
    bench, _ = ahead()
    bench.add("a", PROMPT, 12, (1,), output=True, rows=RowSelection(((-3, None),)), stop=frozenset({stop}))
    bench.run()
    bench.check_results()


def deferred(rows: torch.Tensor) -> StagedSink:
    return StagedSink(rows, 2000, CPU, stream=DeferredStream())


@pytest.mark.parametrize("graphs", [False, True])
def test_a_real_model_gives_the_same_text_and_rows_one_step_ahead(graphs: bool) -> None:
    found = []
    for overlap in (False, True):
        stream = DeferredStream() if overlap else None
        bench = DecodeBench(recorder=FakeRecorder() if graphs else None, sink=deferred, overlap=overlap, stream=stream)
        rng = random.Random(5)
        for number in range(9):
            prompt = [rng.randrange(TINY.vocab) for _ in range(rng.choice([1, 7, 40, 256]))]
            params = SamplingParams(
                max_tokens=rng.randint(1, 9),
                temperature=(0.0, 0.9)[number % 2],
                seed=number,
                stop_token_ids=frozenset(range(0, TINY.vocab, 7)),
                logprobs=2 if number == 8 else None,
            )
            bench.add(f"r{number}", prompt, params, (None, (0, 2, 4, "norm"), (3,))[number % 3])  # type: ignore[arg-type]  # layer ids
        bench.run()
        found.append(bench)
    plain, fast = found
    for name in plain.listener.outputs:
        assert fast.tokens(name) == plain.tokens(name)
        assert [o.finish_reason for o in fast.listener.outputs[name]] == [o.finish_reason for o in plain.listener.outputs[name]]
    for name in plain.jobs:
        torch.testing.assert_close(fast.rows(name), plain.rows(name), rtol=0, atol=1e-5)
    assert fast.num_ahead > 2
    assert plain.num_ahead == 0


@pytest.mark.parametrize("lost", [(1, 3, 5), (2, 4, 6, 8), (3, 6), (7,)])
def test_texts_of_seeded_requests_are_those_of_a_device_that_loses_nothing(lost: tuple[int, ...]) -> None:
    """Random numbers of a lost step, and of the one behind it, are put back before they are drawn again."""
    found = []
    for lost_steps in ((), lost):
        stream, rng = DeferredStream(), random.Random(5)
        bench = DecodeBench(sink=deferred, overlap=True, stream=stream)
        for number in range(6):
            prompt = [rng.randrange(TINY.vocab) for _ in range(rng.choice([1, 7, 40]))]
            params = SamplingParams(max_tokens=rng.randint(9, 12), temperature=1.0, seed=number, ignore_eos=True)
            bench.add(f"r{number}", prompt, params, (1, "norm") if number % 2 else None)
        for number in range(10):
            if number in lost:  # begins in the step behind the one that is lost
                bench.add(f"late{number}", [number, 3, 5], SamplingParams(max_tokens=4, temperature=1.0, seed=number, ignore_eos=True))
            stream.num_losses = int(number in lost_steps)
            bench.step()
            assert not stream.num_losses
        bench.run()
        assert bench.core.num_step_failures == len(lost_steps)
        found.append(bench)
    plain, fast = found
    assert fast.num_ahead > 2
    for name in plain.listener.outputs:
        assert fast.tokens(name) == plain.tokens(name)
    for name in plain.jobs:
        torch.testing.assert_close(fast.rows(name), plain.rows(name), rtol=0, atol=1e-5)


def test_an_engine_one_step_ahead_writes_the_same_files(tmp_path: Path) -> None:
    save_tiny_llama(tmp_path / "model")
    found = []
    for overlap in ("off", "on"):
        folder = tmp_path / overlap
        folder.mkdir()
        with OfflineEngine(small_config(tmp_path / "model", overlap=overlap, prefix_cache=False)) as engine:
            requests = [make_request(f"r{number}", folder, max_tokens=3 + number, seed=number or None) for number in range(4)]
            completions = engine.generate(requests)
            engine.engine.check_integrity()
        assert all(completion.error is None for completion in completions)
        found.append([(c.token_ids, c.finish_reason, load_file(folder / c.request_id)) for c in completions])
    for (tokens, reason, saved), (other_tokens, other_reason, other) in zip(*found, strict=True):
        assert (tokens, reason) == (other_tokens, other_reason)
        assert all(torch.equal(saved[name], other[name]) for name in saved)
