"""What all parts of the core share: the run's state, its outputs, and how a site is sent to, refused or lost."""

from __future__ import annotations

import json
import logging
from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from atoll.coordinator.core import events as e
from atoll.coordinator.core.audit import COORDINATOR, DONE, Audit, words_of
from atoll.coordinator.core.auditing.audits import Audits
from atoll.coordinator.core.best_so_far import BestSoFar
from atoll.coordinator.core.changes import Changes
from atoll.coordinator.core.curves import Curves
from atoll.coordinator.core.data.ledger import Ledger
from atoll.coordinator.core.log.commits import CommitLog
from atoll.coordinator.core.log.disputes import Dispute
from atoll.coordinator.core.log.rebuilding import GoingBack
from atoll.coordinator.core.persisted import Persisted
from atoll.coordinator.core.run_outputs import RunOutputs
from atoll.coordinator.core.sites.conduct import Cause
from atoll.coordinator.core.sites.failures import Failures
from atoll.coordinator.core.sites.known_invites import KnownInvites
from atoll.coordinator.core.sites.membership import Membership, Site, Standing
from atoll.coordinator.core.sites.offers import Offers
from atoll.coordinator.core.sync.attempts import Attempt
from atoll.coordinator.core.sync.chunk_sizes import ChunkSizes
from atoll.coordinator.core.sync.decision import Wait
from atoll.coordinator.core.sync.exclusions import Kind, LeftOut
from atoll.coordinator.core.sync.link_health import Trouble
from atoll.coordinator.core.sync.links import PATIENCE, Links
from atoll.coordinator.core.sync.norms import Norms
from atoll.coordinator.core.sync.pace import Pace
from atoll.coordinator.core.sync.phases_said import PhasesSaid
from atoll.coordinator.core.sync.resting import Resting
from atoll.coordinator.core.sync.same_samples import SameSamples
from atoll.coordinator.core.sync.stragglers import Stragglers
from atoll.coordinator.core.sync.syncs import Sync
from atoll.protocol import messages as m
from atoll.protocol.log_length import LogLength
from atoll.protocol.ranges import union
from atoll.protocol.sample_order import GLOBAL_LINE
from atoll.protocol.settings import RunSettings
from atoll.protocol.time_limits import time_limits

Refusal = tuple[m.RefusedKind, str]
"""Why a site does not come in: what, both values, what to do."""


