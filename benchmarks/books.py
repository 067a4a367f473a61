"""`python -m benchmarks.books`: what the books of a step cost on the host, without a model, a scheduler or a writer.

A prompt of 8,192 tokens that saves 30 layers: the blocks of its keys and values and the pages of its rows are taken, its rows get
slots, the pages are registered and, by the writer, given back, in a pool where nothing is cached and in one that is full of
cached pages. A step of 256 requests that generate text and save 30 layers: the mean of steps in which each of them fills two blocks.
Last, how a cached prompt of 131,072 tokens is found, and how long the check of the books takes.
"""

import argparse
import random
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np
import torch

from engine.cache.chain import HashChain
from engine.cache.groups import KVGroup
from engine.cache.kv import BlockTables, KVCache
from engine.cache.pool import IntArray
from engine.cache.spec import KVSpec, LayerKV
from engine.cache.states import StateStore

PROMPT_TOKENS, LONG_PROMPT_TOKENS = 8192, 131_072
LAYERS = tuple(range(1, 31))
PAGE_ROWS = 32
NUM_PAGES = 65_537
REQUESTS, DECODE_STEPS = 256, 64
START = 512
"""Tokens that the requests that generate text have at first, and up to a block more."""


@dataclass
class Clock:
    """Seconds of this thread by part: what neighbours do on the machine is left out."""

    parts: dict[str, float] = field(default_factory=dict)

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        started = time.thread_time()
        yield
        self.parts[name] = self.parts.get(name, 0.0) + time.thread_time() - started


_NO_PAGES = np.zeros((1, len(LAYERS)), np.int64)


class NoReservation:
    """A holder that was promised nothing."""

    reservation = num_held = 0


class PageBooks:
    """What a save does with its pages: all layers' pages of some blocks at a time."""

    def __init__(self) -> None:
        self.store = StateStore(NUM_PAGES, PAGE_ROWS, 1, torch.bfloat16)
        self._holder = NoReservation()

    def take(self, num_blocks: int) -> IntArray:
        """`[blocks, layers]`"""
        pages = self.store.allocate(self._holder, num_blocks * len(LAYERS))
        assert pages is not None
        return pages.reshape(num_blocks, len(LAYERS))

    def slots(self, held: Sequence[IntArray], offsets: Sequence[int]) -> IntArray:
        """`[layers, n]`: of the rows at offsets `[n]` of their pages `[1, layers]` each."""
        slots: IntArray = np.concatenate(held).T * PAGE_ROWS + np.array(offsets)
        return slots

    def all_slots(self, pages: IntArray) -> IntArray:
        """`[layers, rows]`, of all rows of pages `[n, layers]`."""
        return (pages.T[:, :, None] * PAGE_ROWS + np.arange(PAGE_ROWS)).reshape(len(LAYERS), -1)

    def register(self, chain: HashChain, first: int, pages: IntArray) -> None:
        self.store.register(chain, range(first, first + len(pages)), LAYERS, pages)

    def release(self, pages: IntArray) -> None:
        self.store.pool.release(pages.ravel())


def make_kv() -> KVCache:
    spec = KVSpec(LayerKV(1, 1), (0,), PAGE_ROWS, torch.bfloat16)
    return KVCache([KVGroup(spec, NUM_PAGES, torch.device("cpu"))])


class PromptStep:
    """The books of one step, over and over, each time of another prompt."""

    def __init__(self, pages: PageBooks, kv: KVCache) -> None:
        self._pages = pages
        self._kv = kv
        self._random = random.Random(1)

    def run(self) -> dict[str, float]:
        clock, pages, kv = Clock(), self._pages, self._kv
        chain = HashChain([self._random.randrange(150_000) for _ in range(PROMPT_TOKENS)], PAGE_ROWS)
        tables, num_blocks = kv.new_tables(1), PROMPT_TOKENS // PAGE_ROWS
        with clock.part("KV: take"):
            kv.extend(tables, 0, PROMPT_TOKENS)
        with clock.part("pages: take"):
            taken = pages.take(num_blocks)
        with clock.part("pages: slots"):
            pages.all_slots(taken)
        with clock.part("names"):
            chain.link(num_blocks - 1)
        with clock.part("KV: register"):
            kv.register(tables, {PAGE_ROWS: chain}, PROMPT_TOKENS)
        with clock.part("pages: register"):
            pages.register(chain, 0, taken)
        with clock.part("pages: release"):
            pages.release(taken)
        with clock.part("KV: release"):
            kv.release(tables)
        return clock.parts


class Decoding:
    """One request that generates text."""

    def __init__(self, kv: KVCache, token_id: int, num_tokens: int) -> None:
        self.token_ids = [token_id] * num_tokens
        self.chains = {PAGE_ROWS: HashChain(self.token_ids, PAGE_ROWS)}
        self.tables: BlockTables = kv.new_tables(1)


