"""Figures that the engine keeps, read by whoever reports them."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from engine.cache.pool import PoolStats
from engine.request import RequestOutput
from engine.saves.spec import SaveEvent

_NONE = PoolStats(0, 0, 0, 0)


@dataclass(frozen=True)
class EngineStats:
    """A snapshot; names ending in `_total` only grow."""

    running: int
    waiting: int
    kv_blocks: PoolStats
    """Of layers with attention."""
    state_pages: PoolStats
    computed_tokens_total: int
    """Tokens run through the model, recomputed ones included."""
    prefix_query_tokens_total: int
    prefix_hit_tokens_total: int
    """Prompt tokens that were not computed, thanks to the KV prefix cache."""
    state_hit_rows_total: int
    """Rows times layers that were taken from cached pages."""
    preemptions_total: int
    writer_queue_depth: int
    """Jobs handed to the writers and not done yet."""
    bytes_written_total: int
    write_seconds_total: float
    recurrent_slots: PoolStats = _NONE
    """Of recurrent layers: cached ones are snapshots."""
    step_failures_total: int = 0
    """Steps that raised, also where all their requests could be computed in smaller parts."""


class EngineListener(Protocol):
    """Hears what happens in the engine. Methods are called from engine and writer threads and must return at once."""

    def on_step(self, outputs: Sequence[RequestOutput], num_tokens: int, seconds: float) -> None:
        """Once per step, on the engine thread: all outputs of the step, the tokens it computed and how long it took."""

    def on_save(self, event: SaveEvent) -> None:
        """A save changed its status."""

    def on_dead(self, error: BaseException) -> None:
        """The engine can't go on. Every request it held has been answered with an error."""
