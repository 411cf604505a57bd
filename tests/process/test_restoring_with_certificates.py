"""Who is heard while a coordinator is restored: whoever is not sent away by the copy, or by what sites have told."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import pytest

from atoll.coordinator import limits, restoring, rows
from atoll.coordinator.core.asked import BanAsked, InviteAsked, TakeBackAsked
from atoll.coordinator.core.persisted import Persisted
from atoll.coordinator.core.records import BanRecord, Record, SiteRecord
from atoll.coordinator.restoring import Restoring
from atoll.coordinator.service import CoordinatorServer
from atoll.protocol import transport
from atoll.protocol.deposits import Seal
from atoll.protocol.machine import Machine
from atoll.protocol.messages import Deposit
from atoll.protocol.pace import Pace
from atoll.protocol.transport import Handshake
from atoll.protocol.trust.invites import from_text
from atoll.protocol.trust.security import MutualTls
from atoll.protocol.v1 import session_pb2, session_pb2_grpc
from tests.harness.load_sites import joined
from tests.harness.memory_store import MemoryStore
from tests.process.test_restoring import Site
from tests.unit.trust.test_standing import SETTINGS, Coordinators

LIMIT_S = 60.0

pytestmark = pytest.mark.timeout(120)


async def enters(server: CoordinatorServer, name: str, role: str = "site") -> Handshake:
    answer = await server.ask(InviteAsked(role=role, name=name))
    assert not answer.problem
    return await joined(from_text(answer.found))


def in_the_run(store: MemoryStore, *names: str) -> Sequence[Record]:
    """Of sites that were admitted, each with the key that its newest invite has now."""
    kept = [record for record in store.all_kept() if getattr(record, "key_digest", b"") and hasattr(record, "role")]
    digests = {record.name: record.key_digest for record in sorted(kept, key=lambda record: record.number)}  # type: ignore[union-attr]
    empty: dict[str, Any] = dict.fromkeys(("may_hold", "voided_sync", "strikes", "max_retained_bytes"), 0)
    return [
        SiteRecord(
            site_id=number,
            name=name,
            key_digest=digests[name],
            incarnation=1,
            address="127.0.0.1:1",
            live=True,
            evicted="",
            bandwidth_bytes_per_s=0,
            contributed=True,
            is_certified=True,
            **empty,
        )
        for number, name in enumerate(names, 1)
    ]


class Restored:
    """A coordinator that is being restored, and who calls it."""

    def __init__(self, address: str, work: asyncio.Task[None]) -> None:
        self.address, self.work = address, work

    @asynccontextmanager
    async def _channel(self, handshake: Handshake) -> AsyncIterator[grpc.aio.Channel]:
        channel = transport.open_channel(self.address, handshake=handshake, max_message_bytes=1 << 20)
        try:
            yield channel
        finally:
            await channel.close()

    async def status(self, handshake: Handshake) -> dict[str, Any] | grpc.StatusCode:
        async with self._channel(handshake) as channel:
            stub = session_pb2_grpc.CoordinatorServiceStub(channel)
            try:
                reply = await stub.Status(session_pb2.StatusRequest(), timeout=LIMIT_S)
            except grpc.aio.AioRpcError as error:
                return error.code()
            shown: dict[str, Any] = json.loads(reply.json)
            return shown

    async def words(self, method: str, handshake: Handshake) -> str:
        """With which whoever calls that is put off."""
        async with self._channel(handshake) as channel:
            stub = session_pb2_grpc.CoordinatorServiceStub(channel)
            asked = {"Status": session_pb2.StatusRequest(), "Renew": session_pb2.RenewRequest()}[method]
            with pytest.raises(grpc.aio.AioRpcError) as raised:
                await getattr(stub, method)(asked, timeout=LIMIT_S)
            return raised.value.details() or ""

    async def says(self, name: str, handshake: Handshake, deposits: Sequence[Deposit] = ()) -> grpc.StatusCode:
        """Hello, and what it keeps; with what the call ends."""
        async with self._channel(handshake) as channel:
            site = Site(self.address, name, channel=channel)
            site.keeps(deposits, deposits_to=1 + len(deposits), has_state=True, state_hash=bytes(32))
            assert await site.ended()
            code: grpc.StatusCode = await site.call.code()
            return code


@asynccontextmanager
async def restored(coordinators: Coordinators, copy: MemoryStore) -> AsyncIterator[Restored]:
    tls = MutualTls("run", coordinators.authority.shown())
    seal = Seal(coordinators.authority.secret, "run")
    started = Restoring(SETTINGS, copy, Machine(), security=tls, seal=seal)
    address = await started.start("127.0.0.1:0")
    work = asyncio.create_task(started.restored())
    try:
        yield Restored(address, work)
    finally:
        work.cancel()
        await started.stop()


def keeps(store: MemoryStore, *records: Record) -> None:
    store.persist(store.begin(SETTINGS).term, records, 1.0)


def test_whoever_the_copy_sends_away_is_refused_and_tells_nothing(tmp_path: Path) -> None:
    """Banned; its key was replaced; what it was given was taken back. The others are heard."""

    async def main() -> None:
        coordinators = Coordinators(tmp_path)
        async with coordinators.leads("127.0.0.1:0") as server:
            banned, old = await enters(server, "evil"), await enters(server, "replaced")
            gone, good = await enters(server, "gone"), await enters(server, "good")
            anna, bob = await enters(server, "anna", "viewer"), await enters(server, "bob", "operator")
            sites = in_the_run(coordinators.store, "evil", "replaced", "gone", "good")
            new = await enters(server, "replaced")
            for asked in (
                BanAsked(name="evil", reason="it lies"),
                TakeBackAsked(role="site", name="gone"),
                TakeBackAsked(role="viewer", name="anna"),
            ):
                assert not (await server.ask(asked)).problem
        keeps(coordinators.store, *sites)
        async with restored(coordinators, coordinators.store) as again:
            for name, handshake in (("evil", banned), ("replaced", old), ("gone", gone)):
                assert await again.status(handshake) is grpc.StatusCode.PERMISSION_DENIED
                assert await again.says(name, handshake) is grpc.StatusCode.PERMISSION_DENIED
            assert await again.status(anna) is grpc.StatusCode.UNAVAILABLE, "nothing of it is known"
            assert await again.says("good", good) is grpc.StatusCode.UNAVAILABLE
            for handshake in (good, bob, new):
                shown = await again.status(handshake)
                assert isinstance(shown, dict)
                assert shown["state"].startswith("being restored: good told what they kept; 3 sites have to")

    asyncio.run(main())


def test_who_came_since_the_copy_is_heard_and_counts_once_that_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before that it knows of the run what a node needs at its start."""
    monkeypatch.setattr(restoring, "OTHERS_S", 0.0)

    async def main() -> None:
        coordinators = Coordinators(tmp_path)
        store = coordinators.store
        async with coordinators.leads("127.0.0.1:0") as server:
            await enters(server, "away")
        keeps(store, *in_the_run(store, "away"))
        copy = store.copied()
        async with coordinators.leads("127.0.0.1:0") as server:
            late = await enters(server, "late")
        keeps(store, *in_the_run(store, "away", "late"))
        deposits = store.deposits_after(copy.last_seq(), 1 << 30)
        seal = Seal(coordinators.authority.secret, "run")
        async with restored(coordinators, copy) as again:
            shown = await again.status(late)
            assert isinstance(shown, dict)
            assert (set(shown), shown["state"]) == ({"settings", "state"}, "being restored")
            assert await again.says("late", late) is grpc.StatusCode.UNAVAILABLE
            shown = await again.status(late)
            assert isinstance(shown, dict)
            assert set(shown) == {"settings", "state"}, "it has told nothing"
            ban = BanRecord(name="away", key_digest=b"", reason="it lies")
            told = [*deposits, rows.deposit_of(ban, deposits[-1].seq + 1, 1.0)]
            site = rows.decode(deposits[-1].record, deposits[-1].body)
            assert isinstance(site, SiteRecord)
            left = replace(site, site_id=1, name="away", live=False)
            told.append(rows.deposit_of(left, deposits[-1].seq + 2, 1.0))
            await again.says("late", late, [seal.sealed(deposit) for deposit in told])
            async with asyncio.timeout(LIMIT_S):
                await again.work
        kept: Persisted = copy.begin(SETTINGS)
        assert {record.name for record in kept.all(BanRecord)} == {"away"}

    asyncio.run(main())


