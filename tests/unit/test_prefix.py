"""Where a request starts from what earlier ones left in the caches."""

from __future__ import annotations

import pytest

from engine.saves.selection import RowSelection
from tests.unit.core_fakes import Bench, next_token

PROMPT = [0, 1, 2, 3, 4, 0, 2, 4, 1, 3, 0, 0]
"""Six blocks of two."""


def ran(bench: Bench, name: str) -> int:
    """Tokens that were computed for the request."""
    return sum(bench.steps_of(name).values())


def test_prefix_hit_leaves_the_last_token_to_be_computed_for_its_logits() -> None:
    bench = Bench()
    bench.add("first", PROMPT, max_tokens=1)
    bench.run()
    bench.add("second", PROMPT, max_tokens=1)
    bench.run()
    assert bench.num_cached("second") == 10
    assert ran(bench, "second") == 2
    bench.check_results()


def test_prefix_hit_ends_where_the_prompts_part() -> None:
    bench = Bench()
    bench.add("first", PROMPT, max_tokens=1)
    bench.run()
    bench.add("second", [*PROMPT[:7], 0, 0, 0, 0], max_tokens=1)
    bench.run()
    assert bench.num_cached("second") == 6
    bench.check_results()


def test_prefix_hit_reaches_into_generated_text() -> None:
    bench = Bench()
    bench.add("first", PROMPT, max_tokens=6)
    bench.run()
    bench.add("second", PROMPT + bench.tokens("first") + [0], max_tokens=1)
    bench.run()
    assert bench.num_cached("second") == 16
    bench.check_results()


def test_prefix_hit_ends_where_a_wanted_state_page_is_missing() -> None:
    bench = Bench()
    bench.add("both layers of the beginning", PROMPT[:4], layers=(1, 2))
    bench.run()
    bench.add("one layer of all", PROMPT, max_tokens=1, layers=(1,))
    bench.run()
    bench.add("both", PROMPT, max_tokens=1, layers=(1, 2))
    bench.run()
    assert bench.num_cached("both") == 4
    bench.check_results()


def test_prefix_hit_does_not_need_pages_of_rows_that_are_not_kept() -> None:
    bench = Bench()
    bench.add("plain", PROMPT, max_tokens=1)
    bench.run()
    bench.add("last rows", PROMPT, max_tokens=1, layers=(1, 2), rows=RowSelection(((-1, None),)))
    bench.run()
    assert bench.num_cached("last rows") == 10
    bench.check_results()


def test_prefix_hit_of_a_plain_request_does_not_look_at_pages() -> None:
    bench = Bench()
    bench.add("first", PROMPT, max_tokens=1)
    bench.run()
    bench.add("saving", PROMPT, max_tokens=1, layers=(1,))
    bench.run()
    bench.add("plain", PROMPT, max_tokens=1)
    bench.run()
    assert bench.num_cached("saving") == 0
    assert bench.num_cached("plain") == 10
    bench.check_results()


@pytest.mark.parametrize(("layers", "cached"), [((3,), 4), (None, 6)])
def test_prefix_hit_of_a_saving_request_ends_at_a_border_of_pages(layers: tuple[int, ...] | None, cached: int) -> None:
    bench = Bench(full_size=2, sliding_size=2, page_size=4)
    bench.add("first", PROMPT[:8], layers=(3,))
    bench.run()
    bench.add("second", PROMPT[:8], max_tokens=1, layers=layers)
    bench.run()
    assert bench.num_cached("second") == cached
    bench.check_results()


@pytest.mark.parametrize(("full_size", "cached"), [(2, 6), (3, 9)])
@pytest.mark.parametrize("layers", [(1,), None])
def test_prefix_hit_ends_at_a_border_of_blocks_of_every_group(full_size: int, cached: int, layers: tuple[int, ...] | None) -> None:
    bench = Bench(full_size=full_size, sliding_size=3, page_size=1)
    bench.add("first", PROMPT, max_tokens=1, layers=layers)
    bench.run()
    bench.add("second", PROMPT[:11], max_tokens=1, layers=layers)
    bench.run()
    assert bench.num_cached("second") == cached
    bench.check_results()


