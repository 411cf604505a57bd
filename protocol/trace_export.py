"""Sends spans to an OpenTelemetry collector (the extra `otel`), over HTTP. Nothing waits for it: spans go into a queue
of bounded length, a thread sends them, and what the collector does not take is counted and forgotten.

The variables are those of OpenTelemetry: OTEL_EXPORTER_OTLP_ENDPOINT (or ..._TRACES_ENDPOINT) turns it on, with
_HEADERS, _CERTIFICATE, _TIMEOUT and so on; OTEL_TRACES_EXPORTER=none and OTEL_SDK_DISABLED=true turn it off.
"""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from atoll.protocol.errors import ConfigError
from atoll.protocol.traces import Span

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import ReadableSpan

log = logging.getLogger("atoll.traces")

ENDPOINTS = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
PROTOCOLS = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
EXPORTER, DISABLED, SERVICE_NAME = "OTEL_TRACES_EXPORTER", "OTEL_SDK_DISABLED", "OTEL_SERVICE_NAME"
HTTP = "http/protobuf"
MAX_QUEUED = 4096
"""Spans: a sync has about ten at a site, so those of some hundred."""
MAX_BATCH = 512
EVERY_S = 5.0
"""Spans go together: a request costs as much as some fifty of them."""
CLOSE_LIMIT_S = 1.0
"""For what is queued as the process ends."""


def where(environ: Mapping[str, str]) -> str:
    """The collector that the environment names; empty if nothing is to be traced. A variable that is empty is as one
    that is not set. Raises ConfigError for what is not supported."""
    by, found = _first(environ, ENDPOINTS)
    exporter = environ.get(EXPORTER) or ("otlp" if found else "none")
    if exporter == "none" or environ.get(DISABLED, "").lower() == "true":
        return ""
    if exporter != "otlp":
        raise ConfigError(f"{EXPORTER}={exporter}: there is otlp, and none")
    name, protocol = _first(environ, PROTOCOLS)
    if protocol not in ("", HTTP):
        raise ConfigError(f"{name}={protocol}: traces are sent by {HTTP} alone (port 4318 of a collector)")
    if found and not _is_url(found):
        raise ConfigError(f"{by} names no collector: write http://HOST:4318, or https://")
    return found or "http://localhost:4318"


def _first(environ: Mapping[str, str], names: Sequence[str]) -> tuple[str, str]:
    """The name and value of the first that is set; empty if none is."""
    return next(((name, value) for name in names if (value := environ.get(name))), ("", ""))


def _is_url(endpoint: str) -> bool:
    try:
        found = urlsplit(endpoint)
        return found.scheme in ("http", "https") and bool(found.hostname) and found.port != 0
    except ValueError:
        return False


async def from_environment(environ: Mapping[str, str], service: str, wall_time: Callable[[], float]) -> Exporter | None:
    """None if nothing is to be traced. Raises ConfigError, also where the extra is missing."""
    if not (endpoint := where(environ)):
        return None
    offset_s = wall_time() - asyncio.get_running_loop().time()
    return await asyncio.to_thread(Exporter, endpoint, environ.get(SERVICE_NAME, service), offset_s)


class Exporter:
    def __init__(self, endpoint: str, service: str, offset_s: float) -> None:
        """`offset_s`: the wall clock minus the clock of spans. Raises ConfigError."""
        try:
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
            from opentelemetry.sdk.resources import Resource
            from opentelemetry.sdk.trace import TracerProvider
        except ImportError as error:
            raise ConfigError(
                f"the environment asks for traces (to {_shown(endpoint)}), and {error.name} is not installed: "
                f'pip install "atoll[otel]", or set {EXPORTER}=none'
            ) from None
        from atoll.protocol import trace_spans

        logging.getLogger("opentelemetry").setLevel(logging.CRITICAL)  # what it says at each try is said here once
        self._endpoint = _shown(endpoint)
        self._ids = trace_spans.GivenIds()
        self._offset_s = offset_s
        self._exporter = OTLPSpanExporter()
        self._queue: queue.Queue[ReadableSpan | None] = queue.Queue(MAX_QUEUED)
        self.num_lost = 0
        """Spans that the collector has not taken."""
        self._is_lost = False
        self._counting = threading.Lock()
        self._is_closing = threading.Event()
        provider = TracerProvider(
            resource=Resource.create({"service.name": service}), id_generator=self._ids, shutdown_on_exit=False
        )
        provider.add_span_processor(trace_spans.Ended(self._put))
        self._tracer = provider.get_tracer("atoll")
        self._thread = threading.Thread(target=self._run, name="traces", daemon=True)
        self._thread.start()
        log.info("traces go to %s", self._endpoint)

    def send(self, span: Span) -> None:
        """Returns at once."""
        from atoll.protocol import trace_spans

        trace_spans.make(self._tracer, self._ids, span, self._offset_s)

    async def close(self) -> None:
        """Within CLOSE_LIMIT_S."""
        await asyncio.to_thread(self._close)

    def _close(self) -> None:
        self._is_closing.set()
        self._put(None)
        self._thread.join(CLOSE_LIMIT_S)
        self._exporter.shutdown()  # type: ignore[no-untyped-call] # ends its tries

    def _put(self, span: ReadableSpan | None) -> None:
        try:
            self._queue.put_nowait(span)
        except queue.Full:
            self._lost(1)

    def _run(self) -> None:
        is_over = False
        while not is_over:
            batch: list[Any] = [self._queue.get()]
            if batch != [None]:
                self._is_closing.wait(EVERY_S)
            while len(batch) < MAX_BATCH and not self._queue.empty():
                batch.append(self._queue.get_nowait())
            is_over = None in batch
            self._export([span for span in batch if span is not None])

    def _export(self, spans: list[ReadableSpan]) -> None:
        from opentelemetry.sdk.trace.export import SpanExportResult

        if not spans:
            return
        if self._exporter.export(spans) is not SpanExportResult.SUCCESS:
            self._lost(len(spans))
        elif self._is_lost:
            self._is_lost = False
            log.info("traces go to %s again", self._endpoint)

    def _lost(self, num_spans: int) -> None:
        with self._counting:
            self.num_lost += num_spans
            is_new, self._is_lost = not self._is_lost, True
        if is_new:
            log.warning("%s takes no traces: they are counted and forgotten until it does", self._endpoint)


def _shown(endpoint: str) -> str:
    """Without what may be a password."""
    found = urlsplit(endpoint)
    return f"{found.scheme}://{found.hostname}{f':{found.port}' if found.port else ''}"
