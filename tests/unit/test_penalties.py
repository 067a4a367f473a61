"""Penalties whose counts are kept: they give what counting anew gives, once per token, and the prompt is read once."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import overload

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.errors import EngineError
from engine.execution.runner import StepOutput
from engine.execution.step_input import StepInput
from engine.offline import OfflineEngine
from engine.request import EngineRequest, SamplingParams
from engine.sampling.penalties import Penalties, TokenCounts
from engine.sampling.sampler import SampledRow, SampledToken, Sampler, SamplerOutput
from engine.scheduling.plan import Chunk
from tests.unit.core_fakes import VOCAB, Bench, FakeRunner
from tests.unit.small_engine import save_tiny_llama, small_config

SMALL_VOCAB = 30
TOKENS = st.integers(0, SMALL_VOCAB - 1)


def penalised_anew(logits: torch.Tensor, params: SamplingParams, prompt: list[int], output: list[int]) -> torch.Tensor:
    """The formulas, with everything counted from the tokens themselves."""
    logits = logits.clone()
    if params.repetition_penalty != 1.0:
        index = torch.tensor([*prompt, *output])
        seen = logits[index]
        logits[index] = torch.where(seen < 0, seen * params.repetition_penalty, seen / params.repetition_penalty)
    if output and (params.presence_penalty or params.frequency_penalty):
        ids, counts = np.unique(np.array(output, np.int64), return_counts=True)
        penalties = torch.from_numpy(params.frequency_penalty * counts + params.presence_penalty).to(logits.dtype)
        logits.index_add_(0, torch.from_numpy(ids), penalties, alpha=-1)
    if params.logit_bias:
        logits.index_add_(0, torch.tensor(list(params.logit_bias)), torch.tensor(list(params.logit_bias.values())))
    return logits


@settings(deadline=None)
@given(
    prompt=st.lists(TOKENS, min_size=1, max_size=40),
    output=st.lists(TOKENS, max_size=60),
    repetition=st.sampled_from([1.0, 0.7, 1.3]),
    presence=st.sampled_from([0.0, 0.3, -1.1]),
    frequency=st.sampled_from([0.0, 0.1, -0.7]),
    bias=st.dictionaries(TOKENS, st.floats(-100, 100, width=32), max_size=4),
)
def test_kept_counts_change_logits_exactly_as_counting_anew(
    prompt: list[int], output: list[int], repetition: float, presence: float, frequency: float, bias: dict[int, float]
) -> None:
    params = SamplingParams(repetition_penalty=repetition, presence_penalty=presence, frequency_penalty=frequency, logit_bias=bias)
    penalties = Penalties.of(params, prompt)
    logits = torch.randn(SMALL_VOCAB)
    for num_output in range(len(output) + 1):
        changed = logits.clone()
        if penalties is not None:
            penalties.apply(changed)
        assert torch.equal(changed, penalised_anew(logits, params, prompt, output[:num_output]))
        if penalties is not None and num_output < len(output):
            penalties.count(output[num_output])


def test_a_request_that_asks_for_nothing_has_no_counts() -> None:
    assert Penalties.of(SamplingParams(), [1, 2, 3]) is None
    assert Penalties.of(SamplingParams(logit_bias={4: 1.0}), [1, 2, 3]) is not None


def test_counts_hold_each_distinct_token_once_however_large_the_vocabulary() -> None:
    counts = TokenCounts([7, 3, 7, 10**9])
    for token in (3, 3, 5, 10**12, *range(100, 140), 3):
        counts.add(token)
    assert sorted(counts.seen.tolist()) == [3, 5, 7, *range(100, 140), 10**9, 10**12]
    ids, numbers = counts.output
    assert dict(zip(ids.tolist(), numbers.tolist(), strict=True)) == {3: 3, 5: 1, 10**12: 1} | dict.fromkeys(range(100, 140), 1)


@dataclass
class WatchedPrompt(Sequence[int]):
    """Notes how many tokens have been read of it."""

    token_ids: list[int]
    num_reads: int = 0

    def __len__(self) -> int:
        return len(self.token_ids)

    @overload
    def __getitem__(self, index: int) -> int: ...
    @overload
    def __getitem__(self, index: slice) -> list[int]: ...
    def __getitem__(self, index: int | slice) -> int | list[int]:
        found = self.token_ids[index]
        self.num_reads += len(found) if isinstance(found, list) else 1
        return found

    def __iter__(self) -> Iterator[int]:
        for token in self.token_ids:
            self.num_reads += 1
            yield token


PENALISED = SamplingParams(temperature=0.0, repetition_penalty=1.2, frequency_penalty=0.5, ignore_eos=True)


def test_the_prompt_is_read_once_when_the_counts_are_made() -> None:
    prompt = WatchedPrompt(list(range(20)) * 5)
    penalties = Penalties(PENALISED, prompt)
    assert prompt.num_reads == len(prompt)
    for token in range(50):
        Sampler(SMALL_VOCAB, torch.device("cpu")).sample(torch.randn(1, SMALL_VOCAB), [SampledRow(PENALISED, penalties, None)])
        penalties.count(token % SMALL_VOCAB)
    assert prompt.num_reads == len(prompt)


def test_a_longer_text_reads_no_more_of_its_prompt(tmp_path: Path) -> None:
    save_tiny_llama(tmp_path)
    reads = []
    with OfflineEngine(small_config(tmp_path)) as engine:
        for max_tokens in (1, 40):
            prompt = WatchedPrompt([5, 9, 30, 7, 8, 60, 11, 3, 17])
            sampling = SamplingParams(max_tokens, temperature=0.0, repetition_penalty=1.2, frequency_penalty=0.5, ignore_eos=True)
            [completion] = engine.generate([EngineRequest(f"{max_tokens}", prompt, sampling)])
            assert len(completion.token_ids) == max_tokens
            reads.append(prompt.num_reads)
    assert reads[0] == reads[1]


LOGITS = torch.tensor([1.0, 0.9, 0.75, 0.5, -0.2])
assert len(LOGITS) == VOCAB


class PenalisedRunner(FakeRunner):
    """Its model always says the same, so a text is made by its penalties alone."""

    def compute(self, step: StepInput, chunks: Sequence[Chunk], sampled_before: torch.Tensor | None) -> StepOutput:
        output = super().compute(step, chunks, sampled_before)
        return output if output.logits is None else replace(output, logits=LOGITS.repeat(len(output.logits), 1))


class FailingSampler(Sampler):
    """Every second attempt to sample for several requests fails when the tokens have been chosen."""

    num_attempts = 0

    def finish(self, choice: SamplerOutput, rows: Sequence[SampledRow]) -> list[SampledToken | EngineError]:
        self.num_attempts += 1
        if self.num_attempts % 2 and len(rows) > 1:
            raise RuntimeError("on purpose")
        return super().finish(choice, rows)


def text_of(prompt: list[int], params: SamplingParams) -> list[int]:
    output: list[int] = []
    while len(output) < params.max_tokens:
        output.append(int(penalised_anew(LOGITS, params, prompt, output).argmax()))
    return output


def texts(bench: Bench, num_requests: int) -> tuple[dict[str, list[int]], dict[str, list[int]]]:
    """Computes requests with penalties; what was and what should have been said."""
    expected = {}
    for number in range(num_requests):
        params = SamplingParams(12, 0.0, repetition_penalty=1.1 + number / 10, frequency_penalty=0.15 * number, presence_penalty=0.1)
        request = EngineRequest(f"{number}", [number % VOCAB, 1, 2, 1], params, cache_salt=f"{number}")
        bench.limits.check(request)
        bench.core.add(request, None)
        expected[request.request_id] = text_of(list(request.prompt_token_ids), params)
    while bench.core.has_work:
        assert bench.step()
    heard = bench.listener.outputs
    return {name: [token for output in outputs for token in output.token_ids] for name, outputs in heard.items()}, expected


def test_a_token_of_a_step_that_is_tried_again_is_counted_once(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("CRITICAL")
    bench = Bench(runner=PenalisedRunner)
    bench.core._steps._sampler = FailingSampler(VOCAB, torch.device("cpu"))
    found, expected = texts(bench, 4)
    assert bench.core.num_step_failures > 5
    assert found == expected


def test_counts_survive_a_preemption() -> None:
    bench = Bench(runner=PenalisedRunner, full_blocks=14, sliding_blocks=14)
    found, expected = texts(bench, 3)
    assert bench.scheduler.num_preemptions > 0
    assert found == expected
