"""The site's state machine: one entry, `handle(event, now) -> outputs`; the shell executes outputs in order.

Outputs that take time end in an event. Messages are idempotent: after every new session the core says again where
the site stands (Applied, Ready, Done), and the coordinator answers with what is pending.
"""

from __future__ import annotations

from atoll.node.core import (
    catching_up,
    departing,
    endings,
    events,
    holding,
    leases,
    rollback,
    saving,
    session,
    snapshots,
    sources,
    syncs,
    workforce,
)
from atoll.node.core.context import Context, SiteIdentity
from atoll.node.core.disk import Disk, Outer
from atoll.node.core.events import (
    DialBack,
    DistrustState,
    Event,
    FetchState,
    ListPayloads,
    Output,
    ProbePeers,
    SeedState,
    SendManifest,
    ShowEvidence,
    StopWorkers,
)
from atoll.node.core.state import SiteState
from atoll.protocol import messages as m
from atoll.protocol.errors import RefusedError
from atoll.protocol.settings import RunSettings
from atoll.protocol.time_limits import TimeLimits, time_limits


class SiteCore:
    """One site. `held` is the outer state found on disk, if any; `branch` that of the commits there."""

    def __init__(
        self, identity: SiteIdentity, settings: RunSettings, held: Outer | None, now: float, *, branch: int = 0
    ) -> None:
        self.ctx = Context(
            identity=identity,
            settings=settings,
            limits=time_limits(settings.time_limits),
            site=SiteState(disk=Disk(outer=held, branch=branch), away_since=now),
            now=now,
        )

    @property
    def site(self) -> SiteState:
        """Everything that the core knows; to be read."""
        return self.ctx.site

    @property
    def settings(self) -> RunSettings:
        """Of the run, as the coordinator says."""
        return self.ctx.settings

    @property
    def limits(self) -> TimeLimits:
        """Of the run's settings."""
        return self.ctx.limits

    # --- the contract of a pure core

    def handle(self, event: Event, now: float) -> list[Output]:
        """What is to be done because of the event, in order. After Exit nothing is."""
        site, ctx = self.ctx.site, self.ctx
        if site.exit is not None:
            return []
        ctx.now = now
        self._dispatch(event)
        if site.exit is None:
            self._advance()
        if site.exit is not None:
            syncs.cancel_exchange(ctx)
            sources.cancel_fetch(ctx)
            if site.workers.running:
                ctx.emit(StopWorkers(site.workers.generation))
            ctx.emit(site.exit)
        return ctx.take()

    def next_deadline(self) -> float | None:
        """When a Tick is due; None: only another event changes anything."""
        site, limits = self.ctx.site, self.ctx.limits
        if site.exit is not None:
            return None
        deadlines = [site.leave_deadline, site.retry_fetch_at, site.workers.restart_at, saving.deadline(self.ctx)]
        if site.away_since is not None:
            away_at = site.away_since + limits.lease_s
            deadlines += [away_at if self.ctx.now < away_at else None, site.away_since + limits.give_up_s]
        return min((t for t in deadlines if t is not None), default=None)

    @property
    def phase(self) -> str:
        """In words, for the status page and the log."""
        site = self.ctx.site
        workers, disk, exchange = site.workers, site.disk, site.exchange
        if site.exit is not None or disk.final:
            return "finished" if disk.final else "leaving"
        if not site.welcomed:
            return "connecting"
        if workers.restart_at is not None:
            return "waiting to restart workers"
        if not workers.joined:
            return "starting workers" if workers.running else "leaving"
        if disk.outer is None:
            return "seeding" if site.seeding else "fetching state"
        if disk.runs(FetchState):
            return "catching up"
        if disk.applying is not None:
            return "applying"
        if site.snapshot.is_sealed:
            if exchange is None or exchange.broken:
                return "ready"
            return "exchanging" if exchange.finished is None else "waiting for commit"
        if workers.version is None:
            return "waiting for start"
        return "leaving" if site.leaving else "training"

    # --- events

    def _dispatch(self, event: Event) -> None:
        match event:
            case events.SessionOpened():
                session.opened(self.ctx)
            case events.SessionLost(reason):
                session.lost(self.ctx, reason)
            case events.Received(term, message):
                self._received(term, message)
            case events.WorkersJoined():
                workforce.joined(self.ctx, event)
            case events.BoundaryAsked():
                workforce.boundary_asked(self.ctx, event)
            case events.SnapshotSealed():
                workforce.sealed(self.ctx, event)
            case events.Merged():
                workforce.merged(self.ctx, event)
            case events.DataAnnounced():
                leases.announced(self.ctx, event)
            case events.DrawAsked():
                leases.draw_asked(self.ctx, event)
            case events.WorkersFailed():
                workforce.failed(self.ctx, event)
            case events.WorkersLeft():
                workforce.left(self.ctx, event)
            case events.StateSeeded(state_hash=state_hash):
                self._seeded(state_hash)
            case events.StateFetched():
                catching_up.state_fetched(self.ctx, event)
                departing.finished_meanwhile(self.ctx)
            case events.FetchFailed(reason):
                sources.fetch_failed(self.ctx, reason)
            case events.ExchangeFinished():
                syncs.exchange_finished(self.ctx, event)
            case events.ExchangeBroken():
                syncs.exchange_broken(self.ctx, event)
            case events.CommitApplied():
                syncs.commit_applied(self.ctx, event)
                departing.finished_meanwhile(self.ctx)
            case events.ApplyFailed():
                syncs.apply_failed(self.ctx, event)
            case events.Published(content):
                self.site.disk.publish_ended(content)
            case events.StateVerified():
                self.site.disk.end(DistrustState)
            case events.ModelSaved(commit=commit, trouble=trouble):
                saving.written(self.ctx, commit, trouble)
            case events.ModelKept(commit=commit):
                saving.kept(self.ctx, commit)
            case events.PayloadsListed(sync=sync, attempt=attempt, term=term, hashes=hashes):
                self.ctx.send(m.PayloadList(sync=sync, attempt=attempt, term=term, hashes=hashes))
            case events.PeersProbed(unreachable_site_ids):
                session.reach(self.ctx, unreachable_site_ids)
            case events.EvidenceShown(shown):
                self.ctx.send(shown)
            case events.CommitRebuilt():
                rollback.rebuilt(self.ctx, event)
            case events.DiskRolledBack():
                is_news = rollback.done(self.ctx, event)
                if not departing.finished_meanwhile(self.ctx) and is_news and self.site.connected:
                    session.hello(self.ctx)
            case events.LeaveAsked(reason):
                departing.leave_asked(self.ctx, reason)
            case events.DataPlaneFailed(text, exit_code):
                endings.give_up(self.ctx, text, exit_code)
            case events.Tick():
                self._tick()

    def _seeded(self, state_hash: bytes) -> None:
        """The starting state is on this disk."""
        if self.site.disk.end(SeedState) is not None:
            session.seeded(self.ctx)
            snapshots.free(self.ctx)
            holding.hold(self.ctx, Outer(commit=0, state_hash=state_hash, run_step=0, run_tokens=0))  # Open says more

    def _received(self, term: int, message: m.CoordinatorMessage) -> None:
        outer = self.site.disk.outer
        if isinstance(message, m.Refused):  # of whatever run and term: this site may not go on with that coordinator
            endings.exit(self.ctx, RefusedError.exit_code, f"refused by the coordinator: {message.text}")
            return
        if not session.is_of_this_term(self.ctx, term, message):
            return
        match message:
            case m.Welcome():
                session.welcome(self.ctx, message)
            case m.Admitted():
                session.admitted(self.ctx, message)
            case m.SendManifest():
                if self.ctx.manifest is not None:
                    self.ctx.emit(SendManifest(self.ctx.manifest))
            case m.Open():
                syncs.opened(self.ctx, message)
            case m.Plan():
                syncs.planned(self.ctx, message)
            case m.Weights():
                syncs.weighed(self.ctx, message)
            case m.Commit():
                syncs.committed(self.ctx, message)
            case m.Abandoned():
                syncs.abandoned(self.ctx, message)
            case m.Sources():
                catching_up.answered(self.ctx, message)
            case m.Evicted(reason=reason):
                session.evicted(self.ctx, reason)
            case m.ListPayloads(sync=sync, attempt=attempt, term=plan_term):
                exchange = syncs.current(self.ctx, sync, plan_term, attempt)
                if exchange is not None and exchange.finished is not None:
                    self.ctx.emit(ListPayloads(sync=sync, attempt=attempt, term=plan_term))
            case m.Disputed(commit=commit, is_over=is_over):
                if outer is not None and outer.commit == commit:
                    holding.disputed(self.ctx, is_over=is_over)
            case m.Show():
                self.ctx.emit(ShowEvidence(message))
            case m.RebuildCommit():
                rollback.rebuild_asked(self.ctx, message)
            case m.RolledBack():
                rollback.rolled_back(self.ctx, message)
            case m.Finished():
                departing.finished(self.ctx, message)
            case m.Leases():
                leases.granted(self.ctx, message)
            case m.Peers(members=members):
                self.ctx.emit(ProbePeers(members))
            case m.DialBack(member=member):
                self.ctx.emit(DialBack(member))
            case m.Pulse():
                pass

    # --- after every event: whatever has become possible

    def _tick(self) -> None:
        if not departing.is_overdue(self.ctx):
            sources.retry_if_due(self.ctx)
            workforce.restart_if_due(self.ctx)

    def _advance(self) -> None:
        ctx, site, workers = self.ctx, self.site, self.site.workers
        if session.away_too_long(ctx):
            return
        if (job := site.disk.next_job(publish_is_in_use=site.publish_is_in_use)) is not None:
            ctx.emit(job)
        if workers.ask is not None and workers.laid_out:
            workforce.answer(ctx)
        syncs.apply_next(ctx)
        saving.advance(ctx)
        if site.exit is None:
            leases.advance(ctx)
            departing.advance(ctx)
