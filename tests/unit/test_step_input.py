"""A step as plain arrays: which rows leave the last layer, that what is taken from them doesn't depend on the others being there, and
that a copy of the arrays is as good as they are."""

from __future__ import annotations

import io
import pickle
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.attention.facade import GroupCache
from engine.attention.sdpa import SdpaBackend
from engine.cache.groups import KVGroup
from engine.cache.kv import KVCache
from engine.cache.pool import IntArray
from engine.cache.spec import group_layers
from engine.cache.states import StateStore
from engine.capture.row_capture import RowCapture
from engine.capture.sink import DirectSink
from engine.core import CoreParts, EngineCore
from engine.execution.runner import ModelRunner, StepOutput
from engine.execution.step_input import StepInput, build_step, in_order
from engine.layers import LayerId
from engine.models.base import Model
from engine.models.loader import load_model
from engine.request import EngineRequest, SamplingParams, TokenLogprobs
from engine.sampling.prompt_logprobs import PromptLogprobs, ScoredTokens
from engine.sampling.sampler import Sampler
from engine.saves.selection import ALL_ROWS, LAST_ROW, RowSelection
from engine.saves.spec import SaveSpec
from engine.scheduling.limits import RequestLimits
from engine.scheduling.plan import Chunk
from engine.scheduling.prefix import PrefixFinder
from engine.scheduling.scheduler import Scheduler
from engine.scheduling.sequence import TokenSequence
from tests.unit.core_fakes import FakeJob, Listener, Target
from tests.unit.small_engine import PROMPT, save_tiny_llama

NUM_LAYERS, PAGE = 3, 4
CPU = torch.device("cpu")
NO_CACHE = KVCache([])
"""Of no group, since rows have their places without one."""


class Requests:
    """Makes chunks of requests that save into one store."""

    def __init__(self) -> None:
        self.store = StateStore(50, PAGE, 1, torch.float32)
        self._arrivals = count()

    def chunk(
        self,
        num_prompt: int,
        start: int = 0,
        end: int | None = None,
        *,
        layers: tuple[LayerId, ...] | None = None,
        rows: RowSelection = ALL_ROWS,
        max_tokens: int = 0,
        num_scored: int | None = None,
    ) -> Chunk:
        """Positions `start … end - 1` (None: all). `num_scored`: how many tokens of the prompt have their score (None: none wants one)."""
        sampling = SamplingParams(max_tokens=max_tokens, prompt_logprobs=None if num_scored is None else 0)
        save = None if layers is None else SaveSpec("s", Target(), layers, "float32", rows=rows)
        request = EngineRequest("r", list(range(num_prompt)), sampling, save)
        capture = None if save is None else self._capture(save, num_prompt)
        scores = None
        if num_scored is not None:
            scores = PromptLogprobs(num_prompt, 0)
            scores.extend(ScoredTokens.empty(max(0, num_scored - 1), 0))
        tables = NO_CACHE.new_tables(NUM_LAYERS)
        tokens = list(request.prompt_token_ids)
        sequence = TokenSequence(request, next(self._arrivals), NUM_LAYERS, tokens, {}, tables, capture, prompt_logprobs=scores)
        end = num_prompt if end is None else end
        plan = None
        if capture is not None:
            assert capture.limit(start, end, num_prompt, None) == end
            plan = capture.plan(start, end, num_prompt)
        return Chunk(sequence, start, end, sequence.run_depth, sequence.samples(end), plan)

    def _capture(self, save: SaveSpec, total: int) -> RowCapture:
        job = FakeJob(save, self.store)
        return RowCapture(save, job, self.store, None, total=total, max_total=total, release=lambda pages: None)


def build(*chunks: Chunk, sampled_before: Sequence[Chunk] = (), trim: bool = True) -> StepInput:
    return build_step(in_order(chunks), NO_CACHE, NUM_LAYERS, sampled_before, trim=trim)


def final_rows(step: StepInput) -> list[int] | None:
    return None if step.final_rows is None else step.final_rows.tolist()


def captured(step: StepInput) -> dict[LayerId, list[int]]:
    return {layer: wanted.rows.tolist() for layer, wanted in step.captures.items()}


def scored(step: StepInput) -> list[tuple[int, list[int]]]:
    """First row and targets of every prompt that is scored."""
    return [(score.first_row, score.targets.tolist()) for score in step.scores]


