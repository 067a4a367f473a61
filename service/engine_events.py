"""The way of outputs from the engine thread to the task that answers a request.

The engine calls `EngineEvents` once per step; one `call_soon_threadsafe` carries all outputs of the step to the event loop, where they
are added to the collectors of their requests. A reader that lags finds one merged update, however many steps have passed.
"""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from engine.errors import EngineError, EngineUnavailable
from engine.request import FinishReason, RequestOutput, TokenLogprobs
from engine.saves.spec import SaveEvent
from service.observe.metrics import Metrics


@dataclass
class Update:
    """What has become known of one choice since its reader last looked."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: Sequence[TokenLogprobs | None] | None = None
    finish_reason: FinishReason | None = None
    stop_token_id: int | None = None
    num_cached_tokens: int = 0
    error: EngineError | None = None
    save_changed: bool = False

    def merge(self, output: RequestOutput) -> None:
        self.token_ids.extend(output.token_ids)
        self.logprobs.extend(output.logprobs or ())
        self.prompt_logprobs = self.prompt_logprobs or output.prompt_logprobs
        self.finish_reason = output.finish_reason or self.finish_reason
        self.stop_token_id = output.stop_token_id if output.stop_token_id is not None else self.stop_token_id
        self.num_cached_tokens = max(self.num_cached_tokens, output.num_cached_tokens)
        self.error = output.error or self.error


class Collector:
    """Collects what happens to the choices of one HTTP request. Used on the event loop only, with one reader at a time."""

    def __init__(self) -> None:
        self._updates: dict[int, Update] = {}
        self._waiter: asyncio.Future[None] | None = None

    def add(self, index: int, output: RequestOutput) -> None:
        self._update_of(index).merge(output)

    def add_save_change(self, index: int) -> None:
        self._update_of(index).save_changed = True

    async def take(self, timeout_seconds: float | None = None) -> Mapping[int, Update]:
        """Waits until there is something, then takes all of it; nothing where that took longer than `timeout_seconds` seconds."""
        if not self._updates:
            await self._wait(timeout_seconds)
        updates, self._updates = self._updates, {}
        return updates

    async def _wait(self, timeout_seconds: float | None) -> None:
        # Once per token of every stream: an asyncio.Event within an asyncio.timeout takes several times as long.
        loop = asyncio.get_running_loop()
        self._waiter = loop.create_future()
        timer = None if timeout_seconds is None else loop.call_later(timeout_seconds, self._wake)
        try:
            await self._waiter
        finally:
            self._waiter = None
            if timer is not None:
                timer.cancel()

    def _update_of(self, index: int) -> Update:
        self._wake()
        return self._updates.setdefault(index, Update())

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


Receiver = Callable[[RequestOutput], None]


class EngineEvents:
    """The engine's listener: brings its events to the event loop, where `receivers` wait by request id."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self._loop: asyncio.AbstractEventLoop | None = None
        self._receivers: dict[str, Receiver] = {}
        self._on_save: Callable[[SaveEvent], None] = lambda event: None
        self._on_dead: Callable[[BaseException], None] = lambda error: None

    def bind(self, loop: asyncio.AbstractEventLoop, on_save: Callable[[SaveEvent], None], on_dead: Callable[[BaseException], None]) -> None:
        """`on_save` is called on the thread of the event, `on_dead` on the loop. Called before the engine starts."""
        self._loop, self._on_save, self._on_dead = loop, on_save, on_dead

    def attach(self, request_id: str, receiver: Receiver) -> None:
        self._receivers[request_id] = receiver

    def detach(self, request_id: str) -> None:
        """Outputs of this request are dropped from now on."""
        self._receivers.pop(request_id, None)

    @property
    def attached(self) -> int:
        return len(self._receivers)

    def on_step(self, outputs: Sequence[RequestOutput], num_tokens: int, seconds: float) -> None:
        self._call(self._deliver, outputs, num_tokens, seconds)

    def on_save(self, event: SaveEvent) -> None:
        self._on_save(event)

    def on_dead(self, error: BaseException) -> None:
        self._call(self._deliver_death, error)

    def _call(self, function: Callable[..., None], *arguments: object) -> None:
        # A loop that has closed has no readers left.
        if self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(function, *arguments)

    def _deliver(self, outputs: Sequence[RequestOutput], num_tokens: int, seconds: float) -> None:
        self._metrics.step(num_tokens, seconds)
        for output in outputs:
            receiver = self._receivers.get(output.request_id)
            if receiver is not None:
                receiver(output)

    def _deliver_death(self, error: BaseException) -> None:
        self._on_dead(error)
        # The engine has answered what it held; this is for what it took over and lost.
        for request_id, receiver in list(self._receivers.items()):
            receiver(RequestOutput(request_id, finish_reason="error", error=EngineUnavailable("the engine has failed")))
