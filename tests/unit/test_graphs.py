"""Decoding steps that are recorded and replayed equal those whose kernels are launched one by one."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch

from benchmarks.gpu.model import TINY
from engine.build import build_engine
from engine.errors import ConfigError
from engine.request import SamplingParams
from tests.unit.decode_bench import DecodeBench, FakeRecorder
from tests.unit.small_engine import save_tiny_llama, small_config

ALL_LAYERS = (0, 1, 2, 3, 4, "norm")


def greedy(max_tokens: int, **settings: object) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, temperature=0.0, **settings)  # type: ignore[arg-type]  # settings of a test


def fill(bench: DecodeBench, count: int) -> None:
    """Ragged: prompts of 1 to 300 tokens that end after 2 to 16, so that the batch keeps changing; most of them save something."""
    rng = random.Random(3)
    for number in range(count):
        prompt = [rng.randrange(TINY.vocab) for _ in range(rng.choice([1, 7, 40, 255, 256, 300]))]
        layers = (None, ALL_LAYERS, (2,), ("norm",), (0, 4))[number % 5]
        bench.add(f"r{number}", prompt, greedy(rng.randint(2, 16)), layers)  # type: ignore[arg-type]  # layer ids


@pytest.mark.parametrize("backend", ["varlen", "flashinfer"])
def test_text_and_rows_of_replayed_steps_equal_those_of_plain_ones(backend: str) -> None:
    plain, replayed = DecodeBench(backend), DecodeBench(backend, FakeRecorder())
    for bench in (plain, replayed):
        fill(bench, 11)
        bench.run()
    assert replayed.graphs is not None
    assert replayed.graphs.num_replays > 5
    for name in plain.listener.outputs:
        assert replayed.tokens(name) == plain.tokens(name)
    for name in plain.jobs:
        torch.testing.assert_close(replayed.rows(name), plain.rows(name), rtol=0, atol=1e-5)


def test_every_size_is_recorded_before_anything_is_served_and_nothing_later() -> None:
    recorder = FakeRecorder()
    bench = DecodeBench(recorder=recorder)
    assert recorder.recorded == 2 * len(("16", "8", "4", "2", "1")), "with and without captured rows"
    for layers in (None, (1,), (2, "norm"), None):
        for number in range(3):
            bench.add(f"{layers}-{number}-{recorder.recorded}-{len(bench.jobs)}", [4, 5, number], greedy(5), layers)  # type: ignore[arg-type]
        bench.run()
    assert recorder.recorded == 10
    assert bench.graphs is not None
    assert bench.graphs.num_replays == 4 * 4


def test_steps_with_prompts_and_those_of_half_depth_are_not_replayed() -> None:
    bench = DecodeBench(recorder=FakeRecorder())
    bench.add("prompt only", [1, 2, 3, 4], greedy(0), (1, 2))
    bench.run()
    bench.add("scored", [5, 2, 3, 4], greedy(1, prompt_logprobs=2))
    bench.run()
    assert bench.graphs is not None
    assert bench.graphs.num_replays == 0


def test_what_is_reported_of_the_distribution_is_the_same() -> None:
    found = []
    for recorder in (None, FakeRecorder()):
        bench = DecodeBench(recorder=recorder)
        bench.add("a", [1, 2, 3], greedy(4, logprobs=3, repetition_penalty=1.3, logit_bias={5: 2.0}))
        bench.run()
        found.append([entry for output in bench.listener.outputs["a"] for entry in output.logprobs or ()])
    assert [entry.token_id for entry in found[0]] == [entry.token_id for entry in found[1]]
    assert [entry.logprob for entry in found[0]] == pytest.approx([entry.logprob for entry in found[1]], abs=1e-5)


def test_where_a_replay_fails_steps_go_on_without_graphs(caplog: pytest.LogCaptureFixture) -> None:
    recorder, plain = FakeRecorder(refuses_replays=True), DecodeBench()
    bench = DecodeBench(recorder=recorder)
    for each in (plain, bench):
        each.add("a", [1, 2, 3], greedy(6), ALL_LAYERS)
        each.run()
    assert bench.tokens("a") == plain.tokens("a")
    torch.testing.assert_close(bench.rows("a"), plain.rows("a"))
    assert [record.getMessage().partition(";")[0] for record in caplog.records] == ["a decoding step could not be replayed"]


def test_graphs_that_were_asked_for_and_can_not_be_had_are_a_configuration_error(tmp_path: Path) -> None:
    save_tiny_llama(tmp_path)
    with pytest.raises(ConfigError, match="--cuda-graphs is on, but attention sdpa on cpu has none"):
        build_engine(small_config(tmp_path, cuda_graphs="on"), lambda event: None)
    parts = build_engine(small_config(tmp_path), lambda event: None)
    assert not parts.core.runner.has_graphs
    assert not parts.core.overlap
    parts.writer.close()
