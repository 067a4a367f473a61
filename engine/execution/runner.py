"""Runs one step's arrays through the model: captured rows to their pages, logits of sampled rows, scores of prompts."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from engine.attention.facade import AttentionBackend, GroupCache, GroupStep, cache_of
from engine.cache.groups import CacheGroup, KVGroup
from engine.cache.pool import IntArray
from engine.capture.sink import Landing, RowSink
from engine.device.packing import arrays_to_device
from engine.device.streams import SingleStreamCheck
from engine.execution.graphs import DecodeGraphs, GraphRunner
from engine.execution.recurrent import RecurrentCache, RecurrentStates
from engine.execution.step_input import CaptureInput, ScoreInput, StepInput
from engine.layers import LayerId
from engine.models.base import ForwardBatch, Model
from engine.sampling.logprobs import TokenScores, joined, score

_SCORED_ROWS_AT_ONCE = 128
"""Rows of logits that are in memory at a time while prompts are scored."""


@dataclass(frozen=True)
class StepOutput:
    """What a step gives before tokens are chosen."""

    logits: torch.Tensor | None  # [sampled, vocab] float32, on the device; None: nothing is sampled
    scores: Sequence[TokenScores]
    """For each of the step's `scores`, on the device."""
    landing: Landing
    """Of the captured rows."""


def caches_of(groups: Sequence[CacheGroup]) -> list[GroupCache | RecurrentCache]:
    """The tensors of the groups, by their number."""
    return [cache_of(group) if isinstance(group, KVGroup) else RecurrentCache(group.spec.layers, group.tensors) for group in groups]


class StepArrays:
    """A step's index arrays on the device, which go there in one transfer. Each is asked for by the array that it was."""

    def __init__(self, step: StepInput, device: torch.device) -> None:
        self._step = step  # keeps the arrays, by whose identity theirs are found
        arrays = [step.token_ids, step.positions, step.sampled_rows, step.unknown_rows, step.unknown_from]
        arrays += [] if step.final_rows is None else [step.final_rows]
        arrays += [wanted.targets for wanted in step.scores]
        arrays += [wanted.rows for wanted in step.captures.values() if _as_slice(wanted.rows) is None]
        by_identity = {id(array): array for array in arrays}
        self._sent = dict(zip(by_identity, arrays_to_device(list(by_identity.values()), device), strict=True))

    def __getitem__(self, array: IntArray) -> torch.Tensor:
        return self._sent[id(array)]