def test_all_rows_from_pages_need_no_step_at_all() -> None:
    bench = Bench()
    bench.add("first", PROMPT, layers=(1, "norm"))
    bench.run()
    computed = bench.core.num_computed_tokens
    bench.add("second", PROMPT, layers=("norm",))
    bench.run()
    assert bench.core.num_computed_tokens == computed
    assert bench.num_cached("second") == len(PROMPT)
    assert bench.prefixes.query_tokens_total == 2 * len(PROMPT)
    assert bench.prefixes.state_hit_rows_total == len(PROMPT)
    bench.check_results()


def test_all_rows_from_pages_need_no_step_though_nothing_is_left_of_their_keys_and_values() -> None:
    bench = Bench(full_blocks=6, sliding_blocks=6)
    bench.add("first", PROMPT, layers=(1, "norm"))
    bench.run()
    bench.add("another", PROMPT, salt="x")
    bench.run()
    computed = bench.core.num_computed_tokens
    bench.add("second", PROMPT, layers=("norm",))
    bench.run()
    assert bench.core.num_computed_tokens == computed
    bench.check_results()


def test_a_prompt_that_asks_for_nothing_and_is_wholly_known_needs_no_step_at_all() -> None:
    bench = Bench()
    bench.add("first", PROMPT)
    bench.run()
    computed = bench.core.num_computed_tokens
    bench.add("second", PROMPT)
    bench.run()
    assert bench.core.num_computed_tokens == computed
    assert bench.num_cached("second") == len(PROMPT)
    bench.check_results()


def test_rows_in_a_block_that_is_not_full_are_computed_again() -> None:
    bench = Bench()
    bench.add("first", PROMPT[:11], layers=(1,))
    bench.run()
    bench.add("second", PROMPT[:11], layers=(1,))
    bench.run()
    assert ran(bench, "second") == 1
    bench.check_results()


def test_kv_of_a_run_that_was_not_deep_enough_is_no_hit_but_the_other_way_round_it_is() -> None:
    bench = Bench()
    bench.add("shallow", PROMPT, layers=(2,))
    bench.run()
    bench.add("deep", PROMPT, max_tokens=1)
    bench.run()
    bench.add("shallow again", PROMPT[:9], layers=(2,), rows=RowSelection(((-1, None),)))
    bench.run()
    assert bench.num_cached("deep") == 0
    assert ran(bench, "shallow again") == 1
    bench.check_results()


def test_a_last_token_that_ran_less_deep_than_the_others_does_not_complete_a_cached_block() -> None:
    bench = Bench(full_size=4, sliding_size=4, page_size=4)
    bench.add("first", PROMPT[:3], max_tokens=1, layers=(1,), last=True)
    bench.run()
    bench.add("second", [*PROMPT[:3], next_token(PROMPT[:3]), 0, 1], max_tokens=1)
    bench.run()
    assert bench.num_cached("second") == 0
    bench.check_results()


def test_prefixes_are_shared_only_under_the_same_salt() -> None:
    bench = Bench()
    bench.add("first", PROMPT, max_tokens=1, layers=(1,), salt="tenant")
    bench.run()
    bench.add("other", PROMPT, max_tokens=1, layers=(1,))
    bench.run()
    bench.add("same", PROMPT, max_tokens=1, layers=(1,), salt="tenant")
    bench.run()
    assert bench.num_cached("other") == 0
    assert bench.num_cached("same") == 10
    bench.check_results()


def test_nothing_is_shared_where_the_prefix_cache_is_off() -> None:
    bench = Bench(prefix_cache=False)
    for name in ("first", "second"):
        bench.add(name, PROMPT, max_tokens=1, layers=(1,))
        bench.run()
    assert bench.num_cached("second") == 0
    assert bench.kv.stats().cached == bench.store.pool.stats().cached == 0
    bench.check_results()


def test_a_prompt_that_is_still_being_computed_is_hit_as_far_as_it_has_come() -> None:
    bench = Bench(budget=5)
    bench.add("first", PROMPT)
    bench.step()
    bench.add("second", PROMPT, priority=-1)
    bench.core.abort("first")
    bench.run()
    assert bench.num_cached("second") == 4
    bench.check_results(but=frozenset({"first"}))


def test_queries_and_hits_are_counted_in_prompt_tokens() -> None:
    bench = Bench()
    for name in ("first", "second"):
        bench.add(name, PROMPT, max_tokens=1, layers=(1, 2))
        bench.run()
    assert bench.prefixes.query_tokens_total == 24
    assert bench.prefixes.hit_tokens_total == 10
    assert bench.prefixes.state_hit_rows_total == 20
