"""Gemma 3 with prompts longer than its sliding window of 512, so that most layers see only a part of them."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.parity.subjects import real_subject
from tests.parity.ways import Subject, Workbench, compare

NUM_SHARED = 600


@pytest.fixture(scope="module")
def gemma3(gemma3_folder: Path) -> Subject:
    return real_subject(gemma3_folder, lengths=(620, 640), num_shared=NUM_SHARED)


def assert_close(subject: Subject, bench_result: list[object]) -> None:
    compare(subject, bench_result).check()


def test_rows_and_text_of_one_run_over_more_than_a_window_equal_transformers(gemma3: Subject, tmp_path: Path) -> None:
    with Workbench(gemma3, tmp_path).engine(max_batch_tokens=4096) as engine:
        saved = engine.run(engine.request(gemma3.known[0].prompt, max_tokens=64, output=True))
    assert_close(gemma3, saved)


def test_chunks_and_a_prefix_hit_beyond_the_window_equal_transformers(gemma3: Subject, tmp_path: Path) -> None:
    first, second = gemma3.known[:2]
    with Workbench(gemma3, tmp_path).engine(max_batch_tokens=130, block_size=32) as engine:
        saved = engine.run(engine.request(first.prompt, max_tokens=1))
        saved += engine.run(engine.request(second.prompt, max_tokens=16, output=True))
        assert saved[1].completion.num_cached_tokens == NUM_SHARED // 32 * 32
    assert_close(gemma3, saved)