def test_rows_that_are_sampled_scored_or_captured_leave_the_last_layer_and_no_others() -> None:
    requests = Requests()
    step = build(
        requests.chunk(5, max_tokens=1),  # rows 0 to 4
        requests.chunk(4, num_scored=1),  # rows 5 to 8; the last one scores nothing
        requests.chunk(6, layers=(3,), rows=RowSelection(((1, 3), (-1, None)))),  # rows 9 to 14
    )
    assert final_rows(step) == [4, 5, 6, 7, 10, 11, 14]
    assert step.rows_at_layer == [15, 15, 15]
    assert step.sampled_rows.tolist() == [0]
    assert scored(step) == [(1, [1, 2, 3])]
    assert captured(step) == {3: [4, 5, 6]}


def test_rows_of_other_layers_stay_rows_of_the_step() -> None:
    requests = Requests()
    saved = requests.chunk(4, layers=(0, 1, 2, 3, "norm"), rows=LAST_ROW)
    step = build(requests.chunk(3, max_tokens=1), saved)
    assert final_rows(step) == [2, 6]
    assert captured(step) == {0: [6], 1: [6], 2: [6], 3: [1], "norm": [1]}


def slots_of(chunk: Chunk) -> IntArray:
    """`[rows, layers]` of what the chunk captures."""
    assert chunk.sequence.capture is not None
    assert chunk.rows is not None
    return chunk.sequence.capture.slots(chunk.rows)[1]


def test_a_row_goes_to_the_slot_of_its_position_whether_it_is_alone_in_its_chunk_or_not() -> None:
    requests = Requests()
    several = requests.chunk(9, layers=(2, "norm"), rows=RowSelection(((3, 6),)))
    single = requests.chunk(9, 6, 7, layers=("norm",))
    plain = requests.chunk(2, max_tokens=1)
    step = build(several, plain, single)
    assert final_rows(step) == [3, 4, 5, 10, 11]

    slots = step.captures["norm"].slots.tolist()
    assert captured(step) == {2: [3, 4, 5], "norm": [0, 1, 2, 4]}
    assert [slot % PAGE for slot in slots] == [position % PAGE for position in (3, 4, 5, 6)]
    assert slots == [*slots_of(several)[1].tolist(), *slots_of(single)[0].tolist()]


def test_shallow_requests_come_last_and_do_not_count_among_the_rows_of_the_last_layer() -> None:
    requests = Requests()
    embeddings = requests.chunk(2, layers=(0,))
    first = requests.chunk(3, layers=(0, 1))
    deep = requests.chunk(4, max_tokens=1)
    norm = requests.chunk(2, layers=("norm",), rows=LAST_ROW)
    step = build(embeddings, first, deep, norm)
    assert in_order([embeddings, first, deep, norm]) == [deep, norm, first, embeddings]
    assert step.rows_at_layer == [9, 6, 6]
    assert final_rows(step) == [3, 5]
    assert captured(step) == {0: [6, 7, 8, 9, 10], 1: [6, 7, 8], "norm": [1]}
    assert step.sampled_rows.tolist() == [0]


@pytest.mark.parametrize(
    ("start", "end", "num_scored", "final", "targets"), [(0, 5, 1, [0, 1, 2, 3, 4], [1, 2, 3, 4, 5]), (3, 8, 6, [2, 3], [6, 7])]
)
def test_a_prompt_in_parts_is_scored_from_where_its_scores_end(
    start: int, end: int, num_scored: int, final: list[int], targets: list[int]
) -> None:
    requests = Requests()
    step = build(requests.chunk(8, start, end, num_scored=num_scored), requests.chunk(2, 0, 1, max_tokens=1))
    assert final_rows(step) == final
    assert scored(step) == [(0, targets)]


def test_where_nothing_is_wanted_no_row_leaves() -> None:
    requests = Requests()
    step = build(requests.chunk(8, 0, 5, max_tokens=1), requests.chunk(3, layers=(1, 2)))
    assert final_rows(step) == []
    assert step.rows_at_layer == [8, 8, 5]
    assert (step.sampled_rows.tolist(), step.scores) == ([], [])
    assert captured(step) == {1: [5, 6, 7], 2: [5, 6, 7]}


def test_where_everything_is_wanted_nothing_is_picked() -> None:
    requests = Requests()
    step = build(requests.chunk(8, 7, 8, max_tokens=1), requests.chunk(3, layers=(3,)), requests.chunk(4, layers=(1,)))
    assert final_rows(step) is None
    assert (step.sampled_rows.tolist(), captured(step)) == ([0], {3: [1, 2, 3], 1: [4, 5, 6, 7]})


