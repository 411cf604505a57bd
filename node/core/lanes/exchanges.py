"""The exchange of a sync as a site lives it: Plan, Weights, the exchange, Done."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from atoll.node.core import events
from atoll.node.core import outputs as out
from atoll.node.core.context import Context
from atoll.node.core.exchange_events import ExchangeFinished, ProductsMade
from atoll.node.core.exchange_failures import failure_of, outlier_of
from atoll.node.core.lanes import own_word, snapshots
from atoll.node.core.lanes.lane import Exchange, Lane
from atoll.protocol import messages as m
from atoll.protocol.errors import StateError

SENDING = 0.75
"""Of the time that the ranks train on. What is left of it is for the last average, the commit and the update."""
LEAST_SENDING, MOST_SENDING = 0.5, 0.9
"""The same where it is known how long these took at most in the last syncs: twice as long is left, within these bounds.
"""
DEADLINE_SPREADS = 4
"""The deadline of an exchange is at least so many times as far as the end of its sending: it is by what exchanges took
before, and they may not have been spread."""
OfAttempt = m.Plan | m.Weights | m.Influences | m.Done | m.ExchangeFailed | m.ListPayloads | m.Commit


def planned(ctx: Context, plan: m.Plan) -> None:
    """It begins with its weights, and one that was made ahead at the boundary. An older one is nothing."""
    lane = ctx.site.lanes[plan.fragment]
    if any(_order(known) >= _order(plan) for known in lane.plans):
        return
    if any(member.tokens or member.influence for member in (*plan.contributors, *plan.receivers)):
        _send_failure(ctx, plan, "a plan that says weights; they come apart")
        return
    lane.next_plan = plan
    begin_ahead(ctx, lane)


def weighed(ctx: Context, message: m.Weights) -> None:
    """The plan was sent on this stream before, and begins now, in place of the exchange before it; or its exchange runs
    already, and is told the weights. What this site cannot follow it says, as a contributor."""
    site = ctx.site
    known = [(lane, plan) for lane in site.lanes for plan in lane.plans]
    lane, plan = next((of for of in known if _order(of[1]) == _order(message)), (None, None))
    if lane is None or plan is None or len(plan.contributors) != len(message.tokens) or not all(message.tokens):
        if all(_order(plan) <= _order(message) for _, plan in known if plan.sync == message.sync):
            _send_failure(ctx, message, "weights that fit no plan of this site")
        return
    if lane.exchange is not None and plan is lane.exchange.plan:
        weigh(ctx, lane, lane.exchange, message.tokens, message.roots)
        return
    lane.next_plan = None
    place = _place(ctx, plan.contributors)
    if place is None and _place(ctx, plan.receivers) is None:
        return
    if site.disk.find(out.RollBack) is not None:
        return  # it fetches the commit later
    told = message.tokens[place] if place is not None else 0
    if told and not _has_base(ctx, plan):
        _send_failure(ctx, plan, f"planned on commit {plan.base_commit}, which this site has not applied")
        return
    if site.disk.outer is None:
        return  # a joiner that fetches the state is to cost the others little: it fetches the commit later
    if _has_base(ctx, plan):  # else a commit that is not applied yet may hold it
        snapshots.free_lost(lane)  # another attempt is made
    if told and (not lane.snapshot.is_sealed or lane.snapshot.is_arriving):
        _send_failure(ctx, plan, "planned as a contributor without a sealed snapshot")
        return
    if wrong := own_word.wrong_before(lane, told) or own_word.wrong_root(ctx, lane, place, message.roots):
        _send_failure(ctx, plan, wrong)
        return
    _begin(ctx, lane, plan, told, message)


def begin_ahead(ctx: Context, lane: Lane) -> None:
    """The exchange of a plan that was made ahead, once this site is at its boundary. It does not wait for the
    coordinator, but goes by its plan only while nothing else was heard of that sync."""
    plan, open_ = lane.next_plan, snapshots.ready_for(ctx, lane)
    if plan is None or not plan.ahead or open_ is None or open_.sync != plan.sync:
        return
    if not lane.snapshot.tokens:
        return  # without a weight it cannot contribute: the coordinator plans anew
    if _place(ctx, plan.contributors) is None:
        return
    lane.next_plan = None
    _begin(ctx, lane, plan, lane.snapshot.tokens)


def _has_base(ctx: Context, plan: m.Plan) -> bool:
    outer = ctx.site.disk.outer
    return outer is not None and outer.has_base(plan.fragment, plan.base_commit)


def _place(ctx: Context, members: Sequence[m.Member]) -> int | None:
    """Of this start of this site among them."""
    me = (ctx.site.site_id, ctx.identity.incarnation)
    return next((i for i, member in enumerate(members) if (member.site_id, member.incarnation) == me), None)


def _begin(ctx: Context, lane: Lane, plan: m.Plan, tokens: int, told: m.Weights | None = None) -> None:
    """`tokens`: this site's weight, 0 if it receives. `told`: of all contributors, if they are said."""
    cancel(ctx, lane)
    weights, roots = (told.tokens, told.roots) if told is not None else ((), ())
    spread_s = _spread_s(ctx, lane, plan)
    spread_until = ctx.now + spread_s if spread_s else None
    is_behind = not _has_base(ctx, plan)
    lane.exchange = Exchange(plan=plan, tokens=tokens, weights=weights, is_behind=is_behind, spread_until=spread_until)
    if tokens:
        lane.sent_for = plan.sync
    syncs = {other.open.sync for other in ctx.site.lanes if other.open is not None}
    syncs |= {other.exchange.plan.sync for other in ctx.site.lanes if other.exchange is not None}
    ctx.emit(
        out.BeginExchange(
            plan,
            tokens,
            weights,
            spread_s=spread_s,
            in_flight=frozenset(syncs),
            error_commits=lane.snapshot.error_commits,
            roots=roots,
            is_behind=is_behind,
        )
    )