class ModelRunner:
    """Belongs to the engine thread. What it is given goes to one stream of the device, step after step.

    The scheduler gives out no block that a step in flight reads or writes. But a step that was withdrawn may still run, and its blocks be
    given out: whoever gets them comes behind it on that stream.
    """

    def __init__(
        self,
        model: Model,
        caches: Sequence[GroupCache | RecurrentCache],
        sink: RowSink,
        attention: AttentionBackend,
        graphs: DecodeGraphs | None = None,
    ) -> None:
        """`caches`: of the groups of layers, by their number; `graphs` compute the steps that they can."""
        self._model = model
        self._caches = caches
        self._sink = sink
        self._attention = attention
        self._graphs = GraphRunner(graphs)
        self._stream = SingleStreamCheck(model.device)

    @property
    def busy(self) -> bool:
        """Whether captured rows are on their way to their pages."""
        return self._sink.busy

    @property
    def has_graphs(self) -> bool:
        """Whether decoding steps are recorded and replayed."""
        return self._graphs.usable

    def collect(self, *, wait: bool = False) -> None:
        """See `RowSink.collect`."""
        self._sink.collect(wait=wait)

    def run(self, step: StepInput, sampled_before: torch.Tensor | None = None) -> StepOutput:
        """Gives the device a step, and waits for nothing. When it raises, it may be called again for the same step, or for a part of it.

        Captured rows are sent off before it returns, so before a token is chosen or waited for.

        `sampled_before`: `[sampled]` int64 on the device, the tokens of the step before, where the step has rows whose tokens aren't known.
        """
        self._stream.check()
        try:
            groups = [(self._attention_cache(number), group) for number, group in step.groups.items()]
            arrays = StepArrays(step, self._model.device)
            given = _given_tokens(step, arrays, sampled_before)
            logits, scores = self._replay(step, arrays, groups, given) or self._forward(step, arrays, groups, given)
            return StepOutput(logits, scores, self._sink.flush())
        except BaseException:
            self._sink.discard()
            raise

    def states(self, step: StepInput) -> dict[LayerId, torch.Tensor]:
        """All layers' states of a step's rows, and those of "norm": `[rows, width]` float32 on the host each. Nothing is captured."""
        states: dict[LayerId, torch.Tensor] = {}

        def keep(layer: LayerId, hidden: torch.Tensor) -> None:
            states[layer] = hidden.float().cpu()

        groups = [(self._attention_cache(number), group) for number, group in step.groups.items()]
        keep(
            "norm",
            self._model.final_norm(self._model.forward(self._forward_batch(step, StepArrays(step, self._model.device), groups, keep))),
        )
        return states

    def _replay(
        self, step: StepInput, arrays: StepArrays, groups: Sequence[GroupStep], given: torch.Tensor | None
    ) -> tuple[torch.Tensor | None, list[TokenScores]] | None:
        replayed = self._graphs.run(step, groups, given)
        if replayed is None:
            return None
        for layer, wanted in step.captures.items():
            self._put(wanted, replayed.state(layer), arrays)
        return replayed.logits.index_select(0, arrays[step.sampled_rows]), []

    def _forward(
        self, step: StepInput, arrays: StepArrays, groups: Sequence[GroupStep], given: torch.Tensor | None
    ) -> tuple[torch.Tensor | None, list[TokenScores]]:
        def capture(layer: int, hidden: torch.Tensor) -> None:
            wanted = step.captures.get(layer)
            if wanted is not None:
                self._put(wanted, hidden, arrays)

        hidden = self._model.forward(self._forward_batch(step, arrays, groups, capture, given))
        norm = step.captures.get("norm")
        if norm is not None:
            self._sink.put(self._model.final_norm(_select(norm, hidden, arrays)), torch.from_numpy(norm.slots))
        scores = [self._score(wanted, hidden, arrays[wanted.targets]) for wanted in step.scores]
        logits = None
        if len(step.sampled_rows):
            logits = self._model.logits(self._model.final_norm(hidden.index_select(0, arrays[step.sampled_rows])))
        return logits, scores

    def _forward_batch(
        self,
        step: StepInput,
        arrays: StepArrays,
        groups: Sequence[GroupStep],
        capture: Callable[[int, torch.Tensor], None],
        given: torch.Tensor | None = None,
    ) -> ForwardBatch:
        return ForwardBatch(
            token_ids=arrays[step.token_ids] if given is None else given,
            positions=arrays[step.positions],
            rows_at_layer=step.rows_at_layer,
            attention=self._attention.plan(step.sequences, groups),
            capture=capture,
            recurrent=self._recurrent(step),
            final_rows=None if step.final_rows is None else arrays[step.final_rows],
        )

    def _attention_cache(self, number: int) -> GroupCache:
        cache = self._caches[number]
        assert isinstance(cache, GroupCache)
        return cache

    def _recurrent(self, step: StepInput) -> RecurrentStates | None:
        groups = []
        for number, given in step.slots.items():
            cache = self._caches[number]
            assert isinstance(cache, RecurrentCache)
            groups.append((cache, given))
        return RecurrentStates(step.sequences, groups) if groups else None

    def _put(self, wanted: CaptureInput, hidden: torch.Tensor, arrays: StepArrays) -> None:
        self._sink.put(_select(wanted, hidden, arrays), torch.from_numpy(wanted.slots))

    def _score(self, wanted: ScoreInput, hidden: torch.Tensor, targets: torch.Tensor) -> TokenScores:
        pieces = []
        for at in range(0, len(targets), _SCORED_ROWS_AT_ONCE):
            end, first = min(at + _SCORED_ROWS_AT_ONCE, len(targets)), wanted.first_row
            logits = self._model.logits(self._model.final_norm(hidden[first + at : first + end]))
            pieces.append(score(logits, targets[at:end], wanted.num_top))
        return joined(pieces)


def _given_tokens(step: StepInput, arrays: StepArrays, sampled_before: torch.Tensor | None) -> torch.Tensor | None:
    """`[rows]` on the device, where the host doesn't know them all."""
    if not len(step.unknown_rows):
        return None
    assert sampled_before is not None, "nobody gives the tokens that aren't known"
    # A row without a token goes on with any: its request fails before anybody sees what comes of it.
    tokens = sampled_before.clamp_min(0).index_select(0, arrays[step.unknown_from])
    return arrays[step.token_ids].index_copy(0, arrays[step.unknown_rows], tokens)


def _select(wanted: CaptureInput, hidden: torch.Tensor, arrays: StepArrays) -> torch.Tensor:
    """The wanted rows of `hidden`: a slice where they stand side by side, as they mostly do."""
    rows = _as_slice(wanted.rows)
    return hidden.index_select(0, arrays[wanted.rows]) if rows is None else hidden[rows]


def _as_slice(rows: IntArray) -> slice | None:
    """Ascending rows, where they stand side by side."""
    first, last = int(rows[0]), int(rows[-1])
    return slice(first, last + 1) if last - first + 1 == len(rows) else None
