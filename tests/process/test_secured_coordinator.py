"""What somebody with a certificate has open at the coordinator, over TLS, in this process."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import pytest

from atoll.coordinator import limits
from atoll.coordinator.core.asked import BanAsked, TakeBackAsked
from atoll.coordinator.service import CoordinatorServer
from atoll.coordinator.watchers import Watchers
from atoll.protocol import messages as m
from atoll.protocol import status, transport
from atoll.protocol.pace import Pace
from atoll.protocol.v1 import session_pb2_grpc
from tests.harness.secured_coordinator import channel_to, invited, secured
from tests.process.test_coordinator_session import Client

LIMIT_S = 30.0
MAX_UNREAD = 32
"""Megabytes, by far more than gRPC takes for a call that nobody reads."""

pytestmark = pytest.mark.timeout(150)


@asynccontextmanager
async def watching(server: CoordinatorServer, handshake: transport.Handshake) -> AsyncIterator[Any]:
    """The call of whoever shows this, which has been answered."""
    async with channel_to(server, handshake) as channel:
        call: Any = session_pb2_grpc.CoordinatorServiceStub(channel).Watch()
        assert (await call.read()).roots
        yield call


async def ban(server: CoordinatorServer, name: str = "gone") -> None:
    assert (await server.ask(BanAsked(name=name, reason="it lies", by="otto"))).problem == ""


async def take_back(server: CoordinatorServer) -> None:
    assert (await server.ask(TakeBackAsked(role="relay", name="gone"))).problem == ""


async def invite_anew(server: CoordinatorServer) -> None:
    await invited(server, "gone")


@pytest.mark.parametrize(
    ("role", "name", "end"),
    [
        ("site", "gone", ban),
        ("host", "gone/1", ban),
        ("relay", "gone", take_back),
        ("site", "gone", invite_anew),
    ],
    ids=["banned", "its site is banned", "taken back", "replaced"],
)
def test_whoever_may_call_no_more_hears_no_more(
    role: str, name: str, end: Callable[[CoordinatorServer], Awaitable[None]], tmp_path: Path
) -> None:
    async def main() -> None:
        async with secured(tmp_path) as server:
            for site in ("gone", "stays"):
                await invited(server, site)
            gone, stays = await invited(server, name, role), await invited(server, "stays", "relay")
            async with watching(server, gone) as one, watching(server, stays) as other:
                await end(server)
                await ban(server, "another")
                while "another" not in (await other.read()).banned:
                    pass
                with pytest.raises(grpc.aio.AioRpcError) as ended:
                    assert await one.read() is None, "it heard more"
                assert ended.value.code() is grpc.StatusCode.PERMISSION_DENIED

    asyncio.run(main())


def test_whoever_may_call_no_more_and_does_not_read_is_cut_off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The reason waits behind what was said before: the call stayed open for as long as its connection."""
    monkeypatch.setattr(status, "LAST_WORD_S", 0.1)
    watch, ended = Watchers.watch, asyncio.Event()

    async def noted(self: Watchers, requests: Any, context: Any) -> None:
        try:
            await watch(self, requests, context)
        finally:
            ended.set()

    monkeypatch.setattr(Watchers, "watch", noted)

    async def main() -> None:
        async with secured(tmp_path) as server, watching(server, await invited(server, "gone", "relay")):
            assert server._rotation is not None
            told = server._rotation.watchers
            (watcher,) = told._here
            for number in range(MAX_UNREAD):
                told._known = replace(told._known, tokens=(str(number) * (1 << 20),))
                watcher.changed.set()
                await asyncio.sleep(0.02)
            assert watcher.changed.is_set(), "it reads"
            await take_back(server)
            async with asyncio.timeout(LIMIT_S):
                await ended.wait()

    asyncio.run(main())


def test_another_stream_of_a_site_begins_with_what_the_last_one_has_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a site that opens stream after stream could say as much as it likes."""
    monkeypatch.setattr(limits, "PACE_OF_MESSAGES", Pace(at_once=3, per_s=1e-6))
    monkeypatch.setattr(limits, "PACES_OF_MESSAGES", {})
    ask = m.FindSources(has_state=False, after_commit=0)

    async def main() -> None:
        async with secured(tmp_path) as server:
            shown = {name: await invited(server, name) for name in "ab"}
            first, b = (Client(server.address, name, channel=channel_to(server, shown[name])) for name in "ab")
            for client in (first, b):
                await client.join()
            for _ in range(3):
                first.say(ask)
                await first.hear(m.Sources)
            await first.close()
            again = Client(server.address, "a", channel=channel_to(server, shown["a"]))
            await again.join()
            again.say(ask)
            hears = asyncio.create_task(again.hear(m.Sources))
            while not (await server.document())["delayed_messages"]:
                assert not hears.done(), "it was answered at once"
                await asyncio.sleep(0)
            for _ in range(3):
                b.say(ask)
                await b.hear(m.Sources)
            assert (await server.document())["delayed_messages"] == {"FindSources": 1}
            hears.cancel()
            for client in (again, b):
                await client.close()

    asyncio.run(main())


def test_a_site_whose_streams_end_again_and_again_never_waits(tmp_path: Path) -> None:
    """As often as it may call at all."""

    async def main() -> None:
        async with secured(tmp_path) as server:
            shown = await invited(server, "a")
            for _ in range(limits.CALLS_OF_ONE.at_once):
                client = Client(server.address, "a", channel=channel_to(server, shown))
                await client.join()
                for said in (m.Telemetry(), m.FindSources(has_state=False, after_commit=0)):
                    client.say(said)
                await client.hear(m.Sources)
                await client.close()
            assert (await server.document())["delayed_messages"] == {}

    asyncio.run(main())
