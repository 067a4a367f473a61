"""What one round of one system under test gave."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Answer:
    """One request: how long it took, and the file that came of it where one was asked for."""

    seconds: float
    path: Path | None


@dataclass(frozen=True)
class Round:
    """All requests of one round, in the order of the prompts. The clock stopped when the last answer was there."""

    num_prompt_tokens: int
    wall_seconds: float
    answers: Sequence[Answer]
    peak_rss_bytes: int | None

    @property
    def tokens_per_second(self) -> float:
        return self.num_prompt_tokens / self.wall_seconds

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
    )
