"""A relay's port, with real sockets and certificates: who is served, who is not, and what ends when."""

from __future__ import annotations

import asyncio
import gc
import logging
import socket
import ssl
import subprocess
import sys
from collections.abc import Awaitable, Callable
from contextlib import ExitStack
from dataclasses import replace
from datetime import timedelta
from typing import Any

import grpc
import pytest

from atoll.node.relay import attached as attached_module
from atoll.node.relay import greeting, outgoing, words
from atoll.node.relay import server as server_module
from atoll.node.relay.client import RelayClient
from atoll.node.relay.outgoing import Route
from atoll.node.relay.server import RelayServer
from atoll.protocol import handshakes, transport
from atoll.protocol.addresses import HERE, Relayed, parse_address, parse_proxy
from atoll.protocol.dates import date_of
from atoll.protocol.errors import InvalidMessage, PeerError, RefusedError
from atoll.protocol.machine import REAL, Machine
from atoll.protocol.pace import Pace
from atoll.protocol.trust import certificates
from atoll.protocol.trust.certificates import Root
from atoll.protocol.trust.names import Kind
from atoll.protocol.trust.security import MutualTls, Shown
from tests.harness.connect_proxy import ConnectProxy
from tests.harness.relaying import (
    LIMIT_S,
    attached,
    called,
    echoed,
    echoing,
    relaying,
    site,
    until,
    until_attached,
)  # fmt: skip
from tests.harness.sockets import free_address
from tests.unit.trust.test_security import NOW_S, SALT, tls
from tests.unit.trust.test_server_tls import any_client


def played(play: Callable[[RelayServer, str], Awaitable[None]], bytes_a_day: int = 0) -> None:
    """With site b attached, which echoes."""

    async def main() -> None:
        async with echoing() as port, relaying(bytes_a_day) as server:
            with attached("b", server.address, port):
                await until_attached(server, "b")
                async with asyncio.timeout(2 * LIMIT_S):
                    await play(server, server.address)

    asyncio.run(main())


HUGE = b"\x16\x03\x01\xff\xff" + bytes(1 << 16)
"""A record longer than those of TLS."""


async def comes_to_nothing(connection: socket.socket, data: bytes = b"") -> None:
    """The relay ends it, without a word that is no TLS alert."""
    loop = asyncio.get_running_loop()
    with connection:
        try:
            await loop.sock_sendall(connection, data)
            while heard := await loop.sock_recv(connection, 1 << 16):
                assert heard[:1] == b"\x15", "an alert of TLS, or nothing"
        except ConnectionError:
            pass


def test_a_site_reaches_another_and_what_they_say_is_counted() -> None:
    async def play(server: RelayServer, relay: str) -> None:
        with await called("a", relay, "b") as connection:
            assert await echoed(connection, b"x" * 1000) == b"x" * 1000
            assert [str(pair) for pair in server.pairing.pairs] == ["a to b"]
        await until(lambda: not server.pairing.pairs)
        assert server.quotas.totals == {"a": 2000}

    played(play)


def test_a_ticket_works_once() -> None:
    async def play(server: RelayServer, relay: str) -> None:
        (_, writer), answer = await outgoing.speak(site("a"), Route(relay), words.Call("b"))
        writer.transport.abort()
        assert isinstance(answer, words.Ticket)
        with await outgoing.with_ticket(Route(relay), answer) as connection:
            assert await echoed(connection, b"x") == b"x"
            await comes_to_nothing(await outgoing.with_ticket(Route(relay), answer))
            assert await echoed(connection, b"y") == b"y", "the first one goes on"
        await comes_to_nothing(await outgoing.with_ticket(Route(relay), words.Ticket(bytes(32))))

    played(play)


