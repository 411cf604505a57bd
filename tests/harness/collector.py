"""An OpenTelemetry collector of tests: takes spans by OTLP over HTTP, and keeps them."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span, Status


@dataclass(frozen=True)
class Received:
    """A span, as a collector knows it."""

    service: str
    name: str
    trace_id: bytes
    span_id: bytes
    parent_id: bytes
    begin_ns: int
    end_ns: int
    about: dict[str, Any]
    problem: str

    @classmethod
    def of(cls, service: str, span: Span) -> Received:
        return cls(
            service,
            span.name,
            span.trace_id,
            span.span_id,
            span.parent_span_id,
            span.start_time_unix_nano,
            span.end_time_unix_nano,
            {pair.key: _value(pair.value) for pair in span.attributes},
            span.status.message if span.status.code == Status.STATUS_CODE_ERROR else "",
        )

    @property
    def took_s(self) -> float:
        return (self.end_ns - self.begin_ns) / 1e9


def _value(value: Any) -> Any:
    kind = value.WhichOneof("value")
    if kind == "array_value":
        return [_value(one) for one in value.array_value.values]
    return getattr(value, kind)


@dataclass
class Collector:
    endpoint: str
    spans: list[Received] = field(default_factory=list)
    seen: bytearray = field(default_factory=bytearray)
    """All bytes that came."""
    lock: threading.Lock = field(default_factory=threading.Lock)

    def take(self, body: bytes) -> None:
        asked = ExportTraceServiceRequest.FromString(body)
        with self.lock:
            self.seen += body
            for of_service in asked.resource_spans:
                (service,) = (a.value.string_value for a in of_service.resource.attributes if a.key == "service.name")
                self.spans += [Received.of(service, span) for scope in of_service.scope_spans for span in scope.spans]


@contextmanager
def collecting() -> Iterator[Collector]:
    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            assert (self.path, self.headers["Content-Type"]) == ("/v1/traces", "application/x-protobuf")
            collector.take(body)
            self.send_response(200)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        collector = Collector(f"http://127.0.0.1:{server.server_address[1]}")
        serving = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
        serving.start()
        try:
            yield collector
        finally:
            server.shutdown()
            serving.join()
