"""What the coordinator says of this site, held against what the site said. Pure.

A weight is a claim of the site, which the coordinator may cut (rule 12) but not raise; where the plan came with the
commit before, the site has said its weight to its peers as well, and the coordinator says the same. What is said here
in words goes to the coordinator and the log: either of the two is wrong, or the store is.
"""

from __future__ import annotations

from atoll.node.core.context import Context
from atoll.node.core.state import Exchange
from atoll.protocol import messages as m
from atoll.protocol.ranges import Ranges
from atoll.protocol.sample_order import GLOBAL_LINE


def wrong_in_plan(ctx: Context, plan: m.Plan) -> str:
    """For a plan with weights that this site contributes to."""
    said, planned = ctx.site.snapshot.tokens, own_weight(ctx, plan)
    if planned is not None and planned > said:
        return f"the plan gives this site the weight {planned}, its Ready said {said}"
    return ""


def wrong_in_weights(ctx: Context, exchange: Exchange, plan: m.Plan) -> str:
    """For the weights of a plan under which this site has begun to exchange with its own."""
    said, told = own_weight(ctx, exchange.plan), own_weight(ctx, plan)
    if exchange.contributes and told != said:
        return f"the coordinator says that this site has the weight {told}, and it exchanges with {said}"
    return ""


def wrong_in_commit(ctx: Context, exchange: Exchange, commit: m.Commit) -> str:
    """For the commit of an attempt that this site contributes to."""
    said, listed = own_weight(ctx, exchange.plan), own_weight(ctx, commit)
    if not exchange.contributes:
        return ""
    if listed != said:
        return f"commit {commit.commit} lists this site with the weight {listed}, it exchanged with {said}"
    line = ctx.site.site_id if ctx.settings.data == "local" else GLOBAL_LINE
    done = Ranges(r for item in commit.done if item.line == line for r in item.ranges)
    missing = Ranges(ctx.site.snapshot.ranges).minus(done)
    if missing:
        return f"commit {commit.commit} does not list {missing.num_samples} samples that this site's Ready did"
    return ""


def own_weight(ctx: Context, message: m.Plan | m.Commit) -> int | None:
    """None if the site is not among its contributors."""
    me = (ctx.site.site_id, ctx.identity.incarnation)
    return next((c.tokens for c in message.contributors if (c.site_id, c.incarnation) == me), None)
