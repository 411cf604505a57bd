"""Mutual TLS on real sockets of one process."""

from __future__ import annotations

import asyncio
import ssl
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack
from datetime import timedelta
from pathlib import Path
from typing import Any

import grpc
import pytest

from atoll.node import limits
from atoll.node.daemon.peers import listen_for_peers
from atoll.node.exchange.hub import Hub
from atoll.node.exchange.peers.dialer import Dialer
from atoll.node.exchange.peers.listener import listen
from atoll.node.exchange.peers.rpc import PROBE_METHOD
from atoll.protocol import transport
from atoll.protocol.dates import date_of
from atoll.protocol.errors import InvalidMessage, PeerError, RefusedError
from atoll.protocol.machine import Machine
from atoll.protocol.status import abort
from atoll.protocol.trust import certificates, renewing
from atoll.protocol.trust.access import PEER
from atoll.protocol.trust.certificates import Root
from atoll.protocol.trust.names import Kind, Subject
from atoll.protocol.trust.security import PLAIN, MutualTls, Shown
from tests.simulation.loop import SimLoop

NOW_S = 1_764_000_000.0
DAY = timedelta(days=1)
SALT = bytes(range(16))
LIMIT_S = 30.0
"""Of what comes at once, on however busy a machine."""
ROOT = Root.made(SALT, 36500 * DAY, date_of(NOW_S))


def shown(
    kind: Kind, name: str = "", *, root: Root = ROOT, life: timedelta = 3650 * DAY, signed_s: float = NOW_S
) -> Shown:
    key = certificates.new_key()
    certificate = root.sign(key.public_key(), Subject("run", kind, name), life, date_of(signed_s))
    return Shown(certificates.to_pem(root.certificate), certificates.to_pem(certificate), certificates.key_to_pem(key))


def tls(kind: Kind, name: str = "", *, root: Root = ROOT, signed_s: float = NOW_S) -> MutualTls:
    return MutualTls("run", shown(kind, name, root=root, signed_s=signed_s))


async def probed(port: int, handshake: transport.Handshake | None) -> grpc.StatusCode:
    channel = transport.open_channel(f"127.0.0.1:{port}", handshake=handshake, max_message_bytes=1000)
    try:
        call: Any = channel.unary_unary(PROBE_METHOD)
        assert await call(b"who", timeout=60) == b"b"
    except grpc.aio.AioRpcError as error:
        return error.code()
    finally:
        await channel.close()
    return grpc.StatusCode.OK


def test_only_sites_of_the_run_that_expect_this_one_are_answered() -> None:
    async def answer(asked: bytes, context: Any) -> bytes:
        return b"b"

    async def main() -> list[grpc.StatusCode]:
        handlers: dict[str, Any] = {"Probe": grpc.unary_unary_rpc_method_handler(answer)}
        server, port = await listen("127.0.0.1:0", handlers, security=tls(Kind.SITE, "b"))
        a = tls(Kind.SITE, "a")
        without = transport.Handshake(grpc.ssl_channel_credentials(a.shown.roots), a.towards(Kind.SITE, "b").expected)
        try:
            return [
                await probed(port, a.towards(Kind.SITE, "b")),
                await probed(port, tls(Kind.SITE_IDENTITY, "a").towards(Kind.SITE, "b")),
                await probed(port, tls(Kind.COORDINATOR).towards(Kind.SITE, "b")),
                await probed(port, a.towards(Kind.SITE, "c")),
                await probed(port, without),
                await probed(port, None),
                await probed(
                    port, tls(Kind.SITE, "a", root=Root.made(SALT, DAY, date_of(NOW_S))).towards(Kind.SITE, "b")
                ),
            ]
        finally:
            await server.stop(None)

    unavailable, denied = grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.PERMISSION_DENIED
    assert asyncio.run(main()) == [grpc.StatusCode.OK, denied, denied, *[unavailable] * 4]


@pytest.mark.parametrize("is_refused", [False, True])
def test_a_stream_whose_first_write_is_cancelled_ends_and_says_why(is_refused: bool) -> None:
    """As where what was answered to it ends the call before this side has heard that it is written. gRPC would have
    sent the call's headers twice, and so no status: the other side waited for ever."""

    async def answer(_requests: Any, context: Any) -> None:
        writing = asyncio.create_task(context.write(b"b"))
        await asyncio.sleep(0)  # it has begun
        writing.cancel()
        await asyncio.gather(writing, return_exceptions=True)
        assert writing.cancelled()
        if is_refused:
            await abort(context, RefusedError("not this one"))

    async def main() -> str:
        handlers: dict[str, Any] = {"Exchange": grpc.stream_stream_rpc_method_handler(answer)}
        server, port = await listen("127.0.0.1:0", handlers, security=PLAIN)
        channel = transport.open_channel(f"127.0.0.1:{port}", handshake=None, max_message_bytes=1000)
        try:
            call: Any = channel.stream_stream(f"/{PEER}/Exchange")()
            async with asyncio.timeout(LIMIT_S):
                while await call.read() is not grpc.aio.EOF:
                    pass
        except grpc.aio.AioRpcError as error:
            return str(error.details())
        finally:
            await channel.close()
            await server.stop(None)
        return ""

    assert asyncio.run(main()) == ("not this one" if is_refused else "")


