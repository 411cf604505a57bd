"""A host of a site that fetches, while host 0 moves on or goes back."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from atoll.node import host_protocol as hosts
from atoll.node.daemon.hosts.endpoint import Job
from atoll.protocol import messages as m
from atoll.protocol import transport
from atoll.protocol.errors import PeerError
from tests.harness.following import Following, following, hosts_meet_at_once
from tests.harness.hosts import Led, led


@pytest.fixture(autouse=True)
def _at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    hosts_meet_at_once(monkeypatch)


class HeldFetches:
    """Those of a host, which ask for sources, and go on, as a test lets them."""

    def __init__(self, host: Following) -> None:
        endpoint = host.follower._endpoint
        assert endpoint is not None
        self.begun: asyncio.Queue[None] = asyncio.Queue()
        self.may_ask = asyncio.Semaphore(0)
        self.told: asyncio.Queue[Job] = asyncio.Queue()
        self.num_asked = 0
        self._fetch, self._tell = endpoint._hub.fetch_state, endpoint.tell
        endpoint._hub.fetch_state = self._held  # type: ignore[method-assign]
        endpoint.tell = self._hears  # type: ignore[method-assign]

    async def _held(self, *, refresh: Callable[[tuple[int, ...]], Any], **rest: Any) -> Any:
        self.begun.put_nowait(None)
        await self.may_ask.acquire()
        self.num_asked += 1
        sources = await refresh(())
        return await self._fetch(refresh=refresh, **rest | {"sources": sources})

    def _hears(self, job: Job) -> None:
        self._tell(job)
        self.told.put_nowait(job)

    async def until_told(self, kind: type[Job]) -> None:
        while not isinstance(await self.told.get(), kind):
            pass


@asynccontextmanager
async def fetching(folder: Path) -> AsyncIterator[tuple[Led, Following, HeldFetches]]:
    """Host 1 has begun to fetch what host 0 holds: commit 0."""
    async with led(folder) as site:
        await site.has_state()
        await site.plane.write_snapshot()
        async with following(site.address, folder) as host:
            await site.hosts_changed()
            site.starts(1)
            site.lays_out()
            await site.follows(0)
            fetches = HeldFetches(host)
            site.leader.replicas.bring(site.leader._hosts[1])
            await fetches.begun.get()
            yield site, host, fetches


def test_a_fetch_of_what_host_0_goes_back_from_ends_before_it_asks(tmp_path: Path) -> None:
    """What it would be told could be no more than what the host has to go back to first."""

    async def main() -> None:
        async with fetching(tmp_path) as (site, host, fetches):
            await site.rolls_back(0, 1)
            await fetches.until_told(hosts.RollBackHost)
            fetches.may_ask.release()
            await site.publishes(0)
            assert host.plane.held() == site.plane.held()
            assert fetches.begun.empty()
            await site.commits(1)
            await site.follows(1)
            assert not site.leader._hosts[1].is_brought, "what the host says counts"

    transport.run(main())


def test_a_fetch_that_has_asked_ends_where_host_0_goes_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        async with fetching(tmp_path) as (site, host, fetches):
            replicas, attached = site.leader.replicas, site.leader._hosts[1]
            with monkeypatch.context() as patched:
                asked = asyncio.Event()
                patched.setattr(replicas, "bring", lambda host: asked.set())  # what it says is on its way still
                fetches.may_ask.release()
                await asked.wait()
            await site.rolls_back(0, 1)
            await site.publishes(0)
            assert host.plane.held() == site.plane.held()
            assert fetches.begun.empty()
            assert site.leader._hosts.is_here(attached)

    transport.run(main())


def test_what_was_said_before_a_fetch_was_told_of_more_is_not_fetched_again(tmp_path: Path) -> None:
    async def main() -> None:
        async with fetching(tmp_path) as (site, host, fetches):
            site.leader.replicas.moved(site.plane.held())
            await fetches.until_told(hosts.HoldState)  # of the fetch that has begun
            await fetches.until_told(hosts.HoldState)
            fetches.may_ask.release()
            await site.publishes(0)
            assert host.plane.held() == site.plane.held()
            assert (fetches.num_asked, fetches.begun.empty()) == (1, True)

    transport.run(main())


@pytest.mark.parametrize("has_moved", [False, True])
def test_a_host_that_comes_while_host_0_fetches_is_brought_once_that_has_ended(tmp_path: Path, has_moved: bool) -> None:
    """Chunks of what host 0 held are gone by then, and the host would attach anew each time that it asks for them."""

    async def main() -> None:
        async with led(tmp_path) as site:
            state_hash = await site.has_state()
            with suppress(PeerError):
                async with site.leader.replicas.fetching() as outer:
                    host = await site.host()
                    await site.hosts_changed()
                    await host.says(hosts.SourcesWanted())
                    await site.has_heard(host)
                    await site.says_no_more(host)
                    if has_moved:
                        outer.store.relabel(0, 5)
                    raise PeerError("the donor is gone")
            if has_moved:
                await site.says_no_more(host)
                site.leader.replicas.moved((5, state_hash))
            hold = await host.hears(hosts.HoldState)
            commit = 5 if has_moved else 0
            assert hold.sources.attested == (m.Attestation(commit=commit, state_hash=state_hash),)

    transport.run(main())


def test_what_a_host_is_about_to_be_told_as_host_0_begins_to_fetch_waits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def main() -> None:
        async with led(tmp_path) as site:
            await site.has_state()
            replicas, may_end = site.leader.replicas, threading.Event()
            made = replicas._sources

            def slow(*of: Any) -> m.Sources:
                may_end.wait()
                return made(*of)

            monkeypatch.setattr(replicas, "_sources", slow)
            host = await site.host()
            await site.hosts_changed()
            async with replicas.fetching():
                may_end.set()
                await asyncio.gather(*site.tasks)
                await site.says_no_more(host)
            await host.hears(hosts.HoldState)

    transport.run(main())
