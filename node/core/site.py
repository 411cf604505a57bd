"""The site's state machine: one entry, `handle(event, now) -> outputs`; the shell executes outputs in order.

Outputs that take time end in an event. Messages are idempotent: after every new session the core says again where
the site stands (Applied, Ready, Done), and the coordinator answers with what is pending.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass

from atoll.node.core import answers, events
from atoll.node.core.events import (
    Answer,
    AnswerKind,
    AnswerWorkers,
    ApplyCommit,
    BeginExchange,
    CancelExchange,
    CancelFetch,
    DiscardState,
    DropSync,
    Event,
    Exit,
    FailureKind,
    FetchState,
    MergeMode,
    Output,
    PublishState,
    Report,
    SaveModel,
    SeedState,
    Send,
    SendLayout,
    StartWorkers,
    StopWorkers,
)
from atoll.node.core.state import Ask, Exchange, Outer, SiteState, Snapshot, SnapshotPhase, Workers
from atoll.protocol import messages as m
from atoll.protocol.errors import ConfigError, NonFiniteError, RefusedError, WorkerError
from atoll.protocol.layout import Manifest
from atoll.protocol.settings import RunSettings, settings_from_json
from atoll.protocol.time_limits import TimeLimits, time_limits

MAX_CRASHES_WITHOUT_STEP = 3
FETCH_RETRY_S = 0.5
MAX_FETCH_BACKOFF_S = 8.0


@dataclass(frozen=True, slots=True, kw_only=True)
class SiteIdentity:
    """What Hello and Offer say of this node."""

    name: str
    key: bytes
    address: str
    incarnation: int
    atoll_version: str
    from_saved_model: bool
    max_retained_bytes: int
    bandwidth_bytes_per_s: int


class SiteCore:
    """One site. `held` is the outer state found on disk, if any."""

    def __init__(self, identity: SiteIdentity, settings: RunSettings, held: Outer | None, now: float) -> None:
        self.identity = identity
        self.settings = settings
        self.limits: TimeLimits = time_limits(settings.time_limits)
        self.site = SiteState(outer=held, disconnected_at=now)
        self.manifest: Manifest | None = None
        self.data_fingerprint = b""
        self._settings_json = ""
        self._out: list[Output] = []
        self._now = now

    # --- the contract of a pure core

    def handle(self, event: Event, now: float) -> list[Output]:
        self._now = now
        self._out = []
        if not self.site.exited:
            self._dispatch(event)
            if not self.site.exited:
                self._advance()
        out, self._out = self._out, []
        return out

    def next_deadline(self) -> float | None:
        site = self.site
        times = [t for t in (site.leave_deadline, site.retry_fetch_at) if t is not None]
        if not site.connected and not site.exited:
            away_at = site.disconnected_at + self.limits.lease_s
            if self._now < away_at:
                times.append(away_at)
            times.append(site.disconnected_at + self.limits.give_up_s)
        return min(times, default=None)

    @property
    def phase(self) -> str:
        """In words, for the status page and the log."""
        site = self.site
        workers, snapshot, exchange = site.workers, site.snapshot, site.exchange
        if site.exited or site.final:
            return "finished"
        if not site.welcomed:
            return "connecting"
        if not workers.joined:
            return "starting workers"
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
                self._workers_joined(event)
            case events.BoundaryAsked():
                self._boundary_asked(event)
            case events.SnapshotSealed():
                self._sealed(event)
            case events.Merged():
                self._merged(event)
            case events.WorkersFailed():
                self._workers_failed(event)
            case events.WorkersLeft():
                self._workers_left(event)
            case events.StateSeeded(state_hash=state_hash):
                self.site.seeding = False
                self.site.snapshot = Snapshot()
                self._hold(Outer(commit=0, state_hash=state_hash, run_step=event.run_step, run_tokens=event.run_tokens))
            case events.StateFetched():
                self._state_fetched(event)
            case events.FetchFailed(reason):
                self._fetch_failed(reason)
            case events.ExchangeFinished():
                self._exchange_finished(event)
            case events.ExchangeBroken():
                self._exchange_broken(event)
            case events.CommitApplied():
                self._commit_applied(event)
            case events.ApplyFailed(commit, reason):
                self.site.applying = None
                self._report(logging.WARNING, f"commit {commit} cannot be applied from the log ({reason}); fetching it")
                self._find_sources()
            case events.Published(version=version, mode=mode):
                self.site.publishing = None
                self.site.published = (version, mode)
            case events.ModelSaved(commit=commit):
                if self.site.saving == commit:
                    self.site.saving = None
            case events.LeaveAsked(reason):
                self._leave_asked(reason)
            case events.DataPlaneFailed(text):
                self._give_up(text, NonFiniteError.exit_code)
            case events.Tick():
                self._tick()

    # --- session

    def _hello(self) -> None:
        site, identity = self.site, self.identity
        site.connected = True
        site.welcomed = False
        outer = site.outer
        self._send(
            m.Hello(
                name=identity.name,
                key=identity.key,
                address=identity.address,
                has_state=outer is not None,
                last_commit=outer.commit if outer else 0,
                state_hash=outer.state_hash if outer else b"",
                atoll_version=identity.atoll_version,
                from_saved_model=identity.from_saved_model,
            )
        )

    def _session_lost(self, reason: str) -> None:
        site = self.site
        if site.connected:
            self._report(logging.WARNING, f"lost the coordinator ({reason}); training goes on, reconnecting")
            site.disconnected_at = self._now
        site.connected = False
        site.welcomed = False
        site.looking_for_sources = False

    def _received(self, term: int, message: m.CoordinatorMessage) -> None:
        site = self.site
        if term < site.term:
            self._report(logging.WARNING, f"ignored {type(message).__name__} of term {term}: now in term {site.term}")
            return
        site.term = term
        match message:
            case m.Welcome():
                self._welcome(message)
            case m.Admitted():
                self._admitted(message)
            case m.Refused():
                self._exit(RefusedError.exit_code, f"refused by the coordinator: {message.text}")
            case m.Open():
                self._opened(message)
            case m.Plan():
                self._planned(message)
            case m.Commit():
                self._committed(message)
            case m.Abandoned():
                self._abandoned(message)
            case m.Sources():
                self._sources(message)
            case m.Evicted(reason=reason):
                self._evicted(reason)
            case m.Finished(commit=commit, reason=reason):
                self._finished(commit, reason)
            case m.Pulse():
                pass

    def _welcome(self, message: m.Welcome) -> None:
        site = self.site
        if self._settings_json and message.settings_json != self._settings_json:
            self._exit(RefusedError.exit_code, "the run's settings changed while this site was in it; start it again")
            return
        self._settings_json = message.settings_json
        self.settings = settings_from_json(message.settings_json)
        self.limits = time_limits(self.settings.time_limits)
        site.welcomed = True
        site.last_commit_of_run = message.last_commit
        if not site.workers.running:
            self._start_workers()
        elif self.manifest is not None:
            self._offer()

    def _offer(self) -> None:
        assert self.manifest is not None
        self._send(
            m.Offer(
                manifest=self.manifest,
                data_fingerprint=self.data_fingerprint,
                max_retained_bytes=self.identity.max_retained_bytes,
                bandwidth_bytes_per_s=self.identity.bandwidth_bytes_per_s,
            )
        )

    def _admitted(self, message: m.Admitted) -> None:
        site = self.site
        site.admitted = True
        site.site_id = message.site_id
        site.run_seed = message.run_seed
        if message.admitted_as is m.AdmittedAs.JOINER and site.outer is not None:
            self._output(DiscardState("the coordinator does not know the state on this disk"))
            site.outer = None
            self._discard_local()
        if message.admitted_as is m.AdmittedAs.SEEDER and site.outer is None:
            site.seeder = site.seeding = True
            self._cancel_fetch()
            if self.identity.from_saved_model:
                self._output(SeedState())
        self._layout_to_workers()
        if message.admitted_as is m.AdmittedAs.JOINER and site.outer is None:
            site.seeder = site.seeding = False
            self._find_sources()
        elif site.outer is not None and site.outer.commit < site.last_commit_of_run:
            self._find_sources()
        self._say_where_we_stand()

    def _say_where_we_stand(self) -> None:
        """Everything the coordinator may have missed; it drops what it knows."""
        site = self.site
        if site.outer is not None:
            self._send(m.Applied(commit=site.outer.commit, state_hash=site.outer.state_hash))
            self._ready()
        exchange = site.exchange
        if exchange is not None and exchange.payload_digest is not None:
            self._done(exchange)

    # --- workers

    def _start_workers(self) -> None:
        old = self.site.workers
        self.site.workers = Workers(
            generation=old.generation + 1, running=True, crashes_without_step=old.crashes_without_step
        )
        self._output(StartWorkers(self.site.workers.generation, self._settings_json))

    def _workers_joined(self, event: events.WorkersJoined) -> None:
        workers = self.site.workers
        if event.generation != workers.generation:
            return
        if self.manifest is not None and event.manifest.digest != self.manifest.digest:
            self._give_up("the restarted workers built another model than before", ConfigError.exit_code)
            return
        workers.joined = True
        first = self.manifest is None
        self.manifest = event.manifest
        self.data_fingerprint = event.data_fingerprint
        if not first and self.site.admitted:
            self._layout_to_workers()
        elif self.site.welcomed:
            self._offer()

    def _layout_to_workers(self) -> None:
        workers = self.site.workers
        if workers.joined and not workers.laid_out:
            workers.laid_out = True
            self._output(
                SendLayout(generation=workers.generation, site_id=self.site.site_id, run_seed=self.site.run_seed)
            )

    def _boundary_asked(self, event: events.BoundaryAsked) -> None:
        workers = self.site.workers
        if event.generation != workers.generation:
            return
        if event.step > 0:
            workers.crashes_without_step = 0
        workers.ask = Ask(event.generation, event.step, event.seq)

    def _sealed(self, event: events.SnapshotSealed) -> None:
        site, snapshot = self.site, self.site.snapshot
        if event.generation != site.workers.generation or snapshot.phase is not SnapshotPhase.WRITING:
            return
        snapshot.phase = SnapshotPhase.SEALED
        snapshot.tokens = event.tokens
        snapshot.num_steps = event.num_steps
        snapshot.mean_loss = event.mean_loss
        snapshot.train_s = event.train_s
        site.workers.overrun_left = self.settings.overrun_steps or self.settings.sync.every
        if site.outer is None:
            self._output(SeedState())
        else:
            self._ready()

    def _ready(self) -> None:
        site, snapshot = self.site, self.site.snapshot
        if snapshot.phase is not SnapshotPhase.SEALED or site.open is None or site.outer is None:
            return
        if snapshot.base_commit != site.outer.commit or site.open.base_commit != site.outer.commit:
            return
        self._send(
            m.Ready(
                sync=site.open.sync,
                tokens=snapshot.tokens,
                num_steps=snapshot.num_steps,
                mean_loss=snapshot.mean_loss,
                train_s=snapshot.train_s,
                wait_s=site.workers.wait_s,
            )
        )

    def _merged(self, event: events.Merged) -> None:
        site, workers = self.site, self.site.workers
        if event.generation != workers.generation or event.version != workers.offered_version:
            return
        if workers.contributed and workers.offered_mode is not MergeMode.SHIFT:
            workers.contributed = False
        if site.snapshot.phase is SnapshotPhase.CONSUMED:
            site.snapshot = Snapshot()
        workers.version = event.version
        workers.offered_version = None
        workers.discard_local = False
        workers.wait_s = event.wait_s
        if workers.offered_mode is MergeMode.SHIFT:
            self._publish(event.version, MergeMode.REPLACE)  # the next shift and evaluation need the values again

    def _workers_failed(self, event: events.WorkersFailed) -> None:
        site, workers = self.site, self.site.workers
        if event.generation != workers.generation:
            return
        if event.kind is FailureKind.FATAL:
            self._give_up(event.text, WorkerError.exit_code)
            return
        if site.final or (site.leaving and not answers.in_sync(site)):
            workers.running = False
            return
        workers.crashes_without_step += 1
        if workers.crashes_without_step >= MAX_CRASHES_WITHOUT_STEP:
            self._give_up(
                f"the workers crashed {MAX_CRASHES_WITHOUT_STEP} times without a step: {event.text}",
                WorkerError.exit_code,
            )
            return
        self._report(logging.ERROR, f"workers crashed, restarting them from the outer state: {event.text}")
        self._output(StopWorkers(workers.generation))
        if site.snapshot.phase in (SnapshotPhase.WRITING, SnapshotPhase.CONSUMED):
            site.snapshot = Snapshot()
        if site.seeding and site.outer is None:
            site.snapshot = Snapshot()
        self._start_workers()

    def _workers_left(self, event: events.WorkersLeft) -> None:
        site, workers = self.site, self.site.workers
        if event.generation != workers.generation:
            return
        workers.running = False
        workers.ask = None
        if not site.final and not site.leaving:
            site.leaving = event.reason
            self._report(logging.INFO, f"leaving the run: {event.reason}")
            site.leave_deadline = self._now + self.limits.leave_s

    # --- state

    def _hold(self, outer: Outer) -> None:
        self.site.outer = outer
        self._send(m.Applied(commit=outer.commit, state_hash=outer.state_hash))

    def _find_sources(self) -> None:
        site = self.site
        if site.fetching or site.looking_for_sources or not site.connected:
            return
        site.looking_for_sources = True
        site.retry_fetch_at = None
        outer = site.outer
        self._send(m.FindSources(has_state=outer is not None, after_commit=outer.commit if outer else 0))

    def _sources(self, message: m.Sources) -> None:
        site = self.site
        site.looking_for_sources = False
        if site.fetching or site.seeding:
            return
        if site.applying is not None:
            site.retry_fetch_at = self._now + FETCH_RETRY_S
            return
        newest = max([c.commit for c in message.commits] + [a.commit for a in message.attested], default=-1)
        if site.outer is not None and newest <= site.outer.commit:
            return
        if not message.donors or newest < 0:
            return  # the coordinator sends Sources again when there is one
        site.fetching = True
        self._output(FetchState(message))

    def _cancel_fetch(self) -> None:
        if self.site.fetching:
            self._output(CancelFetch())
        self.site.fetching = self.site.looking_for_sources = False
        self.site.retry_fetch_at = None

    def _state_fetched(self, event: events.StateFetched) -> None:
        site = self.site
        site.fetching = False
        site.fetch_failures = 0
        for commit in [c for c in site.commits if c <= event.commit]:
            del site.commits[commit]
        site.final = site.final or event.final
        self._give_up_exchange_before(event.commit)
        if site.snapshot.phase is SnapshotPhase.SEALED:
            site.snapshot = Snapshot()  # its base is not the latest commit any more; the ranks keep their progress
        self._hold(
            Outer(
                commit=event.commit,
                state_hash=event.state_hash,
                run_step=event.run_step,
                run_tokens=event.run_tokens,
            )
        )
        self._report(logging.INFO, f"outer state complete and verified at commit {event.commit}")

    def _fetch_failed(self, reason: str) -> None:
        site = self.site
        site.fetching = False
        site.fetch_failures += 1
        delay_s = min(FETCH_RETRY_S * 2.0**site.fetch_failures, MAX_FETCH_BACKOFF_S)
        site.retry_fetch_at = self._now + delay_s
        self._report(logging.WARNING, f"could not fetch the state ({reason}); again in {delay_s:g} s")

    # --- one sync

    def _opened(self, message: m.Open) -> None:
        site = self.site
        site.open = message
        outer = site.outer
        if outer is not None and message.base_commit == outer.commit:
            outer.run_step, outer.run_tokens = message.run_step, message.run_tokens
        elif outer is not None and site.applying is None and message.base_commit not in site.commits:
            self._find_sources()
        self._ready()

    def _planned(self, plan: m.Plan) -> None:
        site, exchange = self.site, self.site.exchange
        if exchange is not None and (exchange.plan.sync, exchange.plan.term, exchange.plan.attempt) >= (
            plan.sync,
            plan.term,
            plan.attempt,
        ):
            return
        me = (site.site_id, self.identity.incarnation)
        contributes = me in [(c.site_id, c.incarnation) for c in plan.contributors]
        receives = me in [(r.site_id, r.incarnation) for r in plan.receivers]
        if not contributes and not receives:
            return
        if site.outer is None or site.outer.commit != plan.base_commit:
            if not contributes:
                return  # a joiner that is not there yet fetches the commit later
            self._send_failure(plan, "plan", f"planned on commit {plan.base_commit}, which this site has not applied")
            return
        if contributes and site.snapshot.phase is not SnapshotPhase.SEALED:
            self._send_failure(plan, "plan", "planned as a contributor without a sealed snapshot")
            return
        self._cancel_exchange()
        site.exchange = Exchange(plan=plan, contributes=contributes)
        self._output(BeginExchange(plan, contributes))

    def _send_failure(self, plan: m.Plan, phase: str, text: str) -> None:
        self._report(logging.ERROR, f"sync {plan.sync}: {text}")
        self._send(
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

    def _current(self, sync: int, term: int, attempt: int) -> Exchange | None:
        exchange = self.site.exchange
        if exchange is None:
            return None
        plan = exchange.plan
        return exchange if (plan.sync, plan.term, plan.attempt) == (sync, term, attempt) else None

    def _exchange_finished(self, event: events.ExchangeFinished) -> None:
        exchange = self._current(event.sync, event.term, event.attempt)
        if exchange is None:
            return
        exchange.payload_digest = event.payload_digest
        exchange.sent_bytes = event.sent_bytes
        exchange.received_bytes = event.received_bytes
        self._done(exchange)

    def _done(self, exchange: Exchange) -> None:
        outer = self.site.outer
        assert outer is not None
        assert exchange.payload_digest is not None
        if not exchange.contributes:
            return
        plan = exchange.plan
        self._send(
            m.Done(
                sync=plan.sync,
                attempt=plan.attempt,
                term=plan.term,
                payload_digest=exchange.payload_digest,
                last_commit=outer.commit,
                state_hash=outer.state_hash,
                sent_bytes=exchange.sent_bytes,
                received_bytes=exchange.received_bytes,
            )
        )

    def _exchange_broken(self, event: events.ExchangeBroken) -> None:
        exchange = self._current(event.sync, event.term, event.attempt)
        if exchange is None:
            return
        exchange.broken = True
        self._report(
            logging.WARNING,
            f"sync {event.sync} attempt {event.attempt}: {event.phase} with site {event.peer_site_id}: {event.text}",
        )
        if exchange.contributes:
            direction = m.Direction.SENDING if event.sending else m.Direction.RECEIVING
            self._send(
                m.ExchangeFailed(
                    sync=event.sync,
                    attempt=event.attempt,
                    term=event.term,
                    peer_site_id=event.peer_site_id,
                    direction=direction,
                    phase=event.phase[:64],
                    text=event.text[:1024],
                )
            )

    def _cancel_exchange(self) -> None:
        exchange = self.site.exchange
        if exchange is not None and exchange.payload_digest is None and not exchange.broken:
            self._output(CancelExchange(exchange.plan.sync, exchange.plan.attempt))
        self.site.exchange = None

    def _give_up_exchange_before(self, commit: int) -> None:
        exchange = self.site.exchange
        if exchange is not None and exchange.plan.base_commit < commit:
            self._cancel_exchange()
            self._output(DropSync(exchange.plan.sync))

    def _committed(self, commit: m.Commit) -> None:
        site = self.site
        if site.outer is not None and commit.commit <= site.outer.commit:
            return
        site.commits[commit.commit] = commit
        if site.outer is not None and commit.commit > site.outer.commit + 1 and commit.commit - 1 not in site.commits:
            self._find_sources()

    def _apply_next(self) -> None:
        """The next commit, if it is here and its payloads are, or nobody is bringing them any more."""
        site = self.site
        if site.outer is None or site.applying is not None or site.fetching or site.looking_for_sources:
            return
        commit = site.commits.get(site.outer.commit + 1)
        if commit is None:
            return
        exchange = self._current(commit.sync, commit.term, commit.attempt)
        if exchange is not None and exchange.payload_digest is None and not exchange.broken:
            return
        if site.publishing is not None or (
            site.workers.offered_version is not None and site.workers.offered_mode is MergeMode.SHIFT
        ):
            return  # PUBLISH must hold the workers' version again before the outer state moves on
        site.applying = commit.commit
        self._output(ApplyCommit(commit))

    def _commit_applied(self, event: events.CommitApplied) -> None:
        site, snapshot, workers = self.site, self.site.snapshot, self.site.workers
        if site.applying != event.commit:
            return
        site.applying = None
        commit = site.commits.pop(event.commit)
        me = (site.site_id, self.identity.incarnation)
        if snapshot.phase is SnapshotPhase.SEALED:
            if me in [(c.site_id, c.incarnation) for c in commit.contributors]:
                same_generation = snapshot.generation == workers.generation and workers.version is not None
                snapshot.phase = SnapshotPhase.CONSUMED
                workers.contributed = same_generation
                if not same_generation:
                    site.snapshot = Snapshot()
            else:
                site.snapshot = Snapshot()
        self._cancel_exchange()
        self._output(DropSync(commit.sync))
        site.final = commit.final
        site.open = commit.next if commit.next is not None else site.open
        self._hold(
            Outer(
                commit=event.commit,
                state_hash=event.state_hash,
                run_step=commit.run_step,
                run_tokens=commit.run_tokens,
            )
        )
        if commit.final or (self.settings.save_every and commit.commit % self.settings.save_every == 0):
            self._save()

    def _save(self) -> None:
        outer = self.site.outer
        assert outer is not None
        self.site.saving = outer.commit
        self._output(SaveModel(commit=outer.commit, run_step=outer.run_step, run_tokens=outer.run_tokens))

    def _abandoned(self, message: m.Abandoned) -> None:
        self._report(logging.WARNING, f"sync {message.sync} was abandoned: {message.reason}")
        exchange = self.site.exchange
        if exchange is not None and exchange.plan.sync == message.sync:
            self._cancel_exchange()
            self._output(DropSync(message.sync))
        if message.next is not None:
            self._opened(message.next)

    def _publish(self, version: int, mode: MergeMode) -> None:
        if self.site.publishing is None:
            self.site.publishing = (version, mode)
            self.site.published = None
            self._output(PublishState(version=version, mode=mode))

    # --- eviction, leaving, the end

    def _discard_local(self) -> None:
        site = self.site
        self._cancel_exchange()
        site.snapshot = Snapshot()
        site.workers.contributed = False
        if site.workers.version is not None:
            site.workers.discard_local = True

    def _evicted(self, reason: str) -> None:
        self._report(logging.WARNING, f"evicted ({reason}); local progress is discarded, joining again")
        self._discard_local()
        self.site.open = None
        self.site.admitted = False
        self.site.looking_for_sources = False
        self._hello()

    def _finished(self, commit: int, reason: str) -> None:
        site = self.site
        if site.outer is not None and site.outer.commit == commit:
            if not site.final:
                site.final = True
                self._save()
            return
        if site.applying is None and commit not in site.commits:
            self._exit(0, f"the run is over at commit {commit}: {reason}")

    def _leave_asked(self, reason: str) -> None:
        site = self.site
        if site.leaving or site.final:
            return
        site.leaving = reason
        site.leave_deadline = self._now + self.limits.leave_s
        if site.workers.version is not None:
            self._report(
                logging.INFO, f"leaving after the sync under way, at most {self.limits.leave_s:g} s; again to leave now"
            )

    def _tick(self) -> None:
        site, now = self.site, self._now
        if site.leave_deadline is not None and now >= site.leave_deadline:
            self._depart(f"{site.leaving} (the sync did not end in time)", 0)
            return
        if site.retry_fetch_at is not None and now >= site.retry_fetch_at:
            site.retry_fetch_at = None
            self._find_sources()
        if not site.connected and now >= site.disconnected_at + self.limits.give_up_s:
            away_s = now - site.disconnected_at
            self._exit(RefusedError.exit_code, f"no coordinator for {away_s:.0f} s; the state is kept, start again")

    def _give_up(self, text: str, code: int) -> None:
        self._send(m.Leave(reason=text[:1024], fatal=True))
        self._exit(code, text)

    def _depart(self, reason: str, code: int) -> None:
        self._send(m.Leave(reason=reason[:1024]))
        self._exit(code, reason)

    def _exit(self, code: int, text: str) -> None:
        site = self.site
        self._cancel_exchange()
        self._cancel_fetch()
        if site.workers.running:
            self._output(StopWorkers(site.workers.generation))
        site.exited = True
        self._output(Exit(code, text))

    # --- after every event: whatever has become possible

    def _advance(self) -> None:
        site, workers = self.site, self.site.workers
        if workers.ask is not None and workers.laid_out:
            self._answer()
        self._apply_next()
        if site.final and not workers.running and site.saving is None and site.applying is None:
            self._depart("the run is complete", 0)
        elif site.leaving and not site.final and self._may_depart():
            self._depart(site.leaving, 0)

    def _may_depart(self) -> bool:
        site, workers = self.site, self.site.workers
        if answers.in_sync(site):
            return False
        return not workers.running or workers.version is None

    def _answer(self) -> None:
        site, workers = self.site, self.site.workers
        away = not site.connected and self._now >= site.disconnected_at + self.limits.lease_s
        decision = answers.decide(site, away=away)
        if isinstance(decision, answers.Hold):
            return
        if isinstance(decision, answers.Publish):
            self._publish(decision.version, decision.mode)
            return
        ask = workers.ask
        assert ask is not None
        workers.ask = None
        self._note_answer(decision, ask)
        self._output(AnswerWorkers(generation=ask.generation, step=ask.step, seq=ask.seq, answer=decision))

    def _note_answer(self, answer: Answer, ask: Ask) -> None:
        site, workers = self.site, self.site.workers
        if answer.kind is AnswerKind.SNAPSHOT:
            site.snapshot = Snapshot(
                phase=SnapshotPhase.WRITING,
                base_commit=site.outer.commit if site.outer else 0,
                step=ask.step,
                generation=ask.generation,
            )
        elif answer.kind is AnswerKind.APPLY:
            workers.offered_version = answer.version
            workers.offered_mode = answer.mode
            workers.target_step = answer.next_step
            if answer.mode is MergeMode.REPLACE:
                workers.base_step = ask.step
            elif answer.mode is MergeMode.MERGE:
                workers.base_step = site.snapshot.step
        elif answer.kind is AnswerKind.CONTINUE:
            if site.snapshot.phase is SnapshotPhase.SEALED:
                workers.overrun_left -= 1
            workers.target_step = answer.next_step

    def _output(self, output: Output) -> None:
        self._out.append(output)

    def _send(self, message: m.SiteMessage) -> None:
        if self.site.connected:
            self._output(Send(message))

    def _report(self, level: int, text: str) -> None:
        self._output(Report(level, text))
