"""The weight of each contributor in a sync: the tokens that its Ready says, within bounds. Pure.

What a site says of itself is bounded twice. Tokens of positions that it leases are bounded by them: more than a sample
can hold is refused. Whatever it leases, its pace is compared with that of the others, and what is beyond the bound does
not count: a site that says 2^44 tokens a step would be the run otherwise. That is no refusal, because a site may
be so much faster than the others; the log, the status page and the commit's record say it. No more windows than that
ratio count either, beside those in which the site was told to rest: a site that stays away, on purpose or not, would be
nearly the whole average once it is back.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from fractions import Fraction

from atoll.coordinator.core.events import WeightsRecord
from atoll.coordinator.core.run import Run
from atoll.coordinator.core.sites.membership import Site
from atoll.coordinator.core.sync.attempts import Attempt
from atoll.coordinator.core.sync.syncs import Sync
from atoll.protocol.messages import MAX_TOKENS, Ready
from atoll.protocol.outer import same_rates
from atoll.protocol.sync_settings import SyncSettings

MAX_RATE = 100.0
"""Learning rate of a step, or weight decay."""
VOTE_PART = 0.1
"""Of the difference at which rates are others: within it two sites are for the same ones."""


def within_ratio(ready: Sequence[Ready], covered: Sequence[int], max_ratio: int) -> tuple[int, ...]:
    """The weights: at most `max_ratio` times the pace of the median contributor, over the steps that each covers.

    `covered`: of each contributor, the steps of the run in which it may have trained, as the coordinator saw it. Of
    these its Ready says those in which it did: it may have been without workers for most of them.

    The pace that others are measured by is over the steps in which a site trained: one that comes back after many
    windows without workers was not slow. Of an even number the slower one of the two in the middle is the median: of
    two sites it is the other one.
    """
    said = list(zip(ready, covered, strict=True))
    paces = sorted(Fraction(r.tokens, max(1, min(r.num_steps, num_steps))) for r, num_steps in said)
    most = max_ratio * paces[(len(paces) - 1) // 2]
    return tuple(min(r.tokens, max(1, int(most * num_steps))) for r, num_steps in said)


def weigh(run: Run, sync: Sync, attempt: Attempt) -> WeightsRecord:
    """The weights of the attempt. Requires that all its contributors are ready."""
    settings = run.settings.sync
    longest = settings.window_steps(settings.all_fragments, sync.open.base_commit)
    most_steps = settings.max_weight_ratio * max(longest, sync.open.num_steps)
    ready = [sync.ready[i] for i in attempt.ids()]
    covered = [_steps_covered(run, sync, run.members.known(i), most_steps) for i in attempt.ids()]
    return WeightsRecord(
        sync=sync.open.sync,
        attempt=attempt.plan.attempt,
        tokens=within_ratio(ready, covered, settings.max_weight_ratio),
        said=tuple(message.tokens for message in ready),
        ranges=tuple(message.ranges for message in ready),
        error_commits=tuple(message.error_commits for message in ready) if settings.error_feedback else (),
        rates=_usual_rates(run, sync, attempt.ids()),
        roots=tuple(message.contributions_root for message in ready) if settings.audits else (),
        signatures=tuple(message.signature for message in ready if message.signature) if settings.audits else (),
    )


def odd_rates(run: Run, sync: Sync, site_ids: Sequence[int]) -> dict[int, str]:
    """Of these ready sites, those whose optimizers have other rates than is usual, and what is wrong."""
    said = {site_id: sync.ready[site_id].rates for site_id in site_ids}
    if len(set(said.values())) < 2:
        return {}
    usual = _usual_rates(run, sync, site_ids)
    others = ", ".join(str(i) for i, rates in sorted(said.items()) if same_rates(rates, usual))
    return {
        i: f"its optimizer has the rates {list(rates)}, those of site {others} are {list(usual)} (learning rate and "
        "weight decay of each parameter group): use the same script, and set them from site.inner_step"
        for i, rates in sorted(said.items())
        if not same_rates(rates, usual)
    }


def _usual_rates(run: Run, sync: Sync, site_ids: Sequence[int]) -> tuple[float, ...]:
    """Those, of what these ready sites say, that most of the sites in the last commit have: a site that has been
    started again is no witness. Where as many have one as another all sites are counted, then the lowest id counts.

    Sites count for rates that are much nearer to their own than what is refused. So rates that are at the edge for one
    honest site, and beyond it for another, have no honest site for them: fewer sites than are honest cannot have an
    honest one refused.
    """
    votes: Counter[tuple[float, ...]] = Counter()
    witnesses: Counter[tuple[float, ...]] = Counter()
    last = run.log.record(run.log.last)
    known = {(c.site_id, c.incarnation) for c in last.commit.contributors} if last is not None else set()
    for site_id in sorted(site_ids):
        rates = sync.ready[site_id].rates
        votes[rates] += 1
        witnesses[rates] += run.members.known(site_id).start in known

    def votes_for(rates: tuple[float, ...]) -> tuple[int, int]:
        near = [other for other in votes if same_rates(rates, other, part=VOTE_PART)]
        return sum(witnesses[other] for other in near), sum(votes[other] for other in near)

    return max(votes, key=votes_for)  # of equal ones the first


def cut_of(run: Run, weights: WeightsRecord, site_ids: Sequence[int]) -> tuple[str, ...]:
    """Which weights of these contributors are less than what their Readys said, in words."""
    return tuple(
        f"{run.members.known(site_id).label} says {tokens} tokens, which count as {weight} (sync.max_weight_ratio)"
        for site_id, tokens, weight in zip(site_ids, weights.said, weights.tokens, strict=True)
        if weight < tokens
    )


def beyond_bounds(ready: Ready, settings: SyncSettings) -> str:
    """Why the tokens are more than possible, or cannot be those of the positions that Ready lists, or the rates are
    none; empty if they can, or if it lists none, or shards: these took many syncs."""
    most_rate = MAX_RATE * (settings.most_local_steps if settings.local_doubling else 1)  # learning rates are added up
    if not all(0 <= rate <= most_rate for rate in ready.rates) or len(ready.rates) % 2:
        return (
            f"its optimizer has the rates {list(ready.rates)}: from 0 to {most_rate:g} are possible, two of each group"
        )
    if ready.tokens >= MAX_TOKENS:
        return f"it says {ready.tokens} tokens, less than {MAX_TOKENS} are possible"
    num_samples = sum(r.num_samples for r in ready.ranges)
    most = num_samples * settings.max_tokens_per_sample
    if not num_samples or ready.of_shards or ready.tokens <= most:
        return ""
    return (
        f"it says {ready.tokens} tokens of {num_samples} samples, which hold at most {most} "
        f"(sync.max_tokens_per_sample = {settings.max_tokens_per_sample})"
    )


def _steps_covered(run: Run, sync: Sync, site: Site, most_steps: int) -> int:
    """Steps of the run since the site's last contribution, in a commit or in flight, or since it held its first state:
    as the coordinator saw it. A site that missed some syncs contributes what it trained in all of them; beyond
    `most_steps` only those in which it was told to rest count."""
    begun = sync.open.run_step
    if site.counts_from_step is not None:  # else its Ready is from before this start of the coordinator
        before = [s for s in run.lanes.values() if s.open.run_step < begun and s.is_exchanged]
        in_flight = (s.end_step for s in before if s.attempts[-1].has(site.start))
        begun = min(begun, max((site.counts_from_step, *in_flight)))
    num_steps = sync.end_step - begun
    if num_steps <= most_steps:
        return num_steps
    return min(num_steps, most_steps + run.log.rested_steps(site.site_id, begun))
