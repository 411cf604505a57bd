"""Who is here: sites, their streams, and since when nothing was heard of them. Plain data: other modules decide."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field, fields, replace
from enum import Enum

from atoll.coordinator.core.events import BanRecord, Certified, InviteRecord, SiteRecord
from atoll.coordinator.core.sites.conduct import Conduct
from atoll.coordinator.core.sync.exclusions import Start
from atoll.coordinator.core.sync.topology import Reducer
from atoll.protocol.digest import Digest
from atoll.protocol.figures import MAX_CRASH_CHARACTERS
from atoll.protocol.messages import Endpoint, FindSources, Heartbeat, Hello, LinkUse, Member, Offer, Telemetry
from atoll.protocol.text import last_line

NO_TELEMETRY = Telemetry()
CRASH_SAID_EVERY_S = 5.0


class Standing(Enum):
    """NEW -> (Offer) SEEDER, JOINER or MEMBER -> OUT; a JOINER or SEEDER is a MEMBER once it holds a commit."""

    NEW = "new"
    SEEDER = "seeding"
    JOINER = "joining"
    MEMBER = "member"
    OUT = "out"


LIVE = (Standing.SEEDER, Standing.JOINER, Standing.MEMBER)


@dataclass(slots=True, kw_only=True, eq=False)
class Site:
    name: str
    key_digest: bytes
    site_id: int = 0  # 0 until the first Offer
    incarnation: int = 0
    address: str = ""
    unreachable_site_ids: tuple[int, ...] = ()  # peers that it cannot dial, as its last Ready says
    standing: Standing = Standing.NEW
    evicted: str = ""
    gone: str = ""  # why it is OUT, for people
    max_retained_bytes: int = 0
    bandwidth_bytes_per_s: int = 0
    endpoints: tuple[Endpoint, ...] = ()  # beside the address
    hello: Hello | None = None  # the newest of this incarnation
    stream: int | None = None
    heard_at: float = 0.0
    away_until: float | None = None  # without a stream: evicted then
    progress_at: float = 0.0  # when it last did anything but repeat itself
    owes_since: float | None = None  # progress; None: the coordinator or another site has to do something first
    counts_from_step: int | None = None  # of the run: what it trained since is in no commit; None: holds no state
    applied: int | None = None
    state_hash: bytes = b""
    left_with: tuple[int, bytes] | None = None  # commit and state hash when it went, for people
    num_wrong_states: int = 0  # times that its state was not the run's
    snapshot_s: float = 0.0  # of all syncs of which it said what they took
    log_ends: bool = False  # the payloads of the commit after `applied` are not on this site's disk
    voided_sync: int = 0  # what this incarnation contributed to that one, and to those before it, is discarded
    contributed: bool = False  # to a commit, ever
    may_hold: int = 0  # while it is not live: the newest commit that its disk may have
    catching_up: bool = False
    waits_for_sources: FindSources | None = None
    num_sources_asked: int = 0
    fetches: bool = False  # asked for sources, and has not said since what it holds
    heartbeat: Heartbeat = field(default_factory=lambda: Heartbeat(phase=""))
    telemetry: Telemetry = NO_TELEMETRY
    num_crashes_said: int = 0  # in the log, of this start of its node
    crash_said_at: float = -math.inf
    conduct: Conduct = field(default_factory=Conduct)
    is_certified: bool = False  # its key is that of a certificate
    num_heard: int = 0  # times in a row that it got no further and was taken at its word
    waits_with: Offer | None = None  # it has offered, and is not admitted yet

    @property
    def live(self) -> bool:
        """It is in the run."""
        return self.standing in LIVE

    @property
    def start(self) -> Start:
        """This start of the site: its contributions are its own."""
        return self.site_id, self.incarnation

    @property
    def label(self) -> str:
        """As people know it."""
        return f"{self.name} (site {self.site_id})" if self.site_id else self.name

    # --- its session

    def says_hello(self, hello: Hello, now: float) -> None:
        """It is here again, on the stream that it has."""
        self.hello, self.waits_with, self.away_until = hello, None, None
        self.heard_at = self.progress_at = now

    def has_key(self, digest: bytes, *, is_certified: bool) -> None:
        """By which it is known from now on."""
        self.key_digest, self.is_certified = digest, is_certified

    def starts_again(self, incarnation: int) -> None:
        """Its start before is over, with all that was known of that."""
        self.incarnation, self.evicted, self.voided_sync = incarnation, "", 0
        self.heartbeat, self.telemetry = Heartbeat(phase=""), NO_TELEMETRY
        self.num_crashes_said = 0

    def heard(self, now: float) -> None:
        """It said something, or cannot be held to its silence."""
        self.heard_at = now

    def got_on(self, now: float) -> None:
        """It did anything but repeat itself, or had to wait for this."""
        self.progress_at = now

    def note_owing(self, *, owes_progress: bool, now: float) -> None:
        """The time of a site counts from when the site can go on, not from when the site had to stop."""
        self.owes_since = (now if self.owes_since is None else self.owes_since) if owes_progress else None

    def tells(self, telemetry: Telemetry, now: float) -> bool:
        """What it measures of itself, for people: its words become one line without control characters. Whether the log
        is to say that its workers crashed: of sites in the run, not more often than CRASH_SAID_EVERY_S, and nothing
        anew when a number falls and rises again, whatever a member says."""
        self.telemetry = replace(telemetry, last_crash=last_line(telemetry.last_crash)[:MAX_CRASH_CHARACTERS])
        is_more = telemetry.num_crashes > self.num_crashes_said
        is_news = self.live and is_more and now >= self.crash_said_at + CRASH_SAID_EVERY_S
        if is_news:
            self.num_crashes_said, self.crash_said_at = telemetry.num_crashes, now
        return is_news

    def beats(self, heartbeat: Heartbeat) -> None:
        """What it says of itself now."""
        self.heartbeat = heartbeat

    def has_written(self, snapshot_s: float) -> None:
        """Its ranks, the snapshot of one more sync."""
        self.snapshot_s += snapshot_s

    def is_away(self, until: float) -> None:
        """It has no stream, and is lost then."""
        self.away_until = until

    def says_less(self) -> None:
        """What it said that it holds is void: its offer may wait."""
        if self.hello is not None:
            self.hello = replace(self.hello, has_state=False, last_commit=0, state_hash=b"")

    # --- its standing

    def knocks(self, *, knows: bool) -> None:
        """After its Hello. One that was evicted, and `knows` it, may offer again."""
        if knows:
            self.evicted = ""
        if not self.live and not self.evicted:
            self.standing = Standing.NEW

    def waits(self, offer: Offer | None) -> None:
        """It has offered, and is not admitted yet; None: it does not wait any more."""
        self.waits_with = offer

    def admit(self, standing: Standing, now: float) -> None:
        """What it trained before is gone: it trains again once it holds a state."""
        self.standing, self.gone, self.counts_from_step = standing, "", None
        self.got_on(now)

    def is_to(self, standing: Standing) -> None:
        """Make the starting state, or fetch it."""
        self.standing = standing

    def is_gone(self, why: str) -> None:
        """Why it is not here, for people."""
        self.gone = why

    def goes(self, reason: str, *, evicted: bool, newest: int) -> None:
        """It is not in the run any more. `newest`: the newest commit, which its disk may have."""
        if self.live:
            self.may_hold = self.applied if self.log_ends and self.applied is not None else newest
        self.standing, self.gone, self.evicted = Standing.OUT, reason, reason if evicted else ""
        self.waits_with = self.away_until = self.counts_from_step = self.waits_for_sources = None
        self.conduct.left()
        if self.applied is not None:
            self.left_with = (self.applied, self.state_hash)
        self.applied, self.state_hash, self.log_ends, self.catching_up = None, b"", False, False

    def voids(self, sync: int) -> None:
        """What it was planned to contribute to that sync, and to those before it, is discarded."""
        self.voided_sync = sync

    def may_have(self, commit: int) -> None:
        """While it is not here: the newest commit that its disk may have."""
        self.may_hold = commit

    # --- what it holds

    def holds(self, commit: int) -> bool:
        """Whether the site has applied that commit."""
        return self.applied is not None and self.applied >= commit

    def counts_from(self, step: int | None) -> None:
        """Of the run: what it trained since is in no commit. None: it holds no state."""
        self.counts_from_step = step

    def takes(self, commit: int, state_hash: bytes, *, is_behind: bool, run_step: int) -> None:
        """It holds that commit. `is_behind`: it lacks more commits than those that may be on their way to it."""
        if self.counts_from_step is None:
            self.counts_from_step = run_step
        if self.standing is not Standing.MEMBER or self.applied != commit:  # else it repeats itself, and still waits
            self.waits_for_sources, self.fetches = None, False
        self.log_ends = self.log_ends and self.applied == commit
        self.standing, self.applied, self.state_hash = Standing.MEMBER, commit, state_hash
        self.catching_up = is_behind

    def is_without_state(self) -> None:
        """It has to fetch one."""
        self.standing, self.applied, self.state_hash = Standing.JOINER, None, b""

    def goes_on_from_there(self) -> None:
        """The run went back: nothing follows what it holds, and it lacks nothing. It says anew what it looks for."""
        self.log_ends, self.catching_up, self.waits_for_sources, self.fetches = False, False, None, False

    def looks_for_sources(self, message: FindSources, *, newest: int, found: bool) -> None:
        """It fetches a state; unless donors were `found`, it is told of them later."""
        self.fetches, self.catching_up = True, self.applied is not None and self.applied < newest
        if self.applied is not None and message.lacks_commit == self.applied + 1:
            self.log_ends = True
        self.waits_for_sources = None if found else message

    def finds_sources(self) -> None:
        """It was told of donors."""
        self.waits_for_sources = None

    def contributes(self, run_step: int | None, *, was_done: bool) -> None:
        """To a commit. `run_step`: the end of its window, if this start did; None: one before. The commit of a later
        window may have come first."""
        self.contributed = True
        if run_step is not None:
            self.counts_from_step = max(run_step, self.counts_from_step or 0)
        if was_done:
            self.num_heard = 0

    def is_heard(self) -> None:
        """It got no further, and was taken at its word."""
        self.num_heard += 1

    # --- for others

    def record(self) -> SiteRecord:
        """What the store keeps of it."""
        kept = {name: getattr(self, name) for name in _KEPT}
        conduct = self.conduct
        return SiteRecord(
            **kept,
            live=self.live,
            strikes=conduct.strikes,
            offences=conduct.offences,
            faults=conduct.faults,
            silences=conduct.silences,
            judged_to=conduct.judged_to,
            has_contributed=conduct.has_contributed,
        )

    def member(self) -> Member:
        """As plans and peers know it."""
        return Member(
            site_id=self.site_id,
            incarnation=self.incarnation,
            address=self.address,
            endpoints=self.endpoints,
            name=self.certified_name,
        )

    @property
    def certified_name(self) -> str:
        """That its peers find in its certificate."""
        return self.name if self.is_certified else ""

    def reducer(self) -> Reducer:
        """What it offers as a reducer."""
        return Reducer(
            site_id=self.site_id,
            bandwidth_bytes_per_s=self.bandwidth_bytes_per_s,
            max_retained_bytes=self.max_retained_bytes,
            first_chunks=tuple(endpoint.first_chunk for endpoint in self.endpoints),
        )


_KEPT = {item.name for item in fields(SiteRecord)} & {item.name for item in fields(Site)}
"""What is said of a site alike while it is here and in the store."""


@dataclass(slots=True, kw_only=True)
class Stream:
    waiting_since: float  # for a Hello, while it has no site or an evicted one
    certified: Certified | None = None  # whom it is of; None in plain text
    site: Site | None = None
    num_sent: int = 0
    num_acked: int = 0
    unacked_since: float | None = None  # since when something that was sent is not acknowledged
    evicted_said: bool = False  # Evicted went out on it: a Hello after that knows
    rolled_back: list[tuple[int, int]] = field(default_factory=list)  # not acknowledged: which message, which commit

    def sent(self, now: float) -> None:
        """One more message went out."""
        self.num_sent += 1
        if self.unacked_since is None:
            self.unacked_since = now

    def acked(self, ack: int, now: float) -> None:
        """The site has received so many of them."""
        if ack > self.num_acked:
            self.num_acked = min(ack, self.num_sent)
            self.unacked_since = now if self.num_acked < self.num_sent else None

    def went_back_to(self, commit: int) -> None:
        """What was sent last says so."""
        self.rolled_back = [(number, last) for number, last in self.rolled_back if self.num_acked < number]
        self.rolled_back.append((self.num_sent, commit))

    def is_void(self, commit: int) -> bool:
        """Whether this commit, as its site says it, is one of those that were rolled back."""
        return any(self.num_acked < number and commit > last for number, last in self.rolled_back)


def key_digest(key: bytes) -> bytes:
    """What is kept of a node's key."""
    return Digest("atoll/key/v1").data(key).finish()


