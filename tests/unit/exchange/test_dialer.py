"""Addresses are members' own words: what is dialled how often, on simulated time."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Coroutine
from types import SimpleNamespace
from typing import Any

import pytest

from atoll.node.exchange.peers.dialer import DIALS_AT_ONCE, FIRST_WAIT_S, LONGEST_QUEUE_S, MOST_WAIT_S, Dialer, Purpose
from atoll.protocol.addresses import Relayed
from atoll.protocol.errors import PeerError
from atoll.protocol.messages import Member
from atoll.protocol.trust.names import Kind
from tests.simulation.loop import SimLoop

VICTIM = "198.51.100.7:22"
SECONDS = 12.0


def member(site_id: int, address: str = VICTIM, incarnation: int = 1) -> Member:
    return Member(site_id=site_id, incarnation=incarnation, address=address, tokens=0)


def a_dialer(relays: Any = None) -> Dialer:
    """Nothing happens on its channels."""

    async def close() -> None:
        pass

    network: Any = SimpleNamespace(open_channel=lambda address, **_: SimpleNamespace(address=address, close=close))
    return Dialer(network, relays=relays)


def test_the_name_of_the_site_is_expected_at_the_other_end() -> None:
    expected: list[tuple[Kind, str]] = []

    async def close() -> None:
        pass

    def towards(kind: Kind, name: str) -> str:
        expected.append((kind, name))
        return f"handshake with {name}"

    network: Any = SimpleNamespace(
        open_channel=lambda address, handshake, **_: SimpleNamespace(close=close, handshake=handshake)
    )
    security: Any = SimpleNamespace(towards=towards)

    async def main() -> None:
        dialer = Dialer(network, security)
        callee = Member(site_id=3, incarnation=1, address="a:1", name="berlin")
        channel: Any = await dialer.channel(callee, Purpose.EXCHANGE)
        assert channel.handshake == "handshake with berlin"

    run(main())
    assert expected == [(Kind.SITE, "berlin")]


def test_who_is_banned_is_not_dialled_and_what_is_open_to_it_ends() -> None:
    closed: list[str] = []

    def opened(address: str, **_: Any) -> Any:
        async def close() -> None:
            closed.append(address)

        return SimpleNamespace(close=close)

    async def main() -> None:
        dialer = Dialer(SimpleNamespace(open_channel=opened))
        berlin = Member(site_id=3, incarnation=1, address="a:1", name="berlin")
        paris = Member(site_id=4, incarnation=1, address="b:1", name="paris")
        for callee in (berlin, paris):
            await dialer.channel(callee, Purpose.FETCH)
        dialer.ban(["berlin"])
        await asyncio.sleep(0.1)
        assert closed == ["a:1"]
        with pytest.raises(PeerError, match=r"site 3 \(berlin\) is banned from the run"):
            await dialer.channel(berlin, Purpose.FETCH)
        await dialer.channel(paris, Purpose.FETCH)
        dialer.ban([])
        await dialer.channel(berlin, Purpose.FETCH)

    run(main())


def test_who_is_banned_while_a_dial_waits_for_its_turn_is_not_dialled() -> None:
    async def main() -> None:
        dialer, loop = a_dialer(), asyncio.get_running_loop()
        berlin = Member(site_id=3, incarnation=1, address="a:1", name="berlin")
        dialer.failed(berlin)
        dialling = asyncio.create_task(dialer.channel(berlin, Purpose.FETCH))
        await asyncio.sleep(FIRST_WAIT_S / 2)
        dialer.ban(["berlin"])
        with pytest.raises(PeerError, match=r"site 3 \(berlin\) is banned from the run"):
            await dialling
        dialer.failed(berlin)
        began = loop.time()
        with pytest.raises(PeerError, match=r"site 3 \(berlin\) is banned from the run"):
            await dialer.channel(berlin, Purpose.FETCH)
        assert loop.time() == began, "nobody waits to hear that"

    run(main())


async def dial(dialer: Dialer, callee: Member) -> None:
    """A new connection."""
    dialer.disconnect(callee, Purpose.PROBE)
    await dialer.channel(callee, Purpose.PROBE)


def run(work: Coroutine[Any, Any, None]) -> None:
    with asyncio.Runner(loop_factory=lambda: SimLoop(0)) as runner:
        runner.run(work)


async def dial_in_vain(dialer: Dialer, callee: Member, dials: list[float]) -> None:
    loop = asyncio.get_running_loop()
    end = loop.time() + SECONDS
    while loop.time() < end:
        try:
            await dial(dialer, callee)
            dials.append(loop.time())
        except PeerError:
            await asyncio.sleep(0.05)
        dialer.failed(callee)


def test_who_does_not_answer_is_dialled_less_and_less_often() -> None:
    async def main() -> None:
        dials: list[float] = []
        await dial_in_vain(a_dialer(), member(1), dials)
        waits = [later - earlier for earlier, later in itertools.pairwise(dials)]
        assert waits[:5] == pytest.approx([0.05, 0.1, 0.2, 0.4, 0.8])
        assert waits[-1] == pytest.approx(MOST_WAIT_S)
        assert len(dials) <= SECONDS / MOST_WAIT_S + 7

    run(main())


def test_a_port_that_many_members_name_is_not_flooded() -> None:
    async def main() -> None:
        dialer = a_dialer()
        dials: list[float] = []
        strangers = [member(site_id, incarnation=start) for site_id in range(1, 17) for start in (1, 2)]
        await asyncio.gather(*(dial_in_vain(dialer, stranger, dials) for stranger in strangers))
        assert len(dials) <= DIALS_AT_ONCE + SECONDS + LONGEST_QUEUE_S + 1
        waiting = [asyncio.create_task(dial(dialer, member(1, incarnation=start))) for start in range(20)]
        with pytest.raises(PeerError, match=rf"site 1 at {VICTIM}: .* 16 members name it"):
            await asyncio.gather(*waiting)
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)

    run(main())


def test_a_peer_that_answers_as_itself_waits_for_no_stranger_at_its_address() -> None:
    async def main() -> None:
        dialer = a_dialer()
        honest = member(1)
        await dial(dialer, honest)
        dialer.reached(honest)
        work = [dial_in_vain(dialer, member(site_id), []) for site_id in range(2, 40)]
        flood = asyncio.gather(*work)
        loop = asyncio.get_running_loop()
        for _ in range(10):
            await asyncio.sleep(1.0)
            began = loop.time()
            await dial(dialer, honest)
            assert loop.time() == began
        await flood

    run(main())


def test_a_peer_whose_link_was_cut_is_dialled_at_once_when_it_answered_again() -> None:
    async def main() -> None:
        dialer = a_dialer()
        loop = asyncio.get_running_loop()
        for _ in range(10):
            dialer.failed(member(1))
        dialer.reached(member(1))
        began = loop.time()
        await dial(dialer, member(1))
        assert loop.time() == began

    run(main())


def test_all_who_want_a_peer_for_one_purpose_share_a_connection_until_it_is_closed() -> None:
    async def main() -> None:
        dialer = a_dialer()
        dialer.failed(member(1))  # all of them wait
        first, second = await asyncio.gather(*(dialer.channel(member(1), Purpose.FETCH) for _ in range(2)))
        assert first is second
        probe = await dialer.channel(member(1), Purpose.PROBE)
        assert probe is not first
        other = await dialer.channel(member(2), Purpose.FETCH)
        dialer.disconnect_others([member(2)], Purpose.FETCH)
        assert await dialer.channel(member(1), Purpose.FETCH) is not first
        assert await dialer.channel(member(2), Purpose.FETCH) is other
        assert await dialer.channel(member(1), Purpose.PROBE) is probe
        await dialer.close()
        assert await dialer.channel(member(1), Purpose.PROBE) is not probe

    run(main())


class Relays:
    """In place of a RelayClient."""

    def __init__(self) -> None:
        self.known: set[str] = set()

    def knows(self, relay: str) -> bool:
        return relay in self.known

    def address_for(self, to: Relayed) -> str:
        if to.name == "none":
            raise OSError(24, "Too many open files")
        return f"unix-abstract:{to.name}"


def behind(site_id: int, relay: str = VICTIM) -> Member:
    return member(site_id, f"s{site_id}@{relay}")


def test_a_site_behind_a_relay_is_dialled_by_a_socket_of_this_process() -> None:
    async def main() -> None:
        relays: Any = Relays()
        dialer = a_dialer(relays)
        channel: Any = await dialer.channel(behind(3), Purpose.FETCH)
        assert channel.address == "unix-abstract:s3"
        with pytest.raises(PeerError, match="site 4 at none@r:1: Too many open files"):
            await dialer.channel(member(4, "none@r:1"), Purpose.FETCH)
        with pytest.raises(PeerError, match=f"site 3 at s3@{VICTIM}: without certificates no relay leads to it"):
            await a_dialer().channel(behind(3), Purpose.FETCH)

    run(main())


def test_a_machine_that_was_never_a_relay_is_dialled_seldom_whichever_sites_are_said_to_be_behind_it() -> None:
    """As an address that many members name. Once a relay has answered there, its sites do not wait for each other."""

    async def main() -> None:
        loop, relays = asyncio.get_running_loop(), Relays()
        dialer = a_dialer(relays)
        began = loop.time()
        for number in range(DIALS_AT_ONCE):
            await dialer.channel(behind(number), Purpose.PROBE)
        assert loop.time() == began
        dials = [dialer.channel(behind(number), Purpose.PROBE) for number in range(100, 120)]
        ended = await asyncio.gather(*dials, return_exceptions=True)
        assert loop.time() - began >= LONGEST_QUEUE_S - 1.0
        refused = [error for error in ended if isinstance(error, PeerError)]
        assert len(refused) > 10
        assert "26 members name it" in str(refused[-1])
        relays.known.add(VICTIM)
        began = loop.time()
        for number in range(200, 220):
            await dialer.channel(behind(number), Purpose.PROBE)
        assert loop.time() == began

    run(main())
