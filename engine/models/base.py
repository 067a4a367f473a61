"""The protocol between a model and the engine that runs it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from engine.cache.spec import LayerCache


@dataclass(frozen=True)
class ModelConfig:
    """What the engine and the service need to know of a model."""

    architecture: str
    num_layers: int
    hidden_size: int
    vocab_size: int
    max_model_len: int
    """Positions the checkpoint was made for."""
    eos_token_ids: tuple[int, ...]
    checkpoint_dtype: torch.dtype
    """Where the configuration names none, that of the stored weights."""
    extendable: bool = False
    """The model may be run with more positions than `max_model_len`: its rotary scaling (dynamic NTK) is made for any length."""
    has_head: bool = True
    """False where the checkpoint has no LM head: it has hidden states, but no text and no log-probabilities."""
    soft_caps: bool = False
    """Some layer's attention has a soft cap."""
    attention_sinks: bool = False
    """Some layer's attention has sinks."""
    has_experts: bool = False
    """Some layer routes its rows to experts."""
    recordable: bool = True
    """Whether CUDA graphs can hold its steps. What waits for the device within a layer can't be recorded."""


class AttentionContext(Protocol):
    """The paged cache of one batch, as a layer sees it."""

    def attend(self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, options: "AttentionOptions") -> torch.Tensor:
        """Writes keys and values at the batch's slots and attends causally over each sequence's cache.

        Shapes: query `[rows, heads, head_dim]`, key and value `[rows, kv_heads, head_dim]`; returns `[rows, heads, head_dim]`.
        `rows` may be fewer than the batch's: the leading rows, whole sequences only.
        """


@dataclass(frozen=True)
class AttentionOptions:
    """Constants of one layer's attention."""

    scale: float
    window: int | None = None
    soft_cap: float | None = None
    """logits = cap * tanh(logits / cap), as in Gemma 2."""
    chunk: int | None = None
    """Chunked local attention, of so many positions: backends are given rows and tables that begin with each sequence's chunk."""
    sinks: torch.Tensor | None = None
    """`[heads]` float32: a logit per head that takes its share of the softmax and has no value, as in GPT-OSS."""


@dataclass(frozen=True)
class RecurrentRun:
    """Rows `first … end - 1` of a batch, one sequence's positions from `start` on."""

    first: int
    end: int
    start: int
    read: int
    """The slot with the state behind position `start - 1`; 0: there is none, since `start` is 0."""
    write: int
    """The slot for the state behind the last row."""


@dataclass(frozen=True)
class RecurrentSingles:
    """Sequences of one row each, none of them at position 0. All `[n]` int64 on the model's device."""

    rows: torch.Tensor
    reads: torch.Tensor
    writes: torch.Tensor


@dataclass(frozen=True)
class RecurrentRows:
    """One recurrent layer's part of a batch. What is read is never written in the same step, so a step can be repeated."""

    parts: Sequence[torch.Tensor]
    """Of the layer's state: `[slots, …]` each."""
    singles: RecurrentSingles | None
    runs: Sequence[RecurrentRun]


class RecurrentContext(Protocol):
    """The recurrent states of one batch, as layers see them."""

    def rows_of(self, layer: int, num_rows: int) -> RecurrentRows:
        """Of the leading `num_rows` rows, whole sequences."""


@dataclass
class ForwardBatch:
    """Packed tokens of one step. Sequences that need the most layers come first, so narrowing is a slice."""

    token_ids: torch.Tensor  # [rows] int64, on the model's device
    positions: torch.Tensor  # [rows] int64, on the model's device
    rows_at_layer: Sequence[int]
    """`rows_at_layer[k]`: how many leading rows run through decoder layer k (0-based); not increasing; one entry per layer."""
    attention: AttentionContext
    capture: Callable[[int, torch.Tensor], None]
    """Called as `capture(k, hidden)` for k = 0 (embeddings, all rows) and after each decoder layer that ran
    (k is the layer id; hidden is `[rows_at_layer[k - 1], width]`, after the last layer `final_rows` of it)."""
    recurrent: RecurrentContext | None = None
    """None: the model has no recurrent layers."""
    final_rows: torch.Tensor | None = None
    """`[n]` int64, on the model's device, ascending: the rows that are wanted after the last layer. None: all that reach it."""


class Model(Protocol):
    """A causal language model over packed tokens. All tensors are of the model's dtype and on its device."""

    config: ModelConfig
    dtype: torch.dtype
    device: torch.device

    def cache_layers(self) -> Sequence[LayerCache | None]:
        """What each decoder layer keeps in the cache, in layer order; None: nothing."""

    def forward(self, batch: ForwardBatch) -> torch.Tensor:
        """Residual stream after the last layer, before the final norm, of `final_rows`: `[final_rows, width]`.

        Without `final_rows`: `[rows_at_layer[-1], width]` (no rows: an empty tensor).
        """

    def final_norm(self, hidden: torch.Tensor) -> torch.Tensor:
        """The state "norm": `[rows, width]` of un-normed last-layer rows."""

    def logits(self, normed: torch.Tensor) -> torch.Tensor:
        """`[rows, vocab]` in float32 of normed rows."""
