"""Traces: ids that all compute alike, what calls carry, and a collector that does not take what is sent."""

from __future__ import annotations

import asyncio
import logging
import socket
import sys
from typing import Any

import grpc
import grpc.aio
import pytest

from atoll.node.exchange.peers import rpc
from atoll.node.exchange.peers.listener import listen
from atoll.protocol import trace_export, traces, transport
from atoll.protocol.errors import ConfigError
from atoll.protocol.trace_export import MAX_QUEUED, Exporter
from atoll.protocol.traces import Span

ENDPOINT = "OTEL_EXPORTER_OTLP_ENDPOINT"
TRACES_PROTOCOL = "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL"


def a_span(number: int = 1) -> Span:
    place = traces.of_site("run", number, 1)
    return Span(name="site", place=place, parent=traces.of_sync("run", number), begin_s=1.0, end_s=2.0)


def test_ids_are_of_run_sync_site_and_attempt_alone() -> None:
    places = [traces.of_sync("run", 1), traces.of_site("run", 1, 1), traces.of_exchange("run", 1, 1, 1)]
    assert len({place.trace_id for place in places}) == 1
    others = [traces.of_site("run", 1, 2), traces.of_exchange("run", 1, 1, 2), traces.of_exchange("run", 1, 2, 1)]
    assert len({place.span_id for place in places + others}) == 6
    assert len({traces.of_sync(run, sync).trace_id for run in ("run", "other") for sync in (1, 2)}) == 4
    # A vector: the spans of sites with two versions meet in one trace.
    assert traces.of_sync("r", 1).traceparent == "00-a829869561fa9ef0490889478725dd3c-8787e4a19a931ef6-01"


def test_a_stream_to_a_peer_carries_the_exchange_that_it_is_of() -> None:
    seen: list[dict[str, Any]] = []

    async def exchange(requests: Any, context: Any) -> None:
        seen.append(dict(context.invocation_metadata()))

    async def whole() -> None:
        server, port = await listen("127.0.0.1:0", {"Exchange": grpc.stream_stream_rpc_method_handler(exchange)})
        async with transport.open_channel(f"127.0.0.1:{port}", handshake=None, max_message_bytes=1000) as channel:
            for place in (None, traces.of_exchange("run", 7, 2, 1)):
                traces.CALLS.set(place)
                call = rpc.open_stream(channel, rpc.EXCHANGE_METHOD)
                await call.done_writing()
                assert await call.read() is grpc.aio.EOF
        await server.stop(0)

    asyncio.run(whole())
    traceparents = [metadata.get("traceparent") for metadata in seen]
    assert traceparents == [None, traces.of_exchange("run", 7, 2, 1).traceparent]


@pytest.mark.parametrize(
    ("environ", "endpoint"),
    [
        ({}, ""),
        ({ENDPOINT: "http://c:4318"}, "http://c:4318"),
        ({"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://t:1/x", ENDPOINT: "http://c:4318"}, "http://t:1/x"),
        ({ENDPOINT: "http://c:4318", "OTEL_TRACES_EXPORTER": "none"}, ""),
        ({ENDPOINT: "http://c:4318", "OTEL_SDK_DISABLED": "true"}, ""),
        ({"OTEL_TRACES_EXPORTER": "otlp"}, "http://localhost:4318"),
        ({ENDPOINT: "", "OTEL_TRACES_EXPORTER": "", "OTEL_EXPORTER_OTLP_PROTOCOL": ""}, ""),
        ({ENDPOINT: "http://[::1]:4318", "OTEL_TRACES_EXPORTER": ""}, "http://[::1]:4318"),
        (
            {ENDPOINT: "http://c:1", TRACES_PROTOCOL: "http/protobuf", "OTEL_EXPORTER_OTLP_PROTOCOL": "grpc"},
            "http://c:1",
        ),
    ],
)
def test_the_environment_turns_it_on(environ: dict[str, str], endpoint: str) -> None:
    assert trace_export.where(environ) == endpoint


@pytest.mark.parametrize(
    ("environ", "problem"),
    [
        ({"OTEL_TRACES_EXPORTER": "zipkin"}, "OTEL_TRACES_EXPORTER=zipkin: there is otlp"),
        (
            {ENDPOINT: "http://c", "OTEL_EXPORTER_OTLP_PROTOCOL": "grpc"},
            "=grpc: traces are sent by http/protobuf",
        ),
        ({ENDPOINT: "http://c", TRACES_PROTOCOL: "grpc"}, "=grpc: traces are sent by http/protobuf"),
        *(
            ({ENDPOINT: endpoint}, f"{ENDPOINT} names no collector: write http://HOST:4318")
            for endpoint in ("c.example:4318", "user:secret@c:4318", "http://c:port", "http://", "grpc://c:4317", "/x")
        ),
    ],
)
def test_what_is_not_supported_is_said(environ: dict[str, str], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem) as raised:
        trace_export.where(environ)
    assert "secret" not in str(raised.value)


def test_without_the_extra_it_is_said_how_to_have_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace", None)
    asked = trace_export.from_environment({ENDPOINT: "http://user:secret@c:4318"}, "test", lambda: 0.0)
    with pytest.raises(ConfigError, match=r'pip install "atoll\[otel\]"') as raised:
        asyncio.run(asked)
    assert "http://c:4318" in str(raised.value)
    assert "secret" not in str(raised.value)


def test_a_collector_that_is_not_there_or_hangs_is_said_once_and_waited_for_by_nobody(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(trace_export, "CLOSE_LIMIT_S", 0.05)
    caplog.set_level(logging.INFO)
    with socket.create_server(("127.0.0.1", 0)) as listening:  # takes connections, and never says a word
        endpoint = f"http://127.0.0.1:{listening.getsockname()[1]}"
        monkeypatch.setenv(ENDPOINT, endpoint)
        exporter = Exporter(endpoint, "test", 0.0)
        for number in range(MAX_QUEUED + 2 * trace_export.MAX_BATCH):
            exporter.send(a_span(number))
        assert exporter.num_lost >= trace_export.MAX_BATCH, "what there is no room for is counted"
        asyncio.run(exporter.close())
    said = [record.getMessage() for record in caplog.records]
    assert said == [
        f"traces go to {endpoint}",
        f"{endpoint} takes no traces: they are counted and forgotten until it does",
    ]


def test_what_is_refused_is_counted(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        endpoint = f"http://127.0.0.1:{listening.getsockname()[1]}"
    monkeypatch.setenv(ENDPOINT, endpoint)
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "0.01")
    exporter = Exporter(endpoint, "test", 0.0)
    exporter.send(a_span())
    asyncio.run(exporter.close())
    assert exporter.num_lost == 1
    warnings = [record for record in caplog.records if record.levelname != "INFO"]  # a test before may ask for these
    assert [record.levelname for record in warnings] == ["WARNING"]