def test_one_site_has_so_many_calls_under_way_at_a_node_and_another_one_has_its_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(limits, "MAX_CALLS_OF_SITE", 2)

    async def main() -> list[grpc.StatusCode]:
        num_begun, may_end = 0, asyncio.Event()
        begun = asyncio.Event()

        async def answer(asked: bytes, context: Any) -> bytes:
            nonlocal num_begun
            num_begun += 1
            if num_begun == 2:
                begun.set()
            if num_begun <= 2:
                await may_end.wait()
            return b"b"

        handlers: dict[str, Any] = {"Probe": grpc.unary_unary_rpc_method_handler(answer)}
        server, port = await listen("127.0.0.1:0", handlers, security=tls(Kind.SITE, "b"))
        a, c = (tls(Kind.SITE, name).towards(Kind.SITE, "b") for name in "ac")
        try:
            waiting = [asyncio.create_task(probed(port, a)) for _ in range(2)]
            await begun.wait()
            found = [await probed(port, a), await probed(port, c)]
            may_end.set()
            found += await asyncio.gather(*waiting)
            return [*found, await probed(port, a)]
        finally:
            await server.stop(None)

    ok = grpc.StatusCode.OK
    assert asyncio.run(main()) == [grpc.StatusCode.UNAVAILABLE, ok, ok, ok, ok]


