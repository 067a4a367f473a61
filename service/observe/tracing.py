"""OpenTelemetry traces: whether there are any, where they are sent, and the service's part in them.

FastAPI makes the span of a request and honours `traceparent`; `service/requests/spans.py` makes those below it. OpenTelemetry's SDK is
the extra `otel` and is imported only where an endpoint is set. Its own environment variables hold: names, headers, sampling, batches.
"""

import os
import threading
from collections.abc import MutableMapping
from typing import TYPE_CHECKING, Any

from fastapi.telemetry import TelemetryConfig
from opentelemetry import trace
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from engine.errors import ConfigError
from service.config.settings import Settings
from service.config.values import http_url
from service.config.version import strata_version
from service.observe.logs import request_fields
from service.observe.probes import PROBE_PATHS

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider

SIGNAL_PATH = "/v1/traces"
PROTOCOL = "http/protobuf"
CLOSE_SECONDS = 5.0
"""How long the end of the service may wait for a collector."""


class Tracing:
    """The traces of one service."""

    def __init__(self, provider: "TracerProvider") -> None:
        self._provider = provider
        self.tracer = provider.get_tracer("strata", strata_version())

    @property
    def telemetry(self) -> TelemetryConfig:
        """What FastAPI is to do: a span per request, but for probes and scrapes; metrics and logs are our own."""
        return {**telemetry_off(), "tracing": True, "tracer_provider": self._provider, "exclude": _is_probe}

    def close(self) -> None:
        """Sends what is left, as far as the collector takes it in time: the SDK would wait for it up to half a minute."""
        closing = threading.Thread(target=self._provider.shutdown, name="last-spans", daemon=True)
        closing.start()
        closing.join(CLOSE_SECONDS)


def telemetry_off() -> TelemetryConfig:
    return {"tracing": False, "metrics": False, "logs": False, "operation_spans": False, "auto_configure": False}


def _is_probe(scope: MutableMapping[str, Any]) -> bool:
    return scope["path"] in PROBE_PATHS


class TraceIds:
    """Gives the request's log lines the id of its trace, and its span the request's and the saves' ids. Stands within `RequestId`."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        span = trace.get_current_span()
        context = span.get_span_context()
        if scope["type"] != "http" or not context.is_valid:
            await self._app(scope, receive, send)
            return
        scope["state"]["trace_id"] = trace.format_trace_id(context.trace_id)

        async def send_and_note(message: Message) -> None:
            if message["type"] == "http.response.start":  # by now the ids are what they will be, and the span has not ended
                span.set_attributes({f"strata.{name}": value for name, value in request_fields().items() if name != "trace_id"})
            await send(message)

        await self._app(scope, receive, send_and_note)


def start_tracing(settings: Settings) -> Tracing | None:
    """None where no endpoint is set. Raises `ConfigError` for one that can't be used, and where the extra is not installed."""
    endpoint = traces_endpoint(settings)
    if endpoint is None:
        return None
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import OTELResourceDetector, Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError as error:
        raise ConfigError("traces need OpenTelemetry's SDK and OTLP exporter: pip install 'strata-server[otel]'") from error
    resource = Resource.create({"service.name": "strata", "service.config.version": strata_version()})
    provider = TracerProvider(resource=resource.merge(OTELResourceDetector().detect()), shutdown_on_exit=False)
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint)))
    return Tracing(provider)


def traces_endpoint(settings: Settings) -> str | None:
    """The URL that spans are posted to: of `--otlp-endpoint`, else of OpenTelemetry's variables; None switches traces off."""
    if os.environ.get("OTEL_SDK_DISABLED", "").lower() == "true":
        return None
    endpoint = settings.otlp_endpoint
    if endpoint is not None:
        endpoint = endpoint.rstrip("/") + SIGNAL_PATH
    elif os.environ.get("OTEL_TRACES_EXPORTER", "otlp").lower() == "otlp":
        endpoint = _from_variables()
    if endpoint is not None:
        _check_protocol()
    return endpoint


def _from_variables() -> str | None:
    name = "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT"
    if endpoint := os.environ.get(name):
        return _checked(name, endpoint)
    name = "OTEL_EXPORTER_OTLP_ENDPOINT"
    endpoint = os.environ.get(name)
    return _checked(name, endpoint).rstrip("/") + SIGNAL_PATH if endpoint else None


def _checked(name: str, endpoint: str) -> str:
    try:
        return http_url(endpoint)
    except ValueError as error:
        raise ConfigError(f"{name}: {error}") from None


def _check_protocol() -> None:
    for name in ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL"):
        if protocol := os.environ.get(name):
            if protocol != PROTOCOL:
                raise ConfigError(f"{name}: {protocol!r} is not supported, only {PROTOCOL} is")
            return
