"""What ranks have sealed, on its way between two hosts of a site of which neither is host 0."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest

from atoll.node import host_protocol as hosts
from atoll.node.core import events as e
from atoll.node.core.events import Answer, AnswerKind
from atoll.node.core.host_events import HostsChanged, SlicesArrived, SnapshotShared
from atoll.node.core.outputs import ShareSnapshot
from atoll.node.core.ranks.pieces import SitePieces, site_pieces
from atoll.node.daemon.config import NodeConfig
from atoll.node.daemon.hosts import slices_between
from atoll.node.daemon.hosts.slices_between import SlicesServed, SlicesTaken
from atoll.node.dataplane.slices import Wanted
from atoll.node.exchange.hub import Hub
from atoll.node.exchange.peers.dialer import Dialer
from atoll.node.local_protocol import LocalJoin, Piece
from atoll.node.tasks import end
from atoll.node.worker.client import LocalClient
from atoll.protocol import transport, wire
from atoll.protocol.errors import InvalidMessage, PeerError, RefusedError, StaleError
from atoll.protocol.status import from_rpc_error
from atoll.protocol.time_limits import PRESETS
from atoll.protocol.trust.names import Kind, Subject
from atoll.protocol.trust.security import PLAIN, MutualTls, Security
from atoll.protocol.v1 import hosts_pb2
from tests.harness.following import GREETING, following, hosts_meet_at_once
from tests.harness.hosts import Led, config_of, led
from tests.harness.model_on_hosts import LAYOUT, MANIFEST, copied, random_bytes
from tests.unit.local.test_followers import answered, report
from tests.unit.trust.test_security import shown

CHANGING = Wanted(fragment=0, with_frozen=False)
SHARE = ShareSnapshot(generation=1, fragment=0, step=0, seq=0)
ROWS = ((0, 2), (2, 1), (3, 1))
"""Of `v` and `w`, by rank. Of three hosts, host 0 has `v`, host 2 `w` and `count`."""


def pieces_of(rank: int) -> tuple[Piece, ...]:
    first, size = ROWS[rank]
    halves = (Piece(name=name, offsets=(first, 0), sizes=(size, 6), dtype="F32") for name in ("v", "w"))
    own = Piece(name="own", offsets=(0,), sizes=(3,), dtype="F16")
    return (
        Piece(name="count", offsets=(), sizes=(), dtype="I64"),
        *((own,) if rank == 2 else ()),
        Piece(name="shared", offsets=(0,), sizes=(5,), dtype="F32"),
        *halves,
    )


FROM_HOST_0 = tuple(piece for piece in pieces_of(0) if piece.name in ("count", "w"))
FROM_HOST_1 = tuple(piece for piece in pieces_of(1) if piece.name == "w")


@pytest.fixture(autouse=True)
def _at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    hosts_meet_at_once(monkeypatch)


async def asked(site: Led, **wrong: Any) -> bytes:
    """Of host 1, as host 2 asks; what it answers. Raises what it says of it."""
    assert site.leader.ranks is not None
    right = hosts.TakeFromHostRequest(host=2, key=site.leader.ranks.key, fragment=0, step=0, seq=0)
    channel = transport.open_channel(
        site.leader._hosts[1].site_address, handshake=None, max_message_bytes=hosts.MAX_MESSAGE_BYTES
    )
    method: Any = channel.unary_stream(
        hosts.TAKE_FROM_HOST_METHOD,
        request_serializer=hosts_pb2.TakeFromHostRequest.SerializeToString,
        response_deserializer=hosts_pb2.TakeFromHostResponse.FromString,
    )
    try:
        return b"".join([part.data async for part in method(wire.to_proto(replace(right, **wrong)))])
    except grpc.RpcError as error:
        raise from_rpc_error(error, "host 1") from None
    finally:
        await channel.close()


def test_slices_go_from_host_to_host_and_one_that_dies_as_it_gives_them_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def main() -> None:
        async with AsyncExitStack() as stack:
            site = await stack.enter_async_context(led(tmp_path, site_hosts=3))
            life_of_1 = await stack.enter_async_context(AsyncExitStack())
            one = await life_of_1.enter_async_context(following(site.address, tmp_path, site_hosts=3))
            two = await stack.enter_async_context(
                following(site.address, tmp_path, site_hosts=3, site_rank=2, home=tmp_path / "host2")
            )
            await site.has_state()
            for _ in range(2):
                await site.event(HostsChanged)
            site.server.serve(1, 3, GREETING)
            site.starts(1)
            clients: list[LocalClient] = []
            for rank, path in enumerate((site.server.path, await one.starts_ranks(1), await two.starts_ranks(1))):
                clients.append(await asyncio.to_thread(LocalClient.connect, path, 1, rank))
                stack.push_async_callback(asyncio.to_thread, clients[-1].close)  # before its node is gone
                await asyncio.to_thread(clients[-1].hello, 3)
            offers = [
                LocalJoin(manifest=MANIFEST, pieces=pieces_of(rank), data_fingerprint=b"f", data_rank=rank)
                for rank in range(3)
            ]
            joins = [
                asyncio.create_task(asyncio.to_thread(client.join, offer))
                for client, offer in zip(clients, offers, strict=True)
            ]
            await site.event(e.WorkersJoined)
            pieces = site_pieces(offers, 1)
            assert isinstance(pieces, SitePieces)
            site.leader.endpoints(MANIFEST)
            site.leader.laid_out(pieces, LAYOUT, site.snapshot)
            await site.server.admit(LAYOUT, site.snapshot, site.publish)
            joined = await asyncio.gather(*joins)
            for number in (1, 2):
                await site.follows(0, number)

            async def all_seal(seq: int) -> None:
                await answered(site, clients, seq, Answer(kind=AnswerKind.SNAPSHOT))
                for rank, client in enumerate(clients):
                    client.sealed(report(rank, seq))
                kinds = [type(await site.events.get()) for _ in range(3)]
                assert sorted(kinds, key=str) == sorted([e.SnapshotSealed, SlicesArrived, SlicesArrived], key=str)

            with pytest.raises(StaleError, match="is not there"):
                await asked(site)
            sources = [random_bytes(LAYOUT.buffer_bytes, seed=rank) for rank in range(3)]
            for rank in (1, 2):
                joined[rank].snapshot[:] = sources[rank]
            await all_seal(0)
            site.snapshot.view[:] = sources[0]  # what came from the other hosts is nothing to them
            await site.leader.share(SHARE)
            assert await site.event(SnapshotShared) == SnapshotShared(generation=1, step=0, seq=0)
            expected = copied(memoryview(sources[0]), sources[2], FROM_HOST_0, CHANGING)
            expected = copied(memoryview(sources[1]), expected, FROM_HOST_1, CHANGING)
            assert bytes(joined[2].snapshot) == expected
            assert bytes(joined[1].snapshot) == sources[1], "host 1 sends no chunk"
            ((row, _),) = ROWS[1:2]
            place = LAYOUT.tensor_offsets_bytes[[spec.name for spec in MANIFEST.tensors].index("w")]
            assert await asked(site) == sources[1][place + 24 * row : place + 24 * (row + 1)]
            for wrong in ({"key": bytes(16)}, {"step": 1}, {"seq": 1}, {"fragment": 1}):
                with pytest.raises(StaleError, match="is not there"):
                    await asked(site, **wrong)
            for host in (0, 3):
                with pytest.raises(InvalidMessage, match=f"host {host} of a site of 3 asks"):
                    await asked(site, host=host)

            # It dies in the middle of the next ones: the one that asked begins anew, as where it loses host 0.
            was_asked, before = asyncio.Event(), site.leader._hosts[2].session

            async def gives_nothing(*_: Any) -> None:
                was_asked.set()
                await asyncio.get_running_loop().create_future()

            await all_seal(1)
            monkeypatch.setattr(slices_between, "send_slices", gives_nothing)
            sharing = asyncio.create_task(site.leader.share(replace(SHARE, seq=1)))
            await was_asked.wait()
            for client in clients:  # else this process would end with their hosts
                await asyncio.to_thread(client.close)
            address_of_1 = site.leader._hosts[1].site_address
            await life_of_1.aclose()
            attached = site.leader._hosts
            await attached.until(
                lambda: 2 in attached and attached[2].session != before and bool(attached[2].addresses)
            )
            assert 1 not in attached
            assert f"host 1 of this site at {address_of_1}" in caplog.text
            await end([sharing])

    transport.run(main())


LAID_OUT = hosts.SiteLaidOut(
    generation=1,
    site_id=1,
    manifest=MANIFEST,
    chunk_elements=4096,
    dtypes=(),
    pieces=(*FROM_HOST_0, *FROM_HOST_1),
    num_pieces=(2, 1, 0),
    host_addresses=("", "10.0.0.2:1", "10.0.0.3:1"),
    key=bytes(16),
)


@pytest.mark.parametrize(
    ("wrong", "text"),
    [
        ({"num_pieces": (2, 1)}, "3 pieces of 2 hosts that are at 3 addresses"),
        ({"num_pieces": (2, 2, 0)}, "3 pieces of 3 hosts"),
        ({"num_pieces": (2, 0, 1)}, "or of this host itself"),
        ({"host_addresses": ("", "10.0.0.2:1")}, "at 2 addresses"),
        ({"host_addresses": ("", "", "10.0.0.3:1")}, "pieces of hosts without an address"),
    ],
)
def test_a_layout_of_hosts_that_cannot_be_is_refused(wrong: dict[str, Any], text: str) -> None:
    config: NodeConfig = config_of(2, "127.0.0.1:1", site_hosts=3)
    taken = SlicesTaken(config, PLAIN)
    taken.lay_out(LAID_OUT)
    with pytest.raises(InvalidMessage, match=text):
        taken.lay_out(replace(LAID_OUT, **wrong))


def test_a_host_gives_slices_to_the_host_of_its_site_that_they_are_for(tmp_path: Path) -> None:
    """By certificates. A host that asks expects that of the host that it asks."""
    asker = Subject("run", Kind.HOST, "a/2")

    async def main() -> None:
        config = config_of(1, "127.0.0.1:1", site_hosts=3)
        async with AsyncExitStack() as stack:
            own = MutualTls("run", shown(Kind.HOST, "a/1"))
            hub = Hub(run_id="run", incarnation=1, dialer=Dialer(), pool=ThreadPoolExecutor(1))
            stack.push_async_callback(hub.close)
            served = SlicesServed(config, own, PRESETS["local"], hub, lambda _: [np.arange(3, dtype="u4")])
            address = await served.open(stack)

            async def answer(security: Security, expected: str = "a/1", host: int = 2) -> Any:
                channel = transport.open_channel(
                    address, handshake=security.towards(Kind.HOST, expected), max_message_bytes=1 << 20
                )
                method: Any = channel.unary_stream(
                    hosts.TAKE_FROM_HOST_METHOD,
                    request_serializer=hosts_pb2.TakeFromHostRequest.SerializeToString,
                    response_deserializer=hosts_pb2.TakeFromHostResponse.FromString,
                )
                try:
                    request = hosts_pb2.TakeFromHostRequest(host=host, key=bytes(hosts.KEY_BYTES))
                    return b"".join([part.data async for part in method(request)])
                except grpc.RpcError as error:
                    return type(from_rpc_error(error, "host 1"))
                finally:
                    await channel.close()

            by_2 = MutualTls("run", shown(asker.kind, asker.name))
            assert await answer(by_2) == np.arange(3, dtype="u4").tobytes()
            assert await answer(by_2, host=1) is RefusedError
            assert await answer(by_2, "a/3") is PeerError, "another host's address"
            for kind, name in ((Kind.SITE, "a"), (Kind.HOST, "b/2"), (Kind.HOST_IDENTITY, "a/2")):
                assert await answer(MutualTls("run", shown(kind, name))) is RefusedError, name
            assert await answer(PLAIN) is PeerError

    transport.run(main())
