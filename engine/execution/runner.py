"""Runs one batch through the model: captured rows to their pages, sampled rows to the sampler."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from engine.attention.facade import AttentionBackend, GroupPlan, SequencePlan
from engine.cache.kv import KVCache
from engine.cache.pool import NULL_BLOCK
from engine.capture.sink import Landing, RowSink
from engine.device.streams import CopyStream, Moment, copy_stream, to_device
from engine.errors import EngineError
from engine.execution.batch import Batch, num_scored
from engine.execution.graphs import DecodeGraphs, GraphsOrNot, GraphStep
from engine.models.base import ForwardBatch, Model
from engine.request import TokenLogprobs
from engine.sampling.penalties import needs_penalties
from engine.sampling.sampler import Choice, SampledRow, SampledToken, Sampler, token_logprobs
from engine.scheduling.sequence import TokenSequence

_SCORED_ROWS_AT_ONCE = 128
"""Rows of logits that are in memory at a time while prompts are scored."""


@dataclass(frozen=True)
class StepResult:
    """Per sampled chunk of the batch its token, or what kept it from having one; per scored prompt its new log-probabilities."""

    tokens: Sequence[SampledToken | EngineError]
    prompt_logprobs: Sequence[tuple[TokenSequence, Sequence[TokenLogprobs]]]
    landing: Landing | None = None
    """Of the captured rows; None: they stand in their pages."""


@dataclass(frozen=True)
class Launched:
    """A step that the device was given, and whose tokens nobody has waited for."""

    batch: Batch
    choice: Choice
    ids: torch.Tensor  # [sampled], on the host once `arrived`
    arrived: Moment
    landing: Landing | None

    def ids_of(self, batch: Batch) -> torch.Tensor:
        """The tokens that a batch of single positions begins with, `[rows]` on the device: those that this step gives."""
        places = {chunk.sequence: place for place, chunk in enumerate(self.batch.sampled)}
        index = torch.tensor([places[chunk.sequence] for chunk in batch.chunks])
        # A row without a token goes on with any: its request fails before anybody sees what comes of it.
        return self.choice.ids.clamp_min(0).index_select(0, to_device(index, self.choice.ids.device))


class ModelRunner:
    """Belongs to the engine thread."""

    def __init__(
        self,
        model: Model,
        kv: KVCache,
        sink: RowSink,
        attention: AttentionBackend,
        graphs: DecodeGraphs | None = None,
        stream: CopyStream | None = None,
    ) -> None:
        """`graphs` compute the steps that they can; `stream` brings token ids to the host."""
        self._model = model
        self._kv = kv
        self._sink = sink
        self._attention = attention
        self._graphs = GraphsOrNot(graphs)
        self._stream = stream or copy_stream(model.device)
        self._sampler = Sampler(model.config.vocab_size, model.device)

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

    def execute(self, batch: Batch) -> StepResult:
        """When it returns, every captured row stands in its page or is on its way there. When it raises, it may be called again for the
        same tokens."""
        try:
            return self._execute(batch)
        except BaseException:
            self._sink.discard()
            raise

    def launch(self, batch: Batch, before: Launched | None = None) -> Launched:
        """Gives the device a step of which some rows are sampled and no prompt is scored, and waits for nothing.

        `before`: the step that gives the batch's token ids, which may be under way still; those of the batch itself are ignored then.
        When it raises, it may be called again.
        """
        try:
            logits, _ = self._forward(batch, None if before is None else before.ids_of(batch))
            assert logits is not None
            choice = self._sampler.choose(logits, _sampled_rows(batch))
            ids = torch.empty(choice.ids.shape, dtype=torch.int64, pin_memory=self._stream.pinned)
            arrived = self._stream.copy(ids, choice.ids)
            return Launched(batch, choice, ids, arrived, self._sink.flush())
        except BaseException:
            self._sink.discard()
            raise

    def finish(self, launched: Launched) -> StepResult:
        """Waits for the tokens of a step."""
        self._sink.collect()
        launched.arrived.wait()
        tokens = self._sampler.answers(launched.choice, _sampled_rows(launched.batch), launched.ids.tolist())
        return StepResult(tokens, [], launched.landing)

    def _execute(self, batch: Batch) -> StepResult:
        return self._finish(batch, *self._forward(batch))

    def _forward(
        self, batch: Batch, token_ids: torch.Tensor | None = None
    ) -> tuple[torch.Tensor | None, list[tuple[TokenSequence, list[TokenLogprobs]]]]:
        """Logits of the sampled rows, and scored prompts. `token_ids`: on the device, in place of the batch's."""
        replayed = self._graphs.run(batch, self._sequence_plans(batch), lambda: self._group_plans(batch), token_ids)
        if replayed is not None:
            self._capture_replayed(batch, replayed)
            return replayed.logits.index_select(0, self._sampled_rows(batch)), []
        hidden = self._model.forward(self._forward_batch(batch, token_ids))
        self._capture_norm(batch, hidden)
        scored = self._score_prompts(batch, hidden)
        logits = None
        if batch.sampled:
            logits = self._model.logits(self._model.final_norm(hidden.index_select(0, self._sampled_rows(batch))))
        return logits, scored

    def _finish(self, batch: Batch, logits: torch.Tensor | None, scored: list[tuple[TokenSequence, list[TokenLogprobs]]]) -> StepResult:
        # A device is still at the model: time to see to rows of earlier steps, before the sampled tokens are waited for.
        self._sink.collect()
        tokens: list[SampledToken | EngineError] = []
        if logits is not None:
            tokens = self._sampler.sample(logits, _sampled_rows(batch))
        return StepResult(tokens, scored, self._sink.flush())

    def _sampled_rows(self, batch: Batch) -> torch.Tensor:
        return to_device(torch.tensor(batch.sampled_rows), self._model.device)

    def _forward_batch(self, batch: Batch, token_ids: torch.Tensor | None) -> ForwardBatch:
        device = self._model.device

        def capture(layer: int, hidden: torch.Tensor) -> None:
            wanted = batch.captures.get(layer)
            if wanted is not None:
                self._sink.put(wanted.select(hidden), wanted.slots)

        return ForwardBatch(
            token_ids=to_device(batch.token_ids, device) if token_ids is None else token_ids,
            positions=to_device(batch.positions, device),
            rows_at_layer=batch.rows_at_layer,
            attention=self._attention.plan(self._sequence_plans(batch), self._group_plans(batch)),
            capture=capture,
            final_rows=None if batch.final_rows is None else to_device(batch.final_rows, device),
        )

    def _sequence_plans(self, batch: Batch) -> list[SequencePlan]:
        return [SequencePlan(chunk.start, chunk.count) for chunk in batch.chunks]

    def _group_plans(self, batch: Batch) -> list[GroupPlan]:
        """Groups that some chunk reaches. A chunk that doesn't is narrowed away before, so its table may say anything."""
        plans = []
        for index, group in enumerate(self._kv.groups):
            if batch.rows_at_layer[group.spec.layers[0]]:
                size = group.spec.block_size
                tables = [c.sequence.tables.blocks[index] or [NULL_BLOCK] * -(-c.end // size) for c in batch.chunks]
                plans.append(GroupPlan(group.spec.layers, size, group.keys, group.values, tables))
        return plans

    def _capture_norm(self, batch: Batch, hidden: torch.Tensor) -> None:
        wanted = batch.captures.get("norm")
        if wanted is not None:
            self._sink.put(self._model.final_norm(wanted.select(hidden)), wanted.slots)

    def _capture_replayed(self, batch: Batch, step: GraphStep) -> None:
        for layer, wanted in batch.captures.items():
            self._sink.put(wanted.select(step.state(layer)), wanted.slots)

    def _score_prompts(self, batch: Batch, hidden: torch.Tensor) -> list[tuple[TokenSequence, list[TokenLogprobs]]]:
        scored = []
        for chunk, row, position in batch.logprob_rows:
            sequence = chunk.sequence
            top = sequence.request.sampling.prompt_logprobs or 0
            count = num_scored(chunk, position)
            found: list[TokenLogprobs] = []
            for at in range(0, count, _SCORED_ROWS_AT_ONCE):
                n = min(_SCORED_ROWS_AT_ONCE, count - at)
                logits = self._model.logits(self._model.final_norm(hidden[row + at : row + at + n]))
                targets = sequence.token_ids[position + at + 1 : position + at + n + 1]
                found += token_logprobs(logits, targets, top)
            scored.append((sequence, found))
        return scored


def _sampled_rows(batch: Batch) -> list[SampledRow]:
    return [_sampled_row(chunk.sequence) for chunk in batch.sampled]


def _sampled_row(sequence: TokenSequence) -> SampledRow:
    params = sequence.request.sampling
    return SampledRow(
        params=params,
        prompt_token_ids=sequence.request.prompt_token_ids,
        output_token_ids=sequence.token_ids[sequence.num_prompt_tokens :] if needs_penalties(params) else (),
        generator=sequence.generator,
    )
