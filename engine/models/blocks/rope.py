"""Rotary position embeddings: the frequencies of each variant, the table of a model, and the rotation.

Two variants (dynamic and longrope) have frequencies that depend on the length of the sequence. A reference that runs a
whole prompt at once picks them by that prompt's length. Keys in a cache were rotated when they were computed, so a
sequence that grows past the border would mix two sets, and a row would depend on how its request was cut into chunks.
So the set is chosen once per process, by the context limit that the server runs with: at most the original length, the
short (unscaled) set; above it, the long set (or the one scaled for exactly that limit). vLLM chooses for longrope alike.
"""

import math
from dataclasses import dataclass
from typing import Protocol

import torch
from torch.nn.functional import pad

RotaryAngles = tuple[torch.Tensor, torch.Tensor]
"""Cosines, and sines with the sign of the rotation: `[rows, 1, head_dim]` each."""


class Rope(Protocol):
    """One variant with its settings."""

    @property
    def attention_factor(self) -> float:
        """Scale of both cosines and sines."""

    def inverse_frequencies(self, dim: int, max_model_len: int) -> torch.Tensor:
        """`[dim / 2]` float32 radians per position. `max_model_len` is the context limit that the model runs with."""


def _exponents(dim: int) -> torch.Tensor:
    return torch.arange(0, dim, 2, dtype=torch.float32) / dim


def _plain(theta: float, dim: int) -> torch.Tensor:
    inverse: torch.Tensor = 1.0 / theta ** _exponents(dim)
    return inverse


@dataclass(frozen=True)
class DefaultRope:
    """RoFormer (arXiv 2104.09864): theta ** (-2i / dim)."""

    theta: float
    attention_factor: float = 1.0

    def inverse_frequencies(self, dim: int, max_model_len: int) -> torch.Tensor:
        return _plain(self.theta, dim)


@dataclass(frozen=True)
class LinearRope:
    """Position interpolation (arXiv 2306.15595): positions divided by `factor`."""

    theta: float
    factor: float
    attention_factor: float = 1.0

    def inverse_frequencies(self, dim: int, max_model_len: int) -> torch.Tensor:
        return _plain(self.theta, dim) / self.factor


@dataclass(frozen=True)
class DynamicRope:
    """NTK-aware scaling of theta for sequences longer than the model was trained with; see the module for the choice of length."""

    theta: float
    factor: float
    original_length: int
    attention_factor: float = 1.0

    def inverse_frequencies(self, dim: int, max_model_len: int) -> torch.Tensor:
        length = max(max_model_len, self.original_length)
        stretch = self.factor * length / self.original_length - (self.factor - 1)
        return _plain(self.theta * stretch ** (dim / (dim - 2)), dim)


