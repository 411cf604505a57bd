"""The commit log as the core keeps it: the newest commits, their attested state hashes, the losses of the run."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from atoll.coordinator.core import persisted
from atoll.coordinator.core.events import AttestationRecord, CommitRecord, RollbackRecord
from atoll.coordinator.core.persisted import LossRecord, Persisted, thinned
from atoll.protocol.history import History
from atoll.protocol.layout import Role
from atoll.protocol.log_length import LogLength
from atoll.protocol.logged import Best
from atoll.protocol.messages import Attestation, Commit, Outlier
from atoll.protocol.sync_settings import SyncSettings

REPORTS_OF_COMMITS = 2
"""Reports are kept of so many commits, and of as many more as syncs may be in flight. Sites keep the hashes of chunks
of these commits, and of the older ones from which a dispute over them is computed."""
ATTESTATIONS_IN_SOURCES = 64
"""As many as donors may have lists of hashes of, 2.5 kB: a site that fetches knows each version at which chunks were
read that are on their way."""


@dataclass(frozen=True, slots=True)
class Judgement:
    """What reports of one commit's state hash amount to."""

    attest: bytes | None = None  # to be persisted; None: nothing new
    losers: tuple[int, ...] = ()  # sites whose state is not the run's
    against: bytes = b""
    claims: Mapping[bytes, tuple[int, ...]] = field(default_factory=dict)  # disputed if they are several


