"""Each host of a site holds the site's state: what another one does as host 0 does, and how it comes to that state."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from atoll.node import host_protocol as hosts
from atoll.node.core import events as e
from atoll.node.core.events import FailureKind
from atoll.node.core.outputs import AdvanceErrors
from atoll.node.daemon.hosts import replicas as replicas_module
from atoll.protocol import messages as m
from atoll.protocol import transport
from atoll.protocol.errors import ConfigError, StateError
from atoll.protocol.layout import Manifest
from atoll.protocol.sources_parts import most_bytes
from tests.harness.data_plane import commit_record, filled
from tests.harness.following import Following, an_older_state, following, hosts_meet_at_once
from tests.harness.hand_host import HAND_ADDRESS
from tests.harness.hosts import SITE_ID, Led, led
from tests.harness.model_on_hosts import LAYOUT, SETTINGS, SPECS, logged, payloads_of

WITH_ERRORS = replace(SETTINGS, sync=replace(SETTINGS.sync, error_feedback=1.0))
ADVANCE = AdvanceErrors(2, 0, 1, (1,))
OTHER_HASH = bytes(32)
UNKNOWN = replace(commit_record(1), payload_digest=OTHER_HASH)
"""Commit 1, whose payloads host 0 lacks."""
FETCHED = "at commit %d, as host 0 of this site"


@pytest.fixture(autouse=True)
def _at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    hosts_meet_at_once(monkeypatch)


# --- a host that runs


@asynccontextmanager
async def both(folder: Path) -> AsyncIterator[tuple[Led, Following]]:
    """Host 0 holds commit 0, and ranks run on both hosts."""
    async with led(folder) as site:
        await site.has_state()
        async with following(site.address, folder) as host:
            await site.hosts_changed()
            site.starts(1)
            site.lays_out()
            yield site, host


def test_a_host_without_a_state_fetches_that_of_host_0_and_follows_commit_by_commit(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")

    async def main() -> None:
        async with both(tmp_path) as (site, host):
            await site.follows(0)
            assert host.plane.held() == site.plane.held()
            assert FETCHED % 0 in caplog.text
            caplog.clear()
            for commit in (1, 2, 3):
                await site.commits(commit, host.plane)
            await site.publishes(3)
            assert host.plane.held() == site.plane.held()
            assert host.plane.published.buffer is not None
            assert bytes(host.plane.published.buffer.view) == bytes(site.publish.view)
            assert "fetch" not in caplog.text

    transport.run(main())


def test_a_host_fetches_what_the_run_was_at_when_it_came(tmp_path: Path) -> None:
    async def main() -> None:
        async with led(tmp_path) as site:
            await site.has_state()
            for commit in (1, 2):
                await site.commits(commit)
            async with following(site.address, tmp_path) as host:
                await site.hosts_changed()
                site.starts(1)
                site.lays_out()
                await site.follows(2)
                assert host.plane.held() == site.plane.held()
                await site.commits(3, host.plane)
                await site.publishes(3)
                assert host.plane.held() == site.plane.held()

    transport.run(main())


def test_a_host_without_the_payloads_of_a_commit_takes_them_from_host_0(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def main() -> None:
        async with both(tmp_path) as (site, host):
            await site.follows(0)
            await site.commits(1)
            await site.commits(2, host.plane)
            await site.publishes(2)
            assert host.plane.held() == site.plane.held()
            await site.commits(3, host.plane)
            await site.publishes(3)
            assert host.plane.held() == site.plane.held()

    transport.run(main())
    assert "it fetches that from host 0" not in caplog.text
    assert caplog.text.count(FETCHED % 0) == caplog.text.count("as host 0 of this site") == 1


def test_a_host_whose_payloads_are_others_takes_them_from_host_0(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """They were damaged on its disk, say."""

    async def main() -> None:
        async with both(tmp_path) as (site, host):
            await site.follows(0)
            site.snapshot.view[:] = filled(LAYOUT, seed=5)
            logged(host.plane, *payloads_of(site.plane, 1))
            await site.commits(1)
            await site.publishes(1)
            assert host.plane.held() == site.plane.held()

    transport.run(main())
    assert caplog.text.count("as host 0 of this site") == 1, "no more than these"


def test_another_state_of_the_same_commit_is_reported_and_mended(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    an_older_state(tmp_path, seed=5)

    async def main() -> None:
        async with both(tmp_path) as (site, host):
            await site.follows(0)
            assert host.plane.held() == site.plane.held()

    transport.run(main())
    assert "holds another state of commit 0 than host 0" in caplog.text


def test_a_state_that_is_the_same_is_not_fetched(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    an_older_state(tmp_path, seed=0)

    async def main() -> None:
        async with both(tmp_path) as (site, host):
            await site.publishes(0)
            assert host.plane.held() == site.plane.held()

    transport.run(main())
    assert "fetch" not in caplog.text


def test_a_state_of_another_branch_is_discarded(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The numbers of its commits are those of others by now."""
    caplog.set_level("INFO")
    an_older_state(tmp_path, seed=0)

    async def main() -> None:
        async with led(tmp_path) as site:
            site.home.keep_branch(3)
            await site.has_state()
            async with following(site.address, tmp_path) as host:
                await site.hosts_changed()
                site.starts(1)
                site.lays_out()
                await site.follows(0)
                assert host.plane.home.branch == 3
                assert host.plane.held() == site.plane.held()

    transport.run(main())
    assert FETCHED % 0 in caplog.text, "though the same bytes were there"


