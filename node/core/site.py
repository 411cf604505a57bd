"""The site's state machine: one entry, `handle(event, now) -> outputs`; the shell executes outputs in order.

Outputs that take time end in an event. Messages are idempotent: after every new session the core says again where
the site stands (Applied, Ready, Done), and the coordinator answers with what is pending.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from atoll.node.core import (
    catching_up,
    commits,
    departing,
    endings,
    errors,
    events,
    holding,
    leases,
    rollback,
    saving,
    session,
    sources,
    workforce,
)
from atoll.node.core.context import Context, SiteIdentity
from atoll.node.core.disk import Disk, IllegalStep, Outer
from atoll.node.core.events import Event, OfWorkers
from atoll.node.core.exchange_events import ExchangeFinished, ProductsMade
from atoll.node.core.host_events import HostErrors, HostsChanged, SlicesArrived, SnapshotShared
from atoll.node.core.lanes import exchanges, snapshots, syncs
from atoll.node.core.outputs import DistrustState, FetchState, Fulfil, Output, SeedState
from atoll.node.core.ranks.generations import Generations
from atoll.node.core.state import SiteState, lanes_of
from atoll.protocol import messages as m
from atoll.protocol.errors import InvalidMessage, RefusedError
from atoll.protocol.layout import check_fragment
from atoll.protocol.settings import RunSettings
from atoll.protocol.time_limits import TimeLimits, time_limits

Handler = Callable[[Context, Any], object]


class SiteCore:
    """One site. `held` is the outer state found on disk, if any; `branch` that of the commits there."""

    def __init__(
        self,
        identity: SiteIdentity,
        settings: RunSettings,
        held: Outer | None,
        now: float,
        *,
        branch: int = 0,
        num_ranks: int = 0,
        num_hosts: int = 1,
        held_errors: tuple[int | None, ...] = (),
    ) -> None:
        """`num_ranks`: of all hosts, see `Generations`. `held_errors`: of each fragment, the commit whose error is on
        the disk, None if only a part is."""
        self.ctx = Context(
            identity=identity,
            settings=settings,
            limits=time_limits(settings.time_limits),
            site=SiteState(
                disk=Disk(outer=held, branch=branch),
                away_since=now,
                lanes=lanes_of(settings.sync.fragments),
                held_errors=held_errors,
                missing_hosts=tuple(range(1, num_hosts)),
            ),
            ranks=Generations(num_ranks, now, num_ranks - num_ranks // num_hosts, identity.start_limit_s),
            now=now,
        )
        self.site = self.ctx.site
        """Everything that the core knows; to be read."""
        self.ranks = self.ctx.ranks
        """To be read, too."""

    @property
    def settings(self) -> RunSettings:
        """Of the run, as the coordinator says."""
        return self.ctx.settings

    @property
    def handled(self) -> Sequence[Event]:
        """The last event, and what followed from it."""
        return self.ctx.inbox

    @property
    def limits(self) -> TimeLimits:
        """Of the run's settings."""
        return self.ctx.limits

    # --- the contract of a pure core

    def handle(self, event: Event, now: float) -> list[Output]:
        """What is to be done because of the event, in order. After Exit only a bad end of the script is told."""
        site, ctx = self.ctx.site, self.ctx
        ctx.begin(event, now)
        ctx.ranks.seen(now, ctx.limits)
        if site.exit is not None:
            if isinstance(event, events.WorkersExited):
                workforce.exited(ctx, event)
            return ctx.take()
        try:
            for happened in ctx.inbox:  # it grows
                self._step(happened)
        except Exception:
            ctx.take()  # half of what was wanted: the node ends
            raise
        if site.exit is not None:
            for lane in site.lanes:
                exchanges.cancel(ctx, lane)
            sources.cancel_fetch(ctx)
            if site.workers.running:
                workforce.end(ctx)
            ctx.emit(site.exit)
        return ctx.take()

    def _step(self, event: Event) -> None:
        site, ctx = self.ctx.site, self.ctx
        if site.exit is not None:
            return
        try:
            if not isinstance(event, OfWorkers) or site.workers.is_current(event.generation):
                EVENTS[type(event)](ctx, event)
            if site.exit is None:
                _advance(ctx)
        except IllegalStep as error:
            workforce.blamed(ctx, f"a fault of this node: {error}")

    def next_deadline(self) -> float | None:
        """When a Tick is due; None: only another event changes anything."""
        site, limits = self.ctx.site, self.ctx.limits
        if site.exit is not None:
            return None
        deadlines = [
            *(site.beat_at, site.leave_deadline, site.retry_fetch_at, site.workers.restart_at),
            saving.deadline(self.ctx),
            self.ctx.ranks.next_deadline(limits) if site.workers.running else None,
        ]
        if site.away_since is not None:
            away_at = site.away_since + limits.lease_s
            deadlines += [away_at if self.ctx.now < away_at else None, site.away_since + limits.give_up_s]
        return min((t for t in deadlines if t is not None), default=None)

    @property
    def phase(self) -> str:
        """In words, for the status page and the log."""
        site = self.ctx.site
        workers, disk = site.workers, site.disk
        if site.exit is not None or disk.final:
            return "finished" if disk.final else "leaving"
        if not site.welcomed:
            return "connecting"
        if workers.restart_at is not None:
            return "waiting to restart workers"
        if workers.waits:
            return "waiting for hosts"
        if not workers.joined:
            return "starting workers" if workers.running else "leaving"
        if disk.outer is None:
            return "seeding" if site.seeding else "fetching state"
        if disk.runs(FetchState):
            return "catching up"
        if disk.applying is not None:
            return "applying"
        if (oldest := site.oldest_sealed) is not None:
            return oldest.phase
        if site.version is None:
            return "waiting for start"
        return "leaving" if site.leaving else "training"