class CommitLog:
    """Commits 1, 2, ... (0 is the starting state, which no record describes)."""

    def __init__(self, known: Persisted, sync: SyncSettings, first_run_step: int, first_run_tokens: int) -> None:
        self._sync = sync
        self._length = LogLength(None, sync)
        self._num_bytes: dict[int, int] = {}  # of each commit, as `_length` counts
        self.num_kept = self._length.num_commits
        """Commits that stay here and in payload logs, of as many bytes as the last ones have."""
        self._num_fragments = sync.fragments
        self._num_reported = REPORTS_OF_COMMITS + sync.most_in_flight
        self.records: list[CommitRecord] = list(known.all(CommitRecord))
        self._contributors = {r.commit.commit: _ids(r.commit) for r in self.records}
        self.attested: dict[int, bytes] = {r.commit: r.state_hash for r in known.all(AttestationRecord) if r.state_hash}
        self._from_store = set(self.attested)
        self._reports: dict[int, dict[int, bytes]] = {}
        self._witnesses: dict[int, dict[int, bytes]] = {}  # sites that applied a commit without being part of it
        self.contradicted: dict[int, str] = {}  # site id -> how its words of a commit above contradict each other
        self.losses: dict[int, tuple[int, int, int, float]] = {
            r.commit: (r.commit, r.run_step, r.run_tokens, r.median_loss) for r in known.all(LossRecord)
        }
        newest = self.records[-1].commit if self.records else None
        self.last = newest.commit if newest else 0
        void = (n for r in known.all(RollbackRecord) for n in r.voided)
        self._highest = max((self.last, *void))  # that was ever kept: the store drops old ones by it
        self.voided_starts: set[tuple[int, int]] = set()  # they contributed to void commits, and said no Hello since
        self._first_run_step = first_run_step
        self._first_run_tokens = first_run_tokens
        self.run_step = newest.run_step if newest else first_run_step
        self.run_tokens = newest.run_tokens if newest else first_run_tokens

    @property
    def changed_json(self) -> str:
        """Settings that are not as the run began, as of the last commit."""
        return self.records[-1].commit.changed_json if self.records else ""

    @property
    def best(self) -> Best | None:
        """The best saved model, as it was known at the last commit."""
        return self.records[-1].commit.best if self.records else None

    def append(self, record: CommitRecord) -> None:
        """The next commit. What is known of state hashes of commits that are older than the log goes."""
        commit = record.commit
        assert commit.commit == self.next
        self.records.append(record)
        self._contributors[commit.commit] = _ids(commit)
        self._num_bytes[commit.commit] = self._length.bytes_of(commit)
        self._drop_old()
        self.last, self.run_step, self.run_tokens = commit.commit, commit.run_step, commit.run_tokens
        self._highest = max(self._highest, self.last)
        if record.median_loss is not None:
            self.losses[commit.commit] = (commit.commit, commit.run_step, commit.run_tokens, record.median_loss)
            self.losses = {n: self.losses[n] for n in thinned(list(self.losses))}
        num_known = max(self.num_kept, self._num_reported)  # else an old report would attest it anew
        for known in (self.attested, self._reports, self._witnesses):
            for n in [n for n in known if 0 < n <= self.last - num_known]:
                del known[n]

    def keep(self, length: LogLength) -> None:
        """As many commits as that says, as payload logs do."""
        self._length = length
        self._num_bytes = {r.commit.commit: length.bytes_of(r.commit) for r in self.records}
        self._drop_old()

    def most_read_bytes(self, record_bytes: int, role: Role) -> int:
        """Of one chunk in a payload log, whose record in a state has so many."""
        return self._length.most_read_bytes(self.num_kept, record_bytes, role)

    def _drop_old(self) -> None:
        last = self.records[-1].commit.commit if self.records else 0
        self.num_kept = self._length.num_kept(last, self._num_bytes)
        for old in self.records[: -self.num_kept]:
            self._contributors.pop(old.commit.commit, None)
            self._num_bytes.pop(old.commit.commit, None)
        del self.records[: -self.num_kept]

    def goes_back_to(self, commit: int) -> bool:
        """Whether the run can go back to `commit`: its record is here, and all that follow it."""
        return self.record(commit) is not None if commit else not self.records or self.first == 1

    def is_forgotten(self, commit: int) -> bool:
        """Whether the store may not have all commits any more that follow it."""
        return commit <= self._highest - persisted.KEPT_COMMITS

    @property
    def next(self) -> int:
        """The number of the commit that comes next, whatever fragment it is of."""
        return self.last + 1

    @property
    def history(self) -> History:
        """Which commits touched which fragment, from the state before the oldest commit whose record is here."""
        touched = self.records[0].touched if self.records else ()
        return History(touched or (0,) * self._num_fragments, (r.commit.fragment for r in self.records))

    def touched(self, commit: int) -> tuple[int, ...]:
        """Of each fragment, the last commit <= `commit` that touched it. Empty for a run with one fragment, and if
        the log does not reach back so far."""
        return (self.history.touched(commit) or ()) if self._num_fragments > 1 else ()

    @property
    def first(self) -> int:
        """The oldest commit whose record is here; the next one if there is none."""
        return self.records[0].commit.commit if self.records else self.next

    def extend_back(self, records: Sequence[CommitRecord], attestations: Sequence[AttestationRecord]) -> None:
        """Older ones, for as long as no commit is appended. Nothing if the log begins elsewhere by now.

        What is attested of them stays: their contributors are not asked again.
        """
        if not records or records[-1].commit.commit + 1 != self.first:
            return
        self.records[:0] = records
        self._num_bytes.update((r.commit.commit, self._length.bytes_of(r.commit)) for r in records)
        self.attested.update((a.commit, a.state_hash) for a in attestations if a.state_hash)

    def record(self, commit: int) -> CommitRecord | None:
        """None if it is not one of the newest that are kept here."""
        return next((r for r in reversed(self.records) if r.commit.commit == commit), None)

    def roll_back(self, commit: int) -> list[CommitRecord]:
        """`commit` is the last one again; those after it. Its record must be here, unless it is 0."""
        voided = [r for r in self.records if r.commit.commit > commit]
        del self.records[len(self.records) - len(voided) :]
        for old in voided:
            self.voided_starts |= {(c.site_id, c.incarnation) for c in old.commit.contributors}
            self._contributors.pop(old.commit.commit, None)
            self._num_bytes.pop(old.commit.commit, None)
        newest = self.records[-1].commit if commit else None
        assert newest is None or newest.commit == commit
        self.last = commit
        self.num_kept = self._length.num_kept(commit, self._num_bytes)
        self.run_step = newest.run_step if newest else self._first_run_step
        self.run_tokens = newest.run_tokens if newest else self._first_run_tokens
        known: dict[int, Any]
        for known in (self.losses, self.attested, self._reports, self._witnesses):
            for n in [n for n in known if n > commit]:
                del known[n]
        self._from_store = {n for n in self._from_store if n <= commit}
        return voided

    def says_hello(self, start: tuple[int, int]) -> None:
        """It is told with Welcome which commits are void: what it lists from now on is its own fault."""
        self.voided_starts.discard(start)

    def after(self, commit: int) -> tuple[Commit, ...]:
        """The commits after `commit`, without gaps; empty if there is none or the log does not reach back so far."""
        found = tuple(r.commit for r in self.records if r.commit.commit > commit)
        return found if found and found[0].commit == commit + 1 else ()

    def contributors(self, commit: int) -> frozenset[int]:
        """Ids; none of a commit that is older than the log."""
        return self._contributors.get(commit, frozenset())

    def contributed_at_step(self, site_id: int, incarnation: int) -> int | None:
        """The step of the newest commit that this start of the site is in; None if it is in none."""
        steps = (
            r.commit.run_step
            for r in reversed(self.records)
            if any((c.site_id, c.incarnation) == (site_id, incarnation) for c in r.commit.contributors)
        )
        return next(steps, None)

    def contributed(self, site_id: int) -> tuple[int, ...]:
        """Of each fragment, the newest commit that any start of the site is in, and that leaves errors over; 0 if there
        is none in the log."""

        def last(fragment: int) -> int:
            commits = (r.commit for r in reversed(self.records) if r.commit.fragment in (fragment, self._num_fragments))
            holding = (c.commit for c in commits if any(m.site_id == site_id for m in c.contributors))
            return next((number for number in holding if not self._sync.moves_variance(number - 1)), 0)

        return tuple(map(last, range(self._num_fragments)))

    def rested_steps(self, site_id: int, since: int) -> int:
        """Steps of the run since that one in which the site was told to rest, as far back as the log goes."""
        steps = (
            after.commit.run_step - before.commit.run_step
            for before, after in pairwise(self.records)
            if before.commit.run_step >= since and site_id in after.resting
        )
        return sum(steps)

    def stood_out(self, commit: int) -> Outlier | None:
        """The contribution to it that did so; None if none did, or the commit is older than the log."""
        return next((r.stood_out for r in self.records if r.commit.commit == commit), None)

    def tokens_per_step(self) -> float | None:
        """Of all sites, from the newest commit."""
        if not self.records:
            return None
        commit = self.records[-1].commit
        if len(self.records) > 1:
            before = self.records[-2].commit.run_step
        elif commit.commit == 1:
            before = self._first_run_step
        else:
            return None
        return sum(c.tokens for c in commit.contributors) / max(1, commit.run_step - before)

    # --- state hashes

    def newest_attested(self) -> int | None:
        """None while not even commit 0 is."""
        return max(self.attested, default=None)

    def attestations(self, held: Collection[int]) -> tuple[Attestation, ...]:
        """The newest; and where all that is `held` is older (a power cut) that too: there is nothing else to fetch."""
        known = sorted(self.attested)
        listed = known[-ATTESTATIONS_IN_SOURCES:]
        if max(held, default=0) < listed[0]:
            listed = [n for n in known if n in held][-ATTESTATIONS_IN_SOURCES:] + listed
        return tuple(Attestation(commit=n, state_hash=self.attested[n]) for n in listed)

    def forget_start(self) -> None:
        """Before the first commit: nothing is attested."""
        assert not self.records
        self.attested.clear()
        self._reports.clear()
        self._witnesses.clear()
        self.contradicted.clear()
        self._from_store.clear()

    def note(self, commit: int, site_id: int, state_hash: bytes) -> None:
        """A contributor to the commit says what state it has made of it."""
        self._hear(self._reports, commit, site_id, state_hash)

    def witness(self, commit: int, site_id: int, state_hash: bytes) -> None:
        """The site was no contributor, held the commit before, and has computed every chunk of this one itself."""
        self._hear(self._witnesses, commit, site_id, state_hash)

    def _hear(self, votes: dict[int, dict[int, bytes]], commit: int, site_id: int, state_hash: bytes) -> None:
        said = self.said(commit, site_id)
        votes.setdefault(commit, {})[site_id] = state_hash
        for old in [n for n in votes if n <= max(votes) - self._num_reported]:
            del votes[old]
        if said is not None and said != state_hash:
            self.contradicted[site_id] = (
                f"it said that commit {commit} has hash {said.hex()[:12]}, and now {state_hash.hex()[:12]}"
            )

    def take_contradicted(self) -> dict[int, str]:
        """By site id: how its words contradict each other. Once."""
        found, self.contradicted = self.contradicted, {}
        return found

    def goes_back(self, commit: int, site_id: int) -> None:
        """The site says that it is at `commit`, after one that followed it."""
        votes = {**self._witnesses, **self._reports}
        later = [n for n in votes if n > commit and self.is_heard(n, site_id)]
        if later:
            self.contradicted[site_id] = f"it said what state commit {max(later)} has, and now is at commit {commit}"

    def forget(self, site_id: int, since: int = 0) -> None:
        """Its state turned out not to be the run's, or it comes anew: with commit `since`, to which it has come from
        those before. Of these count as many as it can show."""
        self.contradicted.pop(site_id, None)
        shown = range(self._shown_since(since), since)
        for commit, votes in (*self._reports.items(), *self._witnesses.items()):
            if commit not in shown:
                votes.pop(site_id, None)

    def _shown_since(self, commit: int) -> int:
        """The oldest commit of which a site that is started anew at `commit` has the hashes: its index has two entries
        a chunk, so that no fragment may have been synced twice since."""
        found: set[int] = set()
        for record in reversed(self.records):
            number, fragment = record.commit.commit, record.commit.fragment
            if number > commit:
                continue
            if found & {fragment, self._num_fragments} or (found and fragment == self._num_fragments):
                return number
            found.add(fragment)
        return self.first - 1

    def said(self, commit: int, site_id: int) -> bytes | None:
        """The hash of the state that the site has computed of that commit, by its own word."""
        return self._reports.get(commit, {}).get(site_id) or self._witnesses.get(commit, {}).get(site_id)

    def is_heard(self, commit: int, site_id: int) -> bool:
        """Whether its own word of that commit counts: it has computed that state."""
        return self.said(commit, site_id) is not None

    def has_reported(self, commit: int, site_ids: Collection[int]) -> bool:
        """Whether all these sites, as contributors, have said what state the commit has."""
        return set(site_ids) <= set(self._reports.get(commit, {}))

    def is_agreed(self, commit: int) -> bool:
        """Whether all who said what state the commit has said what is attested of it."""
        said = (*self._reports.get(commit, {}).values(), *self._witnesses.get(commit, {}).values())
        return {*said} == {self.attested.get(commit)}

    def reported(self) -> list[int]:
        """Commits of which contributors said a state hash, ascending."""
        return sorted(self._reports)

    def disprove(self, commit: int, wrong: Collection[bytes]) -> None:
        """These hashes of the commit are not the right one, whoever said so. All who said another are heard alike."""
        votes = self._reports.get(commit, {}) | self._witnesses.pop(commit, {})
        self._reports[commit] = {site_id: value for site_id, value in votes.items() if value not in wrong}
        if self.attested.get(commit) in wrong:
            del self.attested[commit]
            self._from_store.discard(commit)

    def distrust(self, commit: int, site_ids: Collection[int], held: Collection[bytes]) -> list[int]:
        """These sites are wrong in that commit. The later ones of which nobody else said what is attested: it is not
        attested any more, unless others have it, whose states are `held`."""
        found = []
        for n in [n for n in self._reports if n > commit and n in self.attested]:
            known, votes = self.attested[n], self._reports[n] | self._witnesses.get(n, {})
            said_by = {site_id for site_id, value in votes.items() if value == known}
            if said_by and said_by <= set(site_ids):
                found.append(n)
                if known not in held:
                    del self.attested[n]
        return found

    def judge(
        self,
        commit: int,
        live: Collection[int],
        present: Mapping[int, bytes],
        *,
        later: Collection[int],
        starting: Collection[bytes],
    ) -> Judgement:
        """The first report of a contributor attests. `live`: who is in the run; `present`: who of them is at `commit`,
        and the hash of the state that it holds; `later`: who is at a commit after it; `starting`: what
        contributors that are not in the run yet have said that they hold, or held, of `commit`.

        Claims that differ are disputed, however many sites make them, and though these have gone on since: what they
        hold now came of it.
        """
        if commit not in self._reports:
            return Judgement()
        votes = self._reports[commit] | self._witnesses.get(commit, {})
        said: dict[bytes, list[int]] = {}
        for site_id, value in votes.items():
            if site_id in live:
                said.setdefault(value, []).append(site_id)
        claims = {value: tuple(site_ids) for value, site_ids in said.items()}
        attested = self.attested.get(commit)
        if attested is None:
            return Judgement(attest=next(iter(self._reports[commit].values()), None), claims=claims)
        if not claims or list(claims) == [attested]:
            return Judgement()
        if len(claims) == 1 and commit in self._from_store and sum(map(len, claims.values())) == 1:
            # Who said otherwise, to a former start of the coordinator, may come back; if not, one word is not enough.
            is_last = all(s in votes for s in self.contributors(commit) if s in live)
            return Judgement(losers=claims.popitem()[1], against=attested) if is_last else Judgement()
        if attested not in claims:
            # A contributor said it that has gone since. It is not forgotten for others' words while somebody holds it,
            # or has gone on from what it fetched.
            hold = [s for s, value in present.items() if value == attested] or [s for s in later if s not in votes]
            if not hold and len(claims) == 1:
                return Judgement() if attested in starting else Judgement(attest=next(iter(claims)))
            claims = {attested: tuple(hold), **claims} if hold else claims
        return Judgement(claims=claims)

    def attest(self, commit: int, state_hash: bytes) -> None:
        """The run's state of that commit, from now on."""
        self.attested[commit] = state_hash


def _ids(commit: Commit) -> frozenset[int]:
    return frozenset(c.site_id for c in commit.contributors)
