"""Probing of addresses over real sockets, and a run in which one site cannot be dialled."""

from __future__ import annotations

import asyncio
import socket
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import pytest

from atoll.node.exchange.peers.prober import Prober
from atoll.protocol.messages import Header, Member
from atoll.protocol.time_limits import PRESETS
from tests.harness.failures import unexpected
from tests.harness.local_run import LocalRun
from tests.harness.sites import Run, Site, small_layout
from tests.harness.sockets import free_address
from tests.process.test_runs import LIMIT_S, SETTINGS, SLOW, WORKER, assert_equal_at_the_end

pytestmark = pytest.mark.timeout(150)


class Found:
    """What a prober says, awaited one change at a time."""

    def __init__(self, site: Site) -> None:
        self._changes: asyncio.Queue[tuple[int, ...]] = asyncio.Queue()
        self.prober = Prober(
            header=site.hub.identity,
            dialer=site.hub.dialer,
            limits=lambda: PRESETS["local"],
            found=self._changes.put_nowait,
            failed=unexpected,
        )

    async def next(self) -> tuple[int, ...]:
        return await self._changes.get()

    @property
    def num_changes(self) -> int:
        """That were not awaited yet."""
        return self._changes.qsize()


def test_a_closed_port_and_a_wrong_host_are_found_and_so_is_the_peer_when_it_is_there(tmp_path: Path) -> None:
    async def main() -> None:
        async with Run(tmp_path, small_layout()) as run:
            first, second, third = await run.add(3)
            found = Found(first)
            address = free_address()
            late = Member(site_id=4, incarnation=1, address=address)
            wrong = replace(third.member(0), address=second.address)
            found.prober.watch((second.member(0), wrong))
            assert await found.next() == (3,), "site 2 answers there"
            found.prober.watch((second.member(0), late))
            assert await found.next() == (), "nobody asks about site 3 any more"
            assert await found.next() == (4,)
            run.sites.append(await Site.start(4, tmp_path, run.layout, port=int(address.rpartition(":")[2])))
            assert await found.next() == ()
            await found.prober.close()

    asyncio.run(main())


def test_a_peer_that_does_not_know_its_own_id_yet_is_asked_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was admitted; the others hear of it before it does."""

    async def main() -> None:
        async with Run(tmp_path, small_layout()) as run:
            first, second = await run.add(2)
            answer = second.hub.identity()
            loop = asyncio.get_running_loop()
            asked, admitted, asked_again = asyncio.Event(), asyncio.Event(), asyncio.Event()

            def identity() -> Header:
                if not asked.is_set():
                    loop.call_later(PRESETS["local"].heartbeat_s / 2, admitted.set)
                asked.set()
                if not admitted.is_set():
                    return replace(answer, site_id=0)
                asked_again.set()
                return answer

            found = Found(first)
            monkeypatch.setattr(second.hub, "identity", identity)
            found.prober.watch((second.member(0), Member(site_id=3, incarnation=1, address=free_address())))
            assert await found.next() == (3,)
            await asked_again.wait()
            await found.prober.close()
            assert found.num_changes == 0, "nothing was said of site 2"

    asyncio.run(main())


def test_another_start_of_the_peer_is_not_the_peer(tmp_path: Path) -> None:
    async def main() -> None:
        async with Run(tmp_path, small_layout()) as run:
            first, second = await run.add(2)
            found = Found(first)
            found.prober.watch((replace(second.member(0), incarnation=7),))
            assert await found.next() == (2,)
            await found.prober.close()

    asyncio.run(main())


def test_a_new_peer_is_looked_at_while_probes_of_silent_hosts_are_under_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such as frozen processes: the system takes the connection, and nobody ever answers."""

    async def main() -> None:
        async with Run(tmp_path, small_layout()) as run:
            (first,) = await run.add(1)
            with ExitStack() as listening:
                silent = []
                for site_id in range(10, 26):
                    taken = listening.enter_context(socket.create_server(("127.0.0.1", 0), backlog=50))
                    address = f"127.0.0.1:{taken.getsockname()[1]}"
                    silent.append(Member(site_id=site_id, incarnation=1, address=address))
                found = Found(first)
                probed: asyncio.Queue[int] = asyncio.Queue()
                probe = found.prober._probe

                async def told(member: Member) -> None:
                    probed.put_nowait(member.site_id)
                    await probe(member)

                monkeypatch.setattr(found.prober, "_probe", told)
                found.prober.watch(tuple(silent))
                for _ in silent:
                    await probed.get()
                found.prober.watch((*silent, Member(site_id=2, incarnation=1, address=free_address())))
                assert await found.next() == (2,), "before any of the others has used up its time"
                await found.prober.close()

    asyncio.run(main())


def test_a_site_that_cannot_be_dialled_contributes_to_the_end(tmp_path: Path) -> None:
    """It has an address that nobody can connect to. It joins last: nobody needs its state."""
    with LocalRun(tmp_path, replace(SETTINGS, min_sites=3, quorum=3)) as run:
        run.start_coordinator()
        run.start_node("a", SLOW)
        run.wait(lambda s: any(site["last_commit"] == 0 for site in s["sites"]), LIMIT_S, "a makes the starting state")
        run.start_node("b", SLOW)
        run.start_node("c", WORKER, extra=["--advertise", free_address()])
        shown = run.wait(lambda s: any(site["not_dialled_by"] for site in s["sites"]), LIMIT_S, "c is found out")
        assert {site["name"] for site in shown["sites"] if site["not_dialled_by"]} == {"c"}
        assert run.wait_all(LIMIT_S) == {"a": 0, "b": 0, "c": 0}
        assert_equal_at_the_end(run, ["a", "b", "c"])
        assert all("c" in commit["contributors"] for commit in run.status()["commits"])


def test_two_sites_that_cannot_be_dialled_wait_and_say_so(tmp_path: Path) -> None:
    with LocalRun(tmp_path, replace(SETTINGS, min_sites=2, quorum=2)) as run:
        coordinator = run.start_coordinator()
        first = run.start_node("a", SLOW)
        run.wait(lambda s: any(site["last_commit"] == 0 for site in s["sites"]), LIMIT_S, "a makes the starting state")
        run.start_node("b", SLOW, extra=["--advertise", free_address()])
        run.wait(lambda s: s["last_commit"] >= 1, LIMIT_S)
        first.kill()
        run.start_node("a", SLOW, extra=["--advertise", free_address()])
        coordinator.wait_for_line("paused: no site can be dialled by the others", LIMIT_S)
        paused = run.wait(lambda s: "paused: no site can be dialled" in s["state"], LIMIT_S, "it is shown")
        assert not paused["finished"]
        run.nodes["a"].kill()
        run.start_node("a", SLOW)
        assert run.wait_all(LIMIT_S) == {"a": 0, "b": 0}
        assert_equal_at_the_end(run, ["a", "b"])
