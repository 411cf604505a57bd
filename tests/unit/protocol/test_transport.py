"""Addresses, ports, channels; and the errors that calls end with."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import AsyncIterator
from contextlib import ExitStack
from typing import Any

import grpc
import grpc.aio
import pytest

from atoll.protocol import addresses, errors, status, transport
from atoll.protocol.addresses import Relayed
from atoll.protocol.errors import AtollError, ConfigError, HostError, PeerError
from atoll.protocol.time_limits import PRESETS, time_limits

NUM_CALLERS = 8
PATIENCE_S = 30.0
HTTP2_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
HTTP2_SETTINGS = bytes([0, 0, 0, 4, 0, 0, 0, 0, 0])
HTTP2_SETTINGS_ACK = bytes([0, 0, 0, 4, 1, 0, 0, 0, 0])


@pytest.mark.parametrize(
    ("address", "expected"),
    [("127.0.0.1:80", ("127.0.0.1", 80)), ("[::1]:7700", ("::1", 7700)), ("host.example:0", ("host.example", 0))],
)
def test_an_address_and_back(address: str, expected: tuple[str, int]) -> None:
    assert addresses.parse_address(address) == expected
    assert addresses.join_address(*expected) == address


@pytest.mark.parametrize(
    "address", ["", "host", "host:", ":80", "host:x", "host:65536", "::1:80", "host:-1", "host:８"]
)
def test_what_is_no_address(address: str) -> None:
    with pytest.raises(ConfigError, match="address"):
        addresses.parse_address(address)


def test_an_address_by_a_relay() -> None:
    assert addresses.relayed("host:80") is None
    assert addresses.relayed("a.b@[::1]:80") == Relayed("a.b", "[::1]:80")
    assert str(Relayed("a", "r:1")) == "a@r:1"
    with pytest.raises(ConfigError, match="address"):
        addresses.relayed("a@host")
    with pytest.raises(ConfigError, match="address"):
        addresses.parse_address("a@host:80")
    assert addresses.problem_with("a@r:1", "a") == addresses.problem_with("r:1", "a") == ""
    for address in ("b@r:1", "@r:1", "a@r", "a@b@r:1", "a@r:1\n", "<a>@r:1"):
        assert addresses.problem_with(address, "a"), address


def test_an_http_proxy_is_a_machine_and_a_port() -> None:
    assert addresses.parse_proxy("") == ""
    assert addresses.parse_proxy("http://proxy.example:3128") == "proxy.example:3128"
    assert addresses.parse_proxy("http://[::1]:3128/") == "[::1]:3128"
    for url in (
        "proxy:3128",
        "https://proxy:3128",
        "http://proxy",
        "http://a:b@proxy:1",
        "http://p:1/x",
        "http://p:1 ",
    ):
        with pytest.raises(ConfigError):
            addresses.parse_proxy(url)


@pytest.mark.parametrize(
    ("listens", "expected"),
    [("0.0.0.0:0", "127.0.0.1:5"), ("[::]:0", "[::1]:5"), ("10.0.0.1:7", "10.0.0.1:5"), ("[fe80::1]:7", "[fe80::1]:5")],
)
def test_where_a_process_reaches_another_of_its_machine(listens: str, expected: str) -> None:
    assert addresses.on_this_machine(listens, 5) == expected


def test_loopback() -> None:
    for address in ("127.0.0.1:1", "127.9.9.9:1", "localhost:1", "[::1]:1"):
        assert addresses.is_loopback(address)
    for address in ("0.0.0.0:1", "10.0.0.1:1", "host:1", "[::]:1"):
        assert not addresses.is_loopback(address)


class Echo:
    """Answers with its request, or ends with an error."""

    def __init__(self, error: AtollError | None = None) -> None:
        self.error = error

    async def call(self, data: bytes, context: grpc.aio.ServicerContext[bytes, bytes]) -> bytes:
        if self.error is not None:
            await status.abort(context, self.error)
        return data


async def echo(data: bytes, error: AtollError | None = None, limit: int = 1 << 16) -> bytes:
    server = transport.create_server(max_message_bytes=limit)
    handlers: dict[str, grpc.RpcMethodHandler[bytes, bytes]] = {
        "Call": grpc.unary_unary_rpc_method_handler(Echo(error).call)
    }
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("test.Echo", handlers),))
    port = transport.bind(server, "127.0.0.1:0", None)
    await server.start()
    target = f"127.0.0.1:{port}"
    channel = transport.open_channel(target, handshake=None, max_message_bytes=1 << 20)
    try:
        method: grpc.aio.UnaryUnaryMultiCallable[bytes, bytes] = channel.unary_unary("/test.Echo/Call")
        try:
            return await method(data)
        except grpc.RpcError as failure:
            raise status.from_rpc_error(failure, f"echo at {target}") from None
    finally:
        await channel.close()
        await server.stop(0)


def test_a_call_goes_through(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    assert asyncio.run(echo(b"x" * 1000)) == b"x" * 1000


def test_a_message_over_the_bound_is_an_invalid_one() -> None:
    with pytest.raises(errors.InvalidMessage):
        asyncio.run(echo(b"x" * (1 << 17)))


def test_a_taken_port_says_what_to_do() -> None:
    async def main() -> None:
        first = transport.create_server(max_message_bytes=1000)
        address = f"127.0.0.1:{transport.bind(first, '127.0.0.1:0', None)}"
        with pytest.raises(HostError, match=f"{address}.*choose another"):
            transport.bind(transport.create_server(max_message_bytes=1000), address, None)
        await first.stop(0)

    asyncio.run(main())


def test_a_server_that_never_started_leaves_no_log_record_of_itself(caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        transport.create_server(max_message_bytes=1000)

    with caplog.at_level(logging.DEBUG):  # grpcio logs the dying object, and whoever keeps that record crashes
        asyncio.run(main())
    assert [r for r in caplog.records if r.name.startswith("grpc") and r.args] == []


def test_calls_that_are_under_way_when_a_program_ends_print_nothing(capfd: pytest.CaptureFixture[str]) -> None:
    def call(port: int, begun: threading.Barrier) -> None:
        with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
            method: grpc.StreamStreamMultiCallable[bytes, bytes] = channel.stream_stream("/test.Echo/Stream")
            answers = method(iter([b"x"]))
            next(answers)
            begun.wait()
            with pytest.raises(grpc.RpcError):
                next(answers)

    async def stream(requests: AsyncIterator[bytes], context: grpc.aio.ServicerContext[bytes, bytes]) -> None:
        async for data in requests:
            await context.write(data)
        await asyncio.Event().wait()

    async def main(callers: list[threading.Thread]) -> None:
        server = transport.create_server(max_message_bytes=1000)
        handlers: dict[str, grpc.RpcMethodHandler[bytes, bytes]] = {
            "Stream": grpc.stream_stream_rpc_method_handler(stream)
        }
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("test.Echo", handlers),))
        port = transport.bind(server, "127.0.0.1:0", None)
        await server.start()
        begun = threading.Barrier(NUM_CALLERS + 1, timeout=60)
        callers += [threading.Thread(target=call, args=(port, begun)) for _ in range(NUM_CALLERS)]
        for caller in callers:
            caller.start()
        await asyncio.to_thread(begun.wait)
        await server.stop(0)

    for _ in range(5):
        callers: list[threading.Thread] = []
        transport.run(main(callers))
        for caller in callers:
            caller.join()
    assert "Traceback" not in capfd.readouterr().err


@pytest.mark.parametrize(
    ("raised", "expected"),
    [
        (errors.StaleError, errors.StaleError),
        (errors.RefusedError, errors.RefusedError),
        (errors.InvalidMessage, errors.InvalidMessage),
        (errors.DigestMismatch, errors.DigestMismatch),
        (errors.NotYetError, errors.NotYetError),
        (errors.StateError, errors.StateError),
        (errors.PeerError, errors.PeerError),
        (errors.HostError, errors.PeerError),  # it is not this host
        (errors.SelfTestFailed, errors.PeerError),
        (errors.ConfigError, errors.PeerError),
    ],
)
def test_an_error_comes_back_as_its_kind(raised: type[AtollError], expected: type[AtollError]) -> None:
    with pytest.raises(expected, match=r"echo at 127.*: sync 7 is over") as caught:
        asyncio.run(echo(b"", raised("sync 7 is over")))
    assert type(caught.value) is expected


def test_details_are_bounded() -> None:
    with pytest.raises(errors.StaleError) as caught:
        asyncio.run(echo(b"", errors.StaleError("x" * 100_000)))
    assert len(str(caught.value)) < 1200


def test_a_server_that_is_not_there_is_a_peer_error() -> None:
    async def main() -> None:
        channel = transport.open_channel("127.0.0.1:1", handshake=None, max_message_bytes=1000)
        method: grpc.aio.UnaryUnaryMultiCallable[bytes, bytes] = channel.unary_unary("/test.Echo/Call")
        try:
            await method(b"")
        except grpc.RpcError as failure:
            error = status.from_rpc_error(failure, "echo")
            assert type(error) is PeerError
            assert "unavailable" in str(error)
        else:
            raise AssertionError("nobody listens there")
        await channel.close()

    asyncio.run(main())


def test_every_error_has_a_code_and_unknown_codes_are_the_peers_failure() -> None:
    for cls in vars(errors).values():
        if isinstance(cls, type) and issubclass(cls, AtollError):
            assert isinstance(status.code_of(cls("x")), grpc.StatusCode)
    for code in grpc.StatusCode:
        assert isinstance(status.error_of(code, "", "peer"), AtollError)


def test_bytes_in_place_of_text_are_logged_by_grpc_in_one_line(caplog: pytest.LogCaptureFixture) -> None:
    """As its `_decode` does, which a link that cuts messages short makes it do."""
    try:
        b"\x82".decode()
    except UnicodeDecodeError:
        logging.getLogger("grpc._cython.cygrpc").exception("Invalid encoding on %s", b"\x82")
    assert caplog.messages == ["Invalid encoding on b'\\x82'"]
    assert "Traceback" not in caplog.text


def test_connections_beyond_the_bound_of_a_server_are_closed_as_they_come() -> None:
    async def main() -> None:
        server = transport.create_server(max_message_bytes=1000, max_connections=3)
        port = transport.bind(server, "127.0.0.1:0", None)
        await server.start()
        opened = [await asyncio.open_connection("127.0.0.1", port) for _ in range(8)]
        async with asyncio.timeout(60):
            heard = await asyncio.gather(*(reader.read(1) for reader, _ in opened), return_exceptions=True)
        # A server speaks first, once it has taken a connection.
        num_taken = sum(1 for data in heard if isinstance(data, bytes) and data)
        for _, writer in opened:
            writer.close()
        await server.stop(0)
        assert num_taken == 3

    asyncio.run(main())


def test_as_many_calls_wait_for_a_busy_server_as_it_takes_connections() -> None:
    """Each is answered once the event loop is free; those beyond are cancelled at once."""
    most, beyond, num_channels = 100, 50, 3

    async def main() -> None:
        server = transport.create_server(max_message_bytes=1000, max_connections=most)
        handlers: dict[str, grpc.RpcMethodHandler[bytes, bytes]] = {
            "Call": grpc.unary_unary_rpc_method_handler(Echo().call)
        }
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("test.Echo", handlers),))
        port = transport.bind(server, "127.0.0.1:0", None)
        await server.start()
        with ExitStack() as stack:
            channels = [
                stack.enter_context(grpc.insecure_channel(f"127.0.0.1:{port}", options=transport.channel_options(1000)))
                for _ in range(num_channels)
            ]
            methods: list[Any] = [channel.unary_unary("/test.Echo/Call") for channel in channels]
            await asyncio.to_thread(lambda: [method(b"", timeout=PATIENCE_S) for method in methods])
            ended = threading.Semaphore(0)
            # Two more: grpc's bound is exclusive, and the server has asked for one call.
            calls = [methods[i % num_channels].future(b"x") for i in range(most + 2 + beyond)]
            for call in calls:
                call.add_done_callback(lambda _: ended.release())
            # No `await`: the event loop takes no call in the meantime.
            assert all(ended.acquire(timeout=PATIENCE_S) for _ in range(beyond)), "more than those wait"
            answers = await asyncio.to_thread(lambda: [call.exception(timeout=PATIENCE_S) for call in calls])
        await server.stop(0)
        assert [error for error in answers if error is None] == [None] * (most + 2)
        assert {error.code() for error in answers if error is not None} == {grpc.StatusCode.CANCELLED}

    asyncio.run(main())


@pytest.mark.parametrize(("limit_s", "code"), [(1, grpc.StatusCode.CANCELLED), (None, None)])
def test_a_call_that_waits_for_a_busy_server_is_taken_within_a_limit(
    monkeypatch: pytest.MonkeyPatch, limit_s: int | None, code: grpc.StatusCode | None
) -> None:
    """A lower one shows that it counts; the program's is far beyond every lease."""
    assert max(time_limits(preset).lease_s for preset in PRESETS) * 4 < transport.CALLS_WAIT_LIMIT_S
    if limit_s is not None:
        monkeypatch.setattr(transport, "CALLS_WAIT_LIMIT_S", limit_s)

    async def main() -> None:
        server = transport.create_server(max_message_bytes=1000)
        handlers: dict[str, grpc.RpcMethodHandler[bytes, bytes]] = {
            "Call": grpc.unary_unary_rpc_method_handler(Echo().call)
        }
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("test.Echo", handlers),))
        port = transport.bind(server, "127.0.0.1:0", None)
        await server.start()
        with grpc.insecure_channel(f"127.0.0.1:{port}", options=transport.channel_options(1000)) as channel:
            method: Any = channel.unary_unary("/test.Echo/Call")
            await asyncio.to_thread(lambda: method(b"", timeout=PATIENCE_S))
            calls = [method.future(b"x", timeout=PATIENCE_S) for _ in range(3)]
            # No `await`: the event loop is busy for longer than the lower limit.
            threading.Event().wait(1.5)
            errors = await asyncio.to_thread(lambda: [call.exception(timeout=PATIENCE_S) for call in calls])
        await server.stop(0)
        # The server has asked for one call, which does not wait.
        assert [error and error.code() for error in errors[1:]] == [code] * 2

    asyncio.run(main())


