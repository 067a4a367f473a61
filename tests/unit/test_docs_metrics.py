"""docs/operations.md names every metric that a service exports, and no other."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path

from engine.cache.pool import PoolStats
from engine.stats import EngineStats
from service.observe.metrics import Metrics
from service.saves.space import Disk

PAGE = (Path(__file__).parents[2] / "docs" / "operations.md").read_text()
SERIES = r"(?:strata|process)_[a-z_]+"


@dataclass
class FullSpace:
    """Figures with a quota, so that nothing is left out."""

    max_saved_bytes: int | None = 100
    reserved_bytes: int = 10
    saved_bytes: int = 20
    disks: dict[str, Disk] = field(default_factory=lambda: {"/saves": Disk(device=1, free=2, reserve=1)})


def engine_stats() -> EngineStats:
    pool = PoolStats(total=3, free=1, cached=1, referenced=1)
    return EngineStats(
        running=0,
        waiting=0,
        kv_blocks=pool,
        state_pages=pool,
        computed_tokens_total=0,
        prefix_query_tokens_total=0,
        prefix_hit_tokens_total=0,
        state_hit_rows_total=0,
        preemptions_total=0,
        writer_queue_depth=0,
        bytes_written_total=0,
        write_seconds_total=0.0,
    )


def exported() -> set[str]:
    """Names as Prometheus sees them, but for the `_created` that the client library adds to counters and histograms."""
    metrics = Metrics()
    metrics.watch_engine(engine_stats)
    metrics.watch_state(lambda: "ok", ("ok",))
    metrics.watch_space(FullSpace())
    names = re.findall(rf"^# TYPE ({SERIES}) ", metrics.exposition().decode(), flags=re.MULTILINE)
    return {name for name in names if not name.endswith("_created")}


def test_the_operations_page_names_every_metric() -> None:
    table = "".join(line.split("|")[1] for line in PAGE.splitlines() if line.startswith(("| `strata_", "| `process_")))
    assert set(re.findall(f"`({SERIES})`", table)) == exported()


def test_the_operations_page_names_no_other_metric() -> None:
    assert set(re.findall(f"`({SERIES})`", PAGE)) <= exported()
