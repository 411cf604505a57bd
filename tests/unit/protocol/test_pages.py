"""Pages over HTTP: whoever opens connections and says nothing, or asks for nonsense, closes them for nobody."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import pytest

from atoll.coordinator.authority import Authority
from atoll.protocol import pages
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


async def connect(server: pages.Pages) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    host, _, port = server.address.rpartition(":")
    return await asyncio.open_connection(host, int(port))


async def asked(server: pages.Pages, request: bytes) -> bytes:
    reader, writer = await connect(server)
    writer.write(request)
    answer = await reader.read()
    writer.close()
    return answer


def test_silent_connections_make_room_the_oldest_first() -> None:
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


def test_handshakes_have_a_pace_by_address_and_in_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What comes beyond it ends before TLS begins, and other addresses are served."""
    monkeypatch.setattr(pages, "HANDSHAKES_OF_ONE", Pace(at_once=2, per_s=1e-9))
    monkeypatch.setattr(pages, "HANDSHAKES_OF_ALL", Pace(at_once=3, per_s=1e-9))
    authority = Authority.opened(tmp_path / "trust", "run", Machine())
    server_tls = ServerTls(authority.shown_on_pages(["localhost"]))
    mine = ssl.create_default_context(cadata=certificates.to_pem(authority.root.certificate).decode())

    async def main() -> None:
        async with served(ByToken((), server_tls.context, lambda token: True)) as server:
            port = int(server.address.rpartition(":")[2])

            async def is_served(address: str) -> bool:
                try:
                    reader, writer = await asyncio.open_connection(
                        "127.0.0.1", port, ssl=mine, server_hostname="localhost", local_addr=(address, 0)
                    )
                    writer.write(b"GET / HTTP/1.1\r\nAuthorization: Bearer t\r\n\r\n")
                    found = (await reader.read()).endswith(BODY)
                except ConnectionError:
                    return False
                writer.close()
                return found

            asked_by = ["127.0.0.1"] * 3 + ["127.0.0.2"] * 2
            assert [await is_served(address) for address in asked_by] == [True, True, False, True, False]

    asyncio.run(main())


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