def test_where_nobody_reaches_the_last_layer_nothing_is_picked() -> None:
    step = build(Requests().chunk(3, layers=(0, 2)))
    assert final_rows(step) is None
    assert step.rows_at_layer == [3, 3, 0]


def test_without_trimming_all_rows_leave_in_their_places() -> None:
    requests = Requests()
    chunks = requests.chunk(5, max_tokens=1), requests.chunk(4, num_scored=1), requests.chunk(2, layers=(3,), rows=LAST_ROW)
    step = build(*chunks, trim=False)
    assert final_rows(step) is None
    assert (step.sampled_rows.tolist(), scored(step), captured(step)) == ([4], [(5, [1, 2, 3])], {3: [10]})


def test_a_token_that_the_step_before_gives_is_named_by_its_place_there() -> None:
    requests = Requests()
    first, second, prompt = (requests.chunk(count, max_tokens=3) for count in (4, 6, 5))
    before = in_order([first, second])
    for chunk in before:  # their tokens are sampled, and not known yet
        chunk.sequence.num_unknown = 1
    follow = [Chunk(chunk.sequence, chunk.end, chunk.end + 1, NUM_LAYERS, samples=True) for chunk in (second, first)]
    step = build(prompt, *follow, sampled_before=before)
    assert step.unknown_rows.tolist() == [5, 6]
    assert step.unknown_from.tolist() == [1, 0]
    assert step.token_ids.tolist() == [0, 1, 2, 3, 4, 0, 0]
    assert step.positions.tolist() == [0, 1, 2, 3, 4, 6, 4]
    assert step.sampled_rows.tolist() == [0, 1, 2]


# With a model


@dataclass(frozen=True)
class Member:
    """A request of a random step."""

    length: int
    layers: tuple[LayerId, ...] | None
    rows: RowSelection
    output: bool
    max_tokens: int
    scored: bool

    def request(self, name: str) -> EngineRequest:
        save = None if self.layers is None else SaveSpec(name, Target(), self.layers, "float32", self.output, rows=self.rows)
        prompt = [(token + len(name) + 13 * int(name)) % 97 for token in PROMPT[: self.length]]
        scores = 2 if self.scored else None
        sampling = SamplingParams(max_tokens=self.max_tokens, temperature=0.0, ignore_eos=True, prompt_logprobs=scores)
        return EngineRequest(name, prompt, sampling, save)


MEMBERS = st.builds(
    Member,
    length=st.integers(4, len(PROMPT)),
    layers=st.sampled_from([None, (0,), (0, 1), (2,), ("norm",), (1, 2, "norm")]),
    rows=st.sampled_from([ALL_ROWS, LAST_ROW, RowSelection(((1, 3), (-2, -1)))]),
    output=st.booleans(),
    max_tokens=st.sampled_from([0, 1, 4]),
    scored=st.booleans(),
)


@dataclass
class Seen:
    """All that came out of a core."""

    tokens: dict[str, list[int]]
    scores: dict[str, list[TokenLogprobs | None]]
    rows: dict[str, dict[int, torch.Tensor]]  # by request and position: [layers, width]


class Observed:
    """A core with a real model."""

    def __init__(self, model: Model, *, budget: int, trim: bool = True, runner: type[ModelRunner] = ModelRunner) -> None:
        config = model.config
        groups = [KVGroup(spec, 120, CPU, poison=True) for spec in group_layers(model.cache_layers(), PAGE, torch.float32)]
        kv = KVCache(groups)
        self.store = StateStore(400, PAGE, config.hidden_size, torch.float32, poison=True)
        prefixes = PrefixFinder(kv, PAGE, enabled=False)
        scheduler = Scheduler(kv, prefixes, max_batch_tokens=budget, max_running=16)
        limits = RequestLimits(config.num_layers, config.vocab_size, config.max_model_len, kv, PAGE, 399, None)
        caches = [GroupCache(group.spec.layers, group.spec.block_size, group.keys, group.values) for group in groups]
        self.runner = runner(model, caches, DirectSink(self.store.rows), SdpaBackend(CPU))
        self.listener = Listener()
        sampler = Sampler(config.vocab_size, CPU)
        parts = CoreParts(kv, self.store, scheduler, prefixes, self.runner, sampler, limits, frozenset(), CPU, False, trim)
        self.core = EngineCore(parts, self.listener, self.store.pool.release)

    def run(self, requests: Sequence[EngineRequest]) -> Seen:
        jobs = {request.request_id: FakeJob(request.save, self.store) for request in requests if request.save is not None}
        for request in requests:
            self.core.add(request, jobs.get(request.request_id))
        while self.core.has_work:
            assert self.core.step()
        for job in jobs.values():
            job.write_all()
        outputs = self.listener.outputs
        assert all(heard[-1].error is None for heard in outputs.values())
        return Seen(
            {name: [token for output in heard for token in output.token_ids] for name, heard in outputs.items()},
            {name: [score for output in heard for score in output.prompt_logprobs or ()] for name, heard in outputs.items()},
            {name: job.rows for name, job in jobs.items()},
        )


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    folder: Path = tmp_path_factory.mktemp("tiny")
    save_tiny_llama(folder)
    return load_model(folder, device=CPU, dtype=torch.float32)