def test_a_node_takes_so_many_connections_of_peers_and_ends_those_that_are_idle(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What the server does with it is shown by tests/unit/protocol/test_transport.py."""
    monkeypatch.setattr(limits, "MAX_PEER_CONNECTIONS", 7)
    monkeypatch.setattr(limits, "PEER_IDLE_LIMIT_S", 11.0)
    made: list[dict[str, Any]] = []

    class Noted:
        def create_server(self, **options: Any) -> grpc.aio.Server:
            made.append(options)
            return transport.create_server(**options)

    async def main() -> None:
        network: Any = Noted()
        hub = Hub(run_id="run", incarnation=1, dialer=Dialer(), pool=ThreadPoolExecutor(1))
        async with AsyncExitStack() as stack:
            assert await listen_for_peers(hub, "127.0.0.1:0", Machine(network=network), PLAIN, stack)

    asyncio.run(main())
    assert [(options["max_connections"], options["idle_limit_s"]) for options in made] == [(7, 11.0)]


def test_a_server_shows_what_was_renewed_from_the_next_connection_on(tmp_path: Path) -> None:
    client = shown(Kind.SITE, "a")
    (tmp_path / "a.pem").write_bytes(client.certificate + client.key)

    async def seen(port: int) -> bytes:
        """The certificate that a new connection is shown, as PEM; and that it is TLS 1.3."""
        context = ssl.create_default_context(cadata=client.roots.decode())
        context.check_hostname = False
        context.load_cert_chain(tmp_path / "a.pem")
        context.set_alpn_protocols(["h2"])
        _, writer = await asyncio.open_connection("127.0.0.1", port, ssl=context)
        connection = writer.get_extra_info("ssl_object")
        writer.close()
        assert connection.version() == "TLSv1.3"
        return ssl.DER_cert_to_PEM_cert(connection.getpeercert(binary_form=True)).encode()

    async def main() -> None:
        security = tls(Kind.SITE, "b")
        told: list[Shown] = []
        security.told.append(told.append)
        server, port = await listen("127.0.0.1:0", {}, security=security)
        try:
            first = security.shown
            assert await seen(port) == first.certificate
            assert await seen(port) == first.certificate
            security.show(shown(Kind.SITE, "b"))
            assert security.shown.certificate != first.certificate
            assert await seen(port) == security.shown.certificate
            assert told == [security.shown]
        finally:
            await server.stop(None)

    asyncio.run(main())


def test_what_is_shown_is_renewed_when_it_is_due_and_tried_again_where_that_fails(
    caplog: pytest.LogCaptureFixture,
) -> None:
    first, second = shown(Kind.SITE, "a", life=DAY), shown(Kind.SITE, "a", life=2 * DAY)
    security = MutualTls("run", first)
    tried: list[float] = []

    async def main() -> None:
        loop = asyncio.get_running_loop()

        async def renew() -> Shown:
            tried.append(loop.time())
            if len(tried) < 3:
                raise PeerError("no coordinator")
            return second

        task = loop.create_task(renewing.keep_in_force(security, renew, lambda: NOW_S + loop.time()))
        await asyncio.sleep(24 * 3600)
        task.cancel()

    with asyncio.Runner(loop_factory=lambda: SimLoop(0)) as runner:
        runner.run(main())
    assert security.shown is second
    due_s = 16 * 3600.0
    assert [round((at_s - due_s) // renewing.LOOK_EVERY_S) for at_s in tried] == [0, 1, 2]
    warnings = [record for record in caplog.records if "is not renewed yet" in record.message]
    assert len(warnings) == 1, "the same problem is said once"
    assert "holds until 2025-11-25 16:00:00 UTC" in warnings[0].message


def test_a_fault_of_a_renewal_is_said_and_the_next_one_is_tried(caplog: pytest.LogCaptureFixture) -> None:
    first, second = shown(Kind.SITE, "a", life=DAY), shown(Kind.SITE, "a", life=2 * DAY)
    security = MutualTls("run", first)
    answers: list[Shown | Exception] = [ValueError("a fault"), Shown(b"no root", b"", b""), second]

    async def main() -> None:
        loop = asyncio.get_running_loop()

        async def renew() -> Shown:
            answer = answers.pop(0)
            if isinstance(answer, Exception):
                raise answer
            return answer

        task = loop.create_task(renewing.keep_in_force(security, renew, lambda: NOW_S + loop.time()))
        await asyncio.sleep(24 * 3600)
        task.cancel()

    with asyncio.Runner(loop_factory=lambda: SimLoop(0)) as runner:
        runner.run(main())
    assert security.shown is second
    assert [record.levelname for record in caplog.records if "not renewed" in record.message] == ["ERROR", "WARNING"]


def renewed_at(
    monkeypatch: pytest.MonkeyPatch, life: timedelta, clock_ahead_s: float, *, days: float, first: Shown | None = None
) -> list[int]:
    """The days at which something that holds so long is renewed, by a wall clock that is set to be so far ahead once
    that has begun. The coordinator's clock is right."""
    monkeypatch.setattr(renewing, "LOOK_EVERY_S", 1800.0)
    security = MutualTls("run", first or shown(Kind.SITE_IDENTITY, "a", life=life))
    at: list[int] = []

    async def main() -> None:
        loop = asyncio.get_running_loop()

        async def renew() -> Shown:
            at.append(round(loop.time() / 86_400))
            key = certificates.new_key()
            signed = ROOT.sign(
                key.public_key(), Subject("run", Kind.SITE_IDENTITY, "a"), life, date_of(NOW_S + loop.time())
            )
            return Shown(ROOT_PEM, certificates.to_pem(signed), certificates.key_to_pem(key))

        begun_at = loop.time()

        def wall_time() -> float:
            return NOW_S + loop.time() + (clock_ahead_s if loop.time() > begun_at + 60.0 else 0.0)

        task = loop.create_task(renewing.keep_in_force(security, renew, wall_time))
        await asyncio.sleep(days * 86_400)
        task.cancel()

    with asyncio.Runner(loop_factory=lambda: SimLoop(0)) as runner:
        runner.run(main())
    return at


def test_an_identity_is_renewed_at_two_thirds_whatever_the_clock_is_set_to(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """One that holds for thirty days."""
    month = 30 * DAY
    assert renewed_at(monkeypatch, month, 0.0, days=41) == [20, 40]
    assert renewed_at(monkeypatch, month, -15 * 86_400.0, days=41) == [20, 40], "it is set back"
    assert not [record for record in caplog.records if "this machine's clock says" in record.message]
    assert renewed_at(monkeypatch, month, 25 * 86_400.0, days=41) == [0, 20, 40], "ahead: at once, and no more often"
    assert len([record for record in caplog.records if "this machine's clock says" in record.message]) == 3


def test_what_another_root_has_signed_is_renewed_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    old = Root.made(SALT, 36500 * DAY, date_of(NOW_S))
    before = shown(Kind.SITE_IDENTITY, "a", root=old)
    both = Shown(ROOT_PEM + certificates.to_pem(old.certificate), before.certificate, before.key)
    assert renewed_at(monkeypatch, 3650 * DAY, 0.0, days=2, first=both) == [0]
    turned = Shown(certificates.to_pem(old.certificate) + ROOT_PEM, before.certificate, before.key)
    assert renewed_at(monkeypatch, 3650 * DAY, 0.0, days=2, first=turned) == []


def test_a_key_that_is_not_of_the_certificate_is_refused() -> None:
    mixed = Shown(ROOT_PEM, shown(Kind.SITE, "a").certificate, shown(Kind.SITE, "a").key)
    with pytest.raises(InvalidMessage, match="do not belong together"):
        MutualTls("run", mixed)


ROOT_PEM = certificates.to_pem(ROOT.certificate)