def test_whoever_is_not_known_hears_nothing_of_the_run(tmp_path: Path) -> None:
    """Whatever it calls; people whom the run knows hear who has told and what is missing."""

    async def main() -> None:
        coordinators = Coordinators(tmp_path)
        async with coordinators.leads("127.0.0.1:0") as server:
            await enters(server, "good")
            gone, bob = await enters(server, "gone", "viewer"), await enters(server, "bob", "viewer")
            sites = in_the_run(coordinators.store, "good")
            assert not (await server.ask(TakeBackAsked(role="viewer", name="gone"))).problem
        keeps(coordinators.store, *sites)
        async with restored(coordinators, coordinators.store) as again:
            put_off = "the coordinator is being restored from a copy of its store"
            shown = await again.status(bob)
            assert isinstance(shown, dict)
            assert await again.words("Renew", bob) == f"{put_off}: {shown['state'].removeprefix('being restored: ')}"
            assert await again.words("Renew", gone) == put_off
            assert await again.words("Status", gone) == f"{put_off}; nobody has told of viewer gone of run run"

    asyncio.run(main())


def test_a_key_that_was_taken_back_takes_no_place_of_the_one_that_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is known of it any more, so it is heard: a thief that called again and again held up the restore."""
    monkeypatch.setattr(restoring, "OTHERS_S", 0.0)

    async def main() -> None:
        coordinators = Coordinators(tmp_path)
        async with coordinators.leads("127.0.0.1:0") as server:
            thief = await enters(server, "berlin")
            assert not (await server.ask(TakeBackAsked(role="site", name="berlin"))).problem
            owner, paris = await enters(server, "berlin"), await enters(server, "paris")
            sites = in_the_run(coordinators.store, "berlin", "paris")
        keeps(coordinators.store, *sites)
        async with restored(coordinators, coordinators.store) as again:
            for name, handshake in (("berlin", owner), ("berlin", thief), ("paris", paris)):
                assert await again.says(name, handshake) is grpc.StatusCode.UNAVAILABLE
            async with asyncio.timeout(LIMIT_S):
                await again.work

    asyncio.run(main())


def test_a_run_of_many_sites_puts_off_in_few_words(tmp_path: Path) -> None:
    """gRPC takes no more than some kilobytes: a site was told of an exhausted resource in place of the reason."""

    async def main() -> None:
        coordinators = Coordinators(tmp_path)
        async with coordinators.leads("127.0.0.1:0") as server:
            berlin = await enters(server, "berlin")
            (site,) = in_the_run(coordinators.store, "berlin")
            assert isinstance(site, SiteRecord)
        names = ["berlin", *(f"{number}-{'x' * 50}" for number in range(500))]
        keeps(coordinators.store, *(replace(site, site_id=n, name=name) for n, name in enumerate(names, 1)))
        async with restored(coordinators, coordinators.store) as again:
            assert await again.says("berlin", berlin) is grpc.StatusCode.UNAVAILABLE

    asyncio.run(main())


def test_calls_have_the_pace_of_any_coordinator(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "CALLS_OF_ONE", Pace(at_once=2, per_s=0.001))

    async def main() -> None:
        coordinators = Coordinators(tmp_path)
        async with coordinators.leads("127.0.0.1:0") as server:
            berlin, paris = await enters(server, "berlin"), await enters(server, "paris")
        async with restored(coordinators, coordinators.store) as again:
            found = [await again.status(handshake) for handshake in (berlin, berlin, berlin, paris)]
        assert [isinstance(shown, dict) for shown in found] == [True, True, False, True]
        assert found[2] is grpc.StatusCode.UNAVAILABLE, "again later"

    asyncio.run(main())
