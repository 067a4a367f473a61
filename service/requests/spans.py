"""The spans of a request below the one that its HTTP request has: what the engine did for its choices, and their saves.

They are made afterwards, of the times that the engine has reported with its outputs and events.
"""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from opentelemetry import trace
from opentelemetry.trace import Span, Status, StatusCode, Tracer

from engine.request import RequestOutput, RequestTimes
from engine.saves.spec import SaveSpec
from service.observe.tracing import Tracing
from service.requests.choice import Choice
from service.saves.life import LiveSave

Attributes = Mapping[str, str | int | float | Sequence[str]]


@dataclass(frozen=True)
class Phase:
    """A part of what happened to a request, in nanoseconds since 1970."""

    name: str
    start: int
    end: int


def phases_of(times: RequestTimes, num_output_tokens: int) -> list[Phase]:
    """`queue`, `prefill` and `decode`, as far as the request has come. What computed the first token ends the prefill."""
    phases = [Phase("queue", times.made, times.started or times.ended)]
    if times.started is not None:
        phases.append(Phase("prefill", times.started, times.first_token or times.ended))
    if times.first_token is not None and num_output_tokens > 1:
        phases.append(Phase("decode", times.first_token, times.ended))
    return phases


class RequestSpans:
    """Makes the spans of one request. Used on the event loop."""

    @classmethod
    def below_current(cls, tracing: Tracing | None, request_id: str) -> "RequestSpans | None":
        """Spans below the one that is current; None where there are no traces or that span isn't recorded."""
        parent = trace.get_current_span()
        return cls(tracing.tracer, parent, request_id) if tracing is not None and parent.is_recording() else None

    def __init__(self, tracer: Tracer, parent: Span, request_id: str) -> None:
        self._tracer = tracer
        self._context = trace.set_span_in_context(parent)
        self._request_id = request_id
        self._num_output_tokens: dict[int, int] = {}
        self._ended: set[int] = set()

    def ended(self, choice: Choice) -> bool:
        """Whether the engine has nothing more to say of this choice."""
        return choice.index in self._ended

    def received(self, choice: Choice, output: RequestOutput) -> None:
        """Hears everything that the engine says of a choice."""
        count = self._num_output_tokens.get(choice.index, 0) + len(output.token_ids)
        self._num_output_tokens[choice.index] = count
        if output.finish_reason is None:
            return
        self._ended.add(choice.index)
        if output.times is not None:
            self._add_phases(choice, output, phases_of(output.times, count))

    def save_ended(self, save: LiveSave) -> None:
        """From the first row to the published file, or to what became of it instead."""
        end = save.times_ns.get(save.status) or time.time_ns()
        start = min(save.times_ns.get("running", end), end)
        attributes = self._attributes(save.spec) | {"strata.save_status": save.status, "strata.dtype": save.spec.dtype}
        if save.file is not None:
            attributes |= {"strata.num_tokens": save.file.num_tokens, "strata.bytes": save.file.bytes}
        error = save.error.code if save.error is not None else None
        span = self._begin(Phase("save", start, end), attributes, error)
        if "writing" in save.times_ns:
            span.add_event("all rows computed", timestamp=save.times_ns["writing"])
        span.end(end)

    def _add_phases(self, choice: Choice, output: RequestOutput, phases: Sequence[Phase]) -> None:
        attributes = self._attributes(None if choice.save is None else choice.save.spec) | {
            "strata.choice": choice.index,
            "strata.prompt_tokens": len(choice.prompt.token_ids),
            "strata.cached_tokens": output.num_cached_tokens,
            "strata.output_tokens": self._num_output_tokens[choice.index],
            "strata.finish_reason": output.finish_reason or "",
        }
        for phase in phases:
            failed = output.error is not None and phase is phases[-1]
            self._begin(phase, attributes, type(output.error).__name__ if failed else None).end(phase.end)

    def _attributes(self, spec: SaveSpec | None) -> dict[str, str | int | float | Sequence[str]]:
        known: dict[str, str | int | float | Sequence[str]] = {"strata.request_id": self._request_id}
        return known if spec is None else known | {"strata.save_id": spec.save_id, "strata.layers": [str(layer) for layer in spec.layers]}

    def _begin(self, phase: Phase, attributes: Attributes, error: str | None) -> Span:
        span = self._tracer.start_span(phase.name, self._context, attributes=attributes, start_time=phase.start)
        if error is not None:
            span.set_attribute("error.type", error)
            span.set_status(Status(StatusCode.ERROR))
        return span
