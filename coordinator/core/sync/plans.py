"""How a plan is made: after Ready; or ahead, with the commit before, where a run goes on as it is."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import replace

from atoll.coordinator.core.run import Run
from atoll.coordinator.core.sites.membership import Site, Standing
from atoll.coordinator.core.sync import reach
from atoll.coordinator.core.sync.assignments import assign
from atoll.coordinator.core.sync.attempts import Attempt
from atoll.coordinator.core.sync.chunk_sizes import ChunkSizes
from atoll.coordinator.core.sync.deadlines import exchange_deadline_s, most_link_bytes
from atoll.coordinator.core.sync.exclusions import Kind
from atoll.coordinator.core.sync.stragglers import Window
from atoll.coordinator.core.sync.syncs import Sync
from atoll.coordinator.core.sync.topology import Reducer, direct
from atoll.protocol import messages as m
from atoll.protocol.errors import ConfigError

MIDDLE_LINK = 1 << 20
"""What the link of most sites counts as; only the ratios matter."""


def make(
    run: Run,
    sync: Sync,
    contributors: list[Site],
    receivers: list[Site],
    not_reducing: frozenset[int],
    *,
    ahead: bool = False,
) -> tuple[m.Plan, frozenset[int]] | None:
    """The plan of the next attempt at this sync, and who does not reduce in it because exchanges failed. None if every
    assignment of reducers was tried. Raises ConfigError if it fits nowhere."""
    on_probation = run.trouble.held_back(sync.open.sync)
    newcomers = {s.site_id for s in contributors if not s.conduct.may_reduce}
    if len(newcomers) < len(contributors):
        on_probation |= newcomers
    sizes = run.chunk_sizes.of_sync(sync.open.fragment)
    reducers = _with_links(run, contributors)
    found = assign(sync, sizes, reducers, on_probation, not_reducing, num_receivers=len(receivers))
    if found is None:
        return None
    trees, suspects = found
    link_bytes = sizes.num_in_flight * most_link_bytes(sizes, trees, len(contributors), len(receivers))
    longest_s = run.pace.longest_exchange_s([s.site_id for s in contributors], sizes.total_bytes)
    plan = m.Plan(
        sync=sync.open.sync,
        attempt=sync.last_attempt + 1,
        term=run.term,
        fragment=sync.open.fragment,
        base_commit=sync.open.base_commit,
        contributors=tuple(s.member() for s in contributors),
        receivers=tuple(s.member() for s in receivers),
        trees=trees,
        stall_limit_s=run.limits.stall_s,
        num_steps=sync.open.num_steps,
        deadline_s=exchange_deadline_s(run.limits, link_bytes, longest_s, sync.last_attempt + 1),
        slowest_bytes_per_s=max(1, run.limits.slowest_bytes_per_s // sizes.num_in_flight),
        ahead=ahead,
    )
    return plan, suspects


def _with_links(run: Run, contributors: list[Site]) -> list[Reducer]:
    """What sites declare counts where nothing else is known of their links."""
    shares = [run.links.share(s.site_id) for s in contributors]
    if len(set(shares)) == 1:
        return [s.reducer() for s in contributors]
    return [
        replace(s.reducer(), bandwidth_bytes_per_s=max(1, int(MIDDLE_LINK * share)))
        for s, share in zip(contributors, shares, strict=True)
    ]


def fit(sizes: ChunkSizes, contributors: list[Site], not_reducing: frozenset[int]) -> bool:
    """Whether the others may retain what these contribute to a sync of such chunks."""
    try:
        direct(sizes, [s.reducer() for s in contributors], avoid=not_reducing)
    except ConfigError:
        return False
    return True


def with_room(sizes: ChunkSizes, contributors: list[Site], quorum: int, not_reducing: frozenset[int]) -> list[Site]:
    """Without those who offer the least room, as many as it takes until the others can retain what is contributed; all
    of them where that does not help. Each costs as much room as any other, and a stranger says what it likes."""
    if fit(sizes, contributors, not_reducing):
        return contributors
    by_room = sorted(contributors, key=lambda s: (-s.max_retained_bytes, s.site_id))

    def first(count: int) -> list[Site]:
        return sorted(by_room[:count], key=lambda s: s.site_id)

    counts = range(max(1, quorum), len(contributors))
    num_that_fit = bisect_left(counts, True, key=lambda count: not fit(sizes, first(count), not_reducing))
    return first(counts[num_that_fit - 1]) if num_that_fit else contributors


def within_commit(sync: Sync, contributors: list[Site]) -> list[Site]:
    """Without those who list their samples in the most pieces, as many as it takes until one commit can list them all.
    They are ready for the next sync with the same."""
    left, listed = m.MAX_RANGES_OF_COMMIT, set[int]()
    for site in sorted(contributors, key=lambda s: (len(sync.ready[s.site_id].ranges), s.site_id)):
        left -= len(sync.ready[site.site_id].ranges)
        if left >= 0:
            listed.add(site.site_id)
    return [s for s in contributors if s.site_id in listed]


# --- with the commit before


def make_ahead(run: Run, sync: Sync, before: Attempt) -> m.Plan | None:
    """The plan of a sync that is being opened, to be sent with the commit of `before`: only if everybody who is here
    and does not rest was in that one, and nothing is known that speaks against all of them being in this one too."""
    resting = sync.open.resting
    sites = [s for s in run.members.live() if s.site_id not in resting]
    receivers = [s for s in run.members.live() if s.site_id in resting]
    ids = tuple(s.site_id for s in sites)
    contributors = [(c.site_id, c.incarnation) for c in before.plan.contributors if c.site_id not in resting]
    if before.weights.tokens != before.weights.said:
        return None  # by the headers of contributions each site would say its whole weight again
    if [s.start for s in sites] != contributors:
        return None
    if any(s.stream is None or s.standing is not Standing.MEMBER or s.catching_up for s in sites):
        return None
    number = sync.open.sync
    if not run.trouble.plans_ahead(number):
        return None
    if (run.trouble.spared(number) | run.trouble.reduce_nothing.of(number)) & set(ids):
        return None
    if run.stragglers.late(ids, ids, Window(sync.open.num_steps, run.now, run.limits.lease_s / 2)):
        return None
    choice = reach.choose(sites, run.settings.quorum, held_back=run.trouble.held_back(number))
    if choice.problem or choice.left_out:
        return None
    try:
        made = make(run, sync, sites, receivers, choice.not_reducing, ahead=True)
    except ConfigError:
        return None  # is said when it is planned after Ready
    return made and made[0]


def gives_way(run: Run, sync: Sync, attempt: Attempt) -> str:
    """Why a plan that was made ahead no longer holds, whatever its weights are; empty while it may."""
    ids = attempt.ids()
    if gone := sync.gone():
        return "; ".join(e.reason for e in gone.values())
    if failed := sync.failed():
        return "; ".join(failed.values())
    if full := no_room(sync, attempt):
        return full
    if empty := [i for i in ids if i in sync.ready and not sync.ready[i].tokens]:
        return f"site {empty[0]} has trained nothing"
    known = set(ids)
    sites = [s for s in run.members.live() if s.site_id in known]
    known.update(sync.open.resting)
    if joined := [s for s in run.members.holding(sync.open.base_commit) if s.site_id not in known]:
        return f"{joined[0].label} has joined"
    if all(i in sync.ready for i in ids) and len(within_commit(sync, sites)) < len(sites):
        return "its samples are in more pieces than a commit can list"
    if any(site.unreachable_site_ids for site in sites):
        choice = reach.choose(sites, run.settings.quorum, held_back=run.trouble.held_back(sync.open.sync))
        if undialled := choice.not_reducing & attempt.reducing():
            return f"site {min(undialled)} reduces and cannot be dialled by all"
        if choice.problem or choice.left_out:
            return choice.problem or choice.left_out.removeprefix("; ")
    return ""


def no_room(sync: Sync, attempt: Attempt) -> str:
    """Which reducers cannot hold what they are to reduce, and why; empty if all can, as far as is known."""
    reducing = attempt.reducing()
    return "; ".join(text for i, text in sync.exclusions.reasons(Kind.NO_ROOM).items() if i in reducing)