@pytest.mark.parametrize(
    "stranger",
    [
        tls(Kind.SITE_IDENTITY, "a"),
        tls(Kind.VIEWER, "a"),
        tls(Kind.RELAY),
        tls(Kind.COORDINATOR),
        tls(Kind.SITE, "a", root=Root.made(SALT, timedelta(days=36500), date_of(NOW_S))),
    ],
    ids=["identity", "viewer", "relay", "coordinator", "another root"],
)
def test_who_is_no_site_of_the_run_gets_no_answer(stranger: MutualTls) -> None:
    async def play(server: RelayServer, relay: str) -> None:
        # Of another root: with this run's, so that it is the relay that refuses.
        stranger._shown = Shown(site("x").shown.roots, stranger.shown.certificate, stranger.shown.key)
        for word in (words.Call("b"), words.Attach(9)):
            with pytest.raises((OSError, RefusedError)) as caught:
                await outgoing.speak(stranger, Route(relay), word)
            assert "not attached" not in str(caught.value)
        assert server.pairing.attached == ["b"]
        assert server.pairing.num_pairs == 0

    played(play)


def test_who_shows_nothing_or_speaks_something_else_gets_nothing() -> None:
    async def play(server: RelayServer, relay: str) -> None:
        for data in (b"GET / HTTP/1.1\r\n\r\n", b"\x16" + bytes(200), b"T" + bytes(32), b"\x00", HUGE):
            await comes_to_nothing(await outgoing.connect(Route(relay)), data)
        cut = await outgoing.connect(Route(relay))
        cut.send(b"Tabc")
        cut.shutdown(socket.SHUT_WR)
        await comes_to_nothing(cut)
        await until(lambda: server.num_strangers >= 6)
        assert server.pairing.num_pairs == 0

    played(play)


