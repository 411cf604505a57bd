"""One sync as a site lives it: Open, Ready, Plan, the exchange, Done, Commit, applied."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence

from atoll.node.core import endings, events, holding, leases, own_word, saving, snapshots, sources
from atoll.node.core.context import Context
from atoll.node.core.disk import Outer
from atoll.node.core.events import Content
from atoll.node.core.outputs import (
    ApplyCommit,
    BeginExchange,
    CancelExchange,
    DropSync,
    Fulfil,
    PublishState,
    RollBack,
    WeighExchange,
)
from atoll.node.core.state import Exchange, SiteState
from atoll.protocol import messages as m
from atoll.protocol.errors import StateError


def opened(ctx: Context, message: m.Open) -> None:
    """The site goes on for this sync. Says Ready if a snapshot for it is sealed; asks for a base that it lacks."""
    site, disk = ctx.site, ctx.site.disk
    note_opening(ctx, message)
    site.open = message
    if disk.outer is not None and message.base_commit == disk.outer.commit:
        disk.count(message.run_step, message.run_tokens)
    elif disk.outer is not None and disk.applying is None and message.base_commit not in site.commits:
        sources.find(ctx)
    ready(ctx)


def note_opening(ctx: Context, message: m.Open) -> None:
    """How long a window of the run takes."""
    site = ctx.site
    if message.sync == site.newest_sync + 1 and site.newest_sync:
        site.window_s = ctx.now - site.opened_at
    if message.sync > site.newest_sync:
        site.newest_sync, site.opened_at = message.sync, ctx.now


def ready(ctx: Context) -> None:
    """Said of a sealed snapshot, again on a new stream, and again with other peers that cannot be dialled. A plan that
    was made ahead begins then."""
    site, report, open_ = ctx.site, ctx.site.snapshot.report, _sync_of_snapshot(ctx.site)
    if open_ is None or report is None:
        return
    if site.disk.find(RollBack) is not None:
        return  # said when that is done: it removes attempts from the log, also one that was begun meanwhile
    ctx.send(
        m.Ready(
            sync=open_.sync,
            tokens=report.tokens,
            num_steps=report.num_steps,
            mean_loss=report.mean_loss,
            train_s=report.train_s,
            wait_s=site.workers.wait_s,
            ranges=site.snapshot.ranges,
            unreachable_site_ids=site.unreachable_site_ids,
        )
    )
    begin_ahead(ctx)


def _sync_of_snapshot(site: SiteState) -> m.Open | None:
    """The open sync, if there is a sealed snapshot for it. Every sealed one is on the commit that the site holds."""
    outer, open_ = site.disk.outer, site.open
    if not site.snapshot.is_sealed or outer is None or open_ is None:
        return None
    return open_ if open_.base_commit == outer.commit else None


def planned(ctx: Context, plan: m.Plan) -> None:
    """It begins with its weights, and one that was made ahead at the boundary. An older one is nothing."""
    site = ctx.site
    if any(_order(known) >= _order(plan) for known in _plans(site)):
        return
    if any(member.tokens for member in (*plan.contributors, *plan.receivers)):
        send_failure(ctx, plan, "plan", "a plan that says weights; they come apart")
        return
    site.next_plan = plan
    begin_ahead(ctx)


def weighed(ctx: Context, message: m.Weights) -> None:
    """The plan was sent on this stream before, and begins now, in place of the exchange before it; or its exchange runs
    already, and is told the weights. What this site cannot follow it says, as a contributor."""
    site, exchange = ctx.site, ctx.site.exchange
    plan = next((p for p in _plans(site) if _order(p) == _order(message)), None)
    if plan is None or len(plan.contributors) != len(message.tokens) or not all(message.tokens):
        if all(_order(known) <= _order(message) for known in _plans(site)):
            send_failure(ctx, message, "plan", "weights that fit no plan of this site")
        return
    if exchange is not None and plan is exchange.plan:
        _weigh_exchange(ctx, exchange, message.tokens)
        return
    site.next_plan = None
    place = _place(ctx, plan.contributors)
    if place is None and _place(ctx, plan.receivers) is None:
        return
    if site.disk.find(RollBack) is not None:
        return  # it fetches the commit later
    told = message.tokens[place] if place is not None else 0
    if site.disk.outer is None or site.disk.outer.commit != plan.base_commit:
        if told:  # else it is a joiner that is not there yet, and fetches the commit later
            send_failure(ctx, plan, "plan", f"planned on commit {plan.base_commit}, which this site has not applied")
        return
    if told and not site.snapshot.is_sealed:
        send_failure(ctx, plan, "plan", "planned as a contributor without a sealed snapshot")
        return
    if wrong := own_word.wrong_before(ctx, told):
        send_failure(ctx, plan, "plan", wrong)
        return
    _begin(ctx, plan, told, message.tokens)


def begin_ahead(ctx: Context) -> None:
    """The exchange of a plan that was made ahead, once this site is at its boundary. It does not wait for the
    coordinator, but goes by its plan only while nothing else was heard of that sync."""
    site, plan, snapshot, open_ = ctx.site, ctx.site.next_plan, ctx.site.snapshot, _sync_of_snapshot(ctx.site)
    if plan is None or not plan.ahead or open_ is None or open_.sync != plan.sync:
        return
    if not snapshot.tokens:
        return  # without a weight it cannot contribute: the coordinator plans anew
    if _place(ctx, plan.contributors) is None:
        return
    site.next_plan = None
    _begin(ctx, plan, snapshot.tokens)


def _plans(site: SiteState) -> list[m.Plan]:
    """Those that this site knows of: the one that is under way, and the next one."""
    known = (site.exchange.plan if site.exchange is not None else None, site.next_plan)
    return [plan for plan in known if plan is not None]


def _place(ctx: Context, members: Sequence[m.Member]) -> int | None:
    """Of this start of this site among them."""
    me = (ctx.site.site_id, ctx.identity.incarnation)
    return next((i for i, member in enumerate(members) if (member.site_id, member.incarnation) == me), None)


def _begin(ctx: Context, plan: m.Plan, tokens: int, weights: tuple[int, ...] = ()) -> None:
    """`tokens`: this site's weight, 0 if it receives. `weights`: of all contributors, if they are said."""
    cancel_exchange(ctx)
    ctx.site.exchange = Exchange(plan=plan, tokens=tokens, weights=weights)
    ctx.emit(BeginExchange(plan, tokens, weights))


