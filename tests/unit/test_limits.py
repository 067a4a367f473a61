"""What is refused at submission because it could never run."""

from __future__ import annotations

import pytest

from engine.errors import InvalidRequest, QueueFull
from engine.layers import LayerId
from engine.request import EngineRequest, SamplingParams
from engine.saves.selection import RowSelection
from engine.saves.spec import SaveSpec
from engine.scheduling.limits import PromptLogprobsMemory, num_fed, saved_rows
from tests.unit.core_fakes import MAX_MODEL_LEN, Bench, Target


def request(prompt: int, max_tokens: int, *, saves: bool = True, output: bool = False, last: bool = False) -> EngineRequest:
    save = SaveSpec("s", Target(), (1,), "float32", output, last) if saves else None
    return EngineRequest("r", [0] * prompt, SamplingParams(max_tokens=max_tokens), save)


@pytest.mark.parametrize(
    ("built", "fed", "rows"),
    [
        (request(10, 0), 10, (10, 10)),
        (request(10, 1), 10, (10, 10)),
        (request(10, 5, saves=False), 14, (10, 10)),
        (request(10, 5), 14, (10, 10)),
        (request(10, 5, output=True), 14, (10, 14)),
        (request(10, 1, output=True), 10, (10, 10)),
        (request(10, 5, last=True), 15, (11, 15)),
        (request(10, 1, last=True), 11, (11, 11)),
        (request(10, 0, last=True), 10, (10, 10)),
    ],
)
def test_positions_fed_and_rows_saved(built: EngineRequest, fed: int, rows: tuple[int, int]) -> None:
    assert num_fed(built) == fed
    assert saved_rows(built) == rows


def refused(bench: Bench, prompt: list[int], param: str, message: str, **settings: object) -> None:
    with pytest.raises(InvalidRequest, match=message) as error:
        bench.add("r", prompt, **settings)
    assert error.value.param == param
    assert not bench.core.has_work


def test_a_prompt_of_just_the_context_with_one_token_to_come_is_fine() -> None:
    bench = Bench()
    bench.add("fits", [0] * MAX_MODEL_LEN, max_tokens=1)
    bench.run()
    bench.check_results()


def test_more_positions_than_the_context_holds_are_refused_with_both_numbers() -> None:
    refused(Bench(), [0] * 35, "max_tokens", "35 tokens and max_tokens 7 need 41 positions, the context holds 40", max_tokens=7)
    refused(Bench(), [0] * 40, "max_tokens", "need 41 positions", max_tokens=1, layers=(1,), last=True)
    refused(Bench(), [0] * 41, "max_tokens", "need 41 positions", layers=(1,))


def test_a_prompt_that_can_never_fit_the_kv_cache_is_refused() -> None:
    bench = Bench(full_blocks=10)
    refused(bench, [0] * 21, "max_tokens", "21 positions don't fit the KV cache")
    refused(bench, [0] * 18, "max_tokens", "21 positions don't fit", max_tokens=4)
    bench.add("fits", [0] * 17, max_tokens=4)
    bench.run()
    bench.check_results()


def test_a_request_that_runs_no_layer_needs_no_kv() -> None:
    bench = Bench(full_blocks=2)
    bench.add("embeddings", [0, 1, 2] * 10, layers=(0,))
    bench.run()
    bench.check_results()


def test_empty_prompts_and_tokens_outside_the_vocabulary_are_refused() -> None:
    refused(Bench(), [], "prompt", "must not be empty")
    refused(Bench(), [0, 5], "prompt", "outside 0 to 4")
    refused(Bench(), [0, -1], "prompt", "outside 0 to 4")
    refused(Bench(), [0], "max_tokens", "at least 0", max_tokens=-1)


def test_more_layers_than_there_are_pages_or_staged_rows_are_refused() -> None:
    five: tuple[LayerId, ...] = (0, 1, 2, 3, "norm")
    refused(Bench(pages=4), [0, 1], "layers", "5 ids, the hidden-state cache has room for 4", layers=five)
    refused(Bench(max_rows=4), [0, 1], "layers", "5 ids, at most 4 can be captured", layers=five)
    for bench in (Bench(pages=5), Bench(max_rows=5)):
        bench.add("fits", [0, 1, 2], layers=five)
        bench.run()
        bench.check_results()


def test_a_window_of_rows_that_needs_more_pages_than_there_are_is_refused() -> None:
    rows = RowSelection(((-8, None),))
    refused(
        Bench(pages=5), [0], "positions", "8 rows from the end, which needs 6 pages", max_tokens=20, layers=(1,), output=True, rows=rows
    )
    bench = Bench(pages=6)
    bench.add("fits", [0], max_tokens=20, layers=(1,), output=True, rows=rows)
    bench.run()
    bench.check_results()


def test_positions_out_of_range_are_refused_where_the_length_is_known_and_clamped_where_it_is_not() -> None:
    rows = RowSelection(((0, 2), (6, 12)))
    refused(Bench(), [0] * 8, "positions", "12, out of range for 8 positions", layers=(1,), rows=rows)
    bench = Bench()
    bench.add("clamped", [0] * 8, max_tokens=3, layers=(1,), output=True, rows=rows)
    bench.run()
    bench.check_results()


def test_memory_for_prompt_logprobs_is_given_back_once_and_only_by_those_that_hold_some() -> None:
    memory = PromptLogprobsMemory(100)
    memory.reserve("a", 60)
    memory.check(40)
    with pytest.raises(QueueFull, match="beside the 60 bytes"):
        memory.check(41)
    memory.release("of one that holds none")
    memory.release("a")
    memory.release("a")
    memory.check(100)
    with pytest.raises(QueueFull, match="room for 100"):
        memory.check(101)
