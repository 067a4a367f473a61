"""What one round of one system under test gave."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Answer:
    """One request: how long it took until its file could be read, or until it was answered where it has none."""

    seconds: float
    path: Path | None
    token_times: tuple[float, ...] = ()
    """Of a stream: when each token came, on the clock of this process."""

    @property
    def seconds_per_token(self) -> float:
        """Of a stream: the mean time between tokens."""
        return (self.token_times[-1] - self.token_times[0]) / (len(self.token_times) - 1)


@dataclass(frozen=True)
class Round:
    """All requests of one round, in the order of the prompts. The clock stopped when the last file could be read."""

    num_prompt_tokens: int
    wall_seconds: float
    answers: Sequence[Answer]
    peak_rss_bytes: int | None
    num_output_tokens: int = 0

    @property
    def tokens_per_second(self) -> float:
        return self.num_prompt_tokens / self.wall_seconds

    @property
    def output_tokens_per_second(self) -> float:
        return self.num_output_tokens / self.wall_seconds

    @property
    def decode_step_seconds(self) -> float:
        """Of streams: the mean time between a request's tokens while every request was generating, prompts being done with."""
        begin = max(answer.token_times[0] for answer in self.answers)
        end = min(answer.token_times[-1] for answer in self.answers)
        steps = statistics.median(sum(begin < time <= end for time in answer.token_times) for answer in self.answers)
        return (end - begin) / steps if steps else 0.0

    def latency(self, quantile: float) -> float:
        """Seconds within which that share of the requests was answered (nearest rank)."""
        ordered = sorted(answer.seconds for answer in self.answers)
        return ordered[min(len(ordered) - 1, round(quantile * (len(ordered) - 1)))]


@dataclass(frozen=True)
class Summary:
    """Medians over the rounds of one system under test."""

    label: str
    tokens_per_second: float
    slowest: float
    fastest: float
    p50_seconds: float
    p95_seconds: float
    peak_rss_bytes: int | None
    output_tokens_per_second: float


def summarize(label: str, rounds: Sequence[Round]) -> Summary:
    """The median of each figure; the largest of the peaks of memory."""
    rates = [each.tokens_per_second for each in rounds]
    peaks = [each.peak_rss_bytes for each in rounds if each.peak_rss_bytes is not None]
    return Summary(
        label=label,
        tokens_per_second=statistics.median(rates),
        slowest=min(rates),
        fastest=max(rates),
        p50_seconds=statistics.median(each.latency(0.50) for each in rounds),
        p95_seconds=statistics.median(each.latency(0.95) for each in rounds),
        peak_rss_bytes=max(peaks, default=None),
        output_tokens_per_second=statistics.median(each.output_tokens_per_second for each in rounds),
    )
