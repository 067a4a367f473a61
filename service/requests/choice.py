"""One choice of a completion while it is being computed."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, cast

from engine.errors import EngineError, SaveError
from engine.request import EngineRequest, FinishReason, TokenLogprobs
from service.engine_events import Update
from service.errors import ComputationError, SaveFailed, ServiceError, as_service_error
from service.saves.life import LiveSave
from service.text.choice_text import ChoiceText, Echo, LogprobsReport, PromptReport, TokenNames, logprobs_object, prompt_report, with_top
from service.text.prompts import PreparedPrompt


@dataclass
class Delta:
    """What has been added to a choice."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: dict[str, Any] | None = None

    @property
    def empty(self) -> bool:
        return not (self.text or self.token_ids or self.logprobs)


@dataclass(frozen=True)
class Reports:
    """What a choice's answer says of log-probabilities, and in which form."""

    names: TokenNames
    form: LogprobsReport = logprobs_object
    prompt_top: int | None = None
    """How many of the likeliest tokens the prompt's own report has at each place; None: there is no such report."""


@dataclass
class Choice:
    """Counts what has arrived; `token_ids` is the whole output, the one that completed a stop included."""

    index: int
    prompt: PreparedPrompt
    request: EngineRequest
    save: LiveSave | None
    reports: Reports
    text: ChoiceText
    echo: Echo | None
    """None unless asked for; set to None again once it has been sent."""
    waits_for_save: bool
    token_ids: list[int] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    """The stop string or the stop token of the request that ended the text; None for any other end."""
    prompt_logprobs: PromptReport | None = None
    """Once the first output has come, where asked for."""
    error: EngineError | None = None
    num_cached_tokens: int = 0
    first_token_at: float | None = None
    last_token_at: float | None = None
    _echoed: int = 0

    @property
    def engine_id(self) -> str:
        return self.request.request_id

    @property
    def text_done(self) -> bool:
        return self.finish_reason is not None

    @property
    def save_ended(self) -> bool:
        return self.save is None or self.save.ended

    @property
    def done(self) -> bool:
        # A save that failed says why in its own event, so that one is waited for whenever something went wrong.
        if self.error is not None:
            return self.save_ended
        return self.text_done and (self.save_ended or not self.waits_for_save)

    def failure(self) -> ServiceError | None:
        """What went wrong, once the choice is done."""
        save_id = None if self.save is None else self.save.id
        save_error = self.save.error if self.save is not None else None
        if isinstance(self.error, SaveError) or (self.error is None and save_error is not None):
            # The save's own event knows more than the request that was ended for it.
            return SaveFailed(save_id, save_error or cast(SaveError, self.error))
        if self.error is None:
            return None
        error = as_service_error(self.error)
        if isinstance(error, ComputationError):
            error.save_id = save_id
        return error

    def advance(self, update: Update) -> Delta:
        """Takes what the engine has sent and returns what is new for the client."""
        self.num_cached_tokens = max(self.num_cached_tokens, update.num_cached_tokens)
        self.error = self.error or update.error
        ended_now = update.finish_reason is not None and self.finish_reason is None
        self.finish_reason = self.finish_reason or update.finish_reason
        if update.error is not None or not (update.token_ids or ended_now):
            return Delta()
        self._take_time(len(update.token_ids))
        first = len(self.token_ids)
        self.token_ids.extend(update.token_ids)
        text = self.text.push(update.token_ids, ended_now, update.stop_token_id)
        if ended_now and self.finish_reason == "stop":
            self.stop_reason = self._stop_reason(update)
        self._report_prompt(update)
        delta = self._with_echo(update, Delta(text, update.token_ids, self._logprobs(update, first)))
        # The prompt's scores are large and nobody else wants them, so the update doesn't keep them beside the reports.
        update.prompt_logprobs = None
        return delta

    def _stop_reason(self, update: Update) -> str | int | None:
        """An end-of-sequence token that the request doesn't name is the usual end, which has no reason."""
        if update.stop_token_id is None:
            return self.text.matched_stop
        return update.stop_token_id if update.stop_token_id in self.request.sampling.stop_token_ids else None

    def _report_prompt(self, update: Update) -> None:
        if self.reports.prompt_top is not None and update.prompt_logprobs is not None:
            self.prompt_logprobs = prompt_report(self.reports.names, update.prompt_logprobs, self.reports.prompt_top)

    def _take_time(self, count: int) -> None:
        if count:
            self.last_token_at = time.monotonic()
            self.first_token_at = self.first_token_at or self.last_token_at

    def _logprobs(self, update: Update, first: int) -> dict[str, Any] | None:
        if self.request.sampling.logprobs is None:
            return None
        offsets = [self._echoed + offset for offset in self.text.offsets(first, len(update.token_ids))]
        return self.reports.form(self.reports.names, update.token_ids, update.logprobs, offsets)

    def _with_echo(self, update: Update, delta: Delta) -> Delta:
        if self.echo is None:
            return delta
        echo, self.echo = self.echo, None
        self._echoed = len(echo.text)
        if delta.logprobs is not None and echo.offsets is not None:
            delta.logprobs["text_offset"] = [self._echoed + offset for offset in delta.logprobs["text_offset"]]
            report = self._echoed_logprobs(update, echo.offsets)
            _extend(report, delta.logprobs)
            delta.logprobs = report
        delta.text = echo.text + delta.text
        return delta

    def _echoed_logprobs(self, update: Update, offsets: Sequence[int]) -> dict[str, Any]:
        unscored: list[TokenLogprobs | None] = [None] * len(self.prompt.token_ids)
        scores = with_top(update.prompt_logprobs or unscored, self.request.sampling.logprobs or 0)
        return self.reports.form(self.reports.names, self.prompt.token_ids, scores, offsets)


def _extend(report: dict[str, Any], more: dict[str, Any]) -> None:
    for name, values in more.items():
        report[name].extend(values)


@dataclass
class ChoiceResult:
    """All of a choice, for an answer in one piece."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: dict[str, Any] | None = None

    def add(self, delta: Delta) -> None:
        """The first delta's log-probabilities become this object's: they may hold a long prompt's, and are not copied."""
        self.text += delta.text
        self.token_ids.extend(delta.token_ids)
        if delta.logprobs is not None:
            if self.logprobs is None:
                self.logprobs = delta.logprobs
            else:
                _extend(self.logprobs, delta.logprobs)