# --- what happens, and who of the core's parts hears of it


def _seeded(ctx: Context, event: events.StateSeeded) -> None:
    """The starting state is on this disk."""
    if ctx.site.disk.end(SeedState) is not None:
        session.seeded(ctx)
        for lane in ctx.site.lanes:
            snapshots.free(lane)
        outer = Outer(commit=0, state_hash=event.state_hash, run_step=0, run_tokens=0)  # Open says more
        holding.hold(ctx, outer)


def _fetched(ctx: Context, event: events.StateFetched) -> None:
    catching_up.state_fetched(ctx, event)
    departing.finished_meanwhile(ctx)


def _applied(ctx: Context, event: events.CommitApplied) -> None:
    commits.applied(ctx, event)
    departing.finished_meanwhile(ctx)


def _rolled_back(ctx: Context, event: events.DiskRolledBack) -> None:
    is_news = rollback.done(ctx, event)
    if not departing.finished_meanwhile(ctx) and is_news and ctx.site.connected:
        session.hello(ctx)


def _ticked(ctx: Context, _: events.Tick) -> None:
    workforce.crash_if_overdue(ctx)
    if not departing.is_overdue(ctx):
        session.beat_if_due(ctx)
        sources.retry_if_due(ctx)
        workforce.restart_if_due(ctx)


def _received(ctx: Context, event: events.Received) -> None:
    """A refusal is heard whatever its run and term. A fragment that the run does not have ends the site: it could
    follow no commit any more."""
    message = event.message
    if not isinstance(message, m.Refused) and not session.is_of_this_term(ctx, event.term, message):
        return
    try:
        for fragment in _fragments(message):
            check_fragment(fragment, ctx.settings.sync.fragments)
    except InvalidMessage as error:
        endings.give_up(ctx, f"{type(message).__name__} of {error}", RefusedError.exit_code)
        return
    WORDS[type(message)](ctx, message)


def _fragments(message: m.CoordinatorMessage | None) -> list[int]:
    """That it names."""
    match message:
        case m.Open() | m.Plan():
            return [message.fragment]
        case m.Commit():
            return [message.fragment, *_fragments(message.next)]
        case m.Abandoned():
            return _fragments(message.next)
        case m.Sources():
            return [fragment for commit in message.commits for fragment in _fragments(commit)]
    return []


