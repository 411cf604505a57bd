"""Whatever befalls a site of two hosts, both can publish what host 0 holds: at the same commit, with the same bytes."""

from __future__ import annotations

import random
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest

from atoll.protocol import messages as m
from atoll.protocol import transport
from atoll.protocol.errors import StateError
from atoll.protocol.plans import payload_digest, payload_hash
from tests.harness.data_plane import filled
from tests.harness.following import Following, following, hosts_meet_at_once
from tests.harness.hosts import Led, led
from tests.harness.model_on_hosts import LAYOUT, SETTINGS, logged, payloads_of

NUM_SEEDS, NUM_WORDS = 12, 30


@pytest.fixture(autouse=True)
def _at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    hosts_meet_at_once(monkeypatch)


class Story:
    """What host 0 hears of the run. The other host is not waited for but where something is published."""

    def __init__(self, site: Led, host: Following, seed: int) -> None:
        self._site, self._host = site, host
        self._random = random.Random(seed)
        self._branch = self._num_commits = 0
        self._wanted: tuple[m.Commit, dict[int, bytes]] | None = None
        """The commit that host 0 lacks, and what it will fetch."""

    @property
    def _commit(self) -> int:
        held = self._site.plane.held()
        assert held is not None
        return held[0]

    async def goes_on(self) -> None:
        words = [self.publishes, self.goes_back]
        await self._random.choices([*words, self.commits if self._wanted is None else self.fetches], [4, 1, 10])[0]()

    async def commits(self) -> None:
        """Any of the hosts may lack its payloads."""
        site, plane = self._site, self._site.plane
        self._num_commits += 1
        site.snapshot.view[:] = filled(LAYOUT, seed=self._num_commits)
        commit, payloads = payloads_of(plane, self._commit + 1)
        commit = replace(commit, term=self._branch + 1)
        of_all = self._random.random() < 0.5
        has = [of_all or self._random.random() < 0.5 for _ in range(2)]
        hashes = [payload_hash(payload) for payload in payloads.values()]
        commit = replace(commit, payload_digest=payload_digest(SETTINGS.run_id, commit, hashes))
        if has[0]:
            logged(plane, commit, payloads)
        if has[1]:
            with suppress(StateError):  # it is going back meanwhile, and drops what it has of exchanges: it lacks that
                logged(self._host.plane, commit, payloads)
        try:
            await site.leader.replicas.apply(commit)
        except StateError:
            assert not has[0]
            self._wanted = commit, payloads
        else:
            assert has[0]

    async def fetches(self) -> None:
        assert self._wanted is not None
        site, (commit, payloads) = self._site, self._wanted
        self._wanted = None
        await site.plane.apply(logged(site.plane, commit, payloads))
        site.leader.replicas.moved(site.plane.held())

    async def goes_back(self) -> None:
        self._branch += 1
        self._wanted = None
        await self._site.rolls_back(0, self._branch)

    async def publishes(self) -> None:
        site, host = self._site, self._host
        await site.publishes(self._commit)
        assert host.plane.held() == site.plane.held()
        assert host.plane.published.buffer is not None
        assert bytes(host.plane.published.buffer.view) == bytes(site.publish.view)


@pytest.mark.parametrize("seed", range(NUM_SEEDS))
def test_what_host_0_holds_is_published_on_both_hosts_whatever_came_before(tmp_path: Path, seed: int) -> None:
    async def main() -> None:
        async with led(tmp_path) as site:
            await site.has_state()
            await site.plane.write_snapshot()
            async with following(site.address, tmp_path) as host:
                await site.hosts_changed()
                site.starts(1)
                site.lays_out()
                await site.follows(0)
                story = Story(site, host, seed)
                for _ in range(NUM_WORDS):
                    await story.goes_on()
                await story.publishes()

    transport.run(main())
