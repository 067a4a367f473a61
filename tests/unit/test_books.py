"""The benchmark of the books: that it goes through with everything it measures, on a small scale."""

from __future__ import annotations

import pytest

from benchmarks import books


def test_every_case_is_measured_and_leaves_no_block_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = {"PROMPT_TOKENS": 128, "LONG_PROMPT_TOKENS": 256, "LAYERS": (1, 2), "NUM_PAGES": 200, "REQUESTS": 4, "START": 64}
    for name, size in sizes.items():
        monkeypatch.setattr(books, name, size)
    made: list[books.PageBooks] = []

    def make_pages() -> books.PageBooks:
        made.append(books.PageBooks())
        return made[-1]

    measured = dict(books.cases(make_pages))
    assert len(measured) == 6
    assert all(seconds >= 0 for parts in measured.values() for seconds in parts.values())
    (pages,) = made
    assert pages.store.pool.stats().referenced == 0
    assert pages.store.pool.stats().free < 10, "the pool is full of cached pages"
