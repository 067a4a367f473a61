"""Traces as a collector gets them: OTLP over HTTP, received and decoded here, from a service with the real engine."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING, Any

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest, ExportTraceServiceResponse
from opentelemetry.proto.common.v1.common_pb2 import AnyValue, KeyValue
from opentelemetry.proto.trace.v1.trace_pb2 import Span, Status

from engine.errors import ConfigError, SaveError
from engine.saves.builder import FileBuilder
from service.observe.logs import line_formatter
from service.observe.tracing import traces_endpoint
from service.runtime import Runtime

if TYPE_CHECKING:
    from collections.abc import Iterable

    from tests.http.conftest import Service, Services

TRACE_ID = "0af7651916cd43dd8448eb211c80319c"
PARENT_ID = "b7ad6b7169203331"
CHILDREN = ["queue", "prefill", "decode", "save"]


def plain(value: AnyValue) -> Any:  # noqa: ANN401 - any value of an attribute
    kind = value.WhichOneof("value")
    return [plain(each) for each in value.array_value.values] if kind == "array_value" else getattr(value, str(kind))


def attributes_of(pairs: Iterable[KeyValue]) -> dict[str, Any]:
    return {pair.key: plain(pair.value) for pair in pairs}


@dataclass
class OtlpCollector:
    """What has been posted to it."""

    url: str = ""
    paths: list[str] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    requests: list[ExportTraceServiceRequest] = field(default_factory=list)

    @property
    def spans(self) -> list[Span]:
        scopes = [scope for request in self.requests for resource in request.resource_spans for scope in resource.scope_spans]
        return [span for scope in scopes for span in scope.spans]

    def resource(self) -> dict[str, Any]:
        return attributes_of(self.requests[0].resource_spans[0].resource.attributes)

    def named(self, name: str) -> list[Span]:
        return [span for span in self.spans if span.name == name]

    def only(self, name: str) -> Span:
        [span] = self.named(name)
        return span

    def children(self, parent: Span) -> dict[str, list[Span]]:
        """By name, the earliest first."""
        found: dict[str, list[Span]] = {}
        for span in sorted(self.spans, key=lambda span: span.start_time_unix_nano):
            if span.parent_span_id == parent.span_id:
                assert span.trace_id == parent.trace_id
                found.setdefault(span.name, []).append(span)
        return found


@pytest.fixture
def collector(monkeypatch: pytest.MonkeyPatch) -> Iterator[OtlpCollector]:
    """A collector on a port of its own. All spans are there once the service has ended, which sends what is left."""
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    for name in ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_SERVICE_NAME", "OTEL_SDK_DISABLED"):
        monkeypatch.delenv(name, raising=False)
    found = OtlpCollector()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            assert self.headers["Content-Type"] == "application/x-protobuf"
            found.paths.append(self.path)
            found.headers.append(dict(self.headers))
            found.requests.append(ExportTraceServiceRequest.FromString(body))
            answer = ExportTraceServiceResponse().SerializeToString()
            self.send_response(200)
            self.send_header("Content-Type", "application/x-protobuf")
            self.send_header("Content-Length", str(len(answer)))
            self.end_headers()
            self.wfile.write(answer)

        def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - http.server's name
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        found.url = f"http://127.0.0.1:{server.server_address[1]}"
        try:
            yield found
        finally:
            server.shutdown()
            thread.join()


@contextmanager
def traced(services: Services, collector: OtlpCollector) -> Iterator[Service]:
    with services.run(otlp_endpoint=collector.url) as service:
        yield service


def test_what_the_engine_did_stands_below_the_span_of_the_request(services: Services, collector: OtlpCollector) -> None:
    with traced(services, collector) as service:
        params = {"layers": [2, -1, "norm"], "include_output_tokens": True}
        answer = service.completed(request_id="a-request", prompt=[5] * 40, max_tokens=6, ignore_eos=True, kv_transfer_params=params)
    transfer = answer["kv_transfer_params"]
    request = collector.only("POST /v1/completions")
    children = collector.children(request)
    assert {name: len(spans) for name, spans in children.items()} == dict.fromkeys(CHILDREN, 1)
    assert collector.paths == ["/v1/traces"] * len(collector.paths)
    about_request = attributes_of(request.attributes)
    assert request.kind == Span.SPAN_KIND_SERVER
    assert (about_request["http.route"], about_request["http.response.status_code"]) == ("/v1/completions", 200)
    assert (about_request["strata.request_id"], about_request["strata.save_id"]) == ("a-request", transfer["save_id"])
    for name in CHILDREN:
        found = attributes_of(children[name][0].attributes)
        assert (found["strata.request_id"], found["strata.save_id"]) == ("a-request", transfer["save_id"])
        assert found["strata.layers"] == ["2", "6", "norm"]
    about_decode, about_save = attributes_of(children["decode"][0].attributes), attributes_of(children["save"][0].attributes)
    assert (about_decode["strata.prompt_tokens"], about_decode["strata.output_tokens"], about_decode["strata.finish_reason"]) == (
        40,
        6,
        "length",
    )
    assert (about_save["strata.save_status"], about_save["strata.num_tokens"], about_save["strata.bytes"]) == (
        "completed",
        45,
        transfer["bytes"],
    )


def test_the_phases_of_a_request_follow_each_other_within_it(services: Services, collector: OtlpCollector) -> None:
    with traced(services, collector) as service:
        service.completed(prompt=[5] * 40, max_tokens=6, ignore_eos=True, kv_transfer_params={})
    request = collector.only("POST /v1/completions")
    queue, prefill, decode, save = (collector.children(request)[name][0] for name in CHILDREN)
    assert request.start_time_unix_nano <= queue.start_time_unix_nano <= queue.end_time_unix_nano
    assert queue.end_time_unix_nano == prefill.start_time_unix_nano
    assert prefill.end_time_unix_nano == decode.start_time_unix_nano
    assert decode.start_time_unix_nano < decode.end_time_unix_nano <= request.end_time_unix_nano
    assert prefill.start_time_unix_nano <= save.start_time_unix_nano <= save.end_time_unix_nano <= request.end_time_unix_nano
    [rows_computed] = save.events
    assert rows_computed.name == "all rows computed"
    assert decode.end_time_unix_nano <= rows_computed.time_unix_nano + 10**6
    assert rows_computed.time_unix_nano <= save.end_time_unix_nano


def test_a_request_waits_in_its_queue_span_while_another_runs(services: Services, collector: OtlpCollector, slow_steps: None) -> None:
    with services.run(otlp_endpoint=collector.url, max_running=1) as service:
        running = service.send(prompt="Hello", max_tokens=30, ignore_eos=True, stream=True, request_id="running")
        assert running.recv(1)
        service.completed(request_id="waiting", max_tokens=1)
        running.close()
    by_request = {attributes_of(span.attributes)["strata.request_id"]: span for span in collector.named("queue")}
    runs = next(span for span in collector.named("decode") if attributes_of(span.attributes)["strata.request_id"] == "running")
    assert by_request["waiting"].end_time_unix_nano >= runs.end_time_unix_nano
    assert by_request["waiting"].end_time_unix_nano - by_request["waiting"].start_time_unix_nano > 20 * 10**6


def test_the_trace_of_the_client_goes_on(services: Services, collector: OtlpCollector) -> None:
    with traced(services, collector) as service:
        service.client.headers["traceparent"] = f"00-{TRACE_ID}-{PARENT_ID}-01"
        service.completed(kv_transfer_params={})
    assert {span.trace_id.hex() for span in collector.spans} == {TRACE_ID}
    assert collector.only("POST /v1/completions").parent_span_id.hex() == PARENT_ID


def test_a_client_that_does_not_sample_gets_no_spans(services: Services, collector: OtlpCollector) -> None:
    with traced(services, collector) as service:
        service.client.headers["traceparent"] = f"00-{TRACE_ID}-{PARENT_ID}-00"
        service.completed(kv_transfer_params={})
    assert collector.spans == []


def test_without_a_save_or_a_second_token_there_are_no_spans_for_them(services: Services, collector: OtlpCollector) -> None:
    with traced(services, collector) as service:
        service.completed(max_tokens=1)
        service.completed(max_tokens=0, kv_transfer_params={})
    text, states = (collector.children(request) for request in collector.named("POST /v1/completions"))
    assert sorted(text) == ["prefill", "queue"]
    assert sorted(states) == ["prefill", "queue", "save"]


def test_every_choice_has_spans_of_its_own(services: Services, collector: OtlpCollector) -> None:
    with traced(services, collector) as service:
        service.completed(prompt=["one", "another"], n=2, max_tokens=3, ignore_eos=True, seed=1, kv_transfer_params={})
    children = collector.children(collector.only("POST /v1/completions"))
    assert {name: len(spans) for name, spans in children.items()} == dict.fromkeys(CHILDREN, 4)
    assert sorted(attributes_of(span.attributes)["strata.choice"] for span in children["prefill"]) == [0, 1, 2, 3]
    assert len({attributes_of(span.attributes)["strata.save_id"] for span in children["save"]}) == 4


def test_a_cached_prefix_is_told(services: Services, collector: OtlpCollector) -> None:
    with traced(services, collector) as service:
        for _ in range(2):
            service.completed(prompt=[7] * 100, max_tokens=1)
    cached = [attributes_of(span.attributes)["strata.cached_tokens"] for span in collector.named("prefill")]
    assert cached[0] == 0
    assert cached[1] > 0


@pytest.mark.parametrize("wait", [False, "accepted"])
def test_a_save_that_is_not_waited_for_belongs_to_its_request(services: Services, collector: OtlpCollector, wait: object) -> None:
    with traced(services, collector) as service:
        response = service.complete(max_tokens=5, ignore_eos=True, kv_transfer_params={"wait": wait})
        assert service.record(response.json()["kv_transfer_params"]["save_id"])["status"] == "completed"
    children = collector.children(collector.only("POST /v1/completions"))
    assert sorted(children) == sorted(CHILDREN)


def test_a_failed_save_is_an_error_in_the_trace(services: Services, collector: OtlpCollector, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(self: FileBuilder, *arguments: object) -> None:
        raise SaveError("no_space", "the disk is full")

    monkeypatch.setattr(FileBuilder, "complete", full)
    with traced(services, collector) as service:
        service.refused(507, kv_transfer_params={})
    request, save = collector.only("POST /v1/completions"), collector.only("save")
    assert (request.status.code, save.status.code) == (Status.STATUS_CODE_ERROR, Status.STATUS_CODE_ERROR)
    assert attributes_of(save.attributes)["error.type"] == "no_space"
    assert attributes_of(save.attributes)["strata.save_status"] == "failed"


def test_a_client_that_leaves_cuts_its_spans(services: Services, collector: OtlpCollector, slow_steps: None) -> None:
    with traced(services, collector) as service:
        connection = service.send(prompt="Hello", max_tokens=200, ignore_eos=True, stream=True, kv_transfer_params={})
        received = b""
        while received.count(b"data:") < 3:  # the first one may come before anything is computed
            received += connection.recv(4096)
        connection.close()
        while service.runtime.services(for_new_work=False).events.attached:
            time.sleep(0.01)
    children = collector.children(collector.only("POST /v1/completions"))
    about = attributes_of(children["queue"][0].attributes)
    assert about["strata.finish_reason"] == "abort"
    assert about["strata.output_tokens"] < 200
    last = children["decode" if "decode" in children else "prefill"][0]
    assert last.status.code == Status.STATUS_CODE_ERROR
    assert attributes_of(children["save"][0].attributes)["strata.save_status"] != "completed"


def test_refusals_are_traced_and_probes_are_not(services: Services, collector: OtlpCollector) -> None:
    with traced(services, collector) as service:
        service.refused(400, temperature=-1, request_id="never-admitted")
        for path in ("/health", "/health/live", "/metrics", "/version"):
            service.client.get(path)
    [span] = collector.spans
    assert attributes_of(span.attributes)["http.response.status_code"] == 400


def test_nothing_that_is_sent_holds_a_prompt(services: Services, collector: OtlpCollector) -> None:
    secret = "wombat-in-the-moonlight"
    with traced(services, collector) as service:
        service.completed(prompt=secret, kv_transfer_params={"metadata": {"about": secret}})
        service.chatted(messages=[{"role": "user", "content": secret}])
        service.refused(400, prompt=secret, max_tokens=secret)
    assert len(collector.spans) >= 6
    assert not [request for request in collector.requests if secret.encode() in request.SerializeToString()]


def test_log_lines_carry_the_id_of_the_trace(services: Services, collector: OtlpCollector, caplog: pytest.LogCaptureFixture) -> None:
    lines: list[dict[str, Any]] = []

    class Keep(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            lines.append(json.loads(line_formatter("json").format(record)))

    log = logging.getLogger("service.http.access_log")
    keep = Keep()
    log.addHandler(keep)
    try:
        with caplog.at_level(logging.INFO), traced(services, collector) as service:
            service.completed(request_id="traced")
    finally:
        log.removeHandler(keep)
    [line] = [line for line in lines if line["request_id"] == "traced"]
    assert line["trace_id"] == collector.only("POST /v1/completions").trace_id.hex()


def test_the_standard_variables_hold(services: Services, collector: OtlpCollector, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", collector.url)
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "x-team=states")
    monkeypatch.setenv("OTEL_SERVICE_NAME", "extractor-7")
    monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", "deployment.environment.name=test")
    with services.run() as service:
        service.completed()
    assert len(collector.spans) == 4
    assert (collector.resource()["service.name"], collector.resource()["deployment.environment.name"]) == ("extractor-7", "test")
    assert collector.headers[0]["x-team"] == "states"


def test_the_service_has_a_name_of_its_own(services: Services, collector: OtlpCollector) -> None:
    with traced(services, collector) as service:
        service.completed()
    assert collector.resource()["service.name"] == "strata"


@pytest.mark.parametrize(
    ("flag", "variables", "expected"),
    [
        (None, {}, None),
        ("http://one:4318", {}, "http://one:4318/v1/traces"),
        ("http://one:4318/", {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://two:4318"}, "http://one:4318/v1/traces"),
        (None, {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://two:4318/"}, "http://two:4318/v1/traces"),
        (None, {"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://three/x", "OTEL_EXPORTER_OTLP_ENDPOINT": "http://two"}, "http://three/x"),
        (None, {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://two:4318", "OTEL_TRACES_EXPORTER": "none"}, None),
        ("http://one:4318", {"OTEL_SDK_DISABLED": "true"}, None),
    ],
)
def test_where_traces_go(
    services: Services, monkeypatch: pytest.MonkeyPatch, flag: str | None, variables: dict[str, str], expected: str | None
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert traces_endpoint(services.settings(otlp_endpoint=flag)) == expected


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "collector:4318"}, "OTEL_EXPORTER_OTLP_ENDPOINT: 'collector:4318' is not a URL"),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://x", "OTEL_EXPORTER_OTLP_PROTOCOL": "grpc"}, "OTEL_EXPORTER_OTLP_PROTOCOL: 'grpc' is not"),
    ],
)
def test_variables_that_can_not_work_are_a_refused_start(
    services: Services, monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], message: str
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match=message):
        Runtime(services.settings())


def test_a_missing_extra_is_one_line_at_the_start(services: Services) -> None:
    without_it = "import sys; sys.modules['opentelemetry.sdk'] = None; from service.cli.main import main; sys.exit(main(sys.argv[1:]))"
    command = [sys.executable, "-c", without_it, "serve", *services.flags(), "--otlp-endpoint", "http://127.0.0.1:9"]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ended.returncode == 2
    assert ended.stderr.splitlines() == ["strata: traces need OpenTelemetry's SDK and OTLP exporter: pip install 'strata-server[otel]'"]


def test_without_an_endpoint_nothing_of_the_sdk_is_imported() -> None:
    program = (
        "import sys; from service.http.app import create_app; from service.config.settings import Settings; create_app(Settings())\n"
        "print([name for name in sys.modules if name.startswith(('opentelemetry.sdk', 'opentelemetry.exporter', 'google.protobuf'))])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_a_collector_that_is_not_there_costs_spans_and_nothing_else(
    services: Services, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "1")
    with services.run(otlp_endpoint="http://127.0.0.1:9") as service:
        service.completed(kv_transfer_params={})
    assert service.runtime.state == "stopped"