class Membership:
    """Sites by name; ids are given in the order of first offers and never again."""

    def __init__(self, records: tuple[SiteRecord, ...], last_id: int, now: float, lease_s: float) -> None:
        self.sites: dict[str, Site] = {}
        self._by_id: dict[int, Site] = {}  # ascending
        self.streams: dict[int, Stream] = {}
        for r in records:
            self.sites[r.name] = site = Site(**{name: getattr(r, name) for name in _KEPT})
            # What it holds is learnt from its Hello; until then it counts as joining.
            site.standing = Standing.JOINER if r.live else Standing.OUT
            site.away_until = now + lease_s if r.live else None
            site.conduct.restored(r, now=now, lease_s=lease_s)
        self._by_id = {s.site_id: s for s in sorted(self.sites.values(), key=lambda s: s.site_id)}
        self.last_id = max(last_id, next(reversed(self._by_id), 0))

    def came(self, site: Site) -> None:
        """A site of a name that nobody here has."""
        self.sites[site.name] = site

    def is_void(self, site: Site, commit: int) -> bool:
        """Whether the site means one of the commits that were rolled back: it had not heard of that."""
        return site.stream is not None and self.streams[site.stream].is_void(commit)

    def attach(self, site: Site, stream: int) -> None:
        """The site speaks on that stream from now on."""
        site.stream = stream
        self.streams[stream].site = site

    def release(self, site: Site) -> int:
        """The site's stream is nobody's now; its number."""
        assert site.stream is not None
        old, site.stream = site.stream, None
        self.streams[old].site = None
        return old

    def opened(self, stream: int, now: float, certified: Certified | None = None) -> None:
        """A stream, before its Hello."""
        self.streams[stream] = Stream(waiting_since=now, certified=certified)

    def closed(self, stream: int, reason: str) -> tuple[Stream | None, Site | None]:
        """The stream ended: what was known of it, and its site, which has none now. A site that was never admitted
        leaves nothing behind."""
        state = self.streams.pop(stream, None)
        site = state.site if state is not None else None
        if site is None or site.stream != stream:
            return state, None
        site.stream = None
        if not site.site_id and self.sites.get(site.name) is site:
            del self.sites[site.name]
        elif site.standing is Standing.NEW:
            site.standing, site.gone, site.waits_with = Standing.OUT, reason, None
        return state, site

    def num_at_the_door(self) -> int:
        """Who has said Hello and was never admitted."""
        return len(self.sites) - len(self._by_id)

    def give_id(self, site: Site) -> None:
        """The next one; ids are never used again."""
        self.last_id += 1
        site.site_id = self.last_id
        self._by_id[site.site_id] = site

    def forget(self, site: Site) -> None:
        """Its id is not given again."""
        del self.sites[site.name]
        del self._by_id[site.site_id]

    def gone(self) -> list[Site]:
        """Who was in the run, is not, and has no stream; in the order of ids."""
        return [s for s in self._by_id.values() if s.standing is Standing.OUT and s.stream is None]

    def by_id(self, site_id: int) -> Site | None:
        """None if it is forgotten, or was never admitted."""
        return self._by_id.get(site_id)

    def live(self) -> list[Site]:
        """In the order of ids."""
        return [s for s in self._by_id.values() if s.standing in LIVE]

    def shut_out(self, bans: Collection[BanRecord], invites: Iterable[InviteRecord]) -> tuple[str, ...]:
        """Names of those that are banned, also by their key, and of those from which all that they were given was taken
        back."""
        names, digests = {ban.name for ban in bans}, {ban.key_digest for ban in bans} - {b""}
        sites, used = self.sites.values(), [i for i in invites if i.role == "site" and i.key_digest]
        known = {invite.name for invite in used}
        same_key = {site.name for site in sites if site.key_digest in digests}
        same_key |= {invite.name for invite in used if invite.key_digest in digests}  # of who never came, too
        unknown = {site.name for site in sites if site.is_certified and site.name not in known}
        return tuple(sorted({*names, *same_key, *unknown}))

    def holding(self, commit: int) -> list[Site]:
        """Members that have applied that commit, in the order of ids."""
        return [s for s in self.live() if s.standing is Standing.MEMBER and s.holds(commit)]

    def known(self, site_id: int) -> Site:
        """A site that was planned, or is in the run: it is not forgotten."""
        return self._by_id[site_id]

    def among_live(self, uses: Iterable[LinkUse]) -> list[LinkUse]:
        """Those of sites that are in the run."""
        return [use for use in uses if (site := self._by_id.get(use.site_id)) is not None and site.live]

    def connected(self) -> list[Site]:
        """Sites of the run with a stream, in the order of ids."""
        return [s for s in self.live() if s.stream is not None]
