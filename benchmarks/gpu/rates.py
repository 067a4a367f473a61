"""What a card reaches: prompts, text, memory, and its own rate of matrix products to hold against."""

import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from benchmarks.gpu.driver import Driver, Extraction, Rows, Run, synchronize
from benchmarks.gpu.model import ModelShape
from benchmarks.gpu.parity import Parity, compare
from engine.attention.sdpa import SdpaBackend
from engine.config import EngineConfig
from engine.layers import LayerId
from engine.models.base import Model

_RAGGED = ((5, 1), (3, 40, 7), (30, 2, 17, 9, 50))
"""Lengths of prompts that are run together, to compare replayed steps with plain ones: one of each size is padded."""


@dataclass(frozen=True)
class Sizes:
    """How much is run."""

    prompts: tuple[tuple[int, int], ...]
    """`(count, length)`, each at once."""
    samples: tuple[int, int]
    decode_batches: tuple[int, ...]
    decode_prompt: int
    new_tokens: int
    layers: tuple[LayerId, ...]
    max_model_len: int
    kv_tokens: int
    state_bytes: int
    batch_tokens: int | None
    matrix: int
    rounds: int


def full_sizes() -> Sizes:
    """For a model of Llama 8B's shape."""
    prompts = ((8, 8192), (64, 1024))
    return Sizes(prompts, (128, 1024), (1, 16, 128), 128, 64, (8, 16, 24, 32), 8448, 131_072, 3 << 30, None, 8192, 2)


def tiny_sizes() -> Sizes:
    """Every part in a second or two."""
    return Sizes(((2, 64), (4, 16)), (6, 16), (1, 3), 8, 6, (0, 2, "norm"), 128, 1024, 1 << 20, 64, 64, 1)


@dataclass(frozen=True)
class PrefillRate:
    """Prompts alone. Rates are tokens per second."""

    count: int
    length: int
    plain: float
    with_files: float
    with_copies: float
    """Rows go to host memory and no further."""
    share_of_matrix_rate: float
    """Of the plain run."""

    @property
    def overhead(self) -> float:
        """What extraction with files adds, as a share of the plain run's time."""
        return self.plain / self.with_files - 1

    @property
    def copy_overhead(self) -> float:
        return self.plain / self.with_copies - 1


@dataclass(frozen=True)
class DecodeRate:
    """Text, all requests at once. Tokens per second."""

    batch: int
    eager: float
    eager_with_files: float
    graphs: float | None
    """None: decoding steps can't be captured here."""
    graphs_with_files: float | None


@dataclass(frozen=True)
class PeakMemory:
    """Bytes on the device; None on a CPU."""

    plain: int | None
    with_extraction: int | None


@dataclass(frozen=True)
class Rates:
    """Everything that was measured."""

    matrix_flops: float
    """Operations per second of the best of some products of two large square matrices, in the model's dtype."""
    prefill: list[PrefillRate]
    decode: list[DecodeRate]
    memory: PeakMemory
    samples_per_second: float
    sample_length: int
    graph_parity: Parity | None
    """None: decoding steps can't be captured here."""
    graphs: str
    """How many graphs were recorded, or why none were."""


def measure(model: Model, shape: ModelShape, sizes: Sizes, folder: Path, say: Callable[[str], None]) -> Rates:
    """`folder` is where files are written (and removed at once)."""
    config = EngineConfig(
        "random",
        kv_cache_tokens=sizes.kv_tokens,
        state_cache_memory=sizes.state_bytes,
        max_batch_tokens=sizes.batch_tokens,
        trim_last_layer=False,  # else the plain runs would do less of the last layer, and the difference would look like overhead
        durability="none",
        cuda_graphs="off",
    )
    flops = matrix_flops(sizes.matrix, shape.dtype, model.device)
    say(f"matrix products: {flops / 1e12:.1f} TFLOP/s")
    saving = Extraction(sizes.layers, folder)
    with closing(Driver(model, config, sizes.max_model_len)) as driver:
        say(f"attention: {driver.parts.info.attention} ({driver.parts.info.attention_reason})")
        driver.run(1, min(length for _, length in sizes.prompts), 2)  # kernels are loaded
        memory = _peaks(driver, sizes, saving)
        prefill = [_prefill(driver, shape, sizes, count, length, flops, saving) for count, length in sizes.prompts]
        samples = min(driver.run(*sizes.samples, 1, saving).seconds for _ in range(sizes.rounds))
        say("prompts: done")
        eager = [_decode(driver, sizes, batch, saving) for batch in sizes.decode_batches]
        rows = [driver.rows(length, sizes.layers, folder) for length in _RAGGED]
    del driver  # its caches go before the next ones come
    fast = _with_graphs(model, config, sizes, saving, rows)
    say(f"graphs: {fast.told}")
    decode = [DecodeRate(batch, *plain, *rate) for batch, plain, rate in zip(sizes.decode_batches, eager, fast.rates, strict=True)]
    return Rates(flops, prefill, decode, memory, sizes.samples[0] / samples, sizes.samples[1], fast.parity, fast.told)


