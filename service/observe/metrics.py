"""What Prometheus scrapes: counted here, or read from the engine when asked."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Literal, Protocol, get_args

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from engine.cache.pool import PoolStats
from engine.errors import SaveErrorCode
from engine.stats import EngineStats
from service.registry.records import SaveStatus

RequestOutcome = Literal["completed", "failed", "aborted", "rejected", "replayed"]
"""`replayed`: answered out of the record of an earlier request with the same idempotency key."""

LATENCY_BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)
TOKEN_TIME_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5)
BATCH_BUCKETS = tuple(float(2**power) for power in range(16))
SHOWN_STATUSES = ("200", "400", "429", "500", "503", "507")
"""Shown before the first answer has one; others appear with it."""


class Metrics:
    """One registry per service, so that two in one process don't mix. Call from one thread."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        here = self.registry
        self._requests = Counter("strata_requests", "Completion requests by outcome", ["outcome"], registry=here)
        self._answers = Counter("strata_http_answers", "HTTP answers by status", ["status"], registry=here)
        self._saves = Counter("strata_saves", "Saves by outcome", ["outcome"], registry=here)
        self._save_failures = Counter("strata_save_failures", "Failed saves by the error's code", ["code"], registry=here)
        self._prompt_tokens = Counter("strata_prompt_tokens", "Prompt tokens of admitted requests", registry=here)
        self._generated_tokens = Counter("strata_generated_tokens", "Tokens that were sampled", registry=here)
        self._first_token = Histogram(
            "strata_time_to_first_token_seconds", "From admission to the first token of a choice", buckets=LATENCY_BUCKETS, registry=here
        )
        self._token_time = Histogram(
            "strata_time_per_output_token_seconds", "Mean time between tokens of a choice", buckets=TOKEN_TIME_BUCKETS, registry=here
        )
        self._duration = Histogram(
            "strata_request_duration_seconds", "From admission to the end of the answer", buckets=LATENCY_BUCKETS, registry=here
        )
        self._batch_tokens = Histogram("strata_batch_tokens", "Tokens computed in one step", buckets=BATCH_BUCKETS, registry=here)
        self._step_time = Histogram("strata_step_duration_seconds", "Time of one step", buckets=TOKEN_TIME_BUCKETS, registry=here)
        self._save_latency = Histogram(
            "strata_save_latency_seconds", "From the last computed token to the end of a save", buckets=LATENCY_BUCKETS, registry=here
        )
        self._max_running = Gauge("strata_max_running", "Requests that the engine computes at once, at most", registry=here)
        self._max_queued = Gauge("strata_max_queued", "Requests that may wait; more are refused", registry=here)
        ProcessCollector(registry=here)
        self._show_zeros()

    def _show_zeros(self) -> None:
        """A series that begins with its first failure shows no increase, and an alert on it would miss that one."""
        for request_outcome in get_args(RequestOutcome):
            self._requests.labels(request_outcome)
        for save_outcome in ("completed", "failed", "cancelled"):
            self._saves.labels(save_outcome)
        for code in get_args(SaveErrorCode):
            self._save_failures.labels(code)
        for status in SHOWN_STATUSES:
            self._answers.labels(status)

    def show_limits(self, *, max_running: int, max_queued: int) -> None:
        self._max_running.set(max_running)
        self._max_queued.set(max_queued)

    def watch_state(self, state: Callable[[], str], states: Sequence[str]) -> None:
        """`state` is read at every scrape from now on; it returns one of `states`."""
        self.registry.register(StateCollector(state, states))

    def watch_engine(self, stats: Callable[[], EngineStats]) -> None:
        """Engine figures are read at every scrape from now on."""
        self.registry.register(EngineCollector(stats))

    def watch_space(self, space: "SpaceFigures") -> None:
        """Figures of disks and of what is saved are read at every scrape from now on."""
        self.registry.register(SpaceCollector(space))

    def request_ended(self, outcome: RequestOutcome, seconds: float | None = None) -> None:
        self._requests.labels(outcome).inc()
        if seconds is not None:
            self._duration.observe(seconds)

    def answered(self, status: int) -> None:
        self._answers.labels(str(status)).inc()

    def admitted(self, prompt_tokens: int) -> None:
        self._prompt_tokens.inc(prompt_tokens)

    def first_token(self, seconds: float) -> None:
        self._first_token.observe(seconds)

    def generated(self, tokens: int) -> None:
        self._generated_tokens.inc(tokens)

    def time_per_token(self, seconds: float) -> None:
        self._token_time.observe(seconds)

    def step(self, num_tokens: int, seconds: float) -> None:
        if num_tokens:
            self._batch_tokens.observe(num_tokens)
            self._step_time.observe(seconds)

    def save_ended(self, outcome: SaveStatus, seconds: float, code: SaveErrorCode | None) -> None:
        """`code` is that of a save that failed."""
        self._saves.labels(outcome).inc()
        self._save_latency.observe(seconds)
        if outcome == "failed" and code is not None:
            self._save_failures.labels(code).inc()

    def exposition(self) -> bytes:
        """The text format of Prometheus."""
        return generate_latest(self.registry)


