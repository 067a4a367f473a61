"""Chooses one token per row of logits.

Per row, in this order: repetition penalty, presence and frequency penalty, logit bias; then greedy choice, or temperature,
top-k, top-p, min-p (the order of transformers' `generate`) and a draw. Log-probabilities are those of the untouched logits.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from engine.device.streams import to_device
from engine.errors import EngineError
from engine.request import SamplingParams, TokenLogprobs
from engine.sampling.draw import Lots, draw
from engine.sampling.logprobs import rows_at_once, token_logprobs
from engine.sampling.penalties import needs_penalties, penalise

__all__ = ["SampledRow", "SampledToken", "Sampler", "token_logprobs"]

MIN_TEMPERATURE = 1e-30
"""Below it a float32 temperature would be taken for zero."""


@dataclass(slots=True)
class SampledRow:
    """What is needed to choose a token for one request."""

    params: SamplingParams
    prompt_token_ids: Sequence[int]
    output_token_ids: Sequence[int]
    """Looked at only where a penalty or a bias is to be applied."""
    generator: torch.Generator | None
    """The request's own, made from its seed, for as long as the request lives: one number is drawn per token. None: not seeded."""


@dataclass(slots=True)
class SampledToken:
    """The token chosen for one row."""

    token_id: int
    logprobs: TokenLogprobs | None


@dataclass(frozen=True)
class Choice:
    """Tokens that were chosen on the device."""

    ids: torch.Tensor  # [rows] int64; -1: the row's logits were not finite
    reported: Sequence[int]
    """Rows whose log-probabilities were asked for."""
    raw: torch.Tensor | None  # [reported, vocab], their untouched logits


class Sampler:
    """Belongs to the engine thread. Requests without a seed share one generator, seeded by the operating system."""

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        self._vocab_size = vocab_size
        self._device = device
        self._generator = torch.Generator(device)
        self._generator.seed()

    def sample(self, logits: torch.Tensor, rows: Sequence[SampledRow]) -> list[SampledToken | EngineError]:
        """One token per row of `[rows, vocab]` float32 logits, which are modified.

        A row whose logits hold NaN or +inf (or nothing but -inf) gets an `EngineError` instead; the other rows are not affected.
        """
        if not rows:
            return []
        choice = self.choose(logits, rows)
        return self.answers(choice, rows, choice.ids.tolist())

    def choose(self, logits: torch.Tensor, rows: Sequence[SampledRow]) -> "Choice":
        """The first half of `sample`: nothing of it waits for a device, but for penalties."""
        assert logits.shape == (len(rows), self._vocab_size)
        reported = [i for i, row in enumerate(rows) if row.params.logprobs is not None]
        raw = logits[reported] if reported else None  # a copy
        for i, row in enumerate(rows):
            if needs_penalties(row.params):
                penalise(logits[i], row.params, row.prompt_token_ids, row.output_token_ids)
        best, ids = logits.max(-1)  # of equal ones the lowest id
        sound = best.isfinite()
        self._draw(logits, best, sound, rows, ids)
        return Choice(ids.masked_fill_(~sound, -1), reported, raw)

    def answers(self, choice: "Choice", rows: Sequence[SampledRow], chosen: Sequence[int]) -> list[SampledToken | EngineError]:
        """The second half: `chosen` are the choice's ids on the host."""
        logprobs = {} if choice.raw is None else self._logprobs(choice.raw, choice.reported, rows, chosen)
        return self._answers(chosen, logprobs)

    def _draw(self, logits: torch.Tensor, best: torch.Tensor, sound: torch.Tensor, rows: Sequence[SampledRow], ids: torch.Tensor) -> None:
        """Overwrites the ids of rows that aren't greedy."""
        for (top_k, nucleus, _), members in self._alike(rows).items():
            params = [rows[i].params for i in members]
            index = to_device(torch.tensor(members), self._device)
            temperature = self._column([max(p.temperature, MIN_TEMPERATURE) for p in params])
            scores = (logits[index] - best[index, None]) / temperature  # the largest is 0, so none can overflow
            lots = Lots(
                torch.where(sound[index, None], scores, 0.0),
                self._column([p.top_p for p in params]),
                self._column([p.min_p for p in params]),
                self._uniform([rows[i] for i in members]),
            )
            ids[index] = draw(lots, top_k, nucleus=nucleus)

    def _alike(self, rows: Sequence[SampledRow]) -> dict[tuple[int, bool, int], list[int]]:
        """Rows that can be drawn for together: the same top-k, and with or without top-p. Bounded in size.

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
        """`[rows, 1]` float64 in [0, 1): from the request's own generator where it has one, the others in one call."""
        numbers = torch.rand(len(rows), 1, dtype=torch.float64, device=self._device, generator=self._generator)
        for i, row in enumerate(rows):
            if row.generator is not None:
                own = torch.rand(1, dtype=torch.float64, device=row.generator.device, generator=row.generator)
                numbers[i] = own.to(self._device)
        return numbers

    def _logprobs(
        self, raw: torch.Tensor, reported: Sequence[int], rows: Sequence[SampledRow], chosen: Sequence[int]
    ) -> dict[int, TokenLogprobs]:
        sound = [at for at, i in enumerate(reported) if chosen[i] >= 0]
        members = [reported[at] for at in sound]
        asked = [rows[i].params.logprobs or 0 for i in members]
        found = token_logprobs(raw[sound], [chosen[i] for i in members], max(asked, default=0))
        cut = (TokenLogprobs(f.token_id, f.logprob, f.rank, f.top[:count]) for f, count in zip(found, asked, strict=True))
        return dict(zip(members, cut, strict=True))

    def _answers(self, chosen: Sequence[int], logprobs: dict[int, TokenLogprobs]) -> list[SampledToken | EngineError]:
        return [
            SampledToken(token_id, logprobs.get(i)) if token_id >= 0 else EngineError("no token can be chosen: the logits are not finite")
            for i, token_id in enumerate(chosen)
        ]

    def _column(self, values: list[float]) -> torch.Tensor:
        return to_device(torch.tensor(values, dtype=torch.float32), self._device)[:, None]