def _spread_s(ctx: Context, lane: Lane, plan: m.Plan) -> float:
    """In which the site may send what it has to send: while its ranks train on, but for what the last average, the
    commit and the update take. The peers of an attempt that follows another one have waited long enough."""
    snapshot, step_s = lane.snapshot, ctx.site.workers.step_s
    if not ctx.settings.sync.pace or plan.attempt > 1 or step_s is None:
        return 0.0
    left_s = snapshot.sealed_at + snapshot.overlap_steps * step_s - ctx.now
    ending_s = max(lane.ending_s, default=(1 - SENDING) / 2 * left_s)
    sending_s = min(max(left_s - 2 * ending_s, LEAST_SENDING * left_s), MOST_SENDING * left_s)
    return max(0.0, min(sending_s, plan.deadline_s / DEADLINE_SPREADS))


def applied(ctx: Context, commit: m.Commit) -> None:
    """That commit is applied, which ends the exchange of its fragment, but for one of a later sync, of which this site
    receives what it applies next. How long that took after the sending was to end, or after a hurry, counts for the
    next ones if the commit is of that exchange."""
    lane, exchange = ctx.site.lanes[commit.fragment], current(ctx, commit)
    if exchange is not None and exchange.finished and exchange.spread_until is not None:
        lane.ending_s.append(max(0.0, ctx.now - exchange.spread_until))
    if lane.exchange is not None and lane.exchange.plan.sync <= commit.sync:
        cancel(ctx, lane)


def hurry(ctx: Context) -> None:
    """The ranks wait, sooner than was expected: for the oldest of the syncs in flight, unless they are to take a commit
    first. The others leave the link to its exchange."""
    outer, oldest = ctx.site.disk.outer, ctx.site.oldest_sealed
    if outer is None or any(copy.version != outer.commit for copy in ctx.site.workers.copies):
        return
    exchange = oldest.exchange if oldest is not None else None
    if exchange is not None and exchange.spread_until is not None and exchange.spread_until > ctx.now:
        exchange.spread_until = ctx.now
        ctx.emit(out.HurryExchange(exchange.plan.sync))


def weigh(
    ctx: Context, lane: Lane, exchange: Exchange, weights: tuple[int, ...], roots: tuple[bytes, ...] | None
) -> None:
    """All contributors are ready, with these weights. `roots`: None if a commit says so, which holds the right ones."""
    place = _place(ctx, exchange.plan.contributors)
    if exchange.weights or place is None:
        return
    wrong = own_word.wrong_under_way(exchange, weights[place])
    if wrong := wrong or ("" if roots is None else own_word.wrong_root(ctx, lane, place, roots)):
        cancel(ctx, lane)
        _send_failure(ctx, exchange.plan, wrong)
        return
    exchange.weights = weights
    ctx.emit(out.WeighExchange(exchange.plan, weights, roots or ()))


def multiplied(ctx: Context, event: ProductsMade) -> None:
    """The coordinator finds by it what the contributions count."""
    exchange = current(ctx, event.plan)
    if exchange is not None and exchange.is_under_way:
        plan = event.plan
        message = m.Products(sync=plan.sync, attempt=plan.attempt, term=plan.term, products=event.products)
        exchange.products = message
        ctx.send(message)


def influenced(ctx: Context, message: m.Influences) -> None:
    """The reducers of the attempt average from now on; this site may be one. What it cannot follow it says."""
    for lane in ctx.site.lanes:
        if lane.exchange is not None and lane.exchange is current(ctx, message):
            influence(ctx, lane, lane.exchange, message.influences)


def influence(ctx: Context, lane: Lane, exchange: Exchange, influences: tuple[int, ...]) -> None:
    """As the coordinator says, or a commit."""
    if exchange.influences or not exchange.is_under_way or not ctx.settings.sync.averages_by_influence:
        return
    if len(influences) != len(exchange.plan.contributors) or not all(influences):
        cancel(ctx, lane)
        _send_failure(ctx, exchange.plan, "influences that do not fit its plan")
        return
    exchange.influences = influences
    ctx.emit(out.InfluenceExchange(exchange.plan, influences))


