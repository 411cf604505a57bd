"""The node's side of a session against a server that says what a test wants it to say."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc
import pytest

from atoll.node.daemon.session import FIRST_BACKOFF_S, MAX_BACKOFF_S, Session
from atoll.protocol import PROTOCOL_VERSION, transport, wire
from atoll.protocol import messages as m
from atoll.protocol.errors import InvalidMessage
from atoll.protocol.machine import Machine
from atoll.protocol.time_limits import time_limits
from atoll.protocol.v1 import session_pb2
from tests.harness.envelopes import response
from tests.harness.sockets import free_address

HEADER = m.Header(protocol_version=PROTOCOL_VERSION, run_id="run", term=1)
GOOD = wire.to_bytes(response(m.Pulse(), HEADER, 1, 0))
FLIPPED = bytes([GOOD[0] ^ 1]) + GOOD[1:]
NO_BODY = response(m.Pulse(), HEADER, 1, 0)
NO_BODY.ClearField("pulse")


async def serving(serve: Callable[[AsyncIterator[bytes], Any], AsyncIterator[bytes]]) -> tuple[grpc.aio.Server, str]:
    """A server with that Session, and its address."""
    server = transport.create_server(max_message_bytes=1 << 20)
    handlers: dict[str, grpc.RpcMethodHandler[Any, Any]] = {"Session": grpc.stream_stream_rpc_method_handler(serve)}
    server.add_generic_rpc_handlers(
        (grpc.method_handlers_generic_handler("atoll.protocol.v1.CoordinatorService", handlers),)
    )
    port = transport.bind(server, "127.0.0.1:0", None)
    await server.start()
    return server, f"127.0.0.1:{port}"


def a_session(
    address: str, heard: asyncio.Queue[Any], lost: asyncio.Queue[Any] | None = None, kind: type[Session] = Session
) -> Session:
    """What it is told goes to `heard`, and why it lost a stream unless `lost` is given."""
    return kind(
        addresses=[address],
        limits=time_limits("local"),
        machine=Machine(),
        opened=lambda: None,
        lost=(lost or heard).put_nowait,
        received=lambda _, message: heard.put_nowait(message),
        header=lambda: HEADER,
    )


@pytest.mark.parametrize("bad", [b"\xff\xff\xff", GOOD[:-3], FLIPPED, wire.to_bytes(NO_BODY)])
def test_a_message_that_cannot_be_read_ends_the_stream_and_the_next_one_is_heard(bad: bytes) -> None:
    async def scenario() -> None:
        num_streams = 0

        async def serve(requests: AsyncIterator[bytes], _context: Any) -> AsyncIterator[bytes]:
            nonlocal num_streams
            num_streams += 1
            yield bad if num_streams == 1 else GOOD
            async for _ in requests:
                pass

        server, address = await serving(serve)
        heard: asyncio.Queue[Any] = asyncio.Queue()
        session = a_session(address, heard)
        task = asyncio.create_task(session.run())
        assert "a message that cannot be read" in await heard.get()
        assert await heard.get() == m.Pulse()
        assert session.num_refused_messages == 1
        await session.close()
        await task
        await server.stop(0)

    asyncio.run(scenario())


def test_who_is_not_let_in_hears_why_and_does_not_knock_for_ever() -> None:
    """As of a site that was banned while its link was cut: its stream is refused before its Hello is read."""

    async def scenario() -> None:
        async def serve(requests: AsyncIterator[bytes], context: Any) -> AsyncIterator[bytes]:
            await context.abort(grpc.StatusCode.PERMISSION_DENIED, "a is banned: it lies")
            yield b""

        server, address = await serving(serve)
        heard: asyncio.Queue[Any] = asyncio.Queue()
        session = a_session(address, heard)
        task = asyncio.create_task(session.run())
        refused = await heard.get()
        assert (refused.kind, refused.text) == (m.RefusedKind.BANNED, "a is banned: it lies")
        assert await heard.get() == "a is banned: it lies", "once, and the stream is over"
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await server.stop(0)

    asyncio.run(scenario())


class Impatient(Session):
    """Says how long it would wait, as a share of the longest wait, and does not."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.pauses: list[float] = []

    async def _pause(self, delay_s: float) -> None:
        self.pauses.append(delay_s / MAX_BACKOFF_S)


