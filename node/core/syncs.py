"""One sync as a site lives it: Open, Ready, Plan, the exchange, Done, Commit, applied."""

from __future__ import annotations

import logging

from atoll.node.core import catching_up, endings, events, leases, own_word, saving
from atoll.node.core.context import Context
from atoll.node.core.events import (
    ApplyCommit,
    BeginExchange,
    CancelExchange,
    Content,
    Difference,
    DropSync,
    PublishState,
    WeighExchange,
)
from atoll.node.core.state import Exchange, Outer, SiteState, Snapshot, SnapshotPhase
from atoll.protocol import messages as m
from atoll.protocol.errors import ConfigError, StateError
from atoll.protocol.plans import is_weighed, with_weights

MAX_EMPTY_IN_A_ROW = 3
"""Windows without a token, of a site that the run cannot do without."""


def opened(ctx: Context, message: m.Open) -> None:
    site = ctx.site
    note_opening(ctx, message)
    site.open = message
    outer = site.outer
    if outer is not None and message.base_commit == outer.commit:
        outer.run_step, outer.run_tokens = message.run_step, message.run_tokens
    elif outer is not None and site.applying is None and message.base_commit not in site.commits:
        catching_up.find_sources(ctx)
    ready(ctx)


def note_opening(ctx: Context, message: m.Open) -> None:
    """How long a window of the run takes."""
    site = ctx.site
    if message.sync == site.newest_sync + 1 and site.newest_sync:
        site.window_s = ctx.now - site.opened_at
    if message.sync > site.newest_sync:
        site.newest_sync, site.opened_at = message.sync, ctx.now


def ready(ctx: Context) -> None:
    site, snapshot, open_ = ctx.site, ctx.site.snapshot, _sync_of_snapshot(ctx.site)
    if open_ is None:
        return
    if site.rolling_back is not None:
        return  # said when that is done: it removes attempts from the log, also one that was begun meanwhile
    ctx.send(
        m.Ready(
            sync=open_.sync,
            tokens=snapshot.tokens,
            num_steps=snapshot.num_steps,
            mean_loss=snapshot.mean_loss,
            train_s=snapshot.train_s,
            wait_s=site.workers.wait_s,
            ranges=snapshot.ranges,
            unreachable_site_ids=site.unreachable_site_ids,
        )
    )
    begin_ahead(ctx)


def _sync_of_snapshot(site: SiteState) -> m.Open | None:
    """The open sync, if there is a sealed snapshot for it. Every sealed one is on the commit that the site holds."""
    outer, open_ = site.outer, site.open
    if site.snapshot.phase is not SnapshotPhase.SEALED or outer is None or open_ is None:
        return None
    return open_ if open_.base_commit == outer.commit else None


def planned(ctx: Context, plan: m.Plan) -> None:
    site, exchange = ctx.site, ctx.site.exchange
    if exchange is not None and _order(exchange.plan) >= _order(plan):
        if _order(exchange.plan) == _order(plan) and is_weighed(plan) and not is_weighed(exchange.plan):
            if wrong := own_word.wrong_in_weights(ctx, exchange, plan):
                cancel_exchange(ctx)
                send_failure(ctx, plan, "plan", wrong)
                return
            exchange.plan = plan
            ctx.emit(WeighExchange(plan))
        return
    if not is_weighed(plan):
        site.ahead = plan
        begin_ahead(ctx)
        return
    me = (site.site_id, ctx.identity.incarnation)
    contributes = me in [(c.site_id, c.incarnation) for c in plan.contributors]
    receives = me in [(r.site_id, r.incarnation) for r in plan.receivers]
    if not contributes and not receives:
        return
    if site.rolling_back is not None:
        return  # it fetches the commit later
    if site.outer is None or site.outer.commit != plan.base_commit:
        if not contributes:
            return  # a joiner that is not there yet fetches the commit later
        send_failure(ctx, plan, "plan", f"planned on commit {plan.base_commit}, which this site has not applied")
        return
    if contributes and site.snapshot.phase is not SnapshotPhase.SEALED:
        send_failure(ctx, plan, "plan", "planned as a contributor without a sealed snapshot")
        return
    if contributes and (wrong := own_word.wrong_in_plan(ctx, plan)):
        send_failure(ctx, plan, "plan", wrong)
        return
    cancel_exchange(ctx)
    site.exchange = Exchange(plan=plan, contributes=contributes)
    ctx.emit(BeginExchange(plan, contributes))