def test_handshakes_without_a_certificate_have_a_pace_and_those_of_sites_do_not_count(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(handshakes, "OF_ONE", Pace(at_once=3, per_s=1e-9))
    to_relay = ssl.MemoryBIO()
    with pytest.raises(ssl.SSLWantReadError):
        any_client().wrap_bio(ssl.MemoryBIO(), to_relay).do_handshake()
    hello = to_relay.read()

    async def play(server: RelayServer, relay: str) -> None:
        async def begins() -> bool:
            with socket.create_connection(parse_address(relay), LIMIT_S, source_address=("127.0.0.2", 0)) as connection:
                connection.setblocking(False)
                loop = asyncio.get_running_loop()
                try:
                    await loop.sock_sendall(connection, hello)
                    return bool(await loop.sock_recv(connection, 1))
                except ConnectionError:
                    return False

        assert [await begins() for _ in range(5)] == [True] * 3 + [False] * 2
        for _ in range(5):
            with await called("a", relay, "b") as connection:
                assert await echoed(connection, b"x") == b"x"

    played(play)


def test_handshakes_of_a_site_that_is_banned_are_those_of_a_stranger(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its certificate is good for a day."""
    monkeypatch.setattr(handshakes, "OF_ONE", Pace(at_once=3, per_s=1e-9))

    async def play(server: RelayServer, relay: str) -> None:
        with pytest.raises(RefusedError, match="site c"):
            await called("b", relay, "c")
        server.ban(["a"])
        for _ in range(3):
            with pytest.raises(PeerError):
                await called("a", relay, "b")
        with pytest.raises(PeerError):  # from the same address
            await called("b", relay, "c")

    played(play)


def test_a_site_that_expects_a_relay_takes_no_site_for_one() -> None:
    async def main() -> None:
        async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            writer.close()

        context = greeting._context(ssl.PROTOCOL_TLS_SERVER, tls(Kind.SITE, "b"))
        server = await asyncio.start_server(answer, "127.0.0.1", 0, ssl=context)
        address = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
        with pytest.raises(PeerError, match=r"does not lead to site b: .*ostname mismatch"):
            await called("a", address, "b")
        server.close()

    asyncio.run(main())


def test_silent_strangers_make_room_for_others_and_have_no_long_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_module, "MAX_STRANGERS", 3)
    monkeypatch.setattr(greeting, "HANDSHAKE_LIMIT_S", 1000.0)

    async def play(server: RelayServer, relay: str) -> None:
        silent = [await outgoing.connect(Route(relay)) for _ in range(5)]
        with await called("a", relay, "b") as connection:
            assert await echoed(connection, b"x") == b"x"
        await comes_to_nothing(silent[0])
        monkeypatch.setattr(greeting, "HANDSHAKE_LIMIT_S", 0.1)
        late = await outgoing.connect(Route(relay))
        await comes_to_nothing(late)
        for connection in silent:
            connection.close()

    played(play)


def test_an_address_that_opens_connections_and_says_nothing_makes_room_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """However many: a site of another address has all the time that it needs."""
    monkeypatch.setattr(server_module, "MAX_STRANGERS", 3)

    async def play(server: RelayServer, relay: str) -> None:
        loop, no_ticket = asyncio.get_running_loop(), b"T" + bytes(32)
        with ExitStack() as stack:
            slow = stack.enter_context(await outgoing.connect(Route(relay)))
            for _ in range(20):
                flooding = stack.enter_context(socket.socket())
                flooding.setblocking(False)
                flooding.bind(("127.0.0.2", 0))
                await loop.sock_connect(flooding, parse_address(relay))
            await loop.sock_sendall(flooding, no_ticket)  # they are taken in their order
            await until(lambda: server.num_strangers == 1)
            await comes_to_nothing(slow, no_ticket)
            assert server.num_strangers == 2, "it was heard"

    played(play)


def test_at_the_end_of_its_quota_a_site_is_cut_off_and_told_and_others_are_served(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)

    async def play(server: RelayServer, relay: str) -> None:
        async with echoing() as port:
            with attached("a", relay, port):
                await until_attached(server, "a", "b")
                connection, other = await called("a", relay, "b"), await called("b", relay, "a")
                assert await echoed(other, b"y") == b"y"
                with connection, pytest.raises(ConnectionError):
                    await echoed(connection, b"x" * 10_000_000)
                with pytest.raises(RefusedError, match="site a has used its quota of 1e-05 GB a day"):
                    await called("a", relay, "b")
                with other:
                    assert await echoed(other, b"y") == b"y", "it is the caller's quota"
                await until(lambda: any("says: site a has used its quota" in text for text in caplog.messages))

    played(play, bytes_a_day=10_000)


def test_a_site_that_is_banned_is_cut_off_whichever_side_it_is_on_and_comes_no_more() -> None:
    async def play(server: RelayServer, relay: str) -> None:
        async with echoing() as port:
            with attached("a", relay, port), attached("c", relay, port):
                await until_attached(server, "a", "b", "c")
                others = [await called("c", relay, "b"), await called("b", relay, "c")]
                cut = [await called("a", relay, "b"), await called("b", relay, "a")]
                for connection in (*others, *cut):
                    assert await echoed(connection, b"x") == b"x"
                server.ban(["a"])
                for connection in cut:
                    with connection, pytest.raises(ConnectionError):
                        await echoed(connection, b"x" * 1000)
                for connection in others:
                    with connection:
                        assert await echoed(connection, b"y") == b"y"
                await until(lambda: server.pairing.attached == ["b", "c"])
                with pytest.raises(RefusedError, match="site a is banned"):
                    await called("b", relay, "a")
                for word in (words.Call("b"), words.Attach(9)):
                    with pytest.raises((OSError, InvalidMessage)):
                        await outgoing.speak(site("a"), Route(relay), word)
                server.ban([])
                await until_attached(server, "a", "b", "c")

    played(play)


def test_a_host_of_a_site_calls_others_as_its_site_and_is_not_attached() -> None:
    async def play(server: RelayServer, relay: str) -> None:
        host = tls(Kind.HOST, "a/1")
        with pytest.raises((OSError, InvalidMessage)):
            await outgoing.speak(host, Route(relay), words.Attach(9))
        (_, writer), answer = await outgoing.speak(host, Route(relay), words.Call("b"))
        writer.transport.abort()
        assert isinstance(answer, words.Ticket)
        assert [pair.caller for pair in server.pairing.pairs] == ["a"]
        assert server.pairing.attached == ["b"]

    played(play)


def test_what_was_called_before_the_end_of_a_quota_is_not_joined_after_it() -> None:
    async def play(server: RelayServer, relay: str) -> None:
        (_, writer), ticket = await outgoing.speak(site("a"), Route(relay), words.Call("b"))
        writer.transport.abort()
        assert isinstance(ticket, words.Ticket)
        await until(lambda: bool(server._waiting))  # b has come
        server.quotas.charge("a", 10_000, asyncio.get_running_loop().time())
        await comes_to_nothing(await outgoing.with_ticket(Route(relay), ticket))
        assert server.pairing.pairs == []

    played(play, bytes_a_day=10_000)


def test_what_says_nothing_for_long_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_module, "LOOK_EVERY_S", 0.05)

    async def play(server: RelayServer, relay: str) -> None:
        with await called("a", relay, "b") as connection:
            assert await echoed(connection, b"x") == b"x"
            server._idle_limit_s = 0.0
            with pytest.raises(ConnectionResetError):
                await asyncio.get_running_loop().sock_recv(connection, 1)

    played(play)


def test_a_call_that_nobody_comes_to_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_module, "LOOK_EVERY_S", 0.05)
    monkeypatch.setattr("atoll.node.relay.pairing.TICKET_LIMIT_S", 0.2)

    async def main() -> None:
        async with relaying() as server:
            relay = server.address
            (_, writer), answer = await outgoing.speak(site("b"), Route(relay), words.Attach(1))
            assert answer == words.Attached()
            with await called("a", relay, "b") as connection:
                assert await asyncio.get_running_loop().sock_recv(connection, 1) == b""
            assert server.pairing.pairs == []
            writer.transport.abort()

    asyncio.run(main())


def test_a_site_comes_back_to_a_relay_that_was_away() -> None:
    async def main() -> None:
        async with echoing() as port, relaying(address=free_address()) as first:
            with attached("b", first.address, port) as at_b:
                await until_attached(first, "b")
                await until(lambda: at_b.is_attached)
                await first.close()
                await until(lambda: not at_b.is_attached)
                assert at_b.problem
                second = RelayServer(
                    "run", tls(Kind.RELAY), first.quotas, REAL, coordinators=lambda: ["c:1"], max_pairs=9
                )
                await second.start(first.address)
                await until(lambda: at_b.is_attached)
                assert second.pairing.attached == ["b"]
                await second.close()

    asyncio.run(main())


def test_a_site_that_says_nothing_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_module, "CONTROL_LIMIT_S", 0.3)
    monkeypatch.setattr(attached_module, "PING_EVERY_S", 0.05)

    async def play(server: RelayServer, relay: str) -> None:
        (reader, writer), _ = await outgoing.speak(site("c"), Route(relay), words.Attach(1))
        assert "c" in server.pairing.attached
        await until_attached(server, "b")
        assert await reader.read() == b""
        writer.transport.abort()

    played(play)


def test_a_site_is_attached_no_longer_than_its_certificate_holds() -> None:
    """It comes again with a renewed one; one that is banned has none."""
    until_s = certificates.from_pem(site("c").shown.certificate)[0].not_valid_after_utc.timestamp()

    async def main() -> None:
        async with relaying(machine=replace(Machine(), wall_time=lambda: until_s - 0.2)) as server:
            (reader, writer), answer = await outgoing.speak(site("c"), Route(server.address), words.Attach(1))
            assert answer == words.Attached()
            assert await reader.read() == b""
            assert server.pairing.attached == []
            writer.transport.abort()

    asyncio.run(main())


def test_a_thief_with_an_older_certificate_keeps_no_site_from_being_called() -> None:
    """Whatever start it says; once the owner is attached it comes no more."""

    async def main() -> None:
        async with relaying() as server:
            route, thief, owner = Route(server.address), site("c", NOW_S), site("c", NOW_S + 1.0)
            highest = words.Attach(words.MAX_START - 1)
            (to_thief, thief_writer), answer = await outgoing.speak(thief, route, highest)
            assert answer == words.Attached()
            (to_owner, owner_writer), answer = await outgoing.speak(owner, route, words.Attach(1))
            assert answer == words.Attached()
            assert await greeting.read_word(to_thief) == words.Refused(
                "another connection of site c has taken the place of this one"
            )
            with pytest.raises(RefusedError, match="a newer certificate of site c is attached"):
                await outgoing.speak(thief, route, highest)
            calling = asyncio.create_task(called("a", server.address, "c"))
            assert isinstance(await greeting.read_word(to_owner), words.Ticket)
            (await calling).close()
            for writer in (thief_writer, owner_writer):
                writer.transport.abort()

    asyncio.run(main())


def test_of_one_certificate_the_newest_start_is_the_one_that_is_called() -> None:
    async def play(server: RelayServer, relay: str) -> None:
        shown = site("b", NOW_S + 1.0)
        (reader, writer), _ = await outgoing.speak(shown, Route(relay), words.Attach(2))
        with pytest.raises(RefusedError, match="start 1 of site b is over: start 2 is attached"):
            await outgoing.speak(shown, Route(relay), words.Attach(1))
        calling = asyncio.create_task(called("a", relay, "b"))
        assert isinstance(await greeting.read_word(reader), words.Ticket)
        (await calling).close()
        writer.transport.abort()

    played(play)


def test_grpc_comes_to_a_site_by_a_socket_of_its_own_process() -> None:
    async def answer(asked: bytes, context: object) -> bytes:
        return asked

    async def main() -> None:
        server = transport.create_server(max_message_bytes=8 << 20)
        handlers: dict[str, Any] = {"Echo": grpc.unary_unary_rpc_method_handler(answer)}
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("test", handlers),))
        security = site("b")
        port = transport.bind(server, "127.0.0.1:0", security.of_server())
        await server.start()
        client = RelayClient(site("a"))
        async with relaying() as relay:
            with attached("b", relay.address, f"127.0.0.1:{port}"):
                await until_attached(relay, "b")
                address = client.address_for(Relayed("b", relay.address))
                assert client.address_for(Relayed("b", relay.address)) == address
                assert not client.knows(relay.address)
                channel = transport.open_channel(
                    address, handshake=site("a").towards(Kind.SITE, "b"), max_message_bytes=8 << 20
                )
                asked = bytes(4 << 20)
                echo: Any = channel.unary_unary("/test/Echo")
                assert await echo(asked, timeout=LIMIT_S) == asked
                assert client.knows(relay.address)
                await channel.close()
                wrong = transport.open_channel(
                    address, handshake=site("a").towards(Kind.SITE, "c"), max_message_bytes=8 << 20
                )
                echo = wrong.unary_unary("/test/Echo")
                with pytest.raises(grpc.aio.AioRpcError):
                    await echo(b"", timeout=LIMIT_S)
                await wrong.close()
        await asyncio.to_thread(client.close)
        await server.stop(None)

    asyncio.run(main())


@pytest.mark.parametrize("num_steps", range(6))
def test_a_connection_that_comes_as_the_relay_closes_is_closed(num_steps: int) -> None:
    """However far the loop has come with it: else pytest finds a socket that nobody has closed."""

    async def main() -> None:
        async with relaying() as relay:
            connection = socket.create_connection(parse_address(relay.address))
            connection.setblocking(False)
            for _ in range(num_steps):
                await asyncio.sleep(0)
        await comes_to_nothing(connection)

    asyncio.run(main())
    gc.collect()


def test_a_relay_is_reached_through_an_http_proxy() -> None:
    async def play(server: RelayServer, relay: str) -> None:
        with ConnectProxy() as proxy:
            through, port = parse_proxy(proxy.url), relay.rpartition(":")[2]
            route = Route(f"relay.invalid:{port}", through)
            with await outgoing.called(site("a"), route, "b") as connection:
                assert await echoed(connection, b"x" * 100_000) == b"x" * 100_000
            assert proxy.asked == [f"relay.invalid:{port}"] * 2
            proxy.refuses = True
            with pytest.raises(PeerError, match=r"proxy does not lead to relay.invalid:\d+: HTTP/1.1 403 Forb"):
                await outgoing.called(site("a"), route, "b")
        with pytest.raises(PeerError, match="Connect call failed"):
            await outgoing.called(site("a"), route, "b")

    played(play)


def test_what_is_no_name_of_a_machine_is_an_error() -> None:
    with pytest.raises(PeerError, match=r"the relay at a..b:1 does not lead to site b: a..b:1 is no name of a machine"):
        asyncio.run(called("a", "a..b:1", "b"))


@pytest.mark.parametrize(
    "answer", [b"", b"HTTP/1.1 200 OK", b"HTTP/1.1 200 OK\r\n\r\nmore", b"SSH-2.0\r\n\r\n", b"HTTP/1.1 " + b"2" * 9000]
)
def test_what_is_no_answer_of_a_proxy_is_an_error(answer: bytes) -> None:
    async def main() -> None:
        async def say(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.readuntil(b"\r\n\r\n")
            writer.write(answer)
            writer.close()

        server = await asyncio.start_server(say, "127.0.0.1", 0)
        proxy = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
        with pytest.raises(PeerError, match="the HTTP proxy does not lead to r:1"):
            await outgoing.called(site("a"), Route("r:1", proxy), "b")
        server.close()

    asyncio.run(main())


def test_who_expects_the_coordinator_is_led_to_it() -> None:
    """By the name in the handshake, which may come in pieces; TLS is between the two. Nobody else is."""

    async def answer(asked: bytes, context: object) -> bytes:
        return asked

    async def main() -> None:
        server = transport.create_server(max_message_bytes=1 << 20)
        handlers: dict[str, Any] = {"Echo": grpc.unary_unary_rpc_method_handler(answer)}
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("test", handlers),))
        port = transport.bind(server, "127.0.0.1:0", tls(Kind.COORDINATOR).of_server())
        await server.start()
        async with relaying(coordinator=f"127.0.0.1:{port}") as relay, echoing() as echoes:
            before = tls(Kind.SITE_IDENTITY, "a")
            channel = transport.open_channel(
                relay.address, handshake=before.towards(Kind.COORDINATOR), max_message_bytes=1 << 20
            )
            echo: Any = channel.unary_unary("/test/Echo")
            assert await echo(b"x", timeout=LIMIT_S) == b"x"
            assert len(relay.to_coordinator) == 1
            await channel.close()
            await until(lambda: not relay.to_coordinator)
            loop, name = asyncio.get_running_loop(), before.towards(Kind.COORDINATOR).expected.encode()
            hello = b"\x16\x03\x01" + (len(name)).to_bytes(2, "big") + name
            relay._coordinators = lambda: [echoes]
            with await outgoing.connect(Route(relay.address)) as connection:
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                for at in range(len(hello)):
                    assert not relay.to_coordinator
                    await loop.sock_sendall(connection, hello[at : at + 1])
                    await asyncio.sleep(0)
                await until(lambda: len(relay.to_coordinator) == 1)
            await comes_to_nothing(await outgoing.connect(Route(relay.address)), hello[:4] + b"\x05" + bytes(40))
        await server.stop(None)

    asyncio.run(main())


def test_connections_to_the_coordinator_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_module, "MAX_TO_COORDINATOR", 1)

    async def main() -> None:
        name = site("a").towards(Kind.COORDINATOR).expected.encode()
        hello = b"\x16\x03\x01" + (len(name)).to_bytes(2, "big") + name
        async with echoing() as port, relaying(coordinator=port) as relay:
            with await outgoing.connect(Route(relay.address)) as connection:
                assert await echoed(connection, hello) == hello
                await comes_to_nothing(await outgoing.connect(Route(relay.address)), hello)
                assert await echoed(connection, hello) == hello

    asyncio.run(main())


def test_renewed_certificates_are_shown_in_the_next_handshake() -> None:
    async def play(server: RelayServer, relay: str) -> None:
        security = site("a")
        for name in ("a", "c"):
            with await outgoing.called(security, Route(relay), "b") as connection:
                assert await echoed(connection, b"x") == b"x"
            assert server.quotas.totals[name] == 2
            security.show(site("c").shown)
        server._tls.show(tls(Kind.SITE, "x").shown)
        with pytest.raises(PeerError, match="ostname mismatch"):
            await outgoing.called(security, Route(relay), "b")

    played(play)


def test_a_socket_of_this_process_takes_no_other_one() -> None:
    async def main() -> None:
        client = RelayClient(site("a"))
        async with relaying() as relay:
            with attached("b", relay.address, "127.0.0.1:1"):
                await until_attached(relay, "b")
                name = client.address_for(Relayed("b", relay.address)).removeprefix(HERE)
                code = f"import socket; s = socket.socket(1); s.connect({chr(0) + name!r}); print(s.recv(1))"
                command = [sys.executable, "-c", code]
                stranger = await asyncio.create_subprocess_exec(*command, stdout=subprocess.PIPE)
                said, _ = await stranger.communicate()
                assert said == b"b''\n"
                assert relay.pairing.num_pairs == 0
        await asyncio.to_thread(client.close)

    asyncio.run(main())