@pytest.mark.parametrize("welcome", [True, False])
def test_the_session_waits_longer_after_every_stream_until_it_is_welcomed(welcome: bool) -> None:
    """A stream that opens is no sign of a coordinator: one of another run answers, and something else may listen."""
    num_streams = 6

    async def scenario() -> list[float]:
        async def serve(requests: AsyncIterator[bytes], _context: Any) -> AsyncIterator[bytes]:
            yield GOOD
            if welcome:
                yield wire.to_bytes(response(m.Welcome(settings_json="{}"), HEADER, 2, 0))

        server, address = await serving(serve)
        lost: asyncio.Queue[Any] = asyncio.Queue()
        session = a_session(address, asyncio.Queue(), lost, Impatient)
        assert isinstance(session, Impatient)
        task = asyncio.create_task(session.run())
        for _ in range(num_streams):
            await lost.get()
        await session.close()
        await task
        await server.stop(0)
        return session.pauses[: num_streams - 1]

    pauses = asyncio.run(scenario())
    least, most = FIRST_BACKOFF_S / MAX_BACKOFF_S / 2, FIRST_BACKOFF_S / MAX_BACKOFF_S
    if welcome:
        assert all(least <= pause <= most for pause in pauses)
    else:
        assert all(least * 2**i <= pause <= min(most * 2**i, 1.0) for i, pause in enumerate(pauses[:3]))
        assert pauses[-1] >= 0.5


@pytest.mark.parametrize("failing", ["received", "header"])
def test_a_handler_that_fails_ends_the_session_and_is_not_taken_for_the_stream(failing: str) -> None:
    """Else the node would connect again and again, and what it was told would be lost each time."""

    async def scenario() -> None:
        async def serve(requests: AsyncIterator[bytes], _context: Any) -> AsyncIterator[bytes]:
            yield GOOD
            async for _ in requests:
                pass

        def fail(*_: Any) -> Any:
            raise InvalidMessage("of this node's own")

        server, address = await serving(serve)
        lost: list[str] = []
        session = Session(
            addresses=[address],
            limits=time_limits("local"),
            machine=Machine(),
            opened=lambda: session.send(m.Heartbeat(phase="training")),
            lost=lost.append,
            received=lambda header, message: None,
            header=lambda: HEADER,
        )
        setattr(session, failing, fail)
        with pytest.raises(InvalidMessage, match="of this node's own"):
            await session.run()
        assert not lost
        await server.stop(0)

    asyncio.run(scenario())


def test_the_refusal_of_a_coordinator_without_checksums_is_heard() -> None:
    refused = m.Refused(kind=m.RefusedKind.PROTOCOL, text="install the same version of atoll on both")

    async def scenario() -> None:
        async def serve(requests: AsyncIterator[bytes], _context: Any) -> AsyncIterator[bytes]:
            header = m.Header(protocol_version=PROTOCOL_VERSION - 1, run_id="run", term=1)
            yield response(refused, header, 1, 0).SerializeToString()
            async for _ in requests:
                pass

        server, address = await serving(serve)
        heard: asyncio.Queue[Any] = asyncio.Queue()
        session = a_session(address, heard)
        task = asyncio.create_task(session.run())
        assert await heard.get() == refused
        await session.close()
        await task
        await server.stop(0)

    asyncio.run(scenario())


def test_sources_are_heard_once_they_are_whole_and_parts_of_a_stream_that_ended_are_forgotten() -> None:
    donor = m.Donor(site_id=1, incarnation=1, address="127.0.0.1:1", commit=2)
    begun = m.Sources(donors=(donor,), more=True)
    first, second = (
        m.Commit(
            commit=n, sync=n, attempt=1, term=1, contributors=(), payload_digest=bytes(32), run_step=n, run_tokens=n
        )
        for n in (1, 2)
    )
    parts = [begun, m.Sources(commits=(first,), more=True), m.Sources(commits=(second,))]

    async def scenario() -> None:
        num_streams = 0

        async def serve(requests: AsyncIterator[bytes], _context: Any) -> AsyncIterator[bytes]:
            nonlocal num_streams
            num_streams += 1
            for seq, part in enumerate(parts[: num_streams + 1], 1):
                yield wire.to_bytes(response(part, HEADER, seq, 0))
            if num_streams > 1:
                async for _ in requests:
                    pass

        server, address = await serving(serve)
        heard: asyncio.Queue[Any] = asyncio.Queue()
        session = a_session(address, heard, asyncio.Queue())
        task = asyncio.create_task(session.run())
        assert await heard.get() == m.Sources(donors=(donor,), commits=(first, second))
        assert heard.empty()
        assert num_streams == 2
        await session.close()
        await task
        await server.stop(0)

    asyncio.run(scenario())