def weighed(ctx: Context, message: m.Weights) -> None:
    """The rest of the plan was sent on this stream before."""
    site = ctx.site
    plans = [site.ahead] if site.exchange is None else [site.exchange.plan, site.ahead]
    plan = next((p for p in plans if p is not None and _order(p) == _order(message)), None)
    if plan is not None and len(plan.contributors) == len(message.tokens):
        planned(ctx, with_weights(plan, message.tokens))
    elif site.exchange is None or _order(site.exchange.plan) <= _order(message):
        send_failure(ctx, message, "plan", "weights of a plan that this site does not have")


def begin_ahead(ctx: Context) -> None:
    """The exchange of a plan that came with the commit before, once this site is at its boundary. It does not wait for
    the coordinator, but goes by its plan only while nothing else was heard of that sync."""
    site, plan, snapshot, open_ = ctx.site, ctx.site.ahead, ctx.site.snapshot, _sync_of_snapshot(ctx.site)
    if plan is None or open_ is None or open_.sync != plan.sync:
        return
    if not snapshot.tokens:
        return  # without a weight it cannot contribute: the coordinator plans anew
    if site.exchange is not None:
        return  # a later plan of this sync; those of the one before end with its commit
    site.ahead = None
    plan = with_weights(plan, [snapshot.tokens if c.site_id == site.site_id else 0 for c in plan.contributors])
    site.exchange = Exchange(plan=plan, contributes=True)
    ctx.emit(BeginExchange(plan, True))


def _order(plan: m.Plan | m.Weights) -> tuple[int, int, int]:
    return plan.sync, plan.term, plan.attempt


def send_failure(ctx: Context, plan: m.Plan | m.Weights, phase: str, text: str) -> None:
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
    exchange = ctx.site.exchange
    if exchange is None:
        return None
    plan = exchange.plan
    return exchange if (plan.sync, plan.term, plan.attempt) == (sync, term, attempt) else None


def exchange_finished(ctx: Context, event: events.ExchangeFinished) -> None:
    exchange = current(ctx, event.sync, event.term, event.attempt)
    if exchange is None:
        return
    exchange.payload_digest = event.payload_digest
    exchange.tokens = event.tokens
    exchange.stood_out = event.stood_out
    exchange.sent_bytes = event.sent_bytes
    exchange.received_bytes = event.received_bytes
    done(ctx, exchange)


def done(ctx: Context, exchange: Exchange) -> None:
    outer = ctx.site.outer
    assert outer is not None
    assert exchange.payload_digest is not None
    if not exchange.contributes:
        return
    plan = exchange.plan
    ctx.send(
        m.Done(
            sync=plan.sync,
            attempt=plan.attempt,
            term=plan.term,
            payload_digest=exchange.payload_digest,
            last_commit=outer.commit,
            state_hash=outer.state_hash,
            sent_bytes=exchange.sent_bytes,
            received_bytes=exchange.received_bytes,
            tokens=exchange.tokens,
            stood_out=exchange.stood_out,
        )
    )