class DecodeStep:
    """Steps of many requests, whose positions are spread evenly over their blocks."""

    def __init__(self, pages: PageBooks, kv: KVCache, token_id: int) -> None:
        """No two requests of token ids from `token_id` on have the same text."""
        self._pages = pages
        self._kv = kv
        self._requests = [Decoding(kv, token_id + number, START + number % PAGE_ROWS) for number in range(REQUESTS)]
        self._held = [pages.take(1) if len(request.token_ids) % PAGE_ROWS else _NO_PAGES for request in self._requests]
        for request in self._requests:
            kv.extend(request.tables, 0, len(request.token_ids))
            kv.register(request.tables, request.chains, len(request.token_ids))

    def run(self) -> dict[str, float]:
        """The mean of so many steps that every request fills the same number of blocks."""
        clock = Clock()
        for _ in range(DECODE_STEPS):
            self._step(clock)
        return {part: seconds / DECODE_STEPS for part, seconds in clock.parts.items()}

    def end(self) -> None:
        for request, held in zip(self._requests, self._held, strict=True):
            self._kv.release(request.tables)
            if held is not _NO_PAGES:
                self._pages.release(held)

    def _step(self, clock: Clock) -> None:
        requests, kv, pages, held = self._requests, self._kv, self._pages, self._held
        with clock.part("KV: take"):
            for request in requests:
                length = len(request.token_ids)
                if length >= request.tables.steady_end:
                    kv.extend(request.tables, length, length + 1)
        starting = [number for number, request in enumerate(requests) if not len(request.token_ids) % PAGE_ROWS]
        with clock.part("pages: take"):
            for number in starting:
                held[number] = pages.take(1)
        offsets = [len(request.token_ids) % PAGE_ROWS for request in requests]
        with clock.part("pages: slots"):
            pages.slots(held, offsets)
        for request in requests:
            request.token_ids.append(1)
        with clock.part("KV: register"):
            for request in requests:
                if len(request.token_ids) >= request.tables.unregistered_end:
                    kv.register(request.tables, request.chains, len(request.token_ids))
        ending = [number for number, request in enumerate(requests) if not len(request.token_ids) % PAGE_ROWS]
        with clock.part("pages: register"):
            for number in ending:
                pages.register(requests[number].chains[PAGE_ROWS], len(requests[number].token_ids) // PAGE_ROWS - 1, held[number])
        with clock.part("pages: release"):
            for number in ending:
                pages.release(held[number])
                held[number] = _NO_PAGES


def find_prefix(kv: KVCache) -> dict[str, float]:
    """A long prompt that is cached as a whole: its names, the search and taking its blocks."""
    tokens = [i % 150_000 for i in range(LONG_PROMPT_TOKENS)]
    _compute(kv, tokens)
    clock, chain, tables = Clock(), HashChain(tokens, PAGE_ROWS), kv.new_tables(1)
    with clock.part("names"):
        chain.link(chain.num_full_blocks - 1)
    with clock.part("search"):
        (longest, *_) = kv.hit_lengths({PAGE_ROWS: chain}, 1, LONG_PROMPT_TOKENS)
    assert longest == LONG_PROMPT_TOKENS
    with clock.part("adopt"):
        kv.adopt(tables, {PAGE_ROWS: chain}, longest)
    with clock.part("release"):
        kv.release(tables)
    return clock.parts


def _compute(kv: KVCache, tokens: list[int]) -> None:
    tables = kv.new_tables(1)
    kv.extend(tables, 0, len(tokens))
    kv.register(tables, {PAGE_ROWS: HashChain(tokens, PAGE_ROWS)}, len(tokens))
    kv.release(tables)


def check(pages: PageBooks, kv: KVCache) -> dict[str, float]:
    clock = Clock()
    with clock.part("pages"):
        pages.store.pool.check_integrity()
    with clock.part("KV"):
        kv.check_integrity()
    return clock.parts


def fill(step: PromptStep, pages: PageBooks) -> None:
    """Every page is cached afterwards."""
    while pages.store.pool.stats().free:
        step.run()


def cases(make_pages: Callable[[], PageBooks] = PageBooks) -> Iterator[tuple[str, dict[str, float]]]:
    """One round: every case with its seconds by part."""
    pages, kv = make_pages(), make_kv()
    step = PromptStep(pages, kv)
    yield "prompt of 8,192 tokens, fresh pool", step.run()
    decode = DecodeStep(pages, kv, 0)
    yield "256 requests generating, fresh pool", decode.run()
    decode.end()
    fill(step, pages)
    yield "prompt of 8,192 tokens, full pool", step.run()
    decode = DecodeStep(pages, kv, REQUESTS)
    yield "256 requests generating, full pool", decode.run()
    decode.end()
    yield "cached prompt of 131,072 tokens", find_prefix(kv)
    yield "integrity check", check(pages, kv)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    rounds = parser.parse_args().rounds
    found: dict[str, list[dict[str, float]]] = {}
    for _ in range(rounds):
        for name, parts in cases():
            found.setdefault(name, []).append(parts)
    for name, each in found.items():
        total = statistics.median(sum(parts.values()) for parts in each)
        print(f"{name}: {total * 1e3:.2f} ms")
        for part in each[0]:
            print(f"  {part:<32}{statistics.median(parts[part] for parts in each) * 1e3:8.3f} ms")


if __name__ == "__main__":
    main()
