"""One completion request while it runs: its choices, from submission to the end of the last save."""

import asyncio
import logging
import time
from collections.abc import AsyncIterator
from functools import partial
from typing import Any

from engine.errors import SaveError
from engine.request import RequestOutput
from service.engine_events import Collector, Update
from service.errors import as_service_error
from service.observe.metrics import RequestOutcome
from service.requests.choice import Choice, ChoiceResult, Delta
from service.requests.spans import RequestSpans
from service.saves.groups import SaveGroup
from service.saves.life import Ending, LiveSave
from service.services import Services

log = logging.getLogger(__name__)

ABANDONED = Ending("cancelled", SaveError("cancelled", "every client of the request has disconnected"))
FAILED = Ending("failed", SaveError("cancelled", "the request that this save belonged to failed"))


class Generation:
    """Used on the event loop. Its driver must call `leave` in the end, whatever happened.

    `keeps_results`: whether anybody asks for a choice as a whole; a stream has sent it in parts.
    """

    def __init__(
        self,
        services: Services,
        choices: list[Choice],
        group: SaveGroup | None,
        *,
        request_id: str,
        keeps_output: bool,
        keeps_results: bool,
        owner: str | None,
    ) -> None:
        self._owner = owner
        self._admitted: set[int] = set()
        self.choices = choices
        self.request_id = request_id
        self.created = int(time.time())
        self.results = [ChoiceResult() for _ in choices]
        self._services = services
        self._group = group
        self._keeps_output = keeps_output
        self._keeps_results = keeps_results
        self._collector = Collector()
        self._started = time.monotonic()
        self._closed = False
        self._driver: asyncio.Task[None] | None = None
        """Computes the rest for others once the request that began it has left."""
        self._spans = RequestSpans.below_current(services.tracing, request_id)
        if group is not None:
            group.on_abandoned = partial(self.close, "aborted")

    def submit(self) -> None:
        """Hands all choices to the engine, or none; targets of choices not taken over are abandoned.

        Raises the engine's refusal, and `Busy` where the owner has too many.
        """
        events, metrics = self._services.events, self._services.metrics
        submitted = 0
        try:
            self._services.shares.choices.acquire(self._owner, len(self.choices))
            self._admitted = {choice.index for choice in self.choices}
            for choice in self.choices:
                events.attach(choice.engine_id, partial(self._receive, choice))
                if choice.save is not None:
                    self._watch(choice.save, choice)
                self._services.engine.submit(choice.request)
                submitted += 1
        except BaseException:
            self._withdraw(submitted)
            raise
        for choice in self.choices:
            if self._group is not None and choice.save is not None:
                self._group.submitted(choice.save, choice.engine_id)
        metrics.admitted(sum(len(choice.prompt.token_ids) for choice in self.choices))

    def _watch(self, save: LiveSave, choice: Choice) -> None:
        save.on_change = partial(self._collector.add_save_change, choice.index)
        if self._spans is not None:
            save.on_end = partial(self._spans.save_ended, save)

    def _receive(self, choice: Choice, output: RequestOutput) -> None:
        self._collector.add(choice.index, output)
        if self._spans is not None:
            self._spans.received(choice, output)
        if output.finish_reason is not None:
            self._release_slot(choice)
            if self._closed:
                self._services.events.detach(choice.engine_id)

    def _release_slot(self, choice: Choice) -> None:
        """Releases the choice's slot in the engine."""
        if choice.index in self._admitted:
            self._admitted.remove(choice.index)
            self._services.shares.choices.release(self._owner)

    async def deltas(self) -> AsyncIterator[tuple[Choice, Delta]]:
        """What is added to the choices, until all of them are done. A choice that fails doesn't end the others."""
        async for step in self.progress():
            assert step is not None
            yield step

    async def progress(self, timeout_seconds: float | None = None) -> AsyncIterator[tuple[Choice, Delta] | None]:
        """As `deltas`, with None in between whenever nothing has been added for `timeout_seconds` seconds.

        May be left at any time and begun again: what has been taken in is in `results` then.
        """
        while not all(choice.done for choice in self.choices):
            updates = await self._collector.take(timeout_seconds)
            if not updates:
                yield None
            for step in [self._advance(self.choices[index], update) for index, update in updates.items()]:
                yield step

    def _advance(self, choice: Choice, update: Update) -> tuple[Choice, Delta]:
        was_done = choice.text_done
        delta = choice.advance(update)
        if self._keeps_results:
            self.results[choice.index].add(delta)
        if choice.text_done and not was_done:
            self._text_done(choice)
        return choice, delta

    async def run(self) -> None:
        """Computes everything. Raises the first failure, after the other choices have been ended and their files taken back."""
        async for choice, _ in self.deltas():
            if choice.error is not None or choice.failure() is not None:
                await self._fail(choice)
        for choice in self.choices:
            if choice.failure() is not None:
                await self._fail(choice)

    async def finish(self) -> None:
        """Computes the rest where nobody waits for the answer itself, and closes."""
        try:
            async for _ in self.deltas():
                pass
            failed = any(choice.failure() is not None for choice in self.choices)
            self.close("failed" if failed else "completed")
        except Exception:
            self.close("failed")
            raise

    def leave(self) -> None:
        """The driver leaves. The rest is computed for other readers of the same saves, else it is aborted."""
        if self._group is None or not self._group.leave():
            self.close("aborted")
        elif not self._closed:
            self._driver = self._services.start_in_background(self.finish())

    def close(self, outcome: RequestOutcome) -> None:
        """Aborts what still runs and releases everything. Saves that need not be waited for go on. Idempotent."""
        if self._closed:
            return
        self._closed = True
        for choice in self.choices:
            self._release_slot(choice)
            if not choice.done:
                self._services.engine.abort(choice.engine_id)
            if self._spans is None or self._spans.ended(choice):  # else its end is still to be heard of
                self._services.events.detach(choice.engine_id)
        if self._group is not None and outcome != "completed":
            self._group.abort_all(ABANDONED if outcome == "aborted" else FAILED)
        if self._driver is not None and self._driver is not asyncio.current_task():
            self._driver.cancel()
        self._observe(outcome)

    def usage(self) -> dict[str, Any]:
        """Prompts count once, however many choices they have."""
        prompts = {id(choice.prompt): choice for choice in self.choices}
        prompt_tokens = sum(len(choice.prompt.token_ids) for choice in prompts.values())
        completion_tokens = sum(len(choice.token_ids) for choice in self.choices)
        return {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": completion_tokens,
            "total_tokens": prompt_tokens + completion_tokens,
            "prompt_tokens_details": {"cached_tokens": sum(choice.num_cached_tokens for choice in prompts.values())},
        }

    def _text_done(self, choice: Choice) -> None:
        if self._group is None or choice.save is None:
            return
        if choice.error is not None:
            self._group.abort(choice.save, FAILED)  # The engine's own word on the save says more, where it comes.
        else:
            kept = {"output": self.output(choice), "cached_tokens": choice.num_cached_tokens} if self._keeps_output else {}
            self._group.text_done(choice.save, **kept)

    def output(self, choice: Choice) -> dict[str, Any]:
        """What the record keeps of a choice."""
        result = self.results[choice.index]
        known = {"text": result.text, "token_ids": result.token_ids, "finish_reason": choice.finish_reason}
        more = {"stop_reason": choice.stop_reason, "logprobs": result.logprobs, "prompt_logprobs": choice.prompt_logprobs}
        return known | {name: value for name, value in more.items() if value is not None}

    async def _fail(self, choice: Choice) -> None:
        """Ends all choices, waits until nothing of their saves is left, and raises what went wrong with the first of them."""
        for other in self.choices:
            if not other.done:
                self._services.engine.abort(other.engine_id)
        if self._group is not None:
            self._group.abort_all(FAILED)
            while not self._group.ended:
                await self._collector.take()  # What the engine says now is that we have aborted it.
            choice = next((other for other in self.choices if other.save is self._group.first_failed), choice)
        raise choice.failure() or as_service_error(RuntimeError("a choice failed without a reason"))

    def _withdraw(self, submitted: int) -> None:
        for choice in self.choices:
            self._release_slot(choice)
            self._services.events.detach(choice.engine_id)
        for choice in self.choices[:submitted]:
            self._services.engine.abort(choice.engine_id)
        for choice in self.choices[submitted:]:
            if choice.save is not None:
                choice.save.spec.target.abandoned()

    def _observe(self, outcome: RequestOutcome) -> None:
        metrics = self._services.metrics
        metrics.request_ended(outcome, time.monotonic() - self._started)
        for choice in self.choices:
            metrics.generated(len(choice.token_ids))
            if choice.first_token_at is None or choice.last_token_at is None:
                continue
            metrics.first_token(choice.first_token_at - self._started)
            if len(choice.token_ids) > 1:
                metrics.time_per_token((choice.last_token_at - choice.first_token_at) / (len(choice.token_ids) - 1))