def exchange_broken(ctx: Context, event: events.ExchangeBroken) -> None:
    exchange = current(ctx, event.sync, event.term, event.attempt)
    if exchange is None:
        return
    exchange.broken = True
    peer = f" with site {event.peer_site_id}" if event.peer_site_id not in (0, ctx.site.site_id) else ""
    ctx.report(logging.WARNING, f"sync {event.sync} attempt {event.attempt}: {event.phase}{peer}: {event.text}")
    if exchange.contributes:
        direction = m.Direction.SENDING if event.sending else m.Direction.RECEIVING
        exchange.failure = m.ExchangeFailed(
            sync=event.sync,
            attempt=event.attempt,
            term=event.term,
            peer_site_id=event.peer_site_id,
            direction=direction,
            phase=event.phase[:64],
            text=event.text[:1024],
            tensor=event.tensor[:1024],
            outliers=event.outliers,
        )
        ctx.send(exchange.failure)


def cancel_exchange(ctx: Context) -> None:
    exchange = ctx.site.exchange
    if exchange is not None and exchange.payload_digest is None and not exchange.broken:
        ctx.emit(CancelExchange(exchange.plan.sync, exchange.plan.attempt))
    ctx.site.exchange = None


def give_up_exchange_before(ctx: Context, commit: int) -> None:
    exchange = ctx.site.exchange
    if exchange is not None and exchange.plan.base_commit < commit:
        cancel_exchange(ctx)
        ctx.emit(DropSync(exchange.plan.sync))


def committed(ctx: Context, commit: m.Commit) -> None:
    site = ctx.site
    if site.outer is not None and commit.commit <= site.outer.commit:
        return
    exchange = current(ctx, commit.sync, commit.term, commit.attempt)
    if exchange is not None and (wrong := own_word.wrong_in_commit(ctx, exchange, commit)):
        endings.give_up(ctx, wrong, StateError.exit_code)
        return
    site.commits[commit.commit] = commit
    if exchange is not None and len(exchange.plan.contributors) == len(commit.contributors):
        # The weights may have been missed: from now on peers have to get on. They may be gone for good.
        planned(ctx, with_weights(exchange.plan, tuple(c.tokens for c in commit.contributors)))
    note_contribution(ctx, commit)
    if commit.next is not None:
        note_opening(ctx, commit.next)
    if site.outer is not None and commit.commit > site.outer.commit + 1 and commit.commit - 1 not in site.commits:
        catching_up.find_sources(ctx)


def note_contribution(ctx: Context, commit: m.Commit) -> None:
    """Whether the sealed snapshot is in that commit, however the site comes to its state."""
    snapshot = ctx.site.snapshot
    me = (ctx.site.site_id, ctx.identity.incarnation)
    if (
        snapshot.phase is SnapshotPhase.SEALED
        and snapshot.base_commit == commit.commit - 1
        and me in [(c.site_id, c.incarnation) for c in commit.contributors]
    ):
        snapshot.committed_in = commit.commit


def consume(ctx: Context) -> None:
    """The sealed snapshot is in the outer state now: what the ranks trained until it must not be sent again."""
    site, snapshot, workers = ctx.site, ctx.site.snapshot, ctx.site.workers
    leases.committed(ctx, snapshot)
    same_generation = snapshot.generation == workers.generation and workers.version is not None
    snapshot.phase = SnapshotPhase.CONSUMED
    workers.contributed = same_generation
    if not same_generation:
        site.snapshot = Snapshot()


def apply_next(ctx: Context) -> None:
    """The next commit, if it is here and its payloads are, or nobody is bringing them any more."""
    site = ctx.site
    if site.outer is None or site.applying is not None or site.fetching or site.looking_for_sources:
        return
    if site.rolling_back is not None:
        return
    commit = site.commits.get(site.outer.commit + 1)
    if commit is None:
        return
    exchange = current(ctx, commit.sync, commit.term, commit.attempt)
    if exchange is not None and exchange.payload_digest is None and not exchange.broken:
        return
    if publish_is_in_use(site):
        return
    site.applying = commit.commit
    ctx.emit(ApplyCommit(commit))


def publish_is_in_use(site: SiteState) -> bool:
    """Whether PUBLISH has to hold the workers' values again before the outer state changes: it is being written, or
    holds a difference that the workers have not taken yet. Of that no other difference can be made."""
    content, workers = site.published, site.workers
    if site.publishing is not None:
        return True
    if not isinstance(content, Difference) or not workers.running or workers.discard_local:
        return False
    return content.base == workers.version


