"""Spans as OpenTelemetry's SDK knows them. Imported where the extra `otel` is installed, and asked for."""

from __future__ import annotations

from collections.abc import Callable

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.sdk.trace import ReadableSpan, SpanProcessor
from opentelemetry.sdk.trace.id_generator import IdGenerator
from opentelemetry.trace import NonRecordingSpan, SpanContext, Status, StatusCode, TraceFlags, Tracer

from atoll.protocol.traces import Place, Span

NS = 1e9


class GivenIds(IdGenerator):
    """Those of the span that is being made, in the thread that makes it."""

    def __init__(self) -> None:
        self.place = Place(b"", b"")

    def generate_trace_id(self) -> int:
        return int.from_bytes(self.place.trace_id)

    def generate_span_id(self) -> int:
        return int.from_bytes(self.place.span_id)


class Ended(SpanProcessor):
    """`put` gets each span that has ended and is sampled."""

    def __init__(self, put: Callable[[ReadableSpan], None]) -> None:
        self._put = put

    def on_end(self, span: ReadableSpan) -> None:
        if span.context is not None and span.context.trace_flags.sampled:
            self._put(span)


def make(tracer: Tracer, ids: GivenIds, span: Span, offset_s: float) -> None:
    """Begins and ends it, at the times that it says."""
    ids.place = span.place
    made = tracer.start_span(
        span.name,
        context=Context() if span.parent is None else _inside(span.parent),
        start_time=round((span.begin_s + offset_s) * NS),
        attributes=dict(span.attributes),
    )
    if span.problem:
        made.set_status(Status(StatusCode.ERROR, span.problem))
    made.end(round((span.end_s + offset_s) * NS))


def _inside(place: Place) -> Context:
    context = SpanContext(
        int.from_bytes(place.trace_id),
        int.from_bytes(place.span_id),
        is_remote=True,
        trace_flags=TraceFlags(TraceFlags.SAMPLED),
    )
    return trace.set_span_in_context(NonRecordingSpan(context), Context())
