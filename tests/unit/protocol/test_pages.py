"""Pages over HTTP: whoever opens connections and says nothing, or asks for nonsense, closes them for nobody."""

from __future__ import annotations

import asyncio
import select
import socket
import ssl
import struct
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import pytest

from atoll.coordinator.authority import Authority
from atoll.protocol import accepting, addresses, handshakes, pages
from atoll.protocol.handshakes import Crowd
from atoll.protocol.http import PLAIN, Answer, plain_text
from atoll.protocol.machine import Machine
from atoll.protocol.pace import Pace
from atoll.protocol.page_access import Access, ByToken
from atoll.protocol.trust import certificates
from atoll.protocol.trust.server_tls import ServerTls

LIMIT_S = 60.0
BODY = b"x" * 100_000


@asynccontextmanager
async def served(access: Access = pages.OPEN) -> AsyncIterator[pages.Pages]:
    async def answer(path: str) -> Answer:
        return Answer(200, PLAIN, BODY) if path == "/" else plain_text(404, "no")

    server = pages.Pages(answer, access)
    await server.start("127.0.0.1:0", "a test")
    try:
        async with asyncio.timeout(LIMIT_S):
            yield server
    finally:
        await server.close()


async def connect(server: pages.Pages, source: str = "127.0.0.1") -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    host, _, port = server.address.rpartition(":")
    return await asyncio.open_connection(host, int(port), local_addr=(source, 0))


async def asked(server: pages.Pages, request: bytes, source: str = "127.0.0.1") -> bytes:
    reader, writer = await connect(server, source)
    writer.write(request)
    answer = await reader.read()
    writer.close()
    return answer


def test_silent_connections_make_room_the_oldest_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pages, "CONNECTIONS", pages.ACCEPTED)

    async def main() -> None:
        async with served() as server, AsyncExitStack() as stack:
            silent = []
            for _ in range(5 * pages.MAX_CONNECTIONS):
                reader, writer = await connect(server)
                stack.callback(writer.close)
                silent.append(reader)
            answer = await asked(server, b"GET / HTTP/1.1\r\nHost: a\r\n\r\n")
            assert answer.startswith(b"HTTP/1.1 200 OK\r\n")
            assert answer.endswith(BODY)
            with pytest.raises((ConnectionError, asyncio.IncompleteReadError)):  # long gone
                await silent[0].readexactly(1)
            assert not silent[-1].at_eof()
            assert len(server._silent) < pages.MAX_CONNECTIONS

    asyncio.run(main())


