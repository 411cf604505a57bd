"""Whether whoever calls is the site that it says to be."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import grpc
import pytest

from atoll.node.exchange import hub, service
from atoll.node.exchange.hub import Hub
from atoll.node.exchange.peers import claims, rpc
from atoll.node.exchange.peers.claims import Claims
from atoll.node.exchange.peers.dialer import Dialer
from atoll.node.exchange.peers.listener import listen
from atoll.node.exchange.service import PeerService
from atoll.protocol import PROTOCOL_VERSION, transport
from atoll.protocol.errors import RefusedError
from atoll.protocol.messages import Donor, Member, Sources
from atoll.protocol.trust.names import Kind, Subject
from atoll.protocol.trust.security import Caller
from atoll.protocol.v1 import common_pb2, peer_pb2
from tests.harness import calls
from tests.unit.trust.test_security import tls


def called_by(name: str) -> Any:
    return SimpleNamespace(caller=lambda context: Caller(Subject("run", Kind.SITE, name), bytes(32)))


def member(site_id: int, name: str) -> Member:
    return Member(site_id=site_id, incarnation=1, address="a:1", name=name)


def check(found: Claims, site_id: int) -> None:
    """In the task of a call."""

    async def call() -> None:
        found.check(None, site_id)

    asyncio.run(call())


def test_a_site_speaks_for_itself_alone() -> None:
    found = Claims(called_by("b"))
    donor = Donor(site_id=2, incarnation=1, address="b:1", commit=3, name="b")
    found.learn([member(1, "a"), donor])
    check(found, 2)
    with pytest.raises(RefusedError, match="site b of run run says to be site 1, which is a"):
        check(found, 1)
    check(found, 3)  # nobody has named it here yet


def test_calls_of_whoever_is_banned_end_and_no_other_is_let_in() -> None:
    caller = {"name": "b"}
    security: Any = SimpleNamespace(caller=lambda context: Caller(Subject("run", Kind.SITE, caller["name"]), bytes(32)))
    found = Claims(security)
    ended: list[str] = []

    async def call(name: str) -> None:
        caller["name"] = name
        found.check(None, 7)
        try:
            await asyncio.Event().wait()
        finally:
            ended.append(name)

    async def main() -> None:
        calls = [asyncio.create_task(call(name)) for name in ("a", "b", "b")]
        await asyncio.sleep(0)
        found.ban(["b", "c"])
        await asyncio.wait(calls[1:])
        assert ended == ["b", "b"]
        for name in ("b", "c"):
            caller["name"] = name
            with pytest.raises(RefusedError, match=f"site {name} of run run is banned"):
                found.check(None, 7)
        found.ban([])
        caller["name"] = "b"
        found.check(None, 7)
        calls[0].cancel()

    asyncio.run(main())


def test_a_call_that_a_ban_ends_says_so() -> None:
    """A call whose handler is cancelled alone stays open, as gRPC has it."""
    said: list[tuple[object, str]] = []

    class Context:
        async def abort(self, code: object, text: str) -> None:
            said.append((code, text))
            raise asyncio.CancelledError

    async def main() -> None:
        found, asked = Claims(called_by("b")), asyncio.Event()

        async def gives(request: object, write: object, who: str) -> None:
            asked.set()
            await asyncio.Event().wait()

        donor, data = SimpleNamespace(give=gives), peer_pb2.FetchStateRequest(chunks=[0]).SerializeToString()
        hub: Any = SimpleNamespace(run_id="run", claims=found, served_donor=lambda: donor)
        context: Any = Context()
        context.peer, context.write = lambda: "b", None
        for banned in ([], ["b"]):
            asked.clear()
            call = asyncio.create_task(PeerService(hub).fetch_state(data, context))
            await asked.wait()
            if banned:
                found.ban(banned)
            else:
                call.cancel()
            await asyncio.wait({call})
            assert len(said) == len(banned)
        assert said == [(grpc.StatusCode.PERMISSION_DENIED, "site b of run run is banned")]

    asyncio.run(main())


HEADER = common_pb2.Header(protocol_version=PROTOCOL_VERSION, run_id="run", site_id=2, incarnation=1)
SAYS = {
    rpc.EXCHANGE_METHOD: peer_pb2.ExchangeRequest(open=peer_pb2.ExchangeOpen(header=HEADER, num_chunks=1)),
    rpc.FETCH_STATE_METHOD: peer_pb2.FetchStateRequest(header=HEADER),
    rpc.FETCH_PAYLOADS_METHOD: peer_pb2.FetchPayloadsRequest(header=HEADER),
    rpc.DONATE_METHOD: peer_pb2.DonateRequest(open=peer_pb2.DonateOpen(header=HEADER)),
    rpc.PROBE_METHOD: peer_pb2.ProbeRequest(header=HEADER),
    rpc.DIAL_ME_METHOD: peer_pb2.DialMeRequest(header=HEADER, address="127.0.0.1:1"),
    rpc.MEASURE_METHOD: common_pb2.MeasureRequest(header=HEADER, answer=True),
}
"""What opens a call of each method, in the name of site 2."""


async def called(channel: grpc.aio.Channel, method: str, says: bytes) -> object:
    """The first that is answered."""
    if method in (rpc.EXCHANGE_METHOD, rpc.DONATE_METHOD, rpc.MEASURE_METHOD):
        stream: Any = channel.stream_stream(method)(timeout=60)
        await calls.write(stream, says)
        await calls.done_writing(stream)
        return await stream.read()
    if method in (rpc.FETCH_STATE_METHOD, rpc.FETCH_PAYLOADS_METHOD):
        fetch: Any = channel.unary_stream(method)
        return await fetch(says, timeout=60).read()
    ask: Any = channel.unary_unary(method)
    return await ask(says, timeout=60)


@pytest.mark.parametrize("method", SAYS)
def test_no_method_answers_a_member_that_says_to_be_another(method: str) -> None:
    """Over TLS: the certificate says who calls."""

    async def main() -> None:
        security = tls(Kind.SITE, "b")
        found = Claims(security)
        found.learn([member(2, "berlin")])
        here = Hub(run_id="run", incarnation=1, dialer=Dialer(), pool=ThreadPoolExecutor(1), claims=found)
        server, port = await listen("127.0.0.1:0", PeerService(here).handlers, security=security)
        mallory = tls(Kind.SITE, "mallory").towards(Kind.SITE, "b")
        channel = transport.open_channel(f"127.0.0.1:{port}", handshake=mallory, max_message_bytes=1 << 20)
        try:
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await called(channel, method, SAYS[method].SerializeToString())
        finally:
            await channel.close()
            await server.stop(None)
            await here.close()
        assert refused.value.code() is grpc.StatusCode.PERMISSION_DENIED
        assert refused.value.details() == "site mallory of run run says to be site 2, which is berlin"

    asyncio.run(main())


def test_what_every_method_says_is_tried() -> None:
    here: Any = MagicMock(run_id="run")
    assert {f"/{rpc.SERVICE}/{name}" for name in PeerService(here).handlers} == set(SAYS)


def test_whoever_comes_before_the_plan_is_compared_with_it_once_it_is_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a member would contribute in the name of another, of whom nobody had heard yet."""
    served: list[str] = []

    class Served:
        def __init__(self, exchange: Any, context: Any, member: Member, ids: range, held: set[int]) -> None:
            served.append(member.name)

        async def run(self) -> None:
            pass

    class Refused(Exception):
        pass

    class Context:
        async def read(self) -> bytes:
            header = common_pb2.Header(site_id=2, incarnation=1)
            opened = peer_pb2.ExchangeOpen(header=header, num_chunks=1)
            return peer_pb2.ExchangeRequest(open=opened).SerializeToString()

        async def abort(self, code: object, text: str) -> None:
            raise Refused(text)

    class Begun:
        plan = SimpleNamespace(sync=1)

    exchange: Any = Begun()

    def ask(name: str) -> None:
        found = Claims(called_by(name))

        async def find(opened: object) -> tuple[Any, Member]:
            """As the hub does, where the exchange begins meanwhile."""
            berlin = member(2, "berlin")
            found.learn([berlin])
            return exchange, berlin

        counters = SimpleNamespace(refuse=lambda error: None)
        context: Any = Context()
        stub: Any = SimpleNamespace(run_id="run", claims=found, find=find, counters=counters)
        asyncio.run(PeerService(stub).exchange(None, context))

    monkeypatch.setattr(service, "Downstream", Served)
    with pytest.raises(Refused, match="site mallory of run run says to be site 2, which is berlin"):
        ask("mallory")
    assert served == []
    ask("berlin")
    assert served == ["berlin"]