def test_a_session_that_is_cancelled_leaves_no_task_behind() -> None:
    """It would go on listening while the node stops."""

    async def scenario() -> None:
        async def serve(requests: AsyncIterator[bytes], _context: Any) -> AsyncIterator[bytes]:
            yield GOOD
            async for _ in requests:
                pass

        server, address = await serving(serve)
        before = asyncio.all_tasks()
        heard: asyncio.Queue[Any] = asyncio.Queue()
        task = asyncio.create_task(a_session(address, heard).run())
        assert await heard.get() == m.Pulse()
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        ours = {t for t in asyncio.all_tasks() - before if "Session." in t.get_coro().__qualname__}  # type: ignore[union-attr]
        await server.stop(0)
        assert not ours

    asyncio.run(scenario())


def test_a_message_acknowledges_what_was_heard_when_it_was_said() -> None:
    """Not when it went: the coordinator takes it for an answer to what it acknowledges."""

    async def scenario() -> None:
        session = a_session("127.0.0.1:1", asyncio.Queue())
        session._is_open = True
        session.send(m.Heartbeat(phase="before"))
        session._received_seq = 1
        session.send(m.Heartbeat(phase="after"))
        requests = session._requests(asyncio.get_running_loop().create_future())
        said = [wire.parse(session_pb2.SessionRequest, await anext(requests)) for _ in range(2)]
        assert [envelope.ack for envelope in said] == [0, 1]
        await requests.aclose()  # type: ignore[attr-defined]

    asyncio.run(scenario())


def test_where_several_may_serve_the_run_the_session_finds_the_one_that_does_and_learns_of_others() -> None:
    """Nobody listens at the first address, and the second one says where else: there the session goes when it ends."""

    def says(coordinators: list[str]) -> bytes:
        response = wire.response_body(m.Welcome(settings_json="{}"))
        return wire.response_around(response, HEADER, 1, 0, coordinators)

    async def scenario() -> None:
        others: list[str] = []

        async def ends(requests: AsyncIterator[bytes], _context: Any) -> AsyncIterator[bytes]:
            yield says(others)

        async def stays(requests: AsyncIterator[bytes], _context: Any) -> AsyncIterator[bytes]:
            yield GOOD
            async for _ in requests:
                pass

        second, address = await serving(ends)
        third, another = await serving(stays)
        others += [address, another]
        heard: asyncio.Queue[Any] = asyncio.Queue()
        session = a_session(free_address(), heard)
        session.addresses = [session.addresses[0], address]
        session.__post_init__()
        task = asyncio.create_task(session.run())
        async with asyncio.timeout(60):
            assert "refuses connections" in await heard.get()
            assert await heard.get() == m.Welcome(settings_json="{}")
            assert await heard.get() == "the coordinator ended the session"
            while (found := await heard.get()) != m.Pulse():
                assert isinstance(found, str | m.Welcome)
        assert session.address == another
        await session.close()
        await task
        for server in (second, third):
            await server.stop(0)

    asyncio.run(scenario())


@pytest.mark.parametrize("addresses", [["nowhere"], ["a@b:1"], [f"h{n}:1" for n in range(9)], ["x y:1"]])
def test_addresses_that_are_none_end_the_stream(addresses: list[str]) -> None:
    async def scenario() -> None:
        async def serve(requests: AsyncIterator[bytes], _context: Any) -> AsyncIterator[bytes]:
            yield wire.response_around(wire.response_body(m.Pulse()), HEADER, 1, 0, addresses)

        server, address = await serving(serve)
        heard: asyncio.Queue[Any] = asyncio.Queue()
        session = a_session(address, heard)
        task = asyncio.create_task(session.run())
        async with asyncio.timeout(60):
            assert "a message that cannot be read" in await heard.get()
        assert session.address == address
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await server.stop(0)

    asyncio.run(scenario())
