"""Figures that a running service tells at `/metrics`."""

from collections.abc import Mapping
from contextlib import closing

from prometheus_client.parser import text_string_to_metric_families

from benchmarks.client import connect

Figures = Mapping[tuple[str, str], float]
"""Values by the sample's name and its `le` label ("" where it has none)."""


def scrape(url: str) -> Figures:
    """All samples, those that differ in labels other than `le` added up."""
    with closing(connect(url)) as connection:
        connection.request("GET", "/metrics")
        text = connection.getresponse().read().decode()
    figures: dict[tuple[str, str], float] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            key = (sample.name, sample.labels.get("le", ""))
            figures[key] = figures.get(key, 0.0) + sample.value
    return figures


def increase(before: Figures, after: Figures, name: str) -> float:
    """By how much one sample without buckets has grown."""
    return after[name, ""] - before.get((name, ""), 0.0)


def step_sizes(before: Figures, after: Figures) -> list[int]:
    """Numbers of tokens that steps had in between, as the upper ends of the histogram's buckets that hold any."""
    name = "strata_batch_tokens_bucket"
    ends = sorted(float(end) for key, end in after if key == name and end != "+Inf")
    counts = [after[name, _label(end, after)] - before.get((name, _label(end, after)), 0.0) for end in ends]
    return [int(end) for end, count, below in zip(ends, counts, [0.0, *counts], strict=False) if count > below]


def _label(end: float, figures: Figures) -> str:
    return next(label for name, label in figures if name == "strata_batch_tokens_bucket" and label != "+Inf" and float(label) == end)