def test_silent_connections_make_room_over_tls_and_nobody_fills_the_log(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Silent, gone in the handshake, or gone after it: none of it is an error of ours."""
    machine = Machine()
    authority = Authority.opened(tmp_path / "trust", "run", machine)
    server_tls = ServerTls(authority.shown_on_pages(["localhost"]))
    mine = ssl.create_default_context(cadata=certificates.to_pem(authority.root.certificate).decode())
    unhandled: list[object] = []

    async def main() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _, context: unhandled.append(context))
        async with served(ByToken((), server_tls.context, lambda token: True)) as server, AsyncExitStack() as stack:
            host, _, port = server.address.rpartition(":")
            for i in range(3 * pages.MAX_CONNECTIONS):
                _, writer = await connect(server)
                stack.callback(writer.close)
                if i % 3 == 0:
                    writer.close()
                elif i % 3 == 1:
                    writer.write(b"\x16\x03\x01\x02\x00half a hello")
            for _ in range(2):
                reader, writer = await asyncio.open_connection(host, int(port), ssl=mine, server_hostname="localhost")
                writer.write(b"GET / HTTP/1.1\r\nAuthorization: Bearer t\r\n\r\n")
                assert (await reader.read()).endswith(BODY)
                writer.close()
            _, writer = await asyncio.open_connection(host, int(port), ssl=mine, server_hostname="localhost")
            writer.transport.abort()
            assert len(server._silent) <= pages.MAX_CONNECTIONS

    asyncio.run(main())
    assert not unhandled
    assert not caplog.records


def test_handshakes_have_a_pace_by_address_and_in_all_and_a_token_that_is_good_gives_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What comes beyond it ends before TLS begins, and other addresses are served."""
    monkeypatch.setattr(handshakes, "OF_ONE", Pace(at_once=4, per_s=1e-9))
    monkeypatch.setattr(handshakes, "FEW", Pace(at_once=1, per_s=1e-9))
    num_of_all = {Crowd.MANY: 1, Crowd.FEW: 2, Crowd.KNOWN: 9}
    paces = {crowd: Pace(at_once=num, per_s=1e-9) for crowd, num in num_of_all.items()}
    monkeypatch.setattr(handshakes, "OF_ALL", paces)
    monkeypatch.setattr(addresses, "source_of", lambda address: f"not {address}")  # as if from elsewhere
    authority = Authority.opened(tmp_path / "trust", "run", Machine())
    server_tls = ServerTls(authority.shown_on_pages(["localhost"]))
    mine = ssl.create_default_context(cadata=certificates.to_pem(authority.root.certificate).decode())

    async def main() -> None:
        async with served(ByToken((), server_tls.context, lambda token: token == "t")) as server:
            port = int(server.address.rpartition(":")[2])

            async def asks(address: str, token: str) -> str:
                try:
                    reader, writer = await asyncio.open_connection(
                        "127.0.0.1", port, ssl=mine, server_hostname="localhost", local_addr=(address, 0)
                    )
                    writer.write(f"GET / HTTP/1.1\r\nAuthorization: Bearer {token}\r\n\r\n".encode())
                    status = (await reader.read()).split()[1].decode()
                except ConnectionError:
                    return "cut off"
                writer.close()
                return status

            stranger, viewer = "127.0.0.1", "127.0.0.2"
            assert [await asks(stranger, "x") for _ in range(3)] == ["401", "401", "cut off"]
            assert [await asks(viewer, "t") for _ in range(5)] == ["200"] * 4 + ["cut off"]
            assert await asks("127.0.0.3", "t") == "cut off"

    asyncio.run(main())


def test_requests_of_an_address_have_a_pace_and_another_address_waits_for_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """What has to make room before its turn does not count: later ones of that address do not wait for it."""
    monkeypatch.setattr(pages, "REQUESTS", Pace(at_once=4, per_s=1e-6))
    monkeypatch.setattr(pages, "REQUEST_LIMIT_S", LIMIT_S)
    request, flooding, viewer = b"GET / HTTP/1.1\r\n\r\n", "127.0.0.2", "127.0.0.3"

    async def main() -> None:
        async with served() as server, AsyncExitStack() as stack:
            for _ in range(4):
                assert (await asked(server, request, flooding)).endswith(BODY)
            waiting = []
            for _ in range(6):
                reader, writer = await connect(server, flooding)
                stack.callback(writer.close)
                writer.write(request)
                waiting.append(reader)
            assert (await asked(server, request, viewer)).endswith(BODY)
            assert len(server._waiting) == 6, "they have no answer"
            machine = b"GET /metrics HTTP/1.1\r\n\r\n"
            assert b" 404 " in await asked(server, machine, flooding), "behind a proxy both are one address"
            silent = await connect(server, viewer)
            stack.callback(silent[1].close)
            for _ in range(pages.MAX_CONNECTIONS - 1):
                _, writer = await connect(server)
                stack.callback(writer.close)
            silent[1].write(request)
            assert (await silent[0].read()).endswith(BODY), "those that wait for their turn make room first"
            for reader in waiting:
                with pytest.raises((ConnectionError, asyncio.IncompleteReadError)):
                    await reader.readexactly(1)
            assert len(server._tasks) == pages.MAX_CONNECTIONS - 1
            waits_s = server._requests.spend((flooding, False), asyncio.get_running_loop().time())
            assert waits_s == pytest.approx(1e6, rel=0.01)

    asyncio.run(main())


def opened(server: pages.Pages, source: str, limit_s: float = LIMIT_S) -> socket.socket:
    """By the kernel, before the server can take it."""
    host, _, port = server.address.rpartition(":")
    return socket.create_connection((host, int(port)), limit_s, source_address=(source, 0))


def test_connections_of_an_address_have_a_pace_and_another_address_is_served(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is made for those beyond it, and where the address goes on the kernel drops them."""
    monkeypatch.setattr(pages, "CONNECTIONS", Pace(at_once=3, per_s=1.0))
    monkeypatch.setattr(accepting, "MAX_TURNED_AWAY", 4)
    flooding, viewer, request = "127.0.0.2", "127.0.0.3", b"GET / HTTP/1.1\r\n\r\n"

    async def main() -> None:
        loop = asyncio.get_running_loop()
        now = loop.time()
        monkeypatch.setattr(loop, "time", lambda: now)
        async with served() as server, AsyncExitStack() as stack:
            for _ in range(3 + 4):
                stack.enter_context(opened(server, flooding))
            last = stack.enter_context(opened(server, flooding, 5.0))
            assert await asyncio.to_thread(last.recv, 1) == b""
            for _ in range(100):  # those that were taken are connected
                await asyncio.sleep(0)
            assert len(server._tasks) == 3
            with pytest.raises(TimeoutError):
                opened(server, flooding, 0.05)
            assert (await asked(server, request, viewer)).endswith(BODY)
            now += accepting.SHUT_S + accepting.LOOK_EVERY_S
            assert (await asked(server, request, viewer)).endswith(BODY)
            assert (await asked(server, request, flooding)).endswith(BODY), "it may come again after a while"

    asyncio.run(main())


def test_connections_beyond_the_pace_of_all_stay_in_the_queue_of_the_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pages, "ACCEPTED", Pace(at_once=2, per_s=1.0))
    request = b"GET / HTTP/1.1\r\n\r\n"

    async def main() -> None:
        loop = asyncio.get_running_loop()
        now = loop.time()
        monkeypatch.setattr(loop, "time", lambda: now)
        async with served() as server, AsyncExitStack() as stack:
            for _ in range(3):
                stack.enter_context(opened(server, "127.0.0.2"))
            viewer = stack.enter_context(opened(server, "127.0.0.3"))
            viewer.sendall(request)
            while len(server._tasks) < 3:  # noqa: ASYNC110
                await asyncio.sleep(0)
            for _ in range(100):
                await asyncio.sleep(0)
            assert not select.select([viewer], [], [], 0.05)[0], "it was not taken"
            now += accepting.LOOK_EVERY_S + 1.0
            assert (await asyncio.to_thread(viewer.recv, 16)).startswith(b"HTTP/1.1 200")

    asyncio.run(main())


def test_connections_that_were_reset_before_they_are_taken_are_nobodys_error(caplog: pytest.LogCaptureFixture) -> None:
    unhandled: list[object] = []

    async def main() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _, context: unhandled.append(context))
        async with served() as server:
            for _ in range(20):
                client = opened(server, "127.0.0.2")
                client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                client.close()
            assert (await asked(server, b"GET / HTTP/1.1\r\n\r\n")).endswith(BODY)
            while server._tasks:  # noqa: ASYNC110
                await asyncio.sleep(0)

    asyncio.run(main())
    assert not unhandled
    assert not caplog.records


def test_a_request_has_so_long_to_come(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pages, "REQUEST_LIMIT_S", 0.05)

    async def main() -> None:
        async with served() as server:
            reader, writer = await connect(server)
            writer.write(b"GET / HT")
            with pytest.raises((ConnectionError, asyncio.IncompleteReadError)):
                await reader.readexactly(1)
            writer.close()

    asyncio.run(main())


def test_a_reader_that_does_not_read_is_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pages, "ANSWER_LIMIT_S", 0.05)
    monkeypatch.setattr("tests.unit.protocol.test_pages.BODY", b"x" * (64 << 20))

    async def main() -> None:
        async with served() as server:
            reader, writer = await connect(server)
            writer.transport.pause_reading()  # type: ignore[attr-defined]
            writer.write(b"GET / HTTP/1.1\r\n\r\n")
            serving = set(server._tasks)
            while not serving:
                await asked(server, b"GET /nothing HTTP/1.1\r\n\r\n")
                serving = set(server._tasks)
            await asyncio.wait(serving)
            writer.transport.resume_reading()  # type: ignore[attr-defined]
            with pytest.raises((ConnectionError, asyncio.IncompleteReadError)):
                await reader.readexactly(len(BODY))
            writer.close()

    asyncio.run(main())


@pytest.mark.parametrize(
    ("request_bytes", "code"),
    [
        (b"GET /nothing HTTP/1.1\r\n\r\n", 404),
        (b"POST / HTTP/1.1\r\n\r\n", 405),
        (b"GET /\r\n\r\n", 400),
        (b"\xff\x00 \r\n\r\n", 400),
        (b"GET /\xff?\x1b HTTP/1.0\r\n\r\n", 404),
    ],
)
def test_other_requests_are_refused(request_bytes: bytes, code: int) -> None:
    async def main() -> None:
        async with served() as server:
            assert (await asked(server, request_bytes)).startswith(b"HTTP/1.1 %d " % code)

    asyncio.run(main())


def test_a_request_without_end_is_cut_off() -> None:
    async def main() -> None:
        async with served() as server:
            reader, writer = await connect(server)
            writer.write(b"x" * (2 * pages.MAX_REQUEST_BYTES))
            with pytest.raises((ConnectionError, asyncio.IncompleteReadError)):
                await reader.readexactly(1)
            writer.close()

    asyncio.run(main())
