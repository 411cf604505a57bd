"""The weight of each contributor in a sync: the tokens that its Ready says, within bounds. Pure.

What a site says of itself is bounded twice. Tokens of positions that it leases are bounded by them: more than a sample
can hold is refused. Whatever it leases, its pace is compared with that of the others, and what is beyond the bound does
not count: a site that says 2^44 tokens a step would be the run otherwise. That is no refusal, because a site may
be so much faster than the others; the log, the status page and the commit's record say it. No more windows than that
ratio count either: a site that stays away, on purpose or not, would be nearly the whole average once it is back.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

from atoll.coordinator.core.run import Run
from atoll.coordinator.core.sites.membership import Site
from atoll.coordinator.core.sync.attempts import Attempt
from atoll.coordinator.core.sync.syncs import Sync
from atoll.protocol.messages import DataRange, Ready
from atoll.protocol.plans import weights as planned_weights
from atoll.protocol.settings import SyncSettings


@dataclass(frozen=True, slots=True, kw_only=True)
class Said:
    """What one contributor says that it trained."""

    tokens: int
    num_steps: int
    """Steps of the run that it covers, as the coordinator saw it: what the site may have trained in."""
    num_trained_steps: int
    """Of these, what the site says that it trained in: it may have been without workers for most of them."""


def within_ratio(said: Sequence[Said], max_ratio: int) -> tuple[int, ...]:
    """The weights: at most `max_ratio` times the pace of the median contributor, over the steps that each covers.

    The pace that others are measured by is over the steps in which a site trained: one that comes back after many
    windows without workers was not slow. Of an even number the slower one of the two in the middle is the median: of
    two sites it is the other one.
    """
    paces = sorted(Fraction(s.tokens, max(1, min(s.num_trained_steps, s.num_steps))) for s in said)
    most = max_ratio * paces[(len(paces) - 1) // 2]
    return tuple(min(s.tokens, max(1, int(most * s.num_steps))) for s in said)


def weights(run: Run, sync: Sync, contributors: Sequence[Site]) -> tuple[int, ...]:
    """Of contributors that are all ready."""
    settings = run.settings.sync
    most_steps = settings.max_weight_ratio * max(settings.every, sync.open.num_steps)
    said = [
        Said(
            tokens=sync.ready[site.site_id].tokens,
            num_steps=min(_steps_covered(sync, site), most_steps),
            num_trained_steps=sync.ready[site.site_id].num_steps,
        )
        for site in contributors
    ]
    return within_ratio(said, settings.max_weight_ratio)


def cut_now(run: Run, sync: Sync, contributors: Sequence[Site]) -> tuple[str, ...]:
    """Which weights would be less than what the Ready of their sites says, in words."""
    said = [sync.ready[s.site_id].tokens for s in contributors]
    return _in_words(contributors, said, weights(run, sync, contributors))


def cut_of(run: Run, attempt: Attempt) -> tuple[str, ...]:
    """Which weights of this attempt are less than what the Ready of their sites said, in words."""
    sites = [run.members.known(site_id) for site_id in attempt.ids()]
    return _in_words(sites, attempt.said, planned_weights(attempt.plan))


def _in_words(sites: Sequence[Site], said: Sequence[int], weights: Sequence[int]) -> tuple[str, ...]:
    return tuple(
        f"{site.label} says {tokens} tokens, which count as {weight} (sync.max_weight_ratio)"
        for site, tokens, weight in zip(sites, said, weights, strict=True)
        if weight < tokens
    )


def beyond_leases(ready: Ready, settings: SyncSettings) -> str:
    """Why the tokens cannot be those of the positions that Ready lists; empty if they can, or if it lists none."""
    num_samples = _num_samples(ready.ranges)
    most = num_samples * settings.max_tokens_per_sample
    if not num_samples or ready.tokens <= most:
        return ""
    return (
        f"it says {ready.tokens} tokens of {num_samples} samples, which hold at most {most} "
        f"(sync.max_tokens_per_sample = {settings.max_tokens_per_sample})"
    )


def _steps_covered(sync: Sync, site: Site) -> int:
    """Steps of the run since the site's last contribution, or since it held its first state: as the coordinator saw it.
    A site that missed some syncs contributes what it trained in all of them."""
    begun = sync.open.run_step
    if site.counts_from_step is not None:  # else its Ready is from before this start of the coordinator
        begun = min(site.counts_from_step, begun)
    return sync.open.run_step + sync.open.num_steps - begun


def _num_samples(ranges: Sequence[DataRange]) -> int:
    return sum(r.num_samples for r in ranges)
