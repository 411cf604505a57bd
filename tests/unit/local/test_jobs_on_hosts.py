"""What host 0 of a site has done when all hosts of the site have done it: publishing, and errors of a codec."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest

from atoll.node import host_protocol as hosts
from atoll.node.core import events as e
from atoll.node.core.events import Difference, Values
from atoll.node.core.host_events import HostErrors, HostsChanged
from atoll.node.core.outputs import AdvanceErrors
from atoll.protocol import transport
from tests.harness.following import an_older_state, following, hosts_meet_at_once
from tests.harness.hosts import led
from tests.harness.model_on_hosts import SETTINGS

WITH_ERRORS = replace(SETTINGS, sync=replace(SETTINGS.sync, error_feedback=1.0))
ADVANCE = AdvanceErrors(2, 0, 1, (1,))
FETCHED = "at commit %d, as host 0 of this site"


@pytest.fixture(autouse=True)
def _at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    hosts_meet_at_once(monkeypatch)


# --- what ends when all hosts have done it


@pytest.mark.parametrize("content", [Values(0), Difference(0, 1)], ids=["values", "difference"])
def test_publishing_is_said_as_it_is_and_waits_for_every_host(tmp_path: Path, content: e.Content) -> None:
    async def main() -> None:
        async with led(tmp_path, site_hosts=3) as site:
            state_hash = await site.has_state()
            ready = hosts.HostReady(
                address="127.0.0.1:9",
                has_state=True,
                commit=0,
                state_hash=state_hash,
                branch=0,
                site_address="127.0.0.1:9",
            )
            told = []
            for number, missing in ((1, (2,)), (2, ())):
                told.append(await site.host(number, ready=ready, num_hosts=3))
                await site.hosts_changed(*missing)
            await site.runs(1, *told)
            task = asyncio.create_task(site.leader.publish(site.leader.ranks, content))
            words = [await host.hears(hosts.PublishAtHost) for host in told]
            is_difference = isinstance(content, Difference)
            assert (
                words[0]
                == words[1]
                == hosts.PublishAtHost(
                    number=1, version=content.version, fragment=0, is_difference=is_difference, base=0
                )
            )
            await told[0].says(hosts.StatePublished(number=1))
            await told[1].says(hosts.StatePublished(number=0))
            await told[0].says(hosts.RanksExited(generation=1, code=1, text="that word is heard"))
            await told[1].says(hosts.RanksExited(generation=1, code=1, text="that word is heard"))
            for _ in told:
                await site.event(e.WorkersExited)
            assert not task.done()
            await told[1].says(hosts.StatePublished(number=1))
            await task

    transport.run(main())


@pytest.mark.parametrize("ends", ["the host is lost", "new ranks are started", "the ranks are stopped"])
def test_publishing_waits_for_nobody_that_is_gone(tmp_path: Path, ends: str) -> None:
    async def main() -> None:
        async with led(tmp_path) as site:
            host, _ = await site.host_at_commit_0()
            await site.runs(1, host)
            task = asyncio.create_task(site.leader.publish(site.leader.ranks, Values(0)))
            await host.hears(hosts.PublishAtHost)
            assert not task.done()
            match ends:
                case "the host is lost":
                    await host.close()
                case "new ranks are started":
                    site.starts(2)
                case _:
                    site.leader.stop()
            await task

    transport.run(main())


def test_nothing_is_published_for_ranks_that_were_stopped_before(tmp_path: Path) -> None:
    async def main() -> None:
        async with led(tmp_path) as site:
            host, _ = await site.host_at_commit_0()
            await site.runs(1, host)
            ranks = site.leader.ranks
            await site.runs(2, host)
            await site.leader.publish(None, Values(0))
            await site.leader.publish(ranks, Values(0))

    transport.run(main())


def test_what_a_host_could_not_publish_is_said_again_once_it_was_brought(tmp_path: Path) -> None:
    async def main() -> None:
        async with led(tmp_path) as site:
            host, _ = await site.host_at_commit_0()
            await site.runs(1, host)
            state_hash = await site.commits(1)
            await host.hears(hosts.ApplyAtHost)
            task = asyncio.create_task(site.leader.publish(site.leader.ranks, Values(1)))
            number = (await host.hears(hosts.PublishAtHost)).number
            await host.holds(0, state_hash, lacks="no payloads")
            await host.hears(hosts.HoldState)
            assert not task.done()
            await host.holds(1, state_hash)
            assert (await host.hears(hosts.PublishAtHost)).number == number
            await host.says(hosts.StatePublished(number=number))
            await task

    transport.run(main())


# --- error feedback


@pytest.mark.parametrize("has_errors", [True, False])
def test_the_core_hears_what_a_host_has_of_error_feedback_where_there_is_any(tmp_path: Path, has_errors: bool) -> None:
    settings = WITH_ERRORS if has_errors else SETTINGS

    async def main() -> None:
        async with led(tmp_path, settings=settings) as site:
            host = await site.welcome_host()
            await host.says(host.ready(error_commits=(0, -1, 5)))
            if has_errors:
                assert await site.event(HostErrors) == HostErrors((0, None, 5))
            await site.hosts_changed()

    transport.run(main())


def test_errors_of_a_host_that_missed_a_rollback_are_none(tmp_path: Path) -> None:
    """It is told to go back from all commits that it has, and loses its errors with them."""

    async def main() -> None:
        async with led(tmp_path, settings=WITH_ERRORS) as site:
            site.home.keep_branch(1)
            host = await site.welcome_host()
            await host.says(host.ready(branch=0, error_commits=(5,)))
            assert await site.event(HostErrors) == HostErrors((0,))
            assert await host.hears(hosts.RollBackHost) == hosts.RollBackHost(last_commit=-1, branch=1, number=1)

    transport.run(main())


def test_what_hinders_any_host_from_advancing_its_error_is_said(tmp_path: Path) -> None:
    async def main() -> None:
        async with led(tmp_path, settings=WITH_ERRORS, site_hosts=4) as site:
            told = [await site.welcome_host(number, num_hosts=4) for number in (1, 2)]
            for host in told:
                await host.says(host.ready())
                await site.event(HostErrors)
                await site.event(HostsChanged)
            task = asyncio.create_task(site.leader.replicas.advance_errors(ADVANCE))
            for host in told:
                word = await host.hears(hosts.AdvanceAtHost)
                assert word == hosts.AdvanceAtHost(commit=2, fragment=0, base_commit=1, error_commits=(1,))
            await told[0].says(hosts.HostErrorsAdvanced(commit=1, fragment=0, share=0.5))
            await told[0].says(hosts.HostErrorsAdvanced(commit=2, fragment=0, problem="no disk", share=0.0))
            await told[1].close()
            assert await task == [
                "host 2 of this site is not here",
                "host 3 of this site is not here",
                "no disk",
                "host 2 of this site (b) was lost before that",
            ]

    transport.run(main())


def test_hosts_that_have_advanced_their_error_hinder_nothing(tmp_path: Path) -> None:
    async def main() -> None:
        async with led(tmp_path) as site:
            host, _ = await site.host_at_commit_0()
            for _ in range(2):  # what it has said of the first does not count for the second
                task = asyncio.create_task(site.leader.replicas.advance_errors(ADVANCE))
                await host.hears(hosts.AdvanceAtHost)
                assert not task.done()
                await host.says(hosts.HostErrorsAdvanced(commit=2, fragment=0, share=0.5))
                assert await task == [""]

    transport.run(main())


def test_a_host_that_came_back_without_what_it_trained_says_so(tmp_path: Path) -> None:
    an_older_state(tmp_path, seed=0)

    async def main() -> None:
        async with led(tmp_path) as site, following(site.address, tmp_path):
            await site.hosts_changed()
            await site.has_state()
            problems = await site.leader.replicas.advance_errors(ADVANCE)
            assert problems == ["this host came back without what the site trained"]

    transport.run(main())
