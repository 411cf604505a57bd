"""What the coordinator says of this site, held against what the site said. Pure.

A weight is a claim of the site, which the coordinator may cut (rule 12) but not raise; where the site exchanges
already, it has said its weight to its peers as well, and the coordinator says the same. What is said here in words goes
to the coordinator and the log: either of the two is wrong, or the store is.
"""

from __future__ import annotations

from collections.abc import Sequence

from atoll.node.core.context import Context
from atoll.node.core.lanes.lane import Exchange, Lane
from atoll.protocol import messages as m
from atoll.protocol.outer import same_rates
from atoll.protocol.plans import influences
from atoll.protocol.ranges import Ranges
from atoll.protocol.sample_order import GLOBAL_LINE


def wrong_before(lane: Lane, told: int) -> str:
    """For the weight of this site in a plan that it has not begun."""
    said = lane.snapshot.tokens
    return f"the plan gives this site the weight {told}, its Ready said {said}" if told > said else ""


def wrong_under_way(exchange: Exchange, told: int) -> str:
    """For the weight of this site in a plan under which it has begun to exchange with its own."""
    if told == exchange.tokens:
        return ""
    return f"the coordinator says that this site has the weight {told}, and it exchanges with {exchange.tokens}"


def wrong_root(ctx: Context, lane: Lane, place: int | None, roots: Sequence[bytes]) -> str:
    """For the roots that a plan's contributors are said to have, of which this site is at `place`."""
    if not ctx.settings.sync.audits or place is None:
        return ""
    if roots[place : place + 1] == (lane.snapshot.root,):
        return ""
    return "the coordinator says that this site contributes something else than its Ready said (the root of its hashes)"


def wrong_in_commit(ctx: Context, lane: Lane, exchange: Exchange, commit: m.Commit) -> str:
    """For the commit of an attempt that this site contributes to, with the sealed snapshot of the lane."""
    if not exchange.contributes:
        return ""
    me = (ctx.site.site_id, ctx.identity.incarnation)
    listed = next((c.tokens for c in commit.contributors if (c.site_id, c.incarnation) == me), None)
    if listed != exchange.tokens:
        return f"commit {commit.commit} lists this site with the weight {listed}, it exchanged with {exchange.tokens}"
    if exchange.influences and influences(commit) != exchange.influences:
        return f"commit {commit.commit} lists other influences of its contributors than were said of its attempt"
    report = lane.snapshot.report
    if report is not None and not same_rates(commit.rates, report.rates):
        return f"commit {commit.commit} has the rates {list(commit.rates)}, this site's Ready {list(report.rates)}"
    line = ctx.site.site_id if ctx.settings.data == "local" else GLOBAL_LINE
    done = Ranges(r for item in commit.done if item.line == line for r in item.ranges)
    missing = Ranges(lane.snapshot.ranges).minus(done)
    if missing:
        return f"commit {commit.commit} does not list {missing.num_samples} samples that this site's Ready did"
    return ""