class StateCollector(Collector):
    """One series per state: 1 for the one that the service is in, 0 for the others."""

    def __init__(self, state: Callable[[], str], states: Sequence[str]) -> None:
        self._state = state
        self._states = states

    def describe(self) -> list[Metric]:
        return []

    def collect(self) -> Iterator[Metric]:
        current = self._state()
        family = GaugeMetricFamily("strata_service_state", "1 for the state that the service is in", labels=["state"])
        for state in self._states:
            family.add_metric([state], state == current)
        yield family


class EngineCollector(Collector):
    """Reads `EngineAPI.stats()` once per scrape."""

    def __init__(self, stats: Callable[[], EngineStats]) -> None:
        self._stats = stats

    def describe(self) -> list[Metric]:
        return []  # nothing is asked of the engine at registration

    def collect(self) -> Iterator[Metric]:
        stats = self._stats()
        yield GaugeMetricFamily("strata_requests_running", "Requests that the engine is computing", stats.running)
        yield GaugeMetricFamily("strata_requests_waiting", "Requests that wait for the engine", stats.waiting)
        yield GaugeMetricFamily("strata_writer_queue_depth", "Jobs handed to the writers and not done", stats.writer_queue_depth)
        yield _pool("strata_kv_blocks", "KV blocks by state", stats.kv_blocks)
        yield _pool("strata_recurrent_slots", "Slots of recurrent layers by state; cached ones are snapshots", stats.recurrent_slots)
        yield _pool("strata_state_pages", "Hidden-state pages by state", stats.state_pages)
        for name, text, value in _counters(stats):
            yield CounterMetricFamily(name, text, value)


class DiskFigures(Protocol):
    """One save root's file system, as of the last look at it."""

    @property
    def free(self) -> int: ...
    @property
    def reserve(self) -> int: ...


class SpaceFigures(Protocol):
    """Where the figures of `SpaceCollector` come from."""

    max_saved_bytes: int | None

    @property
    def reserved_bytes(self) -> int: ...
    @property
    def saved_bytes(self) -> int: ...
    @property
    def disks(self) -> Mapping[str, DiskFigures]: ...


class SpaceCollector(Collector):
    """Reads what was known at the last look: a scrape never waits for a disk."""

    def __init__(self, space: SpaceFigures) -> None:
        self._space = space

    def describe(self) -> list[Metric]:
        return []

    def collect(self) -> Iterator[Metric]:
        space = self._space
        yield GaugeMetricFamily("strata_saved_bytes", "Bytes of the files of completed saves", space.saved_bytes)
        yield GaugeMetricFamily("strata_reserved_bytes", "What the files of running saves may take at most", space.reserved_bytes)
        if space.max_saved_bytes is not None:
            yield GaugeMetricFamily("strata_max_saved_bytes", "What all files together may take", space.max_saved_bytes)
        free = GaugeMetricFamily("strata_disk_free_bytes", "Free bytes of a save root's file system", labels=["root"])
        reserve = GaugeMetricFamily("strata_disk_reserve_bytes", "Bytes that saves leave free there", labels=["root"])
        for root, disk in dict(space.disks).items():
            free.add_metric([root], disk.free)
            reserve.add_metric([root], disk.reserve)
        yield free
        yield reserve


def _pool(name: str, text: str, pool: PoolStats) -> GaugeMetricFamily:
    family = GaugeMetricFamily(name, text, labels=["state"])
    for state, count in (("free", pool.free), ("cached", pool.cached), ("referenced", pool.referenced)):
        family.add_metric([state], count)
    return family


def _counters(stats: EngineStats) -> list[tuple[str, str, float]]:
    return [
        ("strata_computed_tokens", "Tokens run through the model, recomputed ones included", stats.computed_tokens_total),
        ("strata_prefix_cache_queried_tokens", "Prompt tokens looked up in the prefix cache", stats.prefix_query_tokens_total),
        ("strata_prefix_cache_hit_tokens", "Prompt tokens that were not computed", stats.prefix_hit_tokens_total),
        ("strata_state_cache_hit_rows", "Rows times layers taken from cached hidden-state pages", stats.state_hit_rows_total),
        ("strata_preemptions", "Requests that lost their blocks and were resumed", stats.preemptions_total),
        ("strata_step_failures", "Steps that raised and were tried again in parts", stats.step_failures_total),
        ("strata_written_bytes", "Bytes written to files", stats.bytes_written_total),
        ("strata_write_seconds", "Time spent in writing", stats.write_seconds_total),
    ]