def assert_alike(found: Seen, expected: Seen) -> None:
    assert found.tokens == expected.tokens
    for name, scores in expected.scores.items():
        assert [score and score.token_id for score in found.scores[name]] == [score and score.token_id for score in scores]
        logprobs = [[score.logprob for score in seen if score] for seen in (found.scores[name], scores)]
        assert logprobs[0] == pytest.approx(logprobs[1], abs=1e-4)
    for name, rows in expected.rows.items():
        assert list(found.rows[name]) == list(rows)
        for position, states in rows.items():
            error = (found.rows[name][position] - states).norm(dim=-1) / states.norm(dim=-1)
            assert error.max() < 1e-5, f"{name}, position {position}: {error}"


@settings(max_examples=25, deadline=None)
@given(members=st.lists(MEMBERS, min_size=1, max_size=6), budget=st.integers(3, 40))
def test_what_comes_out_is_the_same_whether_unwanted_rows_are_left_out_or_not(model: Model, members: list[Member], budget: int) -> None:
    requests = [member.request(str(i)) for i, member in enumerate(members)]
    trimmed, whole = (Observed(model, budget=budget, trim=trim).run(requests) for trim in (True, False))
    assert_alike(trimmed, whole)
    for request in requests:
        assert len(whole.tokens[request.request_id]) == request.sampling.max_tokens
        assert len(whole.scores[request.request_id]) == (request.sampling.prompt_logprobs is not None) * len(request.prompt_token_ids)


class _Reader(pickle.Unpickler):
    """Notes which modules the classes of a pickle are from."""

    def __init__(self, data: bytes) -> None:
        super().__init__(io.BytesIO(data))
        self.modules: set[str] = set()

    def find_class(self, module: str, name: str) -> object:
        self.modules.add(module)
        return super().find_class(module, name)


class CopyingRunner(ModelRunner):
    """Runs every step twice: as it is, and as a process that was sent it would."""

    modules: set[str]
    num_steps = 0

    def run(self, step: StepInput, sampled_before: torch.Tensor | None = None) -> StepOutput:
        reader = _Reader(pickle.dumps(step))
        copied = reader.load()
        slots = torch.from_numpy(np.concatenate([np.zeros(0, np.int64), *(wanted.slots for wanted in step.captures.values())]))
        outputs, rows = [], []
        for each in (step, copied):
            outputs.append(super().run(each, sampled_before))
            rows.append(self._sink._store_rows[slots].clone())  # type: ignore[attr-defined]  # the store of this test
        assert torch.equal(*rows)
        assert_same_outputs(*outputs)
        self.modules = reader.modules
        self.num_steps += 1
        return outputs[1]


def assert_same_outputs(found: StepOutput, expected: StepOutput) -> None:
    assert (found.logits is None) == (expected.logits is None)
    if found.logits is not None and expected.logits is not None:
        assert torch.equal(found.logits, expected.logits)
    for scores, others in zip(found.scores, expected.scores, strict=True):
        assert torch.equal(scores.logprobs, others.logprobs)
        assert torch.equal(scores.numbers, others.numbers)


def test_a_step_that_was_sent_elsewhere_gives_the_same_since_it_is_nothing_but_arrays(model: Model) -> None:
    members = [
        Member(9, None, ALL_ROWS, False, 4, True),
        Member(12, (0, 1, 2, "norm"), ALL_ROWS, True, 4, False),
        Member(7, (0, 1), RowSelection(((1, 3), (-2, -1))), False, 0, False),
        Member(5, (2, "norm"), LAST_ROW, False, 0, False),
    ]
    observed = Observed(model, budget=13, runner=CopyingRunner)
    observed.run([member.request(str(i)) for i, member in enumerate(members)])
    assert isinstance(observed.runner, CopyingRunner)
    assert observed.runner.num_steps > 4
    of_engine = {module for module in observed.runner.modules if module.startswith("engine.")}
    assert of_engine == {"engine.execution.step_input", "engine.attention.facade"}
