"""An exchange of a site of several hosts: each does its part, and it is done when all have all payloads."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from atoll.node import host_protocol as hosts
from atoll.node.core.exchange_events import ProductsMade
from atoll.node.core.exchange_failures import failure_of
from atoll.node.daemon.exchanges import Exchanges
from atoll.node.exchange.sync.exchange import ExchangeResult
from atoll.protocol import messages as m
from atoll.protocol import transport
from atoll.protocol.errors import (
    AtollError,
    AverageError,
    HostError,
    NoRoomError,
    PeerError,
    StateError,
)
from tests.harness.following import hosts_meet_at_once
from tests.harness.host_exchanges import SHARE, TAKEN, begun, on_host_0, sharing, takes_snapshot
from tests.harness.hosts import SITE_ID, led

RESULT = ExchangeResult(payload_digest=b"d" * 32, tokens=(100, 50), links=())
DONE = m.Done(
    sync=1, attempt=1, term=1, payload_digest=b"d" * 32, last_commit=0, state_hash=bytes(32), tokens=(100, 50)
)


@pytest.fixture(autouse=True)
def _at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    hosts_meet_at_once(monkeypatch)


# --- who takes part


def test_hosts_are_told_what_host_0_is_to_do(tmp_path: Path) -> None:
    async def main() -> None:
        async with led(tmp_path) as site:
            host, wanted = await sharing(site), begun(site)
            assert site.leader.exchanges.begin(wanted)
            assert await host.hears(hosts.BeginAtHost) == hosts.BeginAtHost(
                plan=wanted.plan,
                tokens=100,
                weights=(),
                spread_s=2.5,
                in_flight=(1, 3),
                error_commits=(4,),
                site_id=SITE_ID,
            )
            site.leader.exchanges.weigh(wanted.plan, (100, 50), ())
            assert await host.hears(m.Weights) == m.Weights(sync=1, attempt=1, term=1, tokens=(100, 50))
            site.leader.exchanges.hurry(1)
            assert await host.hears(hosts.HurryAtHost) == hosts.HurryAtHost(sync=1)
            site.leader.exchanges.cancel(1, 1)
            assert await host.hears(hosts.CancelAtHost) == hosts.CancelAtHost(sync=1, attempt=1)
            site.leader.exchanges.drop(1)
            assert await host.hears(hosts.DropAtHost) == hosts.DropAtHost(sync=1)
            site.leader.exchanges.hurry(1)  # it is over
            await site.says_no_more(host)

    transport.run(main())


def test_inner_products_that_a_site_says_are_those_of_all_its_processes_and_hosts(tmp_path: Path) -> None:
    """And what the coordinator finds by them is told to all."""
    handled: list[Any] = []
    processes = SimpleNamespace(summed=lambda plan, own, then: then(tuple(4.0 + value for value in own)))

    async def main() -> None:
        async with led(tmp_path) as site:
            host, wanted = await sharing(site), begun(site)
            assert site.leader.exchanges.begin(wanted)
            await host.hears(hosts.BeginAtHost)
            shell: Any = SimpleNamespace(
                handle=handled.append, hub=None, leader=site.leader, processes=SimpleNamespace(exchanges=processes)
            )
            disk: Any = None
            Exchanges(shell, disk).multiplied(wanted.plan, (1.0, 2.0, 3.0))
            assert not handled, "host 1 has said nothing yet"
            await host.says(m.Products(sync=1, attempt=2, term=1, products=(9.0, 9.0, 9.0)))
            await host.says(m.Products(sync=1, attempt=1, term=1, products=(0.5, 0.25, 0.0)))
            await site.has_heard(host)
            assert handled == [ProductsMade(wanted.plan, (5.5, 6.25, 7.0))]
            site.leader.exchanges.influence(wanted.plan, (3, 4))
            assert await host.hears(m.Influences) == m.Influences(sync=1, attempt=1, term=1, influences=(3, 4))

    transport.run(main())


def test_what_a_site_contributes_is_on_all_of_its_hosts(tmp_path: Path) -> None:
    async def main() -> None:
        async with led(tmp_path) as site:
            host, _ = await site.host_at_commit_0()
            await site.runs(1, host)
            with pytest.raises(StateError, match=r"is not on all of its hosts: host 1 of this site \(b\)"):
                site.leader.exchanges.begin(begun(site))
            await takes_snapshot(site, host)
            with pytest.raises(StateError):
                site.leader.exchanges.begin(begun(site, fragment=1))
            assert site.leader.exchanges.begin(begun(site))
            await host.hears(hosts.BeginAtHost)
            await host.close()
            await site.hosts_changed(1)
            with pytest.raises(StateError, match=r"is not on all of its hosts: host 1$"):
                site.leader.exchanges.begin(begun(site, sync=2))

    transport.run(main())


def test_a_receiver_does_without_hosts_that_are_not_where_it_is(tmp_path: Path) -> None:
    async def main() -> None:
        async with led(tmp_path) as site:
            assert not site.leader.exchanges.begin(begun(site, tokens=0)), "a host is missing"
            host, _ = await site.host_at_commit_0(has_state=False)
            await host.hears(hosts.HoldState)
            await site.runs(1, host)
            assert not site.leader.exchanges.begin(begun(site, tokens=0)), "it lacks the state"
            state_hash = await site.has_state()
            await host.hears(hosts.HoldState)
            await host.holds(0, state_hash)
            await site.follows(0)
            assert site.leader.exchanges.begin(begun(site, tokens=0))
            assert (await host.hears(hosts.BeginAtHost)).tokens == 0

    transport.run(main())


def test_a_receiver_does_without_a_host_that_came_back_and_whose_ranks_have_no_buffers(tmp_path: Path) -> None:
    async def main() -> None:
        async with led(tmp_path) as site:
            host, _ = await site.host_at_commit_0()
            assert not site.leader.exchanges.begin(begun(site, tokens=0))
            await site.says_no_more(host)

    transport.run(main())


@pytest.mark.parametrize("takes_part", [True, False])
def test_an_older_attempt_is_cancelled_at_hosts_whether_they_take_part_in_the_next_one(
    tmp_path: Path, takes_part: bool
) -> None:
    async def main() -> None:
        async with led(tmp_path) as site:
            host = await sharing(site)
            assert site.leader.exchanges.begin(begun(site))
            await host.hears(hosts.BeginAtHost)
            if takes_part:
                assert site.leader.exchanges.begin(begun(site, attempt=2))
            else:
                with pytest.raises(StateError):
                    site.leader.exchanges.begin(begun(site, attempt=2, fragment=1))
            assert await host.hears(hosts.CancelAtHost) == hosts.CancelAtHost(sync=1, attempt=1)
            if takes_part:
                assert (await host.hears(hosts.BeginAtHost)).plan.attempt == 2
                assert site.leader.exchanges.begin(begun(site, sync=2))
                assert (await host.hears(hosts.BeginAtHost)).plan.sync == 2
            await site.says_no_more(host)

    transport.run(main())


# --- its end


def test_an_exchange_is_done_when_all_hosts_have_all_payloads(tmp_path: Path) -> None:
    averaged = m.Averaged(num_chunks=1, norms=(3.0, 0.0), num_high=(1, 0), cosines=(), codec_error=(0.5,))
    links = (m.LinkUse(site_id=2, received_bytes=10, seconds=4.0),)
    own = replace(RESULT, links=links, averaged=averaged, stood_out=(2, 6.0, 3.0))
    of_host = replace(
        DONE,
        links=(
            m.LinkUse(site_id=3, received_bytes=1, seconds=1.0),
            m.LinkUse(site_id=2, received_bytes=5, seconds=7.0),
        ),
        averaged=m.Averaged(num_chunks=2, norms=(4.0, 2.0), num_high=(1, 2), cosines=(0.5, 0.25), average_share=0.75),
        stood_out=m.Outlier(site_id=3, norm=5.0, limit=1.0),
    )

    async def main() -> None:
        async with led(tmp_path) as site:
            host, wanted = await sharing(site), begun(site)
            site.leader.exchanges.begin(wanted)
            task = asyncio.create_task(site.leader.exchanges.done(wanted.plan, own))
            await host.says(replace(of_host, attempt=2))
            await host.says(replace(of_host, sync=2))
            await host.hears(hosts.BeginAtHost)
            await site.has_heard(host)
            assert not task.done()
            await host.says(of_host)
            assert await task == ExchangeResult(
                payload_digest=own.payload_digest,
                tokens=own.tokens,
                links=(
                    m.LinkUse(site_id=2, received_bytes=15, seconds=7.0),
                    m.LinkUse(site_id=3, received_bytes=1, seconds=1.0),
                ),
                stood_out=(3, 5.0, 1.0),
                averaged=m.Averaged(
                    num_chunks=3,
                    norms=(5.0, 2.0),
                    num_high=(2, 2),
                    cosines=(0.5, 0.25),
                    average_share=0.75,
                    codec_error=(0.5,),
                ),
            )

    transport.run(main())


@pytest.mark.parametrize(
    "averaged",
    [
        m.Averaged(num_chunks=2, norms=(4.0,), num_high=(1,)),
        m.Averaged(num_chunks=2, norms=(4.0, 2.0), num_high=(1,)),
        m.Averaged(num_chunks=99, norms=(4.0, 2.0), num_high=(1, 1)),
        m.Averaged(num_chunks=2, norms=(4.0, 2.0), num_high=(1, 3)),
    ],
    ids=["of-one-site", "of-some", "of-chunks-that-it-has-not", "of-more-than-all"],
)
def test_figures_that_no_exchange_has_end_the_host(tmp_path: Path, averaged: m.Averaged) -> None:
    async def main() -> None:
        async with led(tmp_path) as site:
            host, wanted = await sharing(site), begun(site)
            site.leader.exchanges.begin(wanted)
            await host.says(replace(DONE, averaged=averaged))
            assert "averaged" in await site.hosts_changed(1)

    transport.run(main())


def test_what_a_host_says_that_it_has_moved_stays_within_bounds(tmp_path: Path) -> None:
    async def main() -> None:
        async with led(tmp_path) as site:
            host = await sharing(site)
            for moved in (0, (1 << 64) - 1, 0, (1 << 64) - 1):
                await host.says(hosts.HostBeat(sent_bytes=moved, received_bytes=moved, moved_bytes=moved))
            await site.has_heard(host)
            counters = site.hub.counters
            assert {counters.sent_bytes, counters.received_bytes, counters.moved_bytes} == {1 << 63}

    transport.run(main())


def test_a_snapshot_of_before_is_not_contributed(tmp_path: Path) -> None:
    """Not where a host says late that it has it, nor where host 0 has no state just now."""

    async def main() -> None:
        async with led(tmp_path) as site:
            host = await sharing(site)
            site.leader.replicas.moved(None)
            await site.leader.replicas.share_snapshot(replace(SHARE, step=20), lambda: True)
            await host.says(TAKEN)
            await site.has_heard(host)
            with pytest.raises(StateError, match=r"is not on all of its hosts: host 1 of this site \(b\)"):
                site.leader.exchanges.begin(begun(site))

    transport.run(main())


def test_of_several_contributions_the_nearest_to_its_limit_stood_out_on_whichever_host(tmp_path: Path) -> None:
    async def main() -> None:
        async with led(tmp_path) as site:
            host, wanted = await sharing(site), begun(site)
            site.leader.exchanges.begin(wanted)
            await host.says(replace(DONE, stood_out=m.Outlier(site_id=3, norm=5.0, limit=1.0)))
            for own, expected in (((2, 12.0, 2.0), (2, 12.0, 2.0)), (None, (3, 5.0, 1.0))):
                found = await site.leader.exchanges.done(wanted.plan, replace(RESULT, stood_out=own))
                assert found == replace(RESULT, stood_out=expected)

    transport.run(main())


def test_an_exchange_without_other_hosts_is_done_when_host_0_has_done_it(tmp_path: Path) -> None:
    async def main() -> None:
        async with led(tmp_path) as site:
            host, wanted = await sharing(site), begun(site)
            assert await site.leader.exchanges.done(wanted.plan, RESULT) is RESULT
            site.leader.exchanges.begin(wanted)
            await host.hears(hosts.BeginAtHost)
            later = replace(wanted.plan, attempt=2)
            assert await site.leader.exchanges.done(later, RESULT) is RESULT

    transport.run(main())


@pytest.mark.parametrize("other", [{"payload_digest": b"e" * 32}, {"tokens": (100, 51)}], ids=["digest", "weights"])
def test_hosts_of_a_site_have_the_same_payloads_and_weights(tmp_path: Path, other: dict[str, Any]) -> None:
    async def main() -> None:
        async with led(tmp_path) as site:
            host, wanted = await sharing(site), begun(site)
            site.leader.exchanges.begin(wanted)
            await host.says(replace(DONE, **other))
            with pytest.raises(StateError, match=r"\(b\) has other payloads, or weights, of sync 1"):
                await site.leader.exchanges.done(wanted.plan, RESULT)

    transport.run(main())


def test_what_a_host_fails_by_ends_an_exchange_of_which_host_0_has_done_its_part(tmp_path: Path) -> None:
    async def main() -> None:
        async with led(tmp_path) as site:
            host, wanted = await sharing(site), begun(site)
            site.leader.exchanges.begin(wanted)
            done = asyncio.create_task(site.leader.exchanges.done(wanted.plan, RESULT))
            await host.says(failure_of(wanted.plan, PeerError("silent", 2, phase="payloads"), SITE_ID))
            with pytest.raises(PeerError, match="silent"):
                await done

    transport.run(main())


@pytest.mark.parametrize("how", ["it is over", "another attempt begins"])
def test_nobody_waits_for_hosts_in_an_attempt_that_is_over(tmp_path: Path, how: str) -> None:
    async def main() -> None:
        async with led(tmp_path) as site:
            await sharing(site)
            wanted = begun(site)
            site.leader.exchanges.begin(wanted)
            done = asyncio.create_task(site.leader.exchanges.done(wanted.plan, RESULT))
            await asyncio.sleep(0)  # it waits
            if how == "it is over":
                site.leader.exchanges.drop(wanted.plan.sync)
            else:
                site.leader.exchanges.begin(replace(wanted, plan=replace(wanted.plan, attempt=2)))
            await asyncio.wait({done})
            assert done.cancelled(), "it is no failure of what comes next"

    transport.run(main())


@pytest.mark.parametrize("is_in_flight", [True, False])
def test_nobody_waits_for_hosts_in_a_sync_that_is_no_longer_in_flight(tmp_path: Path, is_in_flight: bool) -> None:
    """A site that was evicted never hears how it ended."""

    async def main() -> None:
        async with led(tmp_path) as site:
            host, wanted = await sharing(site), begun(site)
            site.leader.exchanges.begin(wanted)
            done = asyncio.create_task(site.leader.exchanges.done(wanted.plan, RESULT))
            await host.hears(hosts.BeginAtHost)
            later = begun(site, sync=4)
            site.leader.exchanges.begin(replace(later, in_flight=(1, 3) if is_in_flight else (3,)))
            if is_in_flight:
                await host.says(DONE)
                assert await done == RESULT
            else:
                assert await host.hears(hosts.DropAtHost) == hosts.DropAtHost(sync=1)
                await asyncio.wait({done})
                assert done.cancelled()
            assert (await host.hears(hosts.BeginAtHost)).plan == later.plan

    transport.run(main())


@pytest.mark.parametrize("has_done", [True, False])
def test_a_host_that_is_lost_takes_what_it_has_not_done_along(tmp_path: Path, has_done: bool) -> None:
    async def main() -> None:
        async with led(tmp_path) as site:
            host, wanted = await sharing(site), begun(site)
            site.leader.exchanges.begin(wanted)
            running = on_host_0(site, wanted)
            done = asyncio.create_task(site.leader.exchanges.done(wanted.plan, RESULT))
            if has_done:
                await host.says(DONE)
                assert await done == RESULT
            await host.close()
            await site.hosts_changed(1)
            if has_done:
                site.hub.fail(wanted.plan, NoRoomError("what ends it"))
                with pytest.raises(NoRoomError, match="what ends it"):
                    await running
            else:
                with pytest.raises(StateError, match="is lost, with its part of sync 1"):
                    await done
                with pytest.raises(StateError, match="is lost, with its part of sync 1"):
                    await running

    transport.run(main())


# --- failures


@pytest.mark.parametrize("is_first", [True, False], ids=["before host 0 began", "after it"])
@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (PeerError("silent", 2, sending=True, phase="contribute"), PeerError),
        (PeerError("silent", 2, phase="payloads"), PeerError),
        (PeerError("of this site", SITE_ID), StateError),
        (PeerError("of nobody"), StateError),
        (NoRoomError("no room"), NoRoomError),
        (AverageError("too far", "w", ((2, 3.5, 1.0), (3, 4.5, 1.5))), AverageError),
        (StateError("damaged"), StateError),
        (HostError("no disk"), StateError),
    ],
    ids=lambda value: str(value) if isinstance(value, AtollError) else "",
)
def test_what_another_host_cannot_do_fails_as_if_host_0_could_not(
    tmp_path: Path, error: AtollError, expected: type[AtollError], is_first: bool
) -> None:
    async def main() -> None:
        async with led(tmp_path) as site:
            host, wanted = await sharing(site), begun(site)
            site.leader.exchanges.begin(wanted)
            said = failure_of(wanted.plan, error, SITE_ID)
            running = None if is_first else on_host_0(site, wanted)
            await host.says(replace(said, attempt=2, text="of another attempt"))
            await host.says(replace(said, sync=2, text="of another sync"))
            await host.hears(hosts.BeginAtHost)
            await site.has_heard(host)
            await host.says(said)
            await site.has_heard(host)
            with pytest.raises(expected) as caught:
                await (running or on_host_0(site, wanted))
            assert type(caught.value) is expected
            assert str(caught.value) == f"host 1 of this site (b): {error}"
            for name in ("peer_site_id", "sending", "phase", "tensor", "outliers"):
                if isinstance(error, expected) and hasattr(error, name):
                    assert getattr(caught.value, name) == getattr(error, name)

    transport.run(main())


def test_a_failure_of_an_older_attempt_does_not_fail_the_next_one(tmp_path: Path) -> None:
    async def main() -> None:
        async with led(tmp_path) as site:
            host, wanted, later = await sharing(site), begun(site), begun(site, attempt=2)
            site.leader.exchanges.begin(wanted)
            await host.says(failure_of(wanted.plan, StateError("damaged"), SITE_ID))
            await host.hears(hosts.BeginAtHost)
            await site.has_heard(host)
            site.leader.exchanges.begin(later)
            running = on_host_0(site, later)
            await host.says(failure_of(wanted.plan, StateError("damaged"), SITE_ID))
            await host.hears(hosts.CancelAtHost)
            await host.hears(hosts.BeginAtHost)
            await site.has_heard(host)
            await host.says(failure_of(later.plan, NoRoomError("no room"), SITE_ID))
            with pytest.raises(NoRoomError, match="no room"):  # the first that is said counts
                await running

    transport.run(main())
