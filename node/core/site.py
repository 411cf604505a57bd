"""The site's state machine: one entry, `handle(event, now) -> outputs`; the shell executes outputs in order.

Outputs that take time end in an event. Messages are idempotent: after every new session the core says again where
the site stands (Applied, Ready, Done), and the coordinator answers with what is pending.
"""

from __future__ import annotations

import logging

from atoll.node.core import (
    answers,
    catching_up,
    divergence,
    endings,
    events,
    leases,
    rollback,
    saving,
    syncs,
    workforce,
)
from atoll.node.core.context import Context, SiteIdentity
from atoll.node.core.events import (
    DialBack,
    DistrustState,
    Event,
    ListPayloads,
    Output,
    ProbePeers,
    SeedState,
    SendManifest,
    ShowEvidence,
)
from atoll.node.core.state import Outer, SiteState, Snapshot, SnapshotPhase
from atoll.protocol import messages as m
from atoll.protocol.errors import HostError, InvalidMessage, PeerError, RefusedError
from atoll.protocol.settings import RunSettings, read_settings
from atoll.protocol.time_limits import TimeLimits, time_limits

MAX_LOST_REASONS = 8
"""Said in one time away, each once: a stream that opens and ends again and again is a line, not a flood."""


class SiteCore:
    """One site. `held` is the outer state found on disk, if any; `branch` that of the commits there."""

    def __init__(
        self, identity: SiteIdentity, settings: RunSettings, held: Outer | None, now: float, *, branch: int = 0
    ) -> None:
        self.ctx = Context(
            identity=identity,
            settings=settings,
            limits=time_limits(settings.time_limits),
            site=SiteState(outer=held, away_since=now, branch=branch),
            now=now,
        )

    @property
    def site(self) -> SiteState:
        return self.ctx.site

    @property
    def settings(self) -> RunSettings:
        return self.ctx.settings

    @property
    def limits(self) -> TimeLimits:
        return self.ctx.limits

    # --- the contract of a pure core

    def handle(self, event: Event, now: float) -> list[Output]:
        self.ctx.now = now
        if not self.site.exited:
            self._dispatch(event)
            if not self.site.exited:
                self._advance()
        out, self.ctx.out = self.ctx.out, []
        return out

    def next_deadline(self) -> float | None:
        site = self.ctx.site
        deadlines = (site.leave_deadline, site.retry_fetch_at, site.workers.restart_at)
        times = [t for t in deadlines if t is not None]
        if site.saving is not None and site.saving.keep_at is not None and not site.saving.is_being_kept:
            times.append(site.saving.keep_at)
        if site.away_since is not None and not site.exited:
            away_at = site.away_since + self.ctx.limits.lease_s
            if self.ctx.now < away_at:
                times.append(away_at)
            times.append(site.away_since + self.ctx.limits.give_up_s)
        return min(times, default=None)

    @property
    def phase(self) -> str:
        """In words, for the status page and the log."""
        site = self.ctx.site
        workers, snapshot, exchange = site.workers, site.snapshot, site.exchange
        if site.exited or site.final:
            return "finished" if site.final else "leaving"
        if not site.welcomed:
            return "connecting"
        if workers.restart_at is not None:
            return "waiting to restart workers"
        if not workers.joined:
            return "starting workers" if workers.running else "leaving"
        if site.outer is None:
            return "seeding" if site.seeding else "fetching state"
        if site.fetching:
            return "catching up"
        if site.applying is not None:
            return "applying"
        if snapshot.phase is SnapshotPhase.SEALED:
            if exchange is None or exchange.broken:
                return "ready"
            return "exchanging" if exchange.payload_digest is None else "waiting for commit"
        if workers.version is None:
            return "waiting for start"
        return "leaving" if site.leaving else "training"

    # --- events

    def _dispatch(self, event: Event) -> None:
        match event:
            case events.SessionOpened():
                self._hello()
            case events.SessionLost(reason):
                self._session_lost(reason)
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
                self.site.seeding = self.site.seed_asked = False
                self.site.snapshot = Snapshot()
                catching_up.hold(
                    self.ctx,
                    Outer(commit=0, state_hash=state_hash, run_step=0, run_tokens=0),  # Open says the rest
                )
            case events.StateFetched():
                catching_up.state_fetched(self.ctx, event)
                self._finished_meanwhile()
            case events.FetchFailed(reason):
                catching_up.fetch_failed(self.ctx, reason)
            case events.ExchangeFinished():
                syncs.exchange_finished(self.ctx, event)
            case events.ExchangeBroken():
                syncs.exchange_broken(self.ctx, event)
            case events.CommitApplied():
                syncs.commit_applied(self.ctx, event)
                self._finished_meanwhile()
            case events.ApplyFailed():
                syncs.apply_failed(self.ctx, event)
            case events.Published(content):
                self.site.publishing = None
                self.site.published = content
            case events.ModelSaved(commit=commit, trouble=trouble):
                self.site.saved_elsewhere = trouble
                saving.written(self.ctx, commit)
            case events.ModelKept(commit=commit):
                saving.kept(self.ctx, commit)
            case events.PayloadsListed(sync=sync, attempt=attempt, term=term, hashes=hashes):
                self.ctx.send(m.PayloadList(sync=sync, attempt=attempt, term=term, hashes=hashes))
            case events.PeersProbed(unreachable_site_ids):
                self.site.unreachable_site_ids = unreachable_site_ids
                syncs.ready(self.ctx)  # again, if it was said before
            case events.EvidenceShown(shown):
                self.ctx.send(shown)
            case events.CommitRebuilt():
                rollback.rebuilt(self.ctx, event)
            case events.DiskRolledBack():
                is_news = rollback.done(self.ctx, event)
                if not self._finished_meanwhile() and is_news and self.site.connected:
                    self._hello()
            case events.LeaveAsked(reason):
                self._leave_asked(reason)
            case events.DataPlaneFailed(text, exit_code):
                endings.give_up(self.ctx, text, exit_code)
            case events.Tick():
                self._tick()

    # --- session

    def _hello(self) -> None:
        site, identity = self.site, self.ctx.identity
        site.connected = True
        self._not_welcomed()
        outer = site.outer
        self.ctx.send(
            m.Hello(
                name=identity.name,
                key=identity.key,
                address=identity.address,
                has_state=outer is not None,
                last_commit=outer.commit if outer else 0,
                state_hash=outer.state_hash if outer else b"",
                atoll_version=identity.atoll_version,
                from_saved_model=identity.from_saved_model,
                branch=site.branch,
                process_id=identity.process_id,
            )
        )

    def _session_lost(self, reason: str) -> None:
        site = self.ctx.site
        self._not_welcomed()
        if reason not in site.lost_because and len(site.lost_because) < MAX_LOST_REASONS:
            meanwhile = "reconnecting to leave" if site.leaving or site.final else "training goes on, reconnecting"
            if not site.workers.generation:
                meanwhile = "trying again"
            what = "lost the coordinator" if site.connected else "no coordinator"
            self.ctx.report(logging.WARNING, f"{what} ({reason}); {meanwhile}")
            site.lost_because.append(reason)
        site.connected = False
        site.looking_for_sources = False
        site.data.asked = site.data.short_of = None

    def _not_welcomed(self) -> None:
        """The time away counts from here, through every stream that opens and ends without a Welcome."""
        site = self.ctx.site
        site.welcomed = False
        if site.away_since is None:
            site.away_since = self.ctx.now

    def _received(self, term: int, message: m.CoordinatorMessage) -> None:
        site = self.ctx.site
        if isinstance(message, m.Refused):  # of whatever run and term: this site may not go on with that coordinator
            endings.exit(self.ctx, RefusedError.exit_code, f"refused by the coordinator: {message.text}")
            return
        if term < site.term:
            self.ctx.report(
                logging.WARNING, f"ignored {type(message).__name__} of term {term}: now in term {site.term}"
            )
            return
        site.term = term
        match message:
            case m.Welcome():
                self._welcome(message)
            case m.Admitted():
                self._admitted(message)
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
                catching_up.sources(self.ctx, message)
            case m.Evicted(reason=reason):
                self._evicted(reason)
            case m.ListPayloads(sync=sync, attempt=attempt, term=plan_term):
                exchange = syncs.current(self.ctx, sync, plan_term, attempt)
                if exchange is not None and exchange.payload_digest is not None:
                    self.ctx.emit(ListPayloads(sync=sync, attempt=attempt, term=plan_term))
            case m.Disputed(commit=commit, is_over=is_over):
                if site.outer is not None and site.outer.commit == commit:
                    self._disputed(is_over)
            case m.Show():
                self.ctx.emit(ShowEvidence(message))
            case m.RebuildCommit():
                rollback.rebuild_asked(self.ctx, message)
            case m.RolledBack():
                rollback.rolled_back(self.ctx, message)
            case m.Finished():
                self._finished(message)
            case m.Leases():
                leases.granted(self.ctx, message)
            case m.Peers(members=members):
                self.ctx.emit(ProbePeers(members))
            case m.DialBack(member=member):
                self.ctx.emit(DialBack(member))
            case m.Pulse():
                pass

    def _welcome(self, message: m.Welcome) -> None:
        site = self.ctx.site
        try:
            settings, unknown = read_settings(message.settings_json)
        except InvalidMessage as error:
            endings.exit(self.ctx, RefusedError.exit_code, str(error))
            return
        if self.ctx.settings_json and settings != self.ctx.settings:
            endings.exit(
                self.ctx, RefusedError.exit_code, "the run's settings changed while this site was in it; start it again"
            )
            return
        if unknown and message.settings_json != self.ctx.settings_json:
            keys = ", ".join(unknown)
            self.ctx.report(
                logging.INFO, f"the coordinator is newer; this node does not know, and does not need: {keys}"
            )
        self.ctx.settings = settings
        self.ctx.settings_json = message.settings_json
        self.ctx.limits = time_limits(self.ctx.settings.time_limits)
        site.welcomed = True
        site.away_since = None
        site.lost_because.clear()
        site.last_commit_of_run = message.last_commit
        if not site.workers.generation:
            workforce.start(self.ctx)
        elif self.ctx.manifest is not None:
            workforce.offer(self.ctx)

    def _admitted(self, message: m.Admitted) -> None:
        site = self.ctx.site
        site.admitted = True
        site.looking_for_sources = False  # what was asked before is not answered
        site.site_id = message.site_id
        site.run_seed = message.run_seed
        site.last_commit_of_run = max(site.last_commit_of_run, message.last_commit)
        if message.admitted_as is m.AdmittedAs.JOINER and site.outer is not None:
            catching_up.cancel_fetch(self.ctx)
            site.distrusting = "it is older than the coordinator's log"
            if message.state_hash:
                site.num_wrong_states += 1
                site.distrusting = (
                    f"the state of commit {site.outer.commit} here has hash {site.outer.state_hash.hex()[:12]}, the "
                    f"run's is {message.state_hash.hex()[:12]}"
                )
                self.ctx.report(logging.ERROR, f"{site.distrusting}; repairing it from the other sites")
                saving.void_after(self.ctx, -1)
            site.outer = None
            site.commits.clear()
            syncs.discard_local(self.ctx)
        if message.admitted_as is m.AdmittedAs.SEEDER and site.outer is None:
            site.seeder = site.seeding = True
            catching_up.cancel_fetch(self.ctx)
        workforce.send_layout(self.ctx)
        if site.seeding and site.outer is None and self.ctx.identity.from_saved_model and not site.seed_asked:
            site.seed_asked = True
            self.ctx.emit(SeedState())
        if message.admitted_as is m.AdmittedAs.JOINER and site.outer is None:
            site.seeder = site.seeding = False
            catching_up.find_sources(self.ctx)
        elif site.outer is not None and site.outer.commit < site.last_commit_of_run:
            catching_up.find_sources(self.ctx)
        self._say_where_we_stand()

    def _say_where_we_stand(self) -> None:
        """Everything the coordinator may have missed; it drops what it knows."""
        site = self.ctx.site
        if site.outer is not None:
            self.ctx.send(m.Applied(commit=site.outer.commit, state_hash=site.outer.state_hash))
            syncs.ready(self.ctx)
            divergence.say(self.ctx)
        exchange = site.exchange
        if exchange is not None and exchange.payload_digest is not None:
            syncs.done(self.ctx, exchange)
        if exchange is not None and exchange.failure is not None:
            self.ctx.send(exchange.failure)

    # --- eviction, leaving, the end

    def _disputed(self, is_over: bool) -> None:
        site = self.ctx.site
        assert site.outer is not None
        if not site.is_disputed or site.is_checked == is_over:
            how = "nobody can find out whose is right" if is_over else "whose is right is being found out"
            self.ctx.report(
                logging.WARNING,
                f"sites hold different states of commit {site.outer.commit}, of which this is one: {how}",
            )
        site.is_disputed, site.is_checked = True, not is_over

    def _evicted(self, reason: str) -> None:
        self.ctx.report(logging.WARNING, f"evicted ({reason}); local progress is discarded, joining again")
        leases.voided(self.ctx)
        syncs.discard_local(self.ctx)
        self.site.open = None
        self.site.admitted = False
        self.site.looking_for_sources = False
        self._hello()

    def _finished(self, message: m.Finished) -> None:
        site, commit = self.ctx.site, message.commit
        site.finished = message
        if site.rolling_back is not None:
            return  # void commits leave the disk first
        if site.outer is not None and site.outer.commit == commit:
            if message.state_hash not in (b"", site.outer.state_hash):
                saving.contradicted(self.ctx, message)
                return
            if not site.final:
                site.final = True
                site.outer.run_step, site.outer.run_tokens = message.run_step, message.run_tokens
                saving.save(self.ctx)
            return
        site.over = f"the run is over at commit {commit}: {message.reason}"
        next_is_here = site.outer is not None and site.outer.commit + 1 in site.commits
        if site.applying is None and not (next_is_here and commit in site.commits):
            endings.exit(self.ctx, 0, site.over)

    def _finished_meanwhile(self) -> bool:
        """The end of the run, heard while a commit was applied, a state fetched or the disk rolled back."""
        site = self.ctx.site
        if site.finished is None or site.applying is not None or site.rolling_back is not None:
            return False
        self._finished(site.finished)
        return True

    def _leave_asked(self, reason: str) -> None:
        site = self.ctx.site
        if site.leaving or site.final:
            return
        site.leaving = reason
        site.workers.restart_at = None
        site.leave_deadline = self.ctx.now + self.ctx.limits.leave_s
        if site.workers.version is not None:
            self.ctx.report(
                logging.INFO,
                f"leaving after the sync under way, at most {self.ctx.limits.leave_s:g} s; again to leave now",
            )

    def _tick(self) -> None:
        site, now = self.site, self.ctx.now
        if site.leave_deadline is not None and now >= site.leave_deadline:
            endings.depart(self.ctx, f"{site.leaving} (the sync did not end in time)", 0)
            return
        if site.retry_fetch_at is not None and now >= site.retry_fetch_at:
            site.retry_fetch_at = None
            catching_up.find_sources(self.ctx)
        workforce.restart_if_due(self.ctx)

    # --- after every event: whatever has become possible

    def _advance(self) -> None:
        site, workers = self.site, self.site.workers
        if site.away_since is not None and self.ctx.now >= site.away_since + self.ctx.limits.give_up_s:
            away_s = self.ctx.now - site.away_since
            text = f"no coordinator for {away_s:.0f} s; the state is kept, start again"
            endings.exit(self.ctx, PeerError.exit_code, text)
            return
        if site.distrusting and site.applying is None and site.publishing is None:
            self.ctx.emit(DistrustState(site.distrusting))
            site.distrusting = ""
            site.published = None
            catching_up.find_sources(self.ctx)
        rollback.begin_if_idle(self.ctx)
        if workers.ask is not None and workers.laid_out:
            workforce.answer(self.ctx)
        syncs.apply_next(self.ctx)
        saving.advance(self.ctx)
        if site.exited:
            return
        leases.advance(self.ctx)
        # Workers that were not admitted are told nothing: the run was over before they joined.
        busy = workers.running and workers.laid_out
        if site.final and not busy and site.saving is None and site.applying is None:
            if site.saved_elsewhere:
                endings.depart(self.ctx, f"the run is complete; {site.saved_elsewhere}", HostError.exit_code)
            else:
                endings.depart(self.ctx, "the run is complete", 0)
        elif site.leaving and not site.final and self._may_depart():
            endings.depart(self.ctx, site.leaving, 0)

    def _may_depart(self) -> bool:
        site, workers = self.site, self.site.workers
        if answers.in_sync(site):
            return False
        return not workers.running or workers.version is None