def _weigh_exchange(ctx: Context, exchange: Exchange, weights: tuple[int, ...]) -> None:
    """All contributors are ready, with these weights."""
    place = _place(ctx, exchange.plan.contributors)
    if exchange.weights or place is None:
        return
    if wrong := own_word.wrong_under_way(exchange, weights[place]):
        cancel_exchange(ctx)
        send_failure(ctx, exchange.plan, "plan", wrong)
        return
    exchange.weights = weights
    ctx.emit(WeighExchange(exchange.plan, weights))


def _order(plan: m.Plan | m.Weights) -> tuple[int, int, int]:
    return plan.sync, plan.term, plan.attempt


def send_failure(ctx: Context, plan: m.Plan | m.Weights, phase: str, text: str) -> None:
    """Of this site, before the exchange."""
    ctx.report(logging.ERROR, f"sync {plan.sync}: {text}")
    ctx.send(
        m.ExchangeFailed(
            sync=plan.sync,
            attempt=plan.attempt,
            term=plan.term,
            peer_site_id=0,
            direction=m.Direction.UNSPECIFIED,
            phase=phase,
            text=text,
        )
    )


def current(ctx: Context, sync: int, term: int, attempt: int) -> Exchange | None:
    """The exchange, if it is that one. What comes late of an older attempt is nothing."""
    exchange = ctx.site.exchange
    if exchange is None:
        return None
    plan = exchange.plan
    return exchange if (plan.sync, plan.term, plan.attempt) == (sync, term, attempt) else None


def exchange_finished(ctx: Context, event: events.ExchangeFinished) -> None:
    """All payloads are in the log; a contributor says Done."""
    exchange, outer = current(ctx, event.sync, event.term, event.attempt), ctx.site.disk.outer
    if exchange is None:
        return
    exchange.finished = True
    assert outer is not None
    done = m.Done(
        sync=event.sync,
        attempt=event.attempt,
        term=event.term,
        payload_digest=event.payload_digest,
        last_commit=outer.commit,
        state_hash=outer.state_hash,
        sent_bytes=event.sent_bytes,
        received_bytes=event.received_bytes,
        tokens=event.tokens,
        stood_out=event.stood_out,
    )
    _say(ctx, exchange, done)


def _say(ctx: Context, exchange: Exchange, message: m.Done | m.ExchangeFailed) -> None:
    if exchange.contributes:
        exchange.said = message
        ctx.send(message)


def exchange_broken(ctx: Context, event: events.ExchangeBroken) -> None:
    """A contributor says why; the coordinator plans anew."""
    failure = event.failure
    exchange = current(ctx, failure.sync, failure.term, failure.attempt)
    if exchange is None:
        return
    exchange.broken = True
    peer = f" with site {failure.peer_site_id}" if failure.peer_site_id not in (0, ctx.site.site_id) else ""
    ctx.report(logging.WARNING, f"sync {failure.sync} attempt {failure.attempt}: {failure.phase}{peer}: {failure.text}")
    _say(ctx, exchange, failure)


def cancel_exchange(ctx: Context) -> None:
    """Contributions that are held may serve another attempt."""
    exchange = ctx.site.exchange
    if exchange is not None and exchange.is_under_way:
        ctx.emit(CancelExchange(exchange.plan.sync, exchange.plan.attempt))
    ctx.site.exchange = None


def give_up_exchange(ctx: Context) -> None:
    """Its sync is over, or void."""
    exchange = ctx.site.exchange
    if exchange is not None:
        cancel_exchange(ctx)
        ctx.emit(DropSync(exchange.plan.sync))


