"""Runs one batch through the model: captured rows to their pages, sampled rows to the sampler."""

from collections.abc import Sequence as List
from dataclasses import dataclass

import torch

from engine.attention.facade import AttentionBackend, GroupPlan, SequencePlan
from engine.batch import Batch, num_scored
from engine.cache.kv import KVCache
from engine.cache.pool import NULL_BLOCK
from engine.cache.sink import RowSink
from engine.errors import EngineError
from engine.models.base import ForwardBatch, Model
from engine.penalties import needs_penalties
from engine.request import TokenLogprobs
from engine.sampler import SampledRow, SampledToken, Sampler, token_logprobs
from engine.sequence import Sequence

_SCORED_ROWS_AT_ONCE = 128
"""Rows of logits that are in memory at a time while prompts are scored."""


@dataclass(frozen=True)
class StepResult:
    """Per sampled chunk of the batch its token, or what kept it from having one; per scored prompt its new log-probabilities."""

    tokens: List[SampledToken | EngineError]
    prompt_logprobs: List[tuple[Sequence, List[TokenLogprobs]]]


class ModelRunner:
    """Belongs to the engine thread."""

    def __init__(self, model: Model, kv: KVCache, sink: RowSink, attention: AttentionBackend) -> None:
        self._model = model
        self._kv = kv
        self._sink = sink
        self._attention = attention
        self._sampler = Sampler(model.config.vocab_size, model.device)

    def execute(self, batch: Batch) -> StepResult:
        """When it returns, every captured row stands in its page. When it raises, it may be called again for the same tokens."""
        try:
            return self._execute(batch)
        except BaseException:
            self._sink.discard()
            raise

    def _execute(self, batch: Batch) -> StepResult:
        hidden = self._model.forward(self._forward_batch(batch))
        self._capture_norm(batch, hidden)
        scored = self._score_prompts(batch, hidden)
        tokens = self._sample(batch, hidden)
        self._sink.flush()
        return StepResult(tokens, scored)

    def _forward_batch(self, batch: Batch) -> ForwardBatch:
        device = self._model.device

        def capture(layer: int, hidden: torch.Tensor) -> None:
            wanted = batch.captures.get(layer)
            if wanted is not None:
                self._sink.put(wanted.select(hidden), wanted.slots)

        return ForwardBatch(
            token_ids=batch.token_ids.to(device, non_blocking=True),
            positions=batch.positions.to(device, non_blocking=True),
            rows_at_layer=batch.rows_at_layer,
            attention=self._attention.plan(self._sequence_plans(batch), self._group_plans(batch)),
            capture=capture,
            final_rows=None if batch.final_rows is None else batch.final_rows.to(device, non_blocking=True),
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

    def _sample(self, batch: Batch, hidden: torch.Tensor) -> list[SampledToken | EngineError]:
        if not batch.sampled:
            return []
        rows = hidden.index_select(0, torch.tensor(batch.sampled_rows, device=hidden.device))
        logits = self._model.logits(self._model.final_norm(rows))
        return self._sampler.sample(logits, [_sampled_row(chunk.sequence) for chunk in batch.sampled])

    def _score_prompts(self, batch: Batch, hidden: torch.Tensor) -> list[tuple[Sequence, list[TokenLogprobs]]]:
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


def _sampled_row(sequence: Sequence) -> SampledRow:
    params = sequence.request.sampling
    return SampledRow(
        params=params,
        prompt_token_ids=sequence.request.prompt_token_ids,
        output_token_ids=sequence.token_ids[sequence.num_prompt_tokens :] if needs_penalties(params) else (),
        generator=sequence.generator,
    )
