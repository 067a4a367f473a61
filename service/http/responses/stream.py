"""Server-sent events of a completion."""

from collections.abc import AsyncIterator, Sequence

from fastapi.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from service.errors import ServiceError, as_service_error
from service.http.errors import error_body
from service.http.responses.bodies import chunk_choice, encoded, envelope, first_chunk_choice, replayed_response, top_ids
from service.registry.records import SaveRecord
from service.requests.admission import Plan
from service.requests.choice import Choice, Delta
from service.requests.generation import Generation
from service.requests.replay import failure_of
from service.services import Services
from service.wire import Json

DONE = b"data: [DONE]\n\n"
HEARTBEAT_SECONDS = 15.0
"""How long a stream may be silent: proxies commonly give up after 60 seconds."""
HEARTBEAT = b": keep-alive\n\n"
"""A comment, which clients skip: it keeps connections open that something between here and there would close for being idle."""


def event(body: Json) -> bytes:
    return b"data: " + encoded(body) + b"\n\n"


class EventStream(StreamingResponse):
    """A stream that ends its generation whatever ends the stream, a client that leaves before the first chunk included."""

    media_type = "text/event-stream"

    def __init__(self, content: AsyncIterator[bytes], generation: Generation | None) -> None:
        super().__init__(content, headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        self._generation = generation

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            if self._generation is not None:
                self._generation.leave()


class CompletionStream:
    """The chunks of one generation. A choice's last chunk is sent when its save has completed; failures come at the end."""

    def __init__(self, services: Services, plan: Plan, generation: Generation) -> None:
        self._services = services
        self._plan = plan
        self._generation = generation
        self._finished: set[int] = set()
        options = plan.body.stream_options
        self._include_usage = options is not None and options.include_usage
        self._continuous_usage = options is not None and options.include_usage and options.continuous_usage_stats

    async def events(self) -> AsyncIterator[bytes]:
        choices = self._generation.choices
        try:
            for choice in choices:
                body = first_chunk_choice(self._plan, choice)
                if body is not None:
                    yield self._chunk(body, top_ids(self._plan))
            async for step in self._generation.progress(HEARTBEAT_SECONDS):
                if step is None:
                    yield HEARTBEAT
                    continue
                for body in self._news(*step):
                    yield self._chunk(body)
            for choice in choices:
                for body in self._news(choice, Delta()):
                    yield self._chunk(body)
        except Exception as error:
            yield event(error_body(as_service_error(error)))
            self._generation.close("failed")
            yield DONE
            return
        for last in self._ending():
            yield last

    def _news(self, choice: Choice, delta: Delta) -> list[Json]:
        """Chunks to send after a choice has moved on: one or none."""
        final = choice.done and choice.failure() is None and choice.index not in self._finished
        if final:
            self._finished.add(choice.index)
        return [chunk_choice(self._plan, choice, delta, final)] if final or not delta.empty else []

    def _ending(self) -> list[bytes]:
        failures = {choice.index: error for choice in self._generation.choices if (error := choice.failure()) is not None}
        self._generation.close("failed" if failures else "completed")
        if failures:
            return [*(event(_error_event(error, index, len(self._generation.choices))) for index, error in failures.items()), DONE]
        usage = [event(self._envelope([]) | {"usage": self._generation.usage()})] if self._include_usage else []
        return [*usage, DONE]

    def _chunk(self, choice: Json, more: Json | None = None) -> bytes:
        return event(self._envelope([choice]) | (more or {}) | self._usage_so_far())

    def _usage_so_far(self) -> Json:
        if not self._include_usage:
            return {}
        return {"usage": self._generation.usage() if self._continuous_usage else None}

    def _envelope(self, choices: list[Json]) -> Json:
        return envelope(self._services, self._plan, self._generation.created, choices, chunk=True)


def _error_event(error: ServiceError, index: int, num_choices: int) -> Json:
    body = error_body(error)
    if num_choices > 1:
        body["error"]["index"] = index
    return body


async def replayed_events(services: Services, plan: Plan, records: Sequence[SaveRecord]) -> AsyncIterator[bytes]:
    """The records of a request in the form of its stream: failures come at the end."""
    failed = [record for record in records if record.status in ("failed", "cancelled")]
    answer = replayed_response(services, plan, records)
    common = {name: value for name, value in answer.items() if name not in ("choices", "usage", "kv_transfer_params")}
    options = plan.body.stream_options
    continuous = options is not None and options.continuous_usage_stats
    usage: Json = {"usage": answer["usage"] if continuous else None} if options is not None and options.include_usage else {}
    for choice in answer["choices"]:
        if choice["index"] in {record.choice for record in failed}:
            continue
        transfer = {"kv_transfer_params": choice["kv_transfer_params"]} if "kv_transfer_params" in choice else {}
        yield event({**common, "choices": [choice], **transfer, **usage})
    for record in failed:
        yield event(_error_event(failure_of(record), record.choice, len(records)))
    if usage and not failed:
        yield event({**common, "choices": [], "usage": answer["usage"]})
    yield DONE
