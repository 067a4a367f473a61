"""Where a sequence can start from what the caches hold: KV of sufficient depth, and all the pages it wants to save."""

import time

from engine.cache.kv import KVCache
from engine.scheduling.sequence import TokenSequence


class PrefixFinder:
    """A usable hit is the longest prefix with KV in every group and, for rows still to be saved, the pages of every layer wanted."""

    def __init__(self, kv: KVCache, page_size: int, *, enabled: bool) -> None:
        self.query_tokens_total = 0
        self.hit_tokens_total = 0
        self.state_hit_rows_total = 0
        self._kv = kv
        self._page_size = page_size
        self._enabled = enabled

    def finish_from_cache(self, sequence: TokenSequence) -> bool:
        """Whether nothing need be computed, since all rows wanted lie in cached pages. Takes them."""
        capture, target = sequence.capture, sequence.target
        if capture is None or sequence.prefix_limit < target:
            return False
        if capture.hit_limit(target, sequence.num_sure) < target:
            return False
        self.start_at(sequence, target)
        return True

    def awaited_end(self, running: TokenSequence, waiting: TokenSequence) -> int:
        """While `running` has computed less than this, what it computes next is a block that `waiting` begins with, too, and will be able
        to use: then it needn't be computed twice."""
        if not self._enabled or running.tables.depth < waiting.tables.depth or not _captures_all(running, waiting):
            return 0
        return min(chain.shared_end(waiting.chains[size]) for size, chain in running.chains.items())

    def find(self, sequence: TokenSequence) -> int:
        """The length of the prefix that need not be computed; nothing is taken."""
        limit = sequence.prefix_limit if self._enabled else 0
        border = 1
        if sequence.capture is not None:
            limit = sequence.capture.hit_limit(limit, sequence.num_sure)
            border = self._page_size
        lengths = self._kv.hit_lengths(sequence.chains, sequence.tables.depth, limit)
        return next(length for length in lengths if length % border == 0)

    def start_at(self, sequence: TokenSequence, length: int) -> None:
        """Computation starts behind the first `length` tokens, whose blocks the sequence has."""
        self._count(sequence, length)
        if sequence.capture is not None:
            sequence.capture.start()
            self.state_hit_rows_total += sequence.capture.adopt(length, sequence.num_sure)
            sequence.capture.submit_rows()
        sequence.num_computed = sequence.num_planned = length

    def register(self, sequence: TokenSequence, depth: int) -> None:
        """Offers what has been computed to later requests, unless the last rows, run `depth` layers deep, aren't what the blocks say."""
        if self._enabled and depth >= sequence.tables.depth:
            self._kv.register(sequence.tables, sequence.chains, sequence.num_computed)

    def _count(self, sequence: TokenSequence, length: int) -> None:
        self.query_tokens_total += sequence.num_prompt_tokens
        self.hit_tokens_total += min(length, sequence.num_prompt_tokens)
        if sequence.started_ns is None:
            sequence.num_cached = min(length, sequence.num_prompt_tokens)
            sequence.started_ns = time.time_ns()


def _captures_all(running: TokenSequence, waiting: TokenSequence) -> bool:
    """Whether the pages of `running` will hold every row that `waiting` can want."""
    if waiting.capture is None:
        return True
    if running.capture is None:
        return False
    saved = running.capture.spec
    return saved.rows.everything and set(waiting.capture.spec.layers) <= set(saved.layers)
