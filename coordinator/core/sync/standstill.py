"""Contributors that get no further in an attempt, by what others see of them: evicted, or taken at their word.

Nodes find stalls by themselves after stall_s, and keep the deadline; one that says nothing for longer hangs. So does
one that says that it gets on while no other site moves chunk data. Who waits for others says for whom: it gets on as
long as one of these does, and is not evicted for their standing still. It is heard then as if it had reported them.

A site that has sent everything waits for payloads of a reducer; a reducer waits for contributions, which depend on
nobody else. So what begins with a site that gets no further ends with its reducer, or with whom that one waits for, and
never in a circle. A reducer is believed that it waits for others unless several of those say that they have sent it
everything: its word stands against one other, and neither of the two reduces in the next attempt.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from heapq import nlargest

from atoll.coordinator.core.run import Run
from atoll.coordinator.core.sites.conduct import Cause
from atoll.coordinator.core.sites.membership import Site
from atoll.coordinator.core.sync import influence
from atoll.coordinator.core.sync.attempts import Attempt
from atoll.coordinator.core.sync.blame import Pair
from atoll.coordinator.core.sync.decision import Stuck, Wait
from atoll.coordinator.core.sync.syncs import Sync
from atoll.protocol import messages as m

MOST_HEARD = 3
"""So often in a row a site is taken at its word, in each of the syncs that are in flight at once. Whoever it names
reduces nothing next, so it is not for them."""
LEAST_CONTRADICTIONS = 2


def note_traffic(run: Run, site: Site, message: m.Heartbeat) -> None:
    """Chunk data that a site gets or gives is evidence for its peers that it exchanges with, not for itself."""
    for attempt in run.attempts if message.moved_bytes != site.heartbeat.moved_bytes else ():
        attempt.note_traffic(site.site_id, run.now)


def stuck_at(run: Run, attempt: Attempt, site_ids: Sequence[int]) -> list[float]:
    """Of each site. Once most are done, the others can only get on with these."""
    ids = attempt.ids()
    witnesses = attempt.done if 2 * len(attempt.done) > len(ids) else ids
    newest = nlargest(2, ((attempt.traffic_at.get(i, 0.0), i) for i in witnesses))  # one of them may be the site itself
    latest, patience_s = attempt.runs_since + attempt.plan.deadline_s, _patience_s(run)

    def seen_at(site_id: int) -> float:
        site = run.members.by_id(site_id)
        progress_at = site.progress_at if site else 0.0
        if len(ids) > 1:
            progress_at = min(progress_at, next((at for at, i in newest if i != site_id), 0.0))
        return progress_at

    def due_at(*ids_of: int) -> float:
        return min(max(attempt.runs_since, *map(seen_at, ids_of)), latest) + patience_s

    found = {site_id: due_at(site_id) for site_id in site_ids}
    due = [site_id for site_id, at in found.items() if run.now >= at]
    contributors = frozenset(ids if due else ())
    for site_id in due:
        found[site_id] = due_at(site_id, *_waits_of(run, site_id, contributors).all)
    return list(found.values())


def decide(run: Run, sync: Sync, attempt: Attempt, survivors: Sequence[int]) -> Wait | Stuck:
    """Who of the survivors is evicted or heard now; or until when nobody is."""
    reporters = attempt.reporters()
    silent = [i for i in survivors if i not in attempt.done and i not in reporters]
    if influence.is_awaited(run, attempt):  # all others wait for these
        missing = influence.owing(attempt)
        silent = [i for i in silent if i in missing]
    limits = stuck_at(run, attempt, silent)
    stuck = [run.members.known(i) for i, at in zip(silent, limits, strict=True) if run.now >= at]
    if not stuck:
        return Wait(f"{len(attempt.done)} of {len(attempt.ids())} contributors are done", min(limits, default=None))
    said = _said(run, attempt)  # once for all: a reducer that gives nothing holds up a thousand
    found: list[tuple[Site, str]] = []
    heard: list[int] = []
    number, patience_s, deadline_s = sync.open.sync, _patience_s(run), attempt.plan.deadline_s
    most_heard = MOST_HEARD * run.settings.sync.most_in_flight
    for site in stuck:
        named = said[site.site_id].all
        what = ""
        if run.now >= attempt.runs_since + deadline_s + patience_s:
            what = f"went beyond the deadline of sync {number}, {deadline_s:.0f} s"
        elif not named or site.conduct.is_on_trial or site.num_heard >= most_heard:
            seen = "" if run.now - site.progress_at >= patience_s else " that another site saw"
            what = f"has made no progress{seen} in sync {number} for {patience_s:g} s"
        if what:
            found.append((site, f"it is connected, but {what} (phase {site.heartbeat.phase!r})"))
            continue
        names = ", ".join(str(i) for i in sorted(named))
        heard.append(site.site_id)
        what = f"waits for site{'s' if len(named) > 1 else ''} {names}, and nothing has moved for {patience_s:g} s"
        found.append((site, f"sync {number} attempt {attempt.plan.attempt}: {site.label} {what}"))
    pairs = to_blame(heard, said, tuple(attempt.failing), attempt.done) if heard else ()
    return Stuck(sites=tuple(found), heard=frozenset(heard), pairs=dict.fromkeys(sorted(pairs), True))


def carry_out(run: Run, attempt: Attempt, found: Stuck) -> None:
    """Evicts those who do not get on, and takes the others at their word."""
    for site, words in found.sites:
        if site.site_id in found.heard:
            site.is_heard()
            run.report(logging.WARNING, words)
        else:
            run.trouble.receive_only.note([site.site_id], attempt.plan.sync)
            run.evict(site, words, Cause.HANG)
    attempt.note_heard(found.heard)
    attempt.note_failing(found.pairs, run.now)


def _said(run: Run, attempt: Attempt) -> dict[int, Waits]:
    contributors = frozenset(attempt.ids())
    return {i: _waits_of(run, i, contributors) for i in contributors}


def _waits_of(run: Run, site_id: int, contributors: frozenset[int]) -> Waits:
    site = run.members.by_id(site_id)
    return waits_of(site_id, site.heartbeat, contributors) if site is not None else Waits()


def _patience_s(run: Run) -> float:
    return 2 * run.limits.stall_s


# --- what contributors say that they wait for


@dataclass(frozen=True, slots=True)
class Waits:
    """Of one contributor: the others whose contributions it lacks as a reducer, and whose payloads."""

    contributions: frozenset[int] = frozenset()
    payloads: frozenset[int] = frozenset()

    @property
    def all(self) -> frozenset[int]:
        """Whatever it lacks of them."""
        return self.contributions | self.payloads


def waits_of(site_id: int, heartbeat: m.Heartbeat, contributors: frozenset[int]) -> Waits:
    """Of what a site says, what can be."""

    def others(named: Collection[int]) -> frozenset[int]:
        return contributors.intersection(named) - {site_id} if named else frozenset()

    return Waits(others(heartbeat.waits_for_contributions), others(heartbeat.waits_for_payloads))


def to_blame(
    site_ids: Iterable[int], waits: Mapping[int, Waits], reports: Iterable[Pair], done: Collection[int]
) -> set[Pair]:
    """Who lacks something of whom, beginning with the sites that get no further.

    `reports`: who said to the coordinator that it could not exchange with whom. A site that is done has sent its
    contributions, and lacks none."""
    reported: defaultdict[int, set[int]] = defaultdict(set)
    for reporter, peer in reports:
        reported[reporter].add(peer)
    waiting: dict[int, list[int]] = {}  # for payloads of this reducer
    found: set[Pair] = set()
    for site_id in site_ids:
        mine = waits[site_id]
        found.update((site_id, peer) for peer in mine.contributions)
        for reducer in mine.payloads:
            waiting.setdefault(reducer, []).append(site_id)
    for reducer, sites in waiting.items():
        excuses = _excuses(reducer, waits, reported[reducer], done)
        named = excuses - {sites[0]} if len(sites) == 1 else excuses
        found.update((reducer, peer) for peer in named)
        found.update((site_id, reducer) for site_id in sites if excuses <= {site_id})
    return found


def _excuses(reducer: int, waits: Mapping[int, Waits], reported: Collection[int], done: Collection[int]) -> set[int]:
    if reducer in done:
        return set()
    named = {*reported, *(waits[reducer].contributions if reducer in waits else ())}
    named.difference_update(done)
    contradict = [peer for peer in named if peer in waits and reducer in waits[peer].payloads]
    return set() if len(contradict) >= LEAST_CONTRADICTIONS else named