class Run(RunOutputs):
    """Mutable state of one run and one start of the coordinator.

    Raises StateError if what was kept does not fit together.
    """

    def __init__(self, settings: RunSettings, persisted: Persisted, now: float, wall_s: float) -> None:
        super().__init__()
        self.settings = settings
        self.limits = time_limits(settings.time_limits)
        self.run_id = persisted.run.run_id
        self.settings_json = persisted.run.settings_json
        self.parent_json = persisted.run.parent_json
        self.term = persisted.term
        parent: dict[str, Any] = json.loads(self.parent_json) if self.parent_json else {}
        self.log = CommitLog(persisted, settings.sync, parent.get("run_step", 0), parent.get("run_tokens", 0))
        sites = persisted.all(e.SiteRecord)
        self.members = Membership(sites, persisted.last_site_id, now, self.limits.lease_s)
        self.now, self.wall_s = now, wall_s  # the second: since 1970, by this machine's clock
        self.manifest: e.ManifestRecord | None = None
        self.chunk_sizes = ChunkSizes()
        self.state_bytes = 0  # of the model's values at each site
        if (manifest := persisted.one(e.ManifestRecord)) is not None:
            length = LogLength(manifest.manifest, settings.sync)
            self.set_manifest(manifest, ChunkSizes.of(manifest.manifest, settings.sync), length)
        self.offers = Offers()
        self.ledger = Ledger(persisted.all(e.LineRecord), persisted.all(e.DoneRecord), persisted.all(e.LeaseRecord))
        for record in sites:
            if (site := self.members.sites[record.name]).live:
                site.counts_from(self.log.contributed_at_step(site.site_id, site.incarnation))
        self.claim: bytes | None = None  # state hash of commit 0 until it is attested
        self.last_sync = persisted.last_sync
        self.lanes: dict[int, Sync] = {}  # by fragment: its open sync. None before training, and after the end
        self.finished: e.FinishedRecord | None = persisted.one(e.FinishedRecord)
        for opened in persisted.all(e.OpenRecord) if self.finished is None else ():
            self.lanes[opened.open.fragment] = self._resumed(opened, persisted)
        abandoned, stop = persisted.one(e.AbandonRecord), persisted.one(e.StopRecord)
        self.num_abandoned = abandoned.num_abandoned if abandoned is not None else 0
        self.num_abandoned_in_a_row = 0
        self.stop_reason = stop.reason if stop is not None else ""
        paused = persisted.one(e.PausedRecord)
        self.pause_reason = paused.reason if paused is not None else ""
        self.changes = Changes(settings, persisted.one(e.ChangedRecord), self.log.changed_json)
        self.best = BestSoFar(settings, self.log.best)
        bans = persisted.all(e.BanRecord)
        self.banned = {r.name: r for r in bans if not r.is_over}
        self.bans_due = {r.name: now + r.until_s - wall_s for r in self.banned.values()}  # own time, by a right clock
        self.bans_over = {r.name: (r, now) for r in bans if r.is_over}  # and own time since when
        for name, banned in self.banned.items():
            if (unwanted := self.members.sites.get(name)) is not None:
                unwanted.is_gone(f"banned: {banned.reason}")
        self.audit = Audit(persisted.all(e.AuditRecord))
        self.misused_invites: set[str] = set()
        self.invites = KnownInvites(persisted.all(e.InviteRecord))
        self.void_starts = {start for reset in persisted.all(e.ResetRecord) for start in reset.void_starts}
        self.last_state = b""  # hash of the last commit, when all who are to report it have
        self.trouble = Trouble(settings.sync.fragments)
        self.links = Links(PATIENCE if settings.sync.error_feedback_down else 1)
        self.resting = Resting()
        self.pace = Pace(settings.sync.most_in_flight)
        self.rollbacks = list(persisted.all(e.RollbackRecord))
        self.left_out = LeftOut(persisted.all(e.ExclusionRecord), self.log.records, settings.sync.all_fragments)
        self._leave_out_again(persisted.all(e.ExclusionRecord))
        self.stragglers = Stragglers(is_late_void=settings.sync.steps_at_nodes)
        self.norms = Norms(settings.sync.fragments)
        self.same_samples = SameSamples()
        self.curves = Curves(persisted.all(e.CurveRecord), now)
        self.phases_said = PhasesSaid()
        self.auditing = Audits(persisted.all(e.OpenAuditsRecord))
        self.going_back: GoingBack | None = None
        self.reads_commits = False  # older ones than the log has are being read from the store
        self.waits: tuple[Wait, ...] = ()  # what is waited for; the first one with a reason is shown
        self.diverged: dict[int, tuple[int, int]] = {}  # by site: branch and commit since which its loss is not finite
        self.judged_divergence = (0, 0)  # branch and commit: the run went back to before it by itself, or did not
        self.dispute: Dispute | None = None
        self.num_wrong_states = self.num_attempts = 0
        self.num_not_finite = 0  # losses that stopped being numbers
        self.num_refused = self.num_malformed = 0
        self.evictions: Counter[Cause] = Counter()
        self.failures = Failures()

    def _resumed(self, opened: e.OpenRecord, persisted: Persisted) -> Sync:
        """A sync that was open when the coordinator ended."""
        number, here = opened.open.sync, self.members.live()
        plans = [r for r in persisted.all(e.PlanRecord) if r.plan.sync == number]
        said: list[e.OfPlan] = [r for r in persisted.all(e.WeightsRecord) if r.sync == number]
        said += [r for r in persisted.all(e.InfluencesRecord) if r.sync == number]
        sync = Sync(opened, self.now, plans=plans, said=said, live={s.start for s in here if s.voided_sync < number})
        for site_id in sync.expected - {s.site_id for s in here}:  # it has left since, and may be forgotten
            sync.unexpect(site_id)
        return sync

    def _leave_out_again(self, excluded: Iterable[e.ExclusionRecord]) -> None:
        """Of the syncs that are open, whoever was left out of one before this start of the coordinator."""
        for record in excluded:
            site, sync = self.members.by_id(record.site_id), self.sync_of(record.sync)
            if sync is not None and site is not None and site.live and site.incarnation == record.incarnation:
                sync.exclude(site.start, Kind.ABSURD, record.reason, self.now)

    @property
    def attempts(self) -> list[Attempt]:
        """Those under way of the open syncs."""
        return [sync.attempt for sync in self.lanes.values() if sync.attempt is not None]

    def sync_of(self, number: int) -> Sync | None:
        """The open sync of that number; None if there is none."""
        return next((sync for sync in self.lanes.values() if sync.open.sync == number), None)

    def attempt_of(self, site: Site, message: m.Done | m.PayloadList | m.ExchangeFailed | m.Products) -> Attempt | None:
        """The attempt under way, if the message is of it and its site contributes."""
        sync = self.sync_of(message.sync)
        current = sync.attempt if sync is not None else None
        if current is None or not current.has(site.start):
            return None
        return current if (current.plan.attempt, current.plan.term) == (message.attempt, message.term) else None

    @property
    def started(self) -> bool:
        """A sync was ever opened."""
        return bool(self.lanes) or self.finished is not None

    @property
    def unreachable(self) -> str:
        """Why the newest commit cannot be reached, and who may still have it; empty if it can."""
        return next((w.reason for w in self.waits if w.is_unreachable), "")

    @property
    def disputed(self) -> str:
        """Who holds different states of one commit, while nobody knows who is right; empty if nobody does."""
        return self.dispute.words if self.dispute is not None else ""

    @property
    def branch(self) -> int:
        """In which commits are numbered now."""
        return self.rollbacks[-1].branch if self.rollbacks else 0

    def finished_message(self) -> m.Finished:
        """Of a run that is over."""
        assert self.finished is not None
        return m.Finished(
            commit=self.finished.commit,
            reason=self.finished.reason,
            run_step=self.log.run_step,
            run_tokens=self.log.run_tokens,
            state_hash=self.last_state,
        )

    def forget_model(self) -> None:
        """The model is taken back, before training."""
        self.manifest, self.chunk_sizes, self.state_bytes = None, ChunkSizes(), 0

    def has_used(self, sync: int) -> None:
        """The highest number of a sync that may have been used."""
        self.last_sync = sync

    def note_abandoned(self, sync: int, reason: str) -> None:
        """The sync ends without a commit."""
        self.num_abandoned += 1
        self.persist(e.AbandonRecord(sync, reason, self.num_abandoned))

    def note_divergence(self, site: Site, commit: int) -> None:
        """The site's loss is not finite since that commit, and was before."""
        self.num_not_finite += 1
        self.diverged[site.site_id] = self.branch, commit

    def judge_divergence(self, commit: int) -> None:
        """The run goes back to before that commit by itself, or does not for good."""
        self.judged_divergence = self.branch, commit

    def pause(self, reason: str) -> str:
        """Why that cannot be done; empty if it is."""
        if self.finished is not None or self.stop_reason:
            return "the run is over" if self.finished is not None else "the run is to stop, and takes its last sync"
        self.pause_reason = reason or "paused"
        self.persist(e.PausedRecord(self.pause_reason))
        self.report(logging.WARNING, f"the run is paused: {self.pause_reason}")
        return ""

    def resume(self) -> str:
        """Why that cannot be done; empty if it is."""
        if not self.pause_reason:
            return "no person has paused the run"
        self.pause_reason = ""
        self.persist(e.ResumedRecord())
        self.report(logging.INFO, "the run is resumed")
        return ""

    def ban(self, record: e.BanRecord, cause: Cause = Cause.CONTRADICTION) -> None:
        """Neither name nor key comes in any more, other sites of the key go, no attempt has what they contributed."""
        for site in self.sites_of(record):
            for attempt in (a for a in self.attempts if site.site_id in a.ids()):
                attempt.spoil(f"{site.label} is banned")
            if site.live and site.name != record.name:
                self.evict(site, f"{record.name}, whose key it has, is banned", cause, is_strike=False)
        self.bans_over.pop(record.name, None)
        self.banned[record.name] = record
        self.bans_due[record.name] = self.now + record.until_s - self.wall_s
        self.persist(record)
        self.tell_banned()

    def sites_of(self, record: e.BanRecord) -> list[Site]:
        """Those of its name, or of its key where it has one."""
        key = record.key_digest
        return [s for s in self.members.sites.values() if s.name == record.name or (key and s.key_digest == key)]

    def lift_ban(self, name: str) -> None:
        """A site that was banned may come in again."""
        del self.banned[name], self.bans_due[name]
        self.persist(e.BanLiftedRecord(name))
        self.tell_banned()

    def end_ban(self, name: str) -> None:
        """Its time is over, if the clock is right."""
        record = replace(self.banned.pop(name), is_over=True)
        del self.bans_due[name]
        self.bans_over[name] = record, self.now
        self.persist(record)
        self.tell_banned()

    def forget_ban(self, name: str) -> None:
        """Its time has been over for long."""
        del self.bans_over[name]
        self.persist(e.BanLiftedRecord(name))

    def tell_banned(self, *sites: Site) -> None:
        """Sites that have come, also where nobody is banned: a ban may have been lifted while they were away. All that
        are here, if none is named."""
        word = m.Banned(names=self.banned_names)
        self.send_all((site for site in sites or self.members.sites.values() if site.is_certified), word)

    @property
    def banned_names(self) -> tuple[str, ...]:
        """Of sites that others are to have nothing to do with."""
        return self.members.shut_out(self.banned.values(), self.invites.values())[: m.MAX_BANNED]

    def keep_invite(self, record: e.InviteRecord) -> None:
        """As it is from now on."""
        self.invites[record.invite_id] = record
        self.persist(record)

    def is_first_misuse(self, invite_id: str) -> bool:
        """Of a used invite by another key, since this start: whoever has it may show it again and again."""
        is_first = invite_id not in self.misused_invites
        self.misused_invites.add(invite_id)
        return is_first

    def forget_invite(self, invite_id: str) -> None:
        """Nobody is known by it, and nobody can use it any more."""
        del self.invites[invite_id]
        self.persist(e.InviteForgottenRecord(invite_id))

    def set_manifest(self, record: e.ManifestRecord, chunk_sizes: ChunkSizes, length: LogLength) -> None:
        """The run's model, from now on."""
        self.log.keep(length)
        self.manifest, self.chunk_sizes = record, chunk_sizes
        self.state_bytes = record.manifest.buffer_bytes
        # Each goes through all tensors, once: in a thread for a new model, at the start for one from the store.
        _ = record.manifest.digest, record.manifest.num_trainable

    # --- outputs

    def persist_site(self, site: Site) -> None:
        """What the site is now, if it was ever admitted."""
        if site.site_id:
            self.persist(site.record())

    def persist_ledger(self) -> None:
        """What has changed in the account of samples."""
        if records := self.ledger.changes():
            self.persist(*records)

    def answer(self, request: int, problem: str, found: str = "") -> None:
        """To the person who asked, if one did; it is in the audit log before it is said."""
        if (asked := self.audit.answered(request)) is not None:
            self.note(asked.by, words_of(asked), f"refused: {problem}" if problem else found or DONE)
        if request:
            self.put_out(e.Answer(request, problem, found))

    def note(self, by: str, what: str, outcome: str) -> None:
        """In the audit log."""
        entry = self.audit.add(self.wall_s, by, what, outcome)
        self.persist(entry)
        self.report(logging.INFO, f"audit {entry.number} ({entry.digest}): {by}: {what}: {entry.outcome}")

    def report_sync(self, text: str, *, is_seldom: bool = False) -> None:
        """What an ordinary sync comes to. Where sites exchange at every step a person is told one line a second; a line
        that comes once in a run (`is_seldom`) is always told."""
        often = self.settings.sync.steps_at_nodes and not is_seldom and self.is_often(self.now)
        self.report(logging.DEBUG if often else logging.INFO, text)

    def send_on(self, stream: int, message: m.CoordinatorMessage) -> None:
        """Nothing if the stream has ended."""
        state = self.members.streams.get(stream)
        if state is not None:
            state.sent(self.now)
            if isinstance(message, m.RolledBack):
                state.went_back_to(message.commit)
            self.put_out(e.Send(stream, message))

    def send(self, site: Site, message: m.CoordinatorMessage) -> None:
        """Nothing if the site has no stream; it hears what it missed when it comes back."""
        if site.stream is not None:
            self.send_on(site.stream, message)

    def send_all(self, sites: Iterable[Site], message: m.CoordinatorMessage) -> None:
        """To each of them that has a stream."""
        for site in sites:
            self.send(site, message)

    def close(self, stream: int, reason: str) -> None:
        """The stream's site, if any, no longer has one."""
        state, _ = self.members.closed(stream, reason)
        if state is not None:
            self.put_out(e.CloseStream(stream, reason))

    def refuse(self, stream: int | None, kind: m.RefusedKind, text: str) -> None:
        """The stream's site is told why, for good, and the stream ends. Nothing if the site has none."""
        if stream is None:
            return
        self.num_refused += 1
        state = self.members.streams.get(stream)
        who = state.site.label if state and state.site else f"stream {stream}"
        self.report(logging.WARNING, f"refused {who}: {text}")
        self.send_on(stream, m.Refused(kind=kind, text=text[:4096]))
        self.close(stream, f"refused: {text}")

    # --- data leases

    def line_of(self, site_id: int) -> int:
        """The line of positions that the site draws from."""
        return site_id if self.settings.data == "local" else GLOBAL_LINE

    # --- membership

    def remove(self, site: Site, reason: str, *, evicted: bool, after_done: bool = False) -> None:
        """The site is no longer in the run: what it contributed to the syncs under way is void.

        `after_done`: it left by itself; if it was done, the attempt goes on without waiting for it.
        """
        was_live = site.live
        asked = self.dispute.asked if self.dispute is not None else None
        if was_live and asked is not None and asked.site_id == site.site_id:
            why = f"{reason}, while it was asked for {asked.need.in_words()}"
            self.report(logging.WARNING, f"{site.label}: {self.strike(site, why, is_absence=evicted)}")
        site.goes(reason, evicted=evicted, newest=self.log.last)
        self.stragglers.forget(site.site_id)
        self.links.forget(site.site_id)
        self.resting.forget(site.site_id)
        self.diverged.pop(site.site_id, None)
        if was_live:
            if planned := [sync.open.sync for sync in self.lanes.values() if sync.has_planned(site.start)]:
                site.voids(max(planned))
            self.persist(site.record())
            keep = union(*(attempt.ranges_of(site.site_id) for attempt in self.attempts if attempt.has(site.start)))
            self.ledger.give_back(self.line_of(site.site_id), site.start, keep)
            self.persist_ledger()
            for sync in self.lanes.values():
                sync.drop(site.start, f"{site.label}: {reason}", self.now, after_done=after_done)

    def send_away(self, site: Site, reason: str) -> None:
        """A person wants that: nothing is held against the site."""
        self.evictions[Cause.OPERATOR] += site.live
        self.remove(site, reason, evicted=False)
        self.persist_site(site)

    def lose(self, site: Site, reason: str) -> None:
        """It is evicted because it is not here. Nothing is held against it if it has contributed since it came, or
        fetches its first state, for which nobody waits. Its absence alone never bans it."""
        is_strike = site.standing is Standing.MEMBER and not site.conduct.has_contributed and self.started
        if is_strike:
            reason = self.strike(site, reason, is_absence=True)
        self.evict(site, reason, Cause.ABSENCE, is_strike=False)

    def evict(self, site: Site, reason: str, cause: Cause, *, is_strike: bool = True) -> None:
        """Told on its stream, if it has one; it may say Hello again there. It is admitted when its time comes."""
        self.evictions[cause] += 1
        if is_strike:
            reason = self.strike(site, reason)
        self.report(logging.WARNING, f"evicted {site.label}: {reason}")
        self.remove(site, reason, evicted=True)
        self.log.forget(site.site_id)
        if site.stream is not None:
            stream = self.members.streams[site.stream]
            stream.evicted_said = True
            stream.waiting_since = self.now
            self.send(site, m.Evicted(reason=reason[:1024]))

    def strike(self, site: Site, reason: str, *, is_absence: bool = False) -> str:
        """The site was found out. The reason, with what follows from it."""
        conduct = site.conduct
        conduct.strike(self.now, self.limits.lease_s, is_absence=is_absence)
        if conduct.is_enough:
            why = f"it was found out {conduct.strikes} times without contributing, the last time because {reason}"
            self.ban(e.BanRecord(name=site.name, key_digest=site.key_digest, reason=why[:1024]))
            self.note(COORDINATOR, f"ban name={site.name!r}", why)
            return f"{reason}; it is banned, as this was the {conduct.strikes}th time"
        wait_s = conduct.admitted_again_at - self.now
        return f"{reason}; it is admitted again in {wait_s:.0f} s" if wait_s > 0 else reason
