"""What the machine could do at best: the model's own matrix products at the best rate found for their shapes, and its weights read once.

For every shape three calls are tried, `linear` with the weight as it lies in a checkpoint, with its transposed copy, and with the weight
packed for oneDNN, at several numbers of rows; whichever call and number of rows costs least per row is what counts. No system under test
has to know of it.
"""

import json
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import torch

from engine.errors import ConfigError
from engine.models.blocks.linear import DenseLinear, Linear, PackedLinears

MIN_TRIES = 3
MIN_SECONDS = 0.05
"""Each call is tried so often and so long, and the best try counts."""


@dataclass(frozen=True)
class Product:
    """A weight `[outputs, inputs]` that every row is multiplied with, in so many layers."""

    name: str
    outputs: int
    inputs: int
    layers: int

    @property
    def flops_per_row(self) -> int:
        return 2 * self.outputs * self.inputs * self.layers


@dataclass(frozen=True)
class ModelShape:
    """The matrix products of a Llama-like decoder. Embeddings are looked up, not multiplied."""

    layers: tuple[Product, ...]
    head: Product

    @property
    def flops_per_token(self) -> int:
        """Twice the parameters, embeddings and head left out."""
        return sum(product.flops_per_row for product in self.layers)

    def weight_bytes(self, dtype: torch.dtype) -> int:
        """All weights that a decoding step reads, the head's included."""
        return (self.flops_per_token + self.head.flops_per_row) // 2 * dtype.itemsize


def model_shape(folder: Path) -> ModelShape:
    """Read from the model's configuration."""
    config = json.loads((folder / "config.json").read_text())
    width, inner, layers = (config[name] for name in ("hidden_size", "intermediate_size", "num_hidden_layers"))
    heads = config["num_attention_heads"]
    head_dim = config.get("head_dim") or width // heads
    qkv = (heads + 2 * config.get("num_key_value_heads", heads)) * head_dim
    shapes = (("QKV", qkv, width), ("output", width, heads * head_dim), ("gate-up", 2 * inner, width), ("down", width, inner))
    return ModelShape(
        tuple(Product(name, outputs, inputs, layers) for name, outputs, inputs in shapes),
        Product("head", config["vocab_size"], width, 1),
    )


@dataclass
class ProductClock:
    """Finds the best times of products; measured again between rounds, it keeps the best of all."""

    dtype: torch.dtype
    best: dict[tuple[str, int], float] = field(default_factory=dict)
    """Seconds of one layer's product, by its name and the number of rows."""

    @torch.inference_mode()
    def measure(self, products: Iterable[Product], row_counts: Iterable[int]) -> None:
        for product in products:
            weight = torch.rand(product.outputs, product.inputs).to(self.dtype)
            ways = (DenseLinear(weight), DenseLinear(weight.t().contiguous().t()), *_packed(weight))
            for rows in row_counts:
                states = torch.rand(rows, product.inputs).to(self.dtype)
                seconds = min(_best_seconds(way, states) for way in ways)
                key = (product.name, rows)
                self.best[key] = min(seconds, self.best.get(key, seconds))

    def seconds_per_row(self, product: Product) -> float:
        """At the number of rows that costs least per row, all layers together."""
        return product.layers * min(seconds / rows for (name, rows), seconds in self.best.items() if name == product.name)

    def seconds_of_rows(self, product: Product, rows: int) -> float:
        return product.layers * self.best[product.name, rows]

    def prefill_limit(self, shape: ModelShape) -> float:
        """Prompt tokens per second if there were nothing but the layers' products."""
        return 1.0 / sum(self.seconds_per_row(product) for product in shape.layers)

    def prefill_gflops(self, shape: ModelShape) -> float:
        """The rate behind `prefill_limit`, in 10^9 operations per second."""
        return shape.flops_per_token * self.prefill_limit(shape) / 1e9

    def decode_step_limit(self, shape: ModelShape, rows: int, memory_bytes_per_second: float) -> float:
        """Seconds of a step of so many rows that can't be undercut: the weights are read once, and the products computed."""
        reading = shape.weight_bytes(self.dtype) / memory_bytes_per_second
        computing = sum(self.seconds_of_rows(product, rows) for product in (*shape.layers, shape.head))
        return max(reading, computing)

    def lines(self, shape: ModelShape, row_counts: Sequence[int]) -> Iterable[str]:
        """A table of rates in 10^9 operations per second."""
        yield f"  {'products, GFLOP/s':<20}" + "".join(f"{rows:>8}" for rows in row_counts) + "  rows"
        for product in shape.layers:
            rates = (product.flops_per_row / product.layers * rows / self.best[product.name, rows] / 1e9 for rows in row_counts)
            yield f"  {product.name:<20}" + "".join(f"{rate:>8.0f}" for rate in rates)


def _packed(weight: torch.Tensor) -> Iterator[Linear]:
    """Nothing where torch can't."""
    with suppress(ConfigError):
        yield PackedLinears(weight.dtype).of(weight)


def _best_seconds(product: Linear, states: torch.Tensor) -> float:
    best, tries, until = float("inf"), 0, time.perf_counter() + MIN_SECONDS
    while tries < MIN_TRIES or time.perf_counter() < until:
        started = time.perf_counter()
        product(states)
        best, tries = min(best, time.perf_counter() - started), tries + 1
    return best