def test_a_connection_has_a_bound_of_calls_at_once() -> None:
    num_calls = transport.MAX_CALLS_EACH + 5

    async def main() -> None:
        begun, most_begun = 0, 0
        full, end = asyncio.Event(), asyncio.Event()

        async def hold(data: bytes, context: grpc.aio.ServicerContext[bytes, bytes]) -> bytes:
            nonlocal begun, most_begun
            begun += 1
            most_begun = max(most_begun, begun)
            if begun == transport.MAX_CALLS_EACH:
                full.set()
            await end.wait()
            begun -= 1
            return data

        server = transport.create_server(max_message_bytes=1000)
        handlers: dict[str, grpc.RpcMethodHandler[bytes, bytes]] = {
            "Call": grpc.unary_unary_rpc_method_handler(Echo().call),
            "Hold": grpc.unary_unary_rpc_method_handler(hold),
        }
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("test.Echo", handlers),))
        port = transport.bind(server, "127.0.0.1:0", None)
        await server.start()
        channel, another = (
            transport.open_channel(f"127.0.0.1:{port}", handshake=None, max_message_bytes=1000) for _ in range(2)
        )
        method: grpc.aio.UnaryUnaryMultiCallable[bytes, bytes] = channel.unary_unary("/test.Echo/Hold")
        after: grpc.aio.UnaryUnaryMultiCallable[bytes, bytes] = another.unary_unary("/test.Echo/Call")
        async with asyncio.timeout(PATIENCE_S):
            calls = [asyncio.ensure_future(method(b"x")) for _ in range(num_calls)]
            await full.wait()
            await after(b"x")  # the server takes calls in the order in which they come
            end.set()
            await asyncio.gather(*calls, return_exceptions=True)  # of those beyond, some wait and some are refused
        await channel.close()
        await another.close()
        await server.stop(0)
        assert most_begun == transport.MAX_CALLS_EACH

    asyncio.run(main())


def test_a_connection_that_speaks_and_has_no_call_is_closed() -> None:
    """It has answered the server's settings, so that its handshake is over; a silent one has another limit."""

    async def main() -> None:
        server = transport.create_server(max_message_bytes=1000, idle_limit_s=0.1)
        port = transport.bind(server, "127.0.0.1:0", None)
        await server.start()
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(HTTP2_PREFACE + HTTP2_SETTINGS + HTTP2_SETTINGS_ACK)
        # Less than the 30 s after which an unanswered ping of the server would end it.
        async with asyncio.timeout(PATIENCE_S / 2):
            heard = await reader.read()
        writer.close()
        await server.stop(0)
        assert heard.startswith(heard[:3] + b"\x04"), "it was the server of this connection, whose settings come first"

    asyncio.run(main())
