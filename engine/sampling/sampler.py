"""Chooses one token per row of logits.

Per row, in this order: repetition penalty, presence and frequency penalty, logit bias, banned tokens; then greedy
sampling, or temperature, top-k, top-p, min-p (the order of transformers' `generate`) and random sampling. Log-probabilities are of the
untouched logits.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from engine.device.packing import arrays_to_device
from engine.device.streams import to_device
from engine.errors import EngineError
from engine.request import SamplingParams, TokenLogprobs
from engine.sampling.logprobs import TokenScores, rows_at_once, score, token_logprobs
from engine.sampling.penalties import Penalties
from engine.sampling.top_k_top_p import SamplingBatch, sample_tokens

__all__ = ["SampledRow", "SampledToken", "Sampler", "token_logprobs"]

MIN_TEMPERATURE = 1e-30
"""Below it a float32 temperature would be taken for zero."""


@dataclass(slots=True)
class SampledRow:
    """What is needed to choose a token for one request."""

    params: SamplingParams
    penalties: Penalties | None
    """The request's own, for as long as it lives. None: its logits stay as they are."""
    generator: torch.Generator | None
    """The request's own, on the host, made from its seed, for as long as the request lives: one number is drawn per token. None: not
    seeded."""


@dataclass(slots=True)
class SampledToken:
    """The token chosen for one row."""

    token_id: int
    logprobs: TokenLogprobs | None


@dataclass(frozen=True)
class SamplerOutput:
    """Tokens that were chosen on the device."""

    ids: torch.Tensor  # [rows] int64; -1: the row's logits were not finite
    reported: Sequence[int]
    """Rows whose log-probabilities were asked for."""
    scores: TokenScores | None
    """Of the reported rows, from their untouched logits; None: there are none."""

    def moved(self, move: Callable[[torch.Tensor], torch.Tensor]) -> "SamplerOutput":
        return SamplerOutput(move(self.ids), self.reported, None if self.scores is None else self.scores.moved(move))


class Sampler:
    """Belongs to the engine thread. Requests without a seed share one generator, seeded by the operating system."""

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        self._vocab_size = vocab_size
        self._device = device
        self._generator = torch.Generator()  # on the host, like those of requests: all numbers of a step go to the device together
        self._generator.seed()

    def sample(self, logits: torch.Tensor, rows: Sequence[SampledRow]) -> list[SampledToken | EngineError]:
        """One token per row of `[rows, vocab]` float32 logits, which are modified.

        A row whose logits hold NaN or +inf (or nothing but -inf) gets an `EngineError` instead; the other rows are not affected.
        """
        if not rows:
            return []
        return self.finish(self.launch(logits, rows).moved(torch.Tensor.cpu), rows)

    def launch(self, logits: torch.Tensor, rows: Sequence[SampledRow]) -> SamplerOutput:
        """The first half of `sample`: nothing of it waits for a device."""
        assert logits.shape == (len(rows), self._vocab_size)
        reported = [i for i, row in enumerate(rows) if row.params.logprobs is not None]
        index = to_device(torch.tensor(reported), self._device) if reported else None
        raw = None if index is None else logits.index_select(0, index)  # a copy
        for i, row in enumerate(rows):
            if row.penalties is not None:
                row.penalties.apply(logits[i])
        best, ids = logits.max(-1)  # of equal ones the lowest id
        sound = best.isfinite()
        self._sample_randomly(logits, best, sound, rows, ids)
        scores = None
        if index is not None and raw is not None:
            most = max(rows[i].params.logprobs or 0 for i in reported)
            scores = score(raw, ids.index_select(0, index), most)
        return SamplerOutput(ids.masked_fill_(~sound, -1), reported, scores)

    def finish(self, output: SamplerOutput, rows: Sequence[SampledRow]) -> list[SampledToken | EngineError]:
        """The second half, for an output whose tensors are on the host."""
        chosen = output.ids.tolist()
        return self._tokens(chosen, self._logprobs(output, rows, chosen))

    def _sample_randomly(
        self, logits: torch.Tensor, best: torch.Tensor, sound: torch.Tensor, rows: Sequence[SampledRow], ids: torch.Tensor
    ) -> None:
        """Overwrites the ids of rows that aren't greedy."""
        for (top_k, nucleus, _), members in self._group_rows(rows).items():
            index, temperature, top_p, min_p, uniform = self._settings_columns([rows[i] for i in members], members)
            scores = (logits[index] - best[index, None]) / temperature  # the largest is 0, so none can overflow
            batch = SamplingBatch(torch.where(sound[index, None], scores, 0.0), top_p, min_p, uniform)
            ids[index] = sample_tokens(batch, top_k, nucleus=nucleus)

    def _settings_columns(self, rows: Sequence[SampledRow], members: Sequence[int]) -> list[torch.Tensor]:
        """On the device: the rows' numbers `[rows]`; temperature, top-p, min-p and a random number for each, `[rows, 1]`."""
        params = [row.params for row in rows]
        columns = ([max(p.temperature, MIN_TEMPERATURE) for p in params], [p.top_p for p in params], [p.min_p for p in params])
        settings = [np.array(column, np.float32)[:, None] for column in columns]
        return arrays_to_device([np.array(members, np.int64), *settings, self._uniform(rows).numpy()], self._device)

    def _group_rows(self, rows: Sequence[SampledRow]) -> dict[tuple[int, bool, int], list[int]]:
        """Rows that can be sampled together: the same top-k, and with or without top-p. Bounded in size.

        Rows with unlike top-k stay apart, so that what a seeded row draws can't depend on its neighbours.
        """
        most = rows_at_once(self._vocab_size, self._device)
        alike: dict[tuple[int, bool], list[int]] = {}
        for i, row in enumerate(rows):
            if row.params.temperature > 0:
                top_k = row.params.top_k if 0 < row.params.top_k < self._vocab_size else 0
                alike.setdefault((top_k, row.params.top_p < 1), []).append(i)
        return {(*key, at): members[at : at + most] for key, members in alike.items() for at in range(0, len(members), most)}

    def _uniform(self, rows: Sequence[SampledRow]) -> torch.Tensor:
        """`[rows, 1]` float64 in [0, 1), on the host: from the request's own generator where it has one, the others in one call."""
        numbers = torch.rand(len(rows), 1, dtype=torch.float64, generator=self._generator)
        for i, row in enumerate(rows):
            if row.generator is not None:
                numbers[i] = torch.rand(1, dtype=torch.float64, generator=row.generator)
        return numbers

    def _logprobs(self, output: SamplerOutput, rows: Sequence[SampledRow], chosen: Sequence[int]) -> dict[int, TokenLogprobs]:
        """By row, of those that are reported and have a token."""
        if output.scores is None:
            return {}
        scored = output.scores.of(np.array([chosen[i] for i in output.reported], np.int64))
        found = zip(output.reported, scored.objects(0, len(scored)), strict=True)
        asked = {i: rows[i].params.logprobs or 0 for i in output.reported}
        return {i: TokenLogprobs(f.token_id, f.logprob, f.rank, f.top[: asked[i]]) for i, f in found if chosen[i] >= 0}

    def _tokens(self, chosen: Sequence[int], logprobs: dict[int, TokenLogprobs]) -> list[SampledToken | EngineError]:
        return [
            SampledToken(token_id, logprobs.get(i)) if token_id >= 0 else EngineError("no token can be sampled: the logits are not finite")
            for i, token_id in enumerate(chosen)
        ]
