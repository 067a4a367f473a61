"""How much of prompts a step takes beside text, by what the last steps took. Seconds are told, not measured."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.scheduling.pace import StepPace


def make_pace(seconds: float = 0.5) -> StepPace:
    return StepPace(seconds, at_least=16, at_most=2048)


def test_without_a_limit_a_step_is_whole_whatever_it_takes() -> None:
    pace = make_pace(0.0)
    pace.observe(2048, 60.0, beside_text=True)
    assert pace.prompt_tokens == 2048


def test_before_anything_was_seen_a_quarter_of_a_step_is_tried() -> None:
    assert make_pace().prompt_tokens == 512


def test_the_rate_of_prompts_alone_is_taken_until_there_is_one_beside_text() -> None:
    pace = make_pace()
    pace.observe(2000, 4.0, beside_text=False)
    assert pace.prompt_tokens == 250
    pace.observe(2000, 2.0, beside_text=False)
    assert pace.prompt_tokens == 500
    pace.observe(500, 1.25, beside_text=True)
    assert pace.prompt_tokens == 200
    pace.observe(2000, 1.0, beside_text=False)
    assert pace.prompt_tokens == 200


def test_a_step_that_took_too_long_makes_the_next_one_smaller_at_once() -> None:
    pace = make_pace()
    pace.observe(400, 1.0, beside_text=True)
    assert pace.prompt_tokens == 200
    pace.observe(200, 2.0, beside_text=True)
    assert pace.prompt_tokens == 50


def test_steps_grow_by_half_of_what_the_last_one_left() -> None:
    pace = make_pace()
    pace.observe(2000, 10.0, beside_text=False)
    pace.observe(100, 0.5, beside_text=True)
    pace.observe(100, 0.25, beside_text=True)
    assert pace.prompt_tokens == 150
    pace.observe(150, 0.25, beside_text=True)
    assert pace.prompt_tokens == 225


def test_a_step_with_little_of_a_prompt_says_nothing_of_more_unless_it_took_too_long() -> None:
    pace = make_pace()
    pace.observe(2000, 10.0, beside_text=False)
    pace.observe(100, 0.5, beside_text=True)
    pace.observe(49, 0.5, beside_text=True)
    assert pace.prompt_tokens == 100, "it is the text that took the time"
    pace.observe(49, 0.6, beside_text=True)
    assert pace.prompt_tokens == 40


def test_a_step_has_a_block_of_a_prompt_at_least_and_is_whole_at_most() -> None:
    pace = make_pace()
    pace.observe(100, 100.0, beside_text=True)
    assert pace.prompt_tokens == 16
    for _ in range(20):
        pace.observe(2048, 0.001, beside_text=True)
    assert pace.prompt_tokens == 2048
    assert StepPace(0.5, at_least=16, at_most=4).prompt_tokens == 4


@pytest.mark.parametrize("beside_text", [False, True])
def test_steps_without_prompts_or_without_time_say_nothing(beside_text: bool) -> None:
    pace = make_pace()
    pace.observe(400, 1.0, beside_text=beside_text)
    pace.observe(0, 9.0, beside_text=beside_text)
    pace.observe(50, 0.0, beside_text=beside_text)
    assert pace.prompt_tokens == 200


@given(
    tokens_per_second=st.floats(100, 20_000),
    text_share=st.floats(0, 0.8),
    limit=st.floats(0.02, 1.0),
)
def test_steps_settle_where_they_take_the_time_that_they_may(tokens_per_second: float, text_share: float, limit: float) -> None:
    pace = StepPace(limit, at_least=16, at_most=2048)

    def seconds() -> float:
        return text_share * limit + pace.prompt_tokens / tokens_per_second

    for _ in range(200):
        pace.observe(pace.prompt_tokens, seconds(), beside_text=True)
    one_token = 1 / tokens_per_second
    assert pace.prompt_tokens == 16 or seconds() <= 1.02 * limit + one_token
    assert pace.prompt_tokens == 2048 or seconds() >= 0.98 * limit - 2 * one_token