def test_donors_that_are_named_later_are_known_by_then(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that are to dial this site are asked for again and again."""
    found = Claims(called_by("mallory"))
    berlin = Donor(site_id=2, incarnation=1, address="b:1", commit=3, name="berlin")

    class Fetching:
        def __init__(self, donors: Any, **_: Any) -> None:
            self.donors = donors

        async def run(self) -> Any:
            return await self.donors.refresh(())

    async def refresh(absent: tuple[int, ...]) -> Sources:
        return Sources(donors=(berlin,))

    async def main() -> None:
        here = Hub(run_id="run", incarnation=1, dialer=Dialer(), pool=ThreadPoolExecutor(1), claims=found)
        nothing: Any = MagicMock()
        asked: Any = here.fetch_state(
            sources=Sources(), refresh=refresh, undialable=tuple, outer=nothing, log=nothing, optimizer=nothing,
            pace=nothing,
        )  # fmt: skip
        found.check(None, 2)
        assert await asked == Sources(donors=(berlin,))
        with pytest.raises(RefusedError, match="says to be site 2, which is berlin"):
            found.check(None, 2)
        await here.close()

    monkeypatch.setattr(hub, "Fetch", Fetching)
    monkeypatch.setattr(hub, "Index", MagicMock())
    asyncio.run(main())


def test_in_plain_text_everybody_is_believed() -> None:
    found = Claims()
    found.learn([member(1, "a"), member(2, "")])
    check(found, 1)
    check(found, 2)


def test_the_newest_names_count_and_only_so_many_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(claims, "MAX_REMEMBERED", 2)
    found = Claims(called_by("b"))
    found.learn([member(1, "a"), member(1, "b")])
    check(found, 1)
    found.learn([member(2, "x"), member(3, "y")])
    check(found, 1)
    for site_id in (2, 3):
        with pytest.raises(RefusedError):
            check(found, site_id)
    found.learn([member(2, "x"), member(4, "z")])
    with pytest.raises(RefusedError):
        check(found, 2)
    check(found, 3)