def committed(ctx: Context, commit: m.Commit) -> None:
    """Kept until it is applied; those before it are asked for if they are not here. One that contradicts what this
    site said of itself ends the site."""
    site, outer = ctx.site, ctx.site.disk.outer
    if outer is not None and commit.commit <= outer.commit:
        return
    exchange = current(ctx, commit.sync, commit.term, commit.attempt)
    if exchange is not None and (wrong := own_word.wrong_in_commit(ctx, exchange, commit)):
        endings.give_up(ctx, wrong, StateError.exit_code)
        return
    site.commits[commit.commit] = commit
    if exchange is not None and len(exchange.plan.contributors) == len(commit.contributors):
        # The weights may have been missed: from now on peers have to get on. They may be gone for good.
        _weigh_exchange(ctx, exchange, tuple(c.tokens for c in commit.contributors))
    snapshots.note_contribution(ctx, commit)
    if commit.next is not None:
        note_opening(ctx, commit.next)
    if outer is not None and commit.commit > outer.commit + 1 and commit.commit - 1 not in site.commits:
        sources.find(ctx)


def keep(ctx: Context, commits: Iterable[m.Commit]) -> None:
    """They are tried from this site's own log."""
    ctx.site.commits.update((commit.commit, commit) for commit in commits)


def forget_commits(ctx: Context, last: int | None = None) -> None:
    """Those up to `last`, or all."""
    for commit in [c for c in ctx.site.commits if last is None or c <= last]:
        del ctx.site.commits[commit]


def forget_open(ctx: Context) -> None:
    """The coordinator opens the next sync for this site anew."""
    ctx.site.open = None


def apply_next(ctx: Context) -> None:
    """The next commit, if it is here and its payloads are, or nobody is bringing them any more."""
    site, disk = ctx.site, ctx.site.disk
    if disk.outer is None or disk.running is not None or disk.queue or site.sources_asked or site.publish_is_in_use:
        return
    commit = site.commits.get(disk.outer.commit + 1)
    if commit is None:
        return
    exchange = current(ctx, commit.sync, commit.term, commit.attempt)
    if exchange is not None and exchange.is_under_way:
        return
    ctx.emit(disk.begin(ApplyCommit(commit)))


def apply_failed(ctx: Context, event: events.ApplyFailed) -> None:
    """The commit comes again with its payloads, from the donors. One that is void is lacking to nobody."""
    site, disk = ctx.site, ctx.site.disk
    if disk.end(ApplyCommit) is None or disk.is_void:
        return
    disk.broke_off(has_moved=event.has_moved)
    site.commits.pop(event.commit, None)
    disk.lack(event.commit)
    if site.over and not site.admitted:
        endings.exit(ctx, 0, site.over)
        return
    ctx.report(logging.WARNING, f"commit {event.commit} cannot be applied from the log ({event.reason}); fetching it")
    sources.find(ctx)


def payloads_asked(ctx: Context, message: m.ListPayloads) -> None:
    """Their hashes, of the attempt that this site is done with."""
    exchange = current(ctx, message.sync, message.term, message.attempt)
    if exchange is not None and exchange.finished:
        ctx.emit(Fulfil(message))


def commit_applied(ctx: Context, event: events.CommitApplied) -> None:
    """The site holds the commit, unless it became void meanwhile. A snapshot that is not in it has another base than
    the next sync, and is given up."""
    site, disk = ctx.site, ctx.site.disk
    if disk.end(ApplyCommit) is None or disk.is_void:
        return
    commit = site.commits.pop(event.commit)
    if site.snapshot.is_sealed:
        if site.snapshot.committed_in == event.commit:
            snapshots.consume(ctx)
        else:
            snapshots.free(ctx)
            site.workers.missed()
    cancel_exchange(ctx)
    ctx.emit(DropSync(commit.sync))
    if commit.next is not None and (site.open is None or commit.next.sync > site.open.sync):
        site.open = commit.next  # else that sync was abandoned while this commit was applied
    outer = Outer(
        commit=event.commit, state_hash=event.state_hash, run_step=commit.run_step, run_tokens=commit.run_tokens
    )
    holding.hold(ctx, outer, final=commit.final)
    if commit.final or (ctx.settings.save_every and commit.commit % ctx.settings.save_every == 0):
        saving.save(ctx)


def abandoned(ctx: Context, message: m.Abandoned) -> None:
    """Gives the exchange up, and goes on for the sync that follows."""
    ctx.report(logging.WARNING, f"sync {message.sync} was abandoned: {message.reason}")
    exchange = ctx.site.exchange
    if exchange is not None and exchange.plan.sync == message.sync:
        give_up_exchange(ctx)
    if message.without_tokens and not snapshots.release_empty(ctx):
        return
    if message.next is not None:
        opened(ctx, message.next)


def publish(ctx: Context, content: Content) -> None:
    """Requires that nothing works on the disk."""
    ctx.emit(ctx.site.disk.begin(PublishState(content)))


def discard_local(ctx: Context) -> None:
    """What the ranks have trained counts no longer: their next values replace it."""
    cancel_exchange(ctx)
    ctx.site.next_plan = None
    snapshots.free(ctx)
    leases.discarded(ctx)
    ctx.site.workers.discard()
