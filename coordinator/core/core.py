"""The coordinator's core: `handle(events, now, wall_s) -> outputs`, `next_deadline()`; its shell executes outputs in
order."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Sequence
from dataclasses import asdict
from math import inf
from typing import Any

from atoll.coordinator.core import changing, logging_values
from atoll.coordinator.core import events as e
from atoll.coordinator.core.auditing import drawing_secret, judging
from atoll.coordinator.core.data import leases
from atoll.coordinator.core.log import evidence, going_back, rollback, sources, states
from atoll.coordinator.core.persisted import Persisted
from atoll.coordinator.core.run import Run
from atoll.coordinator.core.sites import admission, bans, forgetting, invites, liveness, manifests, resetting
from atoll.coordinator.core.sites.conduct import Cause
from atoll.coordinator.core.sites.membership import Site, Standing
from atoll.coordinator.core.suspend_clock import OwnTime
from atoll.coordinator.core.sync import driver, influence, outcomes, payload_lists, reach, standstill, unusable
from atoll.coordinator.core.sync.phases_said import bounded
from atoll.coordinator.core.sync.syncs import IllegalStep
from atoll.coordinator.core.view.data_ranges import range_views
from atoll.coordinator.core.view.document import CurveView, RangeView, RunView
from atoll.coordinator.core.view.run_view import curve_views, state_in_words, view_of
from atoll.protocol import PROTOCOL_VERSION
from atoll.protocol import messages as m
from atoll.protocol.messages import RefusedKind
from atoll.protocol.settings import RunSettings

OF_MEMBERS: dict[type[m.SiteMessage], Callable[[Run, Site, Any], None]] = {
    m.Applied: states.applied,
    m.FindSources: sources.find_sources,
    m.Ready: driver.ready,
    m.Done: driver.done,
    m.Products: influence.heard,
    m.ExchangeFailed: driver.exchange_failed,
    m.PayloadList: payload_lists.received,
    m.CommitRebuilt: going_back.rebuilt,
    m.Diverged: unusable.diverged,
    m.Shown: evidence.shown,
    m.ChunkAudited: judging.audited,
    m.LeaseRequest: leases.request,
    m.DepositsReturned: lambda run, site, message: None,  # nobody asked: a coordinator that is being restored does
}
"""What hears the messages of sites that are in the run."""


class Core:
    """One run, from one start of the coordinator on. Times are seconds of one monotonic clock, given by the caller;
    inside they are this process's own (suspend_clock.py). `wall_s`: seconds since 1970, for dates that people said."""

    def __init__(
        self, settings: RunSettings, persisted: Persisted, now: float, wall_s: float, secret: bytes = b""
    ) -> None:
        """`secret`: of this start, by which audits are drawn."""
        self.run = Run(settings, persisted, now, wall_s)
        if settings.sync.audits:
            drawing_secret.begin(self.run, persisted.one(e.DrawingRecord), secret)
        self._next_pulse_at = now + self.run.limits.heartbeat_s
        self._time = OwnTime(tolerance_s=self.run.limits.lease_s / 2)
        self._clock_ahead_s = wall_s - now
        self._pardoned_until = now
        self._state = ""
        self._roster = reach.Roster()
        self._due: float | None = now  # own time at which everything is looked at again
        self._limit_at = now  # and at which a site or a stream may be lost

    def handle(self, events: Sequence[e.Event], now: float, wall_s: float) -> list[e.Output]:
        """Events that have come together: what follows from them is decided once, so that a thousand sites that are
        ready at once do not cost a thousand looks at each of them. Outputs are to be executed in order."""
        run = self.run
        run.wall_s = wall_s
        expected = bool(run.members.streams) or bool(run.members.live())
        run.now, stopped_s = self._time.advance(now, self._next_pulse_at if expected else None)
        if stopped_s:
            self._due = run.now
            self._pardon(stopped_s)
        bans.clock_was_set_forward(run, wall_s - now - self._clock_ahead_s)
        self._clock_ahead_s = wall_s - now
        for event in events:
            self._dispatch(event)
        if self._due is not None and run.now >= self._due:
            self._settle()
        return run.take_outputs()

    def _settle(self) -> None:
        """Everything that has become possible."""
        run = self.run
        if run.now >= self._limit_at:
            self._expire()
        if run.now >= self._next_pulse_at:
            self._pulse()
        bans.expire(run)
        judging.advance(run)
        admission.advance(run)
        try:
            driver.advance(run)
        except IllegalStep as error:
            if (sync := run.sync_of(error.sync)) is None:
                raise
            outcomes.abandon(run, sync, f"a fault of the coordinator: {error}")  # contributions carry over
            driver.advance(run)
        forgetting.advance(run)
        self._roster.tell(run)
        state = state_in_words(run)
        if state != self._state:
            often = run.settings.sync.steps_at_nodes and {state, self._state} == {"syncing", "training"}
            run.report(logging.DEBUG if often else logging.INFO, f"run {run.run_id}: {state}")
            self._state = state
        self._limit_at = liveness.look(run, back_until=self._pardoned_until)
        self._due = self._next_due()

    def next_deadline(self) -> float | None:
        """When `Tick` is due at the latest; None if nothing is waited for."""
        return None if self._due is None else self._time.outer(self._due)

    def _next_due(self) -> float | None:
        """Own time at which something becomes possible or impossible by itself."""
        run = self.run
        expected = run.members.streams or run.members.live()
        times = [self._next_pulse_at if expected else None, self._limit_at, manifests.next_due(run), bans.next_due(run)]
        times.append(run.auditing.next_due())
        times += [wait.until for wait in run.waits]
        return min((t for t in times if t is not None and t < inf), default=None)

    def view(self, now: float) -> RunView:
        """For people; `now` says how old the last words of each site are."""
        return view_of(self.run, self._time.at(now))

    def data_ranges(self) -> tuple[RangeView, ...]:
        """The account of samples, range by range."""
        return range_views(self.run)

    def losses(self) -> tuple[tuple[int, int, int, float], ...]:
        """As in the view, of the run."""
        return tuple(self.run.log.losses.values())

    def phases(self) -> list[tuple[int, dict[str, tuple[float, ...]]]]:
        """Of the newest syncs, ascending: what each took, by the names of sites, in the order of `PHASES`."""
        names = {site.site_id: site.name for site in self.run.members.sites.values()}
        return [
            (sync, {names.get(site_id, str(site_id)): seconds for site_id, seconds in sorted(of_sites.items())})
            for sync, of_sites in self.run.phases_said.of_sites()
        ]

    def median_phases(self) -> dict[int, dict[str, float]]:
        """By sync: what each phase took at the median site."""
        return self.run.phases_said.medians()

    def curves(self) -> tuple[CurveView, ...]:
        """Of the sites, by step of the run."""
        return curve_views(self.run)

    def refusal(self, role: str, name: str, key_digest: bytes, wall_s: float) -> str:
        """Why somebody who is certified as that is not let in any more; empty if it is."""
        self.run.wall_s = wall_s
        return invites.refusal(self.run, role, name, key_digest)

    def missing_for_quorum(self) -> int:
        """Sites; nobody is missing once the run is over."""
        here = sum(site.standing is Standing.MEMBER and site.stream is not None for site in self.run.members.live())
        return 0 if self.run.finished is not None else max(0, self.run.settings.quorum - here)

    @property
    def last_commit(self) -> int:
        """The newest one; 0 before there is any."""
        return self.run.log.last

    @property
    def banned_names(self) -> tuple[str, ...]:
        """Of sites that others are to have nothing to do with."""
        return self.run.banned_names

    def here(self) -> list[str]:
        """Names of sites that are connected."""
        return [site.name for site in self.run.members.sites.values() if site.stream is not None and site.is_certified]

    @property
    def token_ids(self) -> list[str]:
        """Of viewers' tokens that were given out, and not taken back."""
        return [known.invite_id for known in self.run.invites.values() if known.is_token]

    def last_start(self, name: str) -> int:
        """Of the site of that name, from which a home that is new to it counts on; 0 if there is none."""
        site = self.run.members.sites.get(name)
        return site.incarnation if site is not None else 0

    # --- events

    def _dispatch(self, event: e.Event) -> None:
        run = self.run
        if isinstance(event, e.Received) and isinstance(event.message, m.Heartbeat):
            self._heartbeat(event.stream, event.header, event.message, event.ack)
            return
        if isinstance(event, e.Received) and isinstance(event.message, m.Telemetry):
            self._telemetry(event.stream, event.header, event.message, event.ack)
            return
        if isinstance(event, e.Received) and isinstance(event.message, m.Logged):
            self._logged(event.stream, event.header, event.message, event.ack)
            return
        self._due = run.now
        if isinstance(event, e.Asked):
            run.audit.asks(event)
        match event:
            case e.StreamOpened(stream, certified):
                run.members.opened(stream, run.now, certified)
            case e.StreamClosed(stream, reason):
                _, site = run.members.closed(stream, reason)
                if site is not None and site.live:
                    run.report(logging.INFO, f"lost the stream of {site.label}: {reason}")
            case e.Received(stream, header, message, ack):
                self._received(stream, header, message, ack)
            case e.Malformed(stream, text):
                if stream in run.members.streams:
                    run.num_malformed += 1
                    run.refuse(stream, RefusedKind.INVALID, f"malformed message: {text}")
            case e.Garbled(stream, text):
                if (state := run.members.streams.get(stream)) is not None:
                    run.num_malformed += 1
                    who = state.site.label if state.site else f"stream {stream}"
                    run.report(logging.WARNING, f"{who} sent {text}; its stream is ended")
                    run.close(stream, text)
            case e.StopAsked(reason, request=request):
                if not run.stop_reason and run.finished is None:
                    run.stop_reason = reason or "stopped"
                    run.persist(e.StopRecord(run.stop_reason))
                    run.report(logging.INFO, f"asked to stop ({run.stop_reason}): {outcomes.last_in_words(run)}")
                run.answer(request, "", state_in_words(run) if run.finished is not None else "")
            case e.PauseAsked(reason, request=request):
                run.answer(request, run.pause(reason))
            case e.ResumeAsked(request=request):
                run.answer(request, run.resume())
            case e.SetAsked(name=name, value=value, request=request):
                run.answer(request, *changing.ask(run, name, value))
            case e.DrainAsked(name=name, reason=reason, request=request):
                run.answer(request, bans.drain(run, name, reason))
            case e.RollbackAsked(reason, None, request=request):
                run.answer(request, *rollback.asked(run, reason))
            case e.RollbackAsked(reason, int(commit), skip_samples=skip, request=request):
                if problem := going_back.begin(run, commit, reason, request, skip_samples=skip):
                    run.answer(request, problem)
            case e.EvictAsked(name=name, reason=reason, request=request):
                run.answer(request, bans.evict(run, name, reason))
            case e.BanAsked():
                run.answer(event.request, *bans.ban(run, event))
            case e.LiftBanAsked(name=name, request=request):
                run.answer(request, bans.lift(run, name))
            case e.ResetAsked(reason=reason, request=request):
                run.answer(request, resetting.reset(run, reason))
            case e.InviteAsked():
                run.answer(event.request, invites.invite(run, event))
            case e.TakeBackAsked():
                run.answer(event.request, invites.take_back(run, event))
            case e.RenewAsked():
                run.answer(event.request, invites.renew(run, event))
            case e.RotateAsked():
                run.answer(event.request, "", invites.rotate(run, event))
            case e.JoinAsked():
                run.answer(event.request, *invites.use(run, event))
            case e.AuditAsked(after=after, request=request):
                run.answer(request, "", json.dumps([asdict(entry) for entry in run.audit.after(after)]))
            case e.NoteAsked(by=by, what=what, outcome=outcome, request=request):
                run.note(by, what, outcome)
                run.answer(request, "")
            case e.CommitsRead():
                rollback.commits_read(run, event)
            case e.ManifestRead():
                manifests.taken(run, event)
            case e.Recomputed():
                if run.dispute is not None:
                    run.dispute.take_sum(event)
            case e.Tick():
                pass

    def _received(self, number: int, header: m.Header, message: m.SiteMessage, ack: int) -> None:
        run = self.run
        if isinstance(message, m.Hello):
            if (stream := run.members.streams.get(number)) is not None:
                self._limit_at = run.now  # its stream has other limits now
                stream.acked(ack, run.now)
                admission.hello(run, number, header, message)
            return
        site = self._site_of(number, header, message, ack)
        if site is None:
            return
        before = _known_of(run, site)
        if isinstance(message, m.Offer):
            admission.offer(run, number, site, message)
        elif isinstance(message, m.ManifestPart):
            manifests.part(run, number, site, message)
        elif isinstance(message, m.Leave):
            self._leave(site, message)
        elif site.live:
            OF_MEMBERS[type(message)](run, site, message)
        elif run.finished is not None and isinstance(message, m.FindSources):
            run.send(site, run.finished_message())  # nobody waits for it
        if _known_of(run, site) != before or _looks_for_donors(site, message):
            site.got_on(run.now)

    def _site_of(self, number: int, header: m.Header, message: m.SiteMessage, ack: int) -> Site | None:
        """Who says it, and that it was heard; None if it does not count."""
        run = self.run
        stream = run.members.streams.get(number)
        if stream is None:
            return None  # superseded or refused; its last messages are void
        stream.acked(ack, run.now)
        site = stream.site
        if site is None:
            run.refuse(number, RefusedKind.INVALID, f"{type(message).__name__} before Hello")
            return None
        if wrong := self._wrong_in(header, site):
            run.refuse(number, RefusedKind.INVALID, f"{site.label} sent {wrong}")
            return None
        site.heard(run.now)
        return site

    def _wrong_in(self, header: m.Header, site: Site) -> str:
        """What is not as it must be; empty if all of it is."""
        run = self.run
        if header.protocol_version != PROTOCOL_VERSION:
            return f"protocol version {header.protocol_version}, expected {PROTOCOL_VERSION}"
        if header.run_id != run.run_id and (header.run_id or site.live):
            return f"run {header.run_id!r}, expected {run.run_id!r}"
        if header.incarnation != site.incarnation:
            return f"incarnation {header.incarnation}, expected {site.incarnation}"
        if header.site_id not in (0, site.site_id):
            return f"site id {header.site_id}, expected {site.site_id}"
        if header.term > run.term:
            return f"term {header.term}, expected {run.term}"
        return ""

    def _leave(self, site: Site, message: m.Leave) -> None:
        run, reason = self.run, message.reason or "left"
        run.report(logging.ERROR if message.fatal else logging.INFO, f"{site.label} leaves: {reason}")
        if message.fatal:
            run.failures.note(site.name, f"{site.label}: {reason}")
        run.remove(site, reason, evicted=False, after_done=True)
        if site.stream is not None:
            run.close(site.stream, "the site has left")

    def _heartbeat(self, number: int, header: m.Header, message: m.Heartbeat, ack: int) -> None:
        """Most of what arrives. It only moves limits of its own site away, as a rule: then nothing follows from it."""
        site = self._site_of(number, header, message, ack)
        if site is None:
            self._due = self.run.now
            return
        standstill.note_traffic(self.run, site, message)
        if message.progress != site.heartbeat.progress:
            site.got_on(self.run.now)
        if message.limit_s != site.heartbeat.limit_s:
            self._due = self._limit_at = self.run.now  # a limit that may be nearer
            liveness.note_limit(self.run, site, message)
        for phases in message.phases if site.live else ():
            self.run.phases_said.note(site.site_id, phases, self.run.last_sync)
            site.has_written(bounded(phases.snapshot_s))
        site.beats(message)

    def _telemetry(self, number: int, header: m.Header, message: m.Telemetry, ack: int) -> None:
        """For people: nothing follows from it, but that the site was heard."""
        site = self._site_of(number, header, message, ack)
        if site is None:
            self._due = self.run.now
            return
        if site.tells(message, self.run.now):
            times = "once" if message.num_crashes == 1 else f"{message.num_crashes} times"
            said = f"{site.label}: its workers crashed {times} since its node started"
            self.run.report(logging.WARNING, f"{said}, last: {site.telemetry.last_crash or 'its log says why'}")

    def _logged(self, number: int, header: m.Header, message: m.Logged, ack: int) -> None:
        """The same, of what its scripts log; of sites that are in the run."""
        site = self._site_of(number, header, message, ack)
        problem = logging_values.heard(self.run, site, message) if site is not None and site.live else ""
        if problem:
            self.run.refuse(number, RefusedKind.INVALID, f"malformed message: {problem}")
        if site is None or problem:
            self._due = self.run.now

    # --- time

    def _pardon(self, stopped_s: float) -> None:
        """This process stood still. What sites said meanwhile is not read yet, and some have given up their streams:
        each has a full lease from now on."""
        run = self.run
        run.report(logging.WARNING, f"this coordinator stood still for {stopped_s:.1f} s; every site gets a new lease")
        self._pardoned_until = run.now + run.limits.lease_s
        for stream in run.members.streams.values():
            stream.waiting_since = run.now
            if stream.unacked_since is not None:
                stream.unacked_since = run.now
            if stream.site is not None:
                stream.site.heard(run.now)
        for site in run.members.live():
            if site.away_until is not None:
                site.is_away(max(site.away_until, self._pardoned_until))

    def _expire(self) -> None:
        """Ends what has been waited for long enough."""
        run, idle_s = self.run, liveness.idle_limit_s(self.run)
        for number, stream in list(run.members.streams.items()):
            if run.now >= (limit := liveness.limit_of_stream(run, stream)).at:
                self._end(limit.missing, stream.site, number)
        for site in run.members.live():
            if (of_site := liveness.limit_of_site(run, site, idle_s)) is not None and run.now >= of_site.at:
                self._end(of_site.missing, site, None)

    def _end(self, missing: liveness.Missing, site: Site | None, stream: int | None) -> None:
        """What follows from a limit that has passed."""
        run, why = self.run, liveness.in_words(self.run, site, missing)
        if missing in liveness.HANGS and site is not None:
            run.evict(site, why, Cause.HANG)
        elif site is not None and site.live:
            run.lose(site, why)
        elif stream is not None:
            run.close(stream, why)
        if missing is liveness.Missing.ACKS and stream is not None:
            run.close(stream, "the site does not hear")

    def _pulse(self) -> None:
        """To all sites, one for all, which is encoded once."""
        run, pulse = self.run, m.Pulse()
        self._next_pulse_at = run.now + run.limits.heartbeat_s
        for number, stream in run.members.streams.items():
            if stream.site is not None:
                run.send_on(number, pulse)


def _known_of(run: Run, site: Site) -> tuple[object, ...]:
    """How far a site has come. A message that changes nothing of it is a sign of life, however often it is said."""
    found: list[object] = [site.standing, site.applied, run.last_sync]
    for sync in run.lanes.values():
        attempt = sync.attempt
        is_done = attempt is not None and site.site_id in attempt.done
        found += [site.site_id in sync.ready, attempt and attempt.plan.attempt, is_done]
    return tuple(found)


def _looks_for_donors(site: Site, message: m.SiteMessage) -> bool:
    """They may serve others, or be behind a link that is cut, for long. Nobody waits for a site that catches up."""
    return isinstance(message, m.FindSources) and site.live and (site.applied is None or site.catching_up)