def test_a_host_goes_back_with_host_0(tmp_path: Path) -> None:
    async def main() -> None:
        async with both(tmp_path) as (site, host):
            await site.plane.write_snapshot()
            state = site.plane.held()
            await site.follows(0)
            await site.commits(1, host.plane)
            await site.rolls_back(0, 4)
            assert site.plane.held() == state
            await site.publishes(0)
            assert (host.plane.held(), host.plane.home.branch) == (state, 4)
            assert host.plane.log.commits() == []
            await site.commits(1, host.plane)
            await site.publishes(1)
            assert host.plane.held() == site.plane.held()

    transport.run(main())


def test_a_host_that_lacked_payloads_goes_on_once_it_went_back_with_host_0(tmp_path: Path) -> None:
    async def main() -> None:
        async with both(tmp_path) as (site, host):
            await site.follows(0)
            attached, held = site.leader._hosts[1], site.plane.held()
            with pytest.raises(StateError, match="payloads"):
                await site.leader.replicas.apply(UNKNOWN)
            site.leader.replicas.roll_back(0, 4, held)  # before the host is told what to hold
            await site.leader._hosts.until(lambda: attached.follows)
            await site.commits(1, host.plane)
            await site.publishes(1)
            assert host.plane.held() == site.plane.held()

    transport.run(main())