EVENTS: dict[type[Event], Handler] = {
    events.SessionOpened: session.opened,
    events.SessionLost: session.lost,
    events.Received: _received,
    events.Fulfilled: lambda ctx, event: ctx.send(event.message),
    events.PeersProbed: session.reach,
    events.RankSaid: workforce.heard,
    events.RankLost: workforce.heard,
    events.PiecesMerged: workforce.heard,
    events.LayoutSent: workforce.heard,
    SlicesArrived: workforce.heard,
    SnapshotShared: workforce.heard,
    HostsChanged: workforce.hosts_changed,
    HostErrors: errors.host_came,
    events.WorkersJoined: workforce.joined,
    events.BoundaryAsked: workforce.boundary_asked,
    events.SnapshotSealed: workforce.sealed,
    events.SnapshotArrived: workforce.arrived,
    events.Merged: workforce.merged,
    events.DataAnnounced: leases.announced,
    events.DrawAsked: leases.draw_asked,
    events.WorkersExited: workforce.exited,
    events.WorkersFailed: workforce.failed,
    events.WorkersLeft: workforce.left,
    events.StateSeeded: _seeded,
    events.StateFetched: _fetched,
    events.FetchFailed: sources.fetch_failed,
    events.SourcesWanted: sources.wanted,
    events.ContributionsKept: syncs.contributions_kept,
    events.ErrorsAdvanced: errors.advanced,
    events.CommitApplied: _applied,
    events.ApplyFailed: commits.apply_failed,
    events.Published: lambda ctx, event: ctx.site.disk.publish_ended(event.content),
    events.StateVerified: lambda ctx, _: ctx.site.disk.end(DistrustState),
    events.DiskRolledBack: _rolled_back,
    ProductsMade: exchanges.multiplied,
    ExchangeFinished: exchanges.finished,
    events.ExchangeBroken: exchanges.broken,
    events.ModelSaved: saving.written,
    events.ModelKept: saving.kept,
    events.LeaveAsked: departing.leave_asked,
    events.NodeFailed: lambda ctx, event: endings.give_up(ctx, event.text, event.exit_code),
    events.Tick: _ticked,
}
"""By the kind of the event, what becomes of it. Then `_advance` follows."""

WORDS: dict[type[m.CoordinatorMessage], Handler] = {
    m.Refused: session.refused,
    m.Welcome: session.welcome,
    m.Admitted: session.admitted,
    m.Evicted: session.evicted,
    m.SendManifest: session.manifest_asked,
    m.Peers: lambda ctx, message: ctx.emit(Fulfil(message)),
    m.DialBack: lambda ctx, message: ctx.emit(Fulfil(message)),
    m.Banned: lambda ctx, message: ctx.emit(Fulfil(message)),
    m.Drain: lambda ctx, message: ctx.emit(Fulfil(message)),
    m.Show: lambda ctx, message: ctx.emit(Fulfil(message)),
    m.AuditChunk: lambda ctx, message: ctx.emit(Fulfil(message)),
    m.Pulse: lambda ctx, _: None,
    m.Deposits: lambda ctx, _: None,  # the shell keeps them, and gives them back
    m.ReturnDeposits: lambda ctx, _: None,
    m.Open: syncs.opened,
    m.Plan: exchanges.planned,
    m.Weights: exchanges.weighed,
    m.Influences: exchanges.influenced,
    m.ListPayloads: exchanges.payloads_asked,
    m.Commit: commits.committed,
    m.Abandoned: syncs.abandoned,
    m.Sources: catching_up.answered,
    m.Disputed: holding.disputed,
    m.RebuildCommit: rollback.rebuild_asked,
    m.RolledBack: rollback.rolled_back,
    m.Finished: departing.finished,
    m.Leases: leases.granted,
}
"""By the kind of the coordinator's message, the same."""


def _advance(ctx: Context) -> None:
    """After every event: whatever has become possible."""
    site = ctx.site
    if session.away_too_long(ctx):
        return
    if (job := site.disk.next_job(publish_is_in_use=site.publish_is_in_use)) is not None:
        ctx.emit(job)
    if site.workers.ask is not None and site.workers.laid_out:
        workforce.answer(ctx)
    commits.apply_next(ctx)
    saving.advance(ctx)
    if site.exit is None:
        leases.advance(ctx)
        departing.advance(ctx)