@dataclass(frozen=True)
class _Replayed:
    """What came of replayed steps."""

    told: str
    parity: Parity | None
    """Whether they save the rows that plain steps do."""
    rates: list[tuple[float | None, float | None]]
    """Of text, per batch."""


def _with_graphs(model: Model, config: EngineConfig, sizes: Sizes, saving: Extraction, rows: list[Rows]) -> _Replayed:
    """The KV cache takes what it takes by itself, since what is left to the graphs is to be seen to be enough."""
    with closing(Driver(model, replace(config, cuda_graphs="auto", kv_cache_tokens=None), sizes.max_model_len)) as driver:
        told, none = driver.parts.info.cuda_graphs, [(None, None)] * len(sizes.decode_batches)
        if not driver.has_graphs():
            recordable = driver.parts.info.attention != SdpaBackend.name
            return _Replayed(told, Parity("graphs", faults=[told]) if recordable else None, [*none])
        parity = compare("graphs", model.dtype, rows, [driver.rows(length, sizes.layers, _folder_of(saving)) for length in _RAGGED])
        if not driver.has_graphs():
            parity.faults.append("a step could not be replayed: see the log")
            return _Replayed(told, parity, [*none])
        return _Replayed(told, parity, [_decode(driver, sizes, batch, saving) for batch in sizes.decode_batches])


def _folder_of(saving: Extraction) -> Path:
    assert saving.folder is not None
    return saving.folder


def matrix_flops(size: int, dtype: torch.dtype, device: torch.device, tries: int = 10) -> float:
    """Operations per second, of the fastest try."""
    left, right = (torch.randn(size, size, dtype=dtype, device=device) for _ in range(2))
    best = torch.inf
    for _ in range(tries):
        synchronize(device)
        started = time.perf_counter()
        left @ right
        synchronize(device)
        best = min(best, time.perf_counter() - started)
    return 2 * size**3 / best


def _prefill(driver: Driver, shape: ModelShape, sizes: Sizes, count: int, length: int, flops: float, saving: Extraction) -> PrefillRate:
    """The ways take turns, so that a card that grows hot doesn't favour the first. The best of each counts."""
    ways = (None, saving, replace(saving, folder=None))
    runs: list[list[Run]] = [[], [], []]
    for _ in range(sizes.rounds):
        for number, way in enumerate(ways):
            runs[number].append(driver.run(count, length, 1, way))
    plain, files, copies = (count * length / min(run.seconds for run in of_way) for of_way in runs)
    reached = plain / length * shape.prefill_flops(length)
    return PrefillRate(count, length, plain, files, copies, reached / flops)


def _decode(driver: Driver, sizes: Sizes, batch: int, saving: Extraction) -> tuple[float, float]:
    plain, files = (driver.run(batch, sizes.decode_prompt, sizes.new_tokens, way) for way in (None, saving))
    return _rate(plain), _rate(files)


def _rate(run: Run) -> float:
    return run.decode_tokens / run.decode_seconds


def _peaks(driver: Driver, sizes: Sizes, saving: Extraction) -> PeakMemory:
    count, length = sizes.prompts[0]
    return PeakMemory(*(_peak(driver, count, length, way) for way in (None, saving)))


def _peak(driver: Driver, count: int, length: int, way: Extraction | None) -> int | None:
    if not torch.cuda.is_available():
        return None
    torch.cuda.reset_peak_memory_stats()
    driver.run(count, length, 1, way)
    return torch.cuda.max_memory_allocated()