@dataclass(frozen=True)
class YarnRope:
    """YaRN (arXiv 2309.00071): interpolates slow dimensions, keeps fast ones, with a ramp between."""

    theta: float
    factor: float
    original_length: int
    attention_factor: float
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    context_length: int | None = None
    """Positions that the settings name: factor times the original length. None where they don't name that."""

    def inverse_frequencies(self, dim: int, max_model_len: int) -> torch.Tensor:
        low, high = self._ramp_bounds(dim)
        ramp = ((torch.arange(dim // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
        frequencies = _plain(self.theta, dim)
        return frequencies / self.factor * ramp + frequencies * (1 - ramp)

    def _ramp_bounds(self, dim: int) -> tuple[float, float]:
        low, high = self._dimension_of(self.beta_fast, dim), self._dimension_of(self.beta_slow, dim)
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, dim - 1)
        return low, high + 0.001 if high == low else high

    def _dimension_of(self, rotations: float, dim: int) -> float:
        """The dimension that makes this many rotations over the original length."""
        return dim * math.log(self.original_length / (rotations * 2 * math.pi)) / (2 * math.log(self.theta))


def yarn_attention_factor(factor: float, mscale: float | None, mscale_all_dim: float | None) -> float:
    """The paper's 0.1 ln(factor) + 1, or the ratio of two such with DeepSeek's coefficients."""
    if mscale and mscale_all_dim:
        return yarn_magnitude(factor, mscale) / yarn_magnitude(factor, mscale_all_dim)
    return yarn_magnitude(factor, 1.0)


def yarn_magnitude(factor: float, coefficient: float) -> float:
    """0.1 c ln(factor) + 1; 1 where nothing is stretched."""
    return 0.1 * coefficient * math.log(factor) + 1.0 if factor > 1 else 1.0


@dataclass(frozen=True)
class Llama3Rope:
    """Llama 3.1: wavelengths beyond the original context divided by `factor`, short ones kept, a smooth step between."""

    theta: float
    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_length: int
    attention_factor: float = 1.0

    def inverse_frequencies(self, dim: int, max_model_len: int) -> torch.Tensor:
        frequencies = _plain(self.theta, dim)
        rotations = self.original_length * frequencies / (2 * math.pi)  # over the original length
        kept = ((rotations - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor)).clamp(0, 1)
        return (1 - kept) * frequencies / self.factor + kept * frequencies


@dataclass(frozen=True)
class LongRope:
    """LongRoPE (arXiv 2402.13753): a divisor per frequency, from one of two lists; see the module for the choice."""

    theta: float
    short_factor: tuple[float, ...]
    long_factor: tuple[float, ...]
    original_length: int
    attention_factor: float

    def inverse_frequencies(self, dim: int, max_model_len: int) -> torch.Tensor:
        divisors = self.long_factor if max_model_len > self.original_length else self.short_factor
        inverse: torch.Tensor = 1.0 / (torch.tensor(divisors, dtype=torch.float32) * self.theta ** _exponents(dim))
        return inverse


def longrope_attention_factor(factor: float, original_length: int) -> float:
    """The paper's sqrt(1 + ln(factor) / ln(original length))."""
    return math.sqrt(1 + math.log(factor) / math.log(original_length)) if factor > 1 else 1.0


@dataclass(frozen=True)
class RotaryLayout:
    """Which dimensions of a head are rotated, and with which others."""

    dim: int
    """The first so many; the rest pass as they are."""
    interleaved: bool = False
    """Pairs are neighbours (2i, 2i + 1), instead of (i, i + dim / 2)."""

    def order(self, head_dim: int) -> list[int] | None:
        """The stored dimension for each place of a head whose pairs are (i, i + head_dim / 2); None where they are already.

        Queries and keys are put in this order when they are loaded: their products don't depend on it.
        """
        half = self.dim // 2
        firsts, seconds = (range(0, self.dim, 2), range(1, self.dim, 2)) if self.interleaved else (range(half), range(half, self.dim))
        passing = range(self.dim, head_dim)
        order = [*firsts, *passing[: len(passing) // 2], *seconds, *passing[len(passing) // 2 :]]
        return None if order == list(range(head_dim)) else order


class RotaryTable:
    """Cosines and sines of every position up to the context limit.

    A table rather than a computation per step: a vectorised cosine may round its last few elements differently, so a
    row's angles would depend on its place in the batch.
    """

    def __init__(
        self, rope: Rope, head_dim: int, max_model_len: int, *, dtype: torch.dtype, device: torch.device, rotary_dim: int | None = None
    ) -> None:
        """`rotary_dim`: the dimensions that are rotated, in the places that `RotaryLayout.order` gives them (None: all)."""
        rotary_dim = rotary_dim or head_dim
        frequencies = rope.inverse_frequencies(rotary_dim, max_model_len)
        angles = torch.outer(torch.arange(max_model_len, dtype=torch.float32), frequencies)  # [positions, rotary_dim / 2]
        passing = (head_dim - rotary_dim) // 2
        cos = pad(angles.cos().mul_(rope.attention_factor), (0, passing), value=1.0)
        sin = pad(angles.sin().mul_(rope.attention_factor), (0, passing))
        self._table = torch.cat((cos, sin), dim=-1).to(device=device, dtype=dtype)  # [positions, head_dim]

    def lookup(self, positions: torch.Tensor) -> RotaryAngles:
        """Angles of packed rows; `positions` is `[rows]` int64 on the table's device."""
        cos, sin = self._table[positions].unsqueeze(1).chunk(2, dim=-1)
        return torch.cat((cos, cos), dim=-1), torch.cat((-sin, sin), dim=-1)


def rotate(states: torch.Tensor, angles: RotaryAngles) -> torch.Tensor:
    """Rotates each pair (i, i + head_dim / 2) by its angle: `[rows, heads, head_dim]` in and (contiguous) out."""
    cos, signed_sin = angles
    first, second = states.chunk(2, dim=-1)
    return torch.cat((second, first), dim=-1).mul_(signed_sin).addcmul_(states, cos)