def _order(said: OfAttempt) -> tuple[int, int, int]:
    return said.sync, said.term, said.attempt


def _send_failure(ctx: Context, plan: m.Plan | m.Weights, text: str) -> None:
    """Of this site, before the exchange."""
    ctx.report(logging.ERROR, f"sync {plan.sync}: {text}")
    ctx.send(
        m.ExchangeFailed(
            sync=plan.sync,
            attempt=plan.attempt,
            term=plan.term,
            peer_site_id=0,
            direction=m.Direction.UNSPECIFIED,
            phase="plan",
            text=text[:1024],
        )
    )


def current(ctx: Context, said: OfAttempt) -> Exchange | None:
    """The exchange of that attempt. What comes late of an older one is nothing."""
    under_way = (lane.exchange for lane in ctx.site.lanes if lane.exchange is not None)
    return next((exchange for exchange in under_way if _order(exchange.plan) == _order(said)), None)


def finished(ctx: Context, event: ExchangeFinished) -> None:
    """All payloads are in the log; a contributor says Done, and so does a receiver that has seen links at work, unless
    it began behind: its link carried what it fetched, too. Nobody does if the run has gone back meanwhile, and no state
    is held."""
    plan, outer = event.plan, ctx.site.disk.outer
    exchange = current(ctx, plan)
    if exchange is None or outer is None:
        return
    exchange.finished = True
    done = m.Done(
        sync=plan.sync,
        attempt=plan.attempt,
        term=plan.term,
        payload_digest=event.payload_digest,
        last_commit=outer.commit,
        state_hash=outer.state_hash,
        tokens=event.tokens,
        stood_out=outlier_of(event.stood_out) if event.stood_out is not None else None,
        links=event.links,
        averaged=event.averaged,
        payloads_root=event.payloads_root,
        signature=event.signature,
        errors=event.errors,
    )
    _say(ctx, exchange, done)
    if not exchange.contributes and event.links and not exchange.is_behind:
        ctx.send(done)


def broken(ctx: Context, event: events.ExchangeBroken) -> None:
    """A contributor says why; the coordinator plans anew."""
    exchange = current(ctx, event.plan)
    if exchange is None:
        return
    exchange.broken = True
    failure = failure_of(event.plan, event.error, ctx.site.site_id)
    peer = f" with site {failure.peer_site_id}" if failure.peer_site_id not in (0, ctx.site.site_id) else ""
    level = logging.DEBUG if exchange.is_behind else logging.WARNING  # one that is behind fetches the commit
    ctx.report(level, f"sync {failure.sync} attempt {failure.attempt}: {failure.phase}{peer}: {failure.text}")
    _say(ctx, exchange, failure)


def _say(ctx: Context, exchange: Exchange, message: m.Done | m.ExchangeFailed) -> None:
    if exchange.contributes:
        exchange.said = message
        ctx.send(message)


def say_again(ctx: Context) -> None:
    """What was said of each exchange, on a new stream."""
    for lane in ctx.site.lanes:
        if lane.exchange is None:
            continue
        if lane.exchange.products is not None and not lane.exchange.influences:
            ctx.send(lane.exchange.products)
        if lane.exchange.said is not None:
            ctx.send(lane.exchange.said)


def host_lost(ctx: Context, lane: Lane, text: str) -> None:
    """A host of this site is gone, with its part of the sealed snapshot, which can begin no exchange any more. Where
    one has begun, the others may have all of it, and a commit may hold it: it stays until another attempt is made."""
    exchange = lane.exchange
    is_sent = exchange is not None and exchange.contributes
    if exchange is not None and is_sent and exchange.is_under_way:
        _say(ctx, exchange, failure_of(exchange.plan, StateError(text), ctx.site.site_id))
        discard(ctx, lane)
    snapshots.lose(lane, is_sent=is_sent)


def payloads_asked(ctx: Context, message: m.ListPayloads) -> None:
    """Their hashes, of the attempt that this site is done with."""
    exchange = current(ctx, message)
    if exchange is not None and exchange.finished:
        ctx.emit(out.ListPayloads(exchange.plan))


def cancel(ctx: Context, lane: Lane) -> None:
    """Contributions that are held may serve another attempt."""
    exchange = lane.exchange
    if exchange is not None and exchange.is_under_way:
        ctx.emit(out.CancelExchange(exchange.plan.sync, exchange.plan.attempt))
    lane.exchange = None


def give_up(ctx: Context, lane: Lane) -> None:
    """Its sync is over, or void."""
    exchange = lane.exchange
    if exchange is not None:
        cancel(ctx, lane)
        ctx.emit(out.DropSync(exchange.plan.sync))


def discard(ctx: Context, lane: Lane) -> None:
    """What this site would contribute counts no longer, and no plan that was made for it."""
    cancel(ctx, lane)
    lane.next_plan = None