def apply_failed(ctx: Context, event: events.ApplyFailed) -> None:
    ctx.site.applying = None
    if ctx.site.rolling_back is not None:
        return  # it is void, and the one of its number that is here, or is not lacking yet, is another commit
    ctx.site.commits.pop(event.commit, None)  # comes again with its payloads, from the donors
    ctx.site.lacks = event.commit
    if ctx.site.over and not ctx.site.admitted:
        endings.exit(ctx, 0, ctx.site.over)
        return
    ctx.report(logging.WARNING, f"commit {event.commit} cannot be applied from the log ({event.reason}); fetching it")
    catching_up.find_sources(ctx)


def commit_applied(ctx: Context, event: events.CommitApplied) -> None:
    site = ctx.site
    if site.applying != event.commit:
        return
    site.applying = None
    if site.distrusting or site.rolling_back is not None:
        return
    commit = site.commits.pop(event.commit)
    if site.snapshot.phase is SnapshotPhase.SEALED:
        if site.snapshot.committed_in == event.commit:
            consume(ctx)
        else:
            site.snapshot = Snapshot()
            site.workers.sealed_in_vain = True
    cancel_exchange(ctx)
    ctx.emit(DropSync(commit.sync))
    site.final = commit.final
    if commit.next is not None and (site.open is None or commit.next.sync > site.open.sync):
        site.open = commit.next  # else that sync was abandoned while this commit was applied
    catching_up.hold(
        ctx,
        Outer(
            commit=event.commit,
            state_hash=event.state_hash,
            run_step=commit.run_step,
            run_tokens=commit.run_tokens,
        ),
    )
    if commit.final or (ctx.settings.save_every and commit.commit % ctx.settings.save_every == 0):
        saving.save(ctx)


def abandoned(ctx: Context, message: m.Abandoned) -> None:
    ctx.report(logging.WARNING, f"sync {message.sync} was abandoned: {message.reason}")
    exchange = ctx.site.exchange
    if exchange is not None and exchange.plan.sync == message.sync:
        cancel_exchange(ctx)
        ctx.emit(DropSync(message.sync))
    if message.without_tokens and not _train_on(ctx):
        return
    if message.next is not None:
        opened(ctx, message.next)


def _train_on(ctx: Context) -> bool:
    """Too few sites had tokens: ranks whose snapshot has none train another window, for it would fail the next sync as
    well. False: that was so too often, the site ends."""
    site, snapshot, workers = ctx.site, ctx.site.snapshot, ctx.site.workers
    if snapshot.phase is not SnapshotPhase.SEALED or snapshot.tokens:
        return True
    site.snapshot = Snapshot()
    if snapshot.generation == workers.generation:
        workers.released_step = snapshot.step
    site.num_empty_in_a_row += 1
    if site.num_empty_in_a_row < MAX_EMPTY_IN_A_ROW:
        return True
    text = (
        f"{site.num_empty_in_a_row} windows in a row had no tokens, and the run has too few sites without this one: "
        "give site.step(..., tokens=...) the number of tokens that the rank's own batch held"
    )
    endings.give_up(ctx, text, ConfigError.exit_code)
    return False


def publish(ctx: Context, content: Content) -> None:
    if ctx.site.publishing is None:
        ctx.site.publishing = content
        ctx.site.published = None
        ctx.emit(PublishState(content))


def discard_local(ctx: Context) -> None:
    site = ctx.site
    cancel_exchange(ctx)
    site.ahead = None
    site.snapshot = Snapshot()
    leases.discarded(ctx)
    site.workers.contributed = False
    if site.workers.version is not None or site.workers.offered_version is not None:
        site.workers.discard_local = True
        site.workers.offered_is_discarded = site.workers.offered_version is not None