def test_a_host_that_attaches_again_goes_on_from_what_it_holds(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Host 0 was started again meanwhile, and is at a later commit."""
    caplog.set_level("INFO")

    async def main() -> None:
        async with both(tmp_path) as (site, host):
            await site.follows(0)
            server, site.leader._server = site.leader._server, None
            assert server is not None
            await server.stop(0)
            await site.commits(1)
            site.leader = site.a_leader()
            await site.leader.open(site.server.connected)
            await site.hosts_changed()
            site.starts(2)
            site.lays_out()
            await site.follows(1)
            assert host.plane.held() == site.plane.held()

    transport.run(main())
    assert "at commit 1 after fetching 0 chunks" in caplog.text


def test_a_host_with_the_state_of_another_model_ends_the_site_with_the_reason(tmp_path: Path) -> None:
    an_older_state(tmp_path, seed=0, manifest=Manifest.canonical(SPECS[:-1]))

    async def main() -> None:
        async with both(tmp_path) as (site, _):
            failed = await site.event(e.WorkersFailed)
            assert (failed.kind, failed.exit_code) == (FailureKind.FATAL, ConfigError.exit_code)
            assert "holds the state of another model than host 0 has; choose another with --home" in failed.text

    transport.run(main())


# --- what host 0 says


def a_commit(site: Led) -> m.Commit:
    return logged(site.plane, *payloads_of(site.plane, 1))


def test_where_there_is_no_state_yet_a_host_hears_of_it_once_there_is_one(tmp_path: Path) -> None:
    async def main() -> None:
        async with led(tmp_path) as site:
            host = await site.host()
            await site.hosts_changed()
            await site.says_no_more(host)
            state_hash = await site.has_state()
            hold = await host.hears(hosts.HoldState)
            assert hold.site_id == SITE_ID
            assert hold.sources.attested == (m.Attestation(commit=0, state_hash=state_hash),)
            donor = m.Donor(site_id=SITE_ID, incarnation=site.home.incarnation, address=site.address, commit=0)
            assert hold.sources.donors == (donor,)
            assert hold.sources.commits == ()

    transport.run(main())


def test_a_fetch_that_wants_more_is_told_what_host_0_holds_by_then(tmp_path: Path) -> None:
    async def main() -> None:
        async with led(tmp_path) as site:
            host, _ = await site.host_at_commit_0(has_state=False)
            assert (await host.hears(hosts.HoldState)).sources.commits == ()
            state_hash = await site.commits(1)
            await site.says_no_more(host)
            await host.says(hosts.SourcesWanted())
            sources = (await host.hears(hosts.HoldState)).sources
            assert sources.attested == (m.Attestation(commit=1, state_hash=state_hash),)
            assert [commit.commit for commit in sources.commits] == [1]
            assert [donor.commit for donor in sources.donors] == [1]

    transport.run(main())


def test_a_host_at_the_same_commit_follows_and_is_told_of_each(tmp_path: Path) -> None:
    async def main() -> None:
        async with led(tmp_path) as site:
            host, state_hash = await site.host_at_commit_0()
            state_hash = await site.commits(1)
            assert (await host.hears(hosts.ApplyAtHost)).commit.commit == 1
            await host.holds(1, state_hash)
            await site.commits(2)
            assert (await host.hears(hosts.ApplyAtHost)).commit.commit == 2
            # Which is slow: what it says of the one before comes late, and is right.
            await host.holds(1, state_hash)
            await site.commits(3)
            assert (await host.hears(hosts.ApplyAtHost)).commit.commit == 3

    transport.run(main())


def test_a_host_that_comes_while_host_0_applies_a_commit_is_told_of_it(tmp_path: Path) -> None:
    async def main() -> None:
        async with led(tmp_path) as site:
            await site.has_state()
            commit = a_commit(site)
            async with site.plane.lock:
                applying = asyncio.create_task(site.leader.replicas.apply(commit))
                host = await site.welcome_host()
                held = site.plane.held()
                assert held is not None
                await host.says(host.ready(has_state=True, commit=0, state_hash=held[1]))
                assert (await host.hears(hosts.ApplyAtHost)).commit == commit
            await applying

    transport.run(main())


def test_a_host_that_lacks_payloads_is_brought_once_host_0_has_applied_them(tmp_path: Path) -> None:
    """Until then host 0 has no more than that host."""

    async def main() -> None:
        async with led(tmp_path) as site:
            host, state_hash = await site.host_at_commit_0()
            commit = a_commit(site)
            async with site.plane.lock:
                applying = asyncio.create_task(site.leader.replicas.apply(commit))
                await host.hears(hosts.ApplyAtHost)
                await host.holds(0, state_hash, lacks="payloads of commit 1")
                await site.says_no_more(host)
            await applying
            assert [donor.commit for donor in (await host.hears(hosts.HoldState)).sources.donors] == [1]

    transport.run(main())


@pytest.mark.parametrize("has_payloads", [True, False], ids=["the-other-has-them", "the-other-lacks-them-too"])
def test_what_host_0_holds_is_published_though_it_lacks_the_payloads_of_the_next_commit(
    tmp_path: Path, has_payloads: bool
) -> None:
    """Host 0 fetches that commit once it has published: the other host cannot be told to wait for it."""

    async def main() -> None:
        async with led(tmp_path) as site:
            host, state_hash = await site.host_at_commit_0()
            with pytest.raises(StateError, match="payloads"):
                await site.leader.replicas.apply(UNKNOWN)
            await host.hears(hosts.ApplyAtHost)
            brought = await host.hears(hosts.HoldState)
            assert [donor.commit for donor in brought.sources.donors] == [0]
            word = hosts.StateHeld(has_state=True, commit=1, state_hash=OTHER_HASH)
            await host.says(word if has_payloads else replace(word, commit=0, state_hash=state_hash, lacks="payloads"))
            await host.holds(0, state_hash)
            await site.follows(0)
            publishing = asyncio.create_task(site.leader.replicas.publish(e.Values(0), lambda: True))
            await host.hears(hosts.PublishAtHost)
            await host.says(hosts.StatePublished(number=1))
            await publishing

    transport.run(main())


def test_what_a_host_held_before_it_is_where_it_was_told_to_be_does_not_count(tmp_path: Path) -> None:
    async def main() -> None:
        async with led(tmp_path) as site:
            host, state_hash = await site.host_at_commit_0(has_state=False)
            assert (await host.hears(hosts.HoldState)).number == 1
            site.leader.replicas.roll_back(0, 0, (0, state_hash))
            assert (await host.hears(hosts.RollBackHost)).number == 2
            await host.says(hosts.StateHeld(has_state=True, commit=0, state_hash=state_hash, number=1))
            await site.commits(1)
            await site.has_heard(host)
            assert not site.leader._hosts[1].follows
            await host.holds(0, state_hash)
            await host.hears(hosts.ApplyAtHost)

    transport.run(main())


def test_a_host_that_could_not_take_payloads_either_is_brought(tmp_path: Path) -> None:
    async def main() -> None:
        async with led(tmp_path) as site:
            host, state_hash = await site.host_at_commit_0()
            await site.commits(1)
            await host.hears(hosts.ApplyAtHost)
            await host.holds(0, state_hash, lacks="payloads of commit 1")
            assert [donor.commit for donor in (await host.hears(hosts.HoldState)).sources.donors] == [1]

    transport.run(main())


def test_a_host_that_is_a_few_commits_behind_is_told_of_each(tmp_path: Path) -> None:
    """However often there is one, it does not have to be at the newest."""

    async def main() -> None:
        async with led(tmp_path) as site:
            host, state_hash = await site.host_at_commit_0(has_state=False)
            await host.hears(hosts.HoldState)
            found = [await site.commits(number) for number in (1, 2, 3)]
            await host.holds(0, state_hash)
            for number in (1, 2, 3):
                assert (await host.hears(hosts.ApplyAtHost)).commit.commit == number
            attached = site.leader._hosts[1]
            assert attached.follows
            assert not attached.is_in_step, "it has no time for an exchange yet"
            await host.holds(2, found[1])
            await site.has_heard(host)
            assert attached.is_in_step

    transport.run(main())


@pytest.mark.parametrize("at", [None, 7])
def test_a_host_at_another_commit_is_brought_to_that_of_host_0(tmp_path: Path, at: int | None) -> None:
    async def main() -> None:
        async with led(tmp_path) as site:
            first = await site.has_state()
            await site.commits(1)
            await site.commits(2)
            ready = hosts.HostReady(
                address="127.0.0.1:9",
                has_state=at is not None,
                commit=at or 0,
                state_hash=first,
                branch=0,
                site_address=HAND_ADDRESS,
            )
            host = await site.host(ready=ready)
            assert [donor.commit for donor in (await host.hears(hosts.HoldState)).sources.donors] == [2]
            await site.commits(3)
            await site.says_no_more(host)  # it is told of no commit before it is there

    transport.run(main())


def test_a_host_with_another_hash_is_brought_though_it_followed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def main() -> None:
        async with led(tmp_path) as site:
            host, _ = await site.host_at_commit_0()
            await site.commits(1)
            await host.hears(hosts.ApplyAtHost)
            await host.holds(1, bytes(32))
            assert [donor.commit for donor in (await host.hears(hosts.HoldState)).sources.donors] == [1]

    transport.run(main())
    assert "host 1 of this site (b) holds another state of commit 1 than host 0 (000000000000, not" in caplog.text


def test_another_state_of_a_host_that_is_faster_than_host_0_is_found_too(tmp_path: Path) -> None:
    async def main() -> None:
        async with led(tmp_path) as site:
            host, _ = await site.host_at_commit_0()
            async with site.plane.lock:
                applying = asyncio.create_task(site.leader.replicas.apply(a_commit(site)))
                await host.hears(hosts.ApplyAtHost)
                await host.holds(1, OTHER_HASH)
                await site.has_heard(host)
            await applying
            assert [donor.commit for donor in (await host.hears(hosts.HoldState)).sources.donors] == [1]

    transport.run(main())


def test_what_is_published_of_another_state_does_not_count(tmp_path: Path) -> None:
    async def main() -> None:
        async with led(tmp_path) as site:
            host, state_hash = await site.host_at_commit_0()
            publishing = asyncio.create_task(site.leader.replicas.publish(e.Values(0), lambda: True))
            await host.hears(hosts.PublishAtHost)
            await host.says(hosts.StateHeld(has_state=True, commit=0, state_hash=OTHER_HASH))
            await host.says(hosts.StatePublished(number=1))
            await host.hears(hosts.HoldState)
            await site.has_heard(host)
            assert not publishing.done()
            await host.holds(0, state_hash)
            await host.hears(hosts.PublishAtHost)
            await host.says(hosts.StatePublished(number=1))
            await publishing

    transport.run(main())


def test_however_often_a_host_asks_what_host_0_holds_it_is_read_once_at_a_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def main() -> None:
        async with led(tmp_path) as site:
            host, _ = await site.host_at_commit_0()
            replicas, num_read = site.leader.replicas, 0
            sources = replicas._sources

            def counted(commit: int, state_hash: bytes) -> m.Sources:
                nonlocal num_read
                num_read += 1
                return sources(commit, state_hash)

            monkeypatch.setattr(replicas, "_sources", counted)
            for _ in range(50):
                replicas.bring(site.leader._hosts[1])
            assert (await host.hears(hosts.HoldState)).number == 50
            assert num_read == 1
            await site.says_no_more(host)

    transport.run(main())


def test_a_log_of_large_records_is_said_as_far_as_a_message_goes(monkeypatch: pytest.MonkeyPatch) -> None:
    records = [replace(commit_record(number), payload_digest=OTHER_HASH) for number in range(1, 9)]
    monkeypatch.setattr(hosts, "MAX_MESSAGE_BYTES", 2 * sum(map(most_bytes, records[5:])))
    assert replicas_module._that_fit(records) == records[5:]
    assert replicas_module._that_fit([]) == []


def test_of_a_host_of_another_branch_all_is_discarded_before_it_is_told_more(tmp_path: Path) -> None:
    async def main() -> None:
        async with led(tmp_path) as site:
            site.home.keep_branch(3)
            host, _ = await site.host_at_commit_0()
            assert await host.hears(hosts.RollBackHost) == hosts.RollBackHost(last_commit=-1, branch=3, number=1)
            await site.says_no_more(host)
            await host.says(hosts.StateHeld(has_state=False, commit=0, state_hash=b"", number=1))
            await host.hears(hosts.HoldState)

    transport.run(main())


def test_hosts_that_went_back_are_told_what_host_0_holds_once_they_have(tmp_path: Path) -> None:
    async def main() -> None:
        async with led(tmp_path) as site:
            host, state_hash = await site.host_at_commit_0()
            await site.plane.write_snapshot()
            await site.commits(1)
            await host.hears(hosts.ApplyAtHost)
            await site.rolls_back(0, 2)
            assert await host.hears(hosts.RollBackHost) == hosts.RollBackHost(last_commit=0, branch=2, number=1)
            other = await site.commits(1)
            assert not site.leader._hosts[1].follows  # it may hold a commit 1 of before
            await host.holds(0, state_hash)
            assert (await host.hears(hosts.ApplyAtHost)).commit.commit == 1
            await host.holds(1, other)
            await site.follows(1)
            await site.commits(2)
            assert (await host.hears(hosts.ApplyAtHost)).commit.commit == 2

    transport.run(main())


def test_what_was_held_before_the_run_went_back_is_not_said_any_more(tmp_path: Path) -> None:
    """It is read in a thread."""

    async def main() -> None:
        async with led(tmp_path) as site:
            host, state_hash = await site.host_at_commit_0()
            site.leader.replicas.bring(site.leader._hosts[1])
            site.leader.replicas.roll_back(0, 1, (0, state_hash))
            await host.hears(hosts.RollBackHost)
            await asyncio.gather(*site.tasks)
            await site.says_no_more(host)

    transport.run(main())
