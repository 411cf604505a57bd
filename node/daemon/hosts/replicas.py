"""The state of the site on its other hosts, as the leader keeps it: each holds what host 0 holds, commit by commit.

A host that follows is told of each commit, and applies it from payloads that are in its own log. One that cannot, or
that has come just now, is told what the leader holds, and fetches that from the leader as a site does from another. So
whatever befalls a host, it ends at the state of the leader, and the hash of each commit shows that it is the same.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain

from atoll.node import host_protocol as hosts
from atoll.node.core import outputs as out
from atoll.node.core.events import Content, Difference
from atoll.node.daemon.hosts.attached import AttachedHost, Hosts
from atoll.node.daemon.plane import DataPlane
from atoll.node.dataplane.outer_state import OuterState
from atoll.node.tasks import Tasks
from atoll.protocol import messages as m
from atoll.protocol.errors import AtollError, InvalidMessage, StateError
from atoll.protocol.hash_tree import HashTree, knots_over
from atoll.protocol.sources_parts import most_bytes
from atoll.protocol.threads import run_to_its_end

log = logging.getLogger("atoll.node")

KEPT_COMMITS = 64
"""Of so many the leader remembers the record and its state hash, for hosts that are slower."""


@dataclass(eq=False, kw_only=True)
class Replicas:
    """`plane` is None until the leader has one."""

    attached: Hosts
    donor: Callable[[], m.Donor]
    """The leader, but for the commit that it holds."""
    tasks: Tasks
    plane: DataPlane | None = None
    _holds: tuple[int, bytes] | None = field(default=None, init=False)  # commit and state hash of the leader
    _is_fetching: bool = field(default=False, init=False)
    """The leader is to come to another commit, or broke off on its way there: chunks of what it held are gone."""
    _recent: OrderedDict[int, m.Commit] = field(default_factory=OrderedDict, init=False)
    """What the leader has applied since its state came otherwise, without a gap; the last may be on its way."""
    _hashes: OrderedDict[int, bytes] = field(default_factory=OrderedDict, init=False)
    """Of the leader: those of its commits since then, and of that one."""
    _numbers: int = field(default=0, init=False)
    _shared: dict[int, tuple[int, int, int]] = field(default_factory=dict, init=False)
    """By fragment: generation, step and seq of the snapshot that hosts are to have."""
    _advancing: set[tuple[int, int]] = field(default_factory=set, init=False)
    """Commits and fragments of errors that hosts are to advance."""
    _keeping: set[int] = field(default_factory=set, init=False)
    """Numbers under which hosts are to keep what they contribute."""

    def serve(self, plane: DataPlane, holds: tuple[int, bytes] | None) -> None:
        """From now on this is the leader's, with a state of this commit and hash."""
        if self.plane is not plane:
            self.plane = plane
            self.moved(holds)

    @property
    def present(self) -> DataPlane:
        """Raises StateError before there is one."""
        if self.plane is None:
            raise StateError("host 0 of this site has no state yet")
        return self.plane

    # --- what the leader does

    async def apply(self, commit: m.Commit, *, lets_go: bool = False) -> bytes:
        """On the leader, and on the hosts that follow. The leader's state hash then.

        Raises what hinders the leader: hosts, which may have applied it, are brought to what the leader holds still.
        """
        assert self.plane is not None
        self._applying(commit)
        try:
            state_hash = await self.plane.apply(commit, lets_go=lets_go)
        except (AtollError, OSError):
            self._holds_instead(await run_to_its_end(self.plane.held))
            for host in self.attached.ready:
                self.bring(host)
            raise
        self._applied(commit.commit, state_hash)
        return state_hash

    def _applying(self, commit: m.Commit) -> None:
        self._recent[commit.commit] = commit
        while len(self._recent) > KEPT_COMMITS:
            self._recent.popitem(last=False)
        for host in self.attached.ready:
            if host.follows:
                self._say_commit(host, commit)

    def _say_commit(self, host: AttachedHost, commit: m.Commit) -> None:
        host.applies = commit.commit
        host.say(hosts.ApplyAtHost(commit=commit))

    def _applied(self, commit: int, state_hash: bytes) -> None:
        self._holds, self._is_fetching = (commit, state_hash), False
        self._hashes[commit] = state_hash
        while len(self._hashes) > KEPT_COMMITS:
            self._hashes.popitem(last=False)
        for host in self.attached.ready:
            if host.is_brought:
                continue
            if not host.follows:  # it could not go on before
                self.bring(host)
            elif host.said.commit == commit:  # it was faster
                self._judge(host)

    @asynccontextmanager
    async def fetching(self) -> AsyncIterator[OuterState]:
        """As `DataPlane.fetching` of the leader. No host is brought until it has `moved`, or broke off as it was."""
        async with self.present.fetching() as outer:
            self._is_fetching = True
            try:
                yield outer
            finally:
                if self._holds is not None and outer.commit == self._holds[0]:
                    self.moved(self._holds)

    def moved(self, holds: tuple[int, bytes] | None) -> None:
        """The leader's state has come to a commit otherwise: it was made, or fetched."""
        self._holds_instead(holds)
        for host in self.attached.ready:
            host.follows = False
            if host.is_brought:
                self.bring(host)
            else:
                self._judge(host)

    def roll_back(self, last_commit: int, branch: int, holds: tuple[int, bytes] | None) -> None:
        """The leader has, and so do the hosts."""
        self._holds_instead(holds)
        for host in self.attached.ready:
            self._roll_back(host, last_commit, branch)

    def _holds_instead(self, holds: tuple[int, bytes] | None) -> None:
        self._holds, self._is_fetching = None, False
        self._recent.clear()
        self._hashes.clear()
        if holds is not None:
            self._holds = holds
            self._hashes[holds[0]] = holds[1]

    def bring(self, host: AttachedHost) -> None:
        """To what the leader holds, from whatever the host holds. A host that is fetching that may ask for it again."""
        host.follows = False
        if self._holds is None:
            return  # it is told when there is a state
        host.told += 1
        host.brought = host.told
        if not host.is_being_told:
            host.is_being_told = True
            self.tasks.spawn(self._say_sources(host))

    async def _say_sources(self, host: AttachedHost) -> None:
        """Once, however often it was to be brought meanwhile."""
        try:
            while host.brought == host.told and self._holds is not None:  # else it is to go back first
                number = host.told
                sources = await run_to_its_end(partial(self._sources, *self._holds))
                if number == host.told:
                    if self.attached.is_here(host) and not self._is_fetching:
                        host.say(hosts.HoldState(site_id=self.donor().site_id, sources=sources, number=number))
                    return
        finally:
            host.is_being_told = False

    def _roll_back(self, host: AttachedHost, last_commit: int, branch: int) -> None:
        host.follows = False
        host.told += 1
        host.say(hosts.RollBackHost(last_commit=last_commit, branch=branch, number=host.told))

    def _sources(self, commit: int, state_hash: bytes) -> m.Sources:
        assert self.plane is not None
        payloads, donor = self.plane.log, self.donor()
        records = _that_fit([record for record in payloads.commits() if record.commit <= commit])
        first = records[0].commit if records and records[-1].commit == commit else commit + 1
        return m.Sources(
            attested=(m.Attestation(commit=commit, state_hash=state_hash),),
            donors=(replace(donor, commit=commit),),
            commits=tuple(record for record in records if record.commit >= first),
            touched=payloads.history.touched(first - 1) or (),
        )

    # --- what hosts say

    def came(self, host: AttachedHost, ready: hosts.HostReady, branch: int) -> None:
        """A host has said what its disk holds."""
        host.said = hosts.StateHeld(has_state=ready.has_state, commit=ready.commit, state_hash=ready.state_hash)
        if ready.branch == branch:
            self._judge(host)
        else:  # numbers of its commits may be those of others by now
            self._roll_back(host, -1, branch)

    def holds(self, host: AttachedHost, said: hosts.StateHeld) -> None:
        """What its disk holds has changed."""
        host.said = said
        if said.lacks:
            log.warning("%s: %s; it fetches that from host 0", host.words, said.lacks)
            host.follows = False
        if not host.is_brought:
            self._judge(host)
        self.attached.changed()

    def _judge(self, host: AttachedHost) -> None:
        """It follows from now on, goes on following, or is brought to what the leader holds."""
        said = host.said
        at = said.commit if said.has_state else None
        if at is not None and (own := self._hashes.get(at)) is not None and own != said.state_hash:
            log.error(
                "%s holds another state of commit %d than host 0 (%s, not %s): its memory or disk is damaged, or this "
                "host's; it fetches what differs",
                host.words, at, said.state_hash.hex()[:12], own.hex()[:12],
            )  # fmt: skip
            self.bring(host)
        elif not host.follows:  # else what it was told next is on its way
            self._go_on_from(host, at)

    def _go_on_from(self, host: AttachedHost, at: int | None) -> None:
        """From that commit. A host that says that it cannot go on from what the leader holds does nothing before it is
        told what to hold: the leader has applied that commit then, or could not."""
        if self._holds is None:
            return
        if at is None or at not in self._hashes or (host.said.lacks and at != self._holds[0]):
            self.bring(host)
        elif not host.said.lacks:
            host.follows, host.applies = True, at
            for number, commit in self._recent.items():
                if number > at:
                    self._say_commit(host, commit)

    # --- jobs that end when all hosts have done them

    async def publish(self, content: Content, is_wanted: Callable[[], bool]) -> None:
        """Returns when PUBLISH of each host holds this, or it is not wanted any more. Hosts that are lost meanwhile are
        not waited for."""
        self._numbers += 1
        number = self._numbers
        word = hosts.PublishAtHost(
            number=number,
            version=content.version,
            fragment=content.fragment,
            is_difference=isinstance(content, Difference),
            base=content.base if isinstance(content, Difference) else 0,
        )
        await self._done_by_all(word, lambda host: host.published >= number, is_wanted)

    async def share_snapshot(self, output: out.ShareSnapshot, is_wanted: Callable[[], bool]) -> bool:
        """True once each host has what it is to send of it; False if it is not wanted any more, or the next one of its
        fragment is shared: it was given up. Where there is no state yet, host 0 alone needs it: it makes the state of
        it."""
        of, fragment = (output.generation, output.step, output.seq), output.fragment
        self._shared[fragment] = of
        for host in self.attached.ready:
            host.snapshots.pop(fragment, None)  # of before
        self.attached.changed()
        if self._holds is None:
            return True

        def is_awaited() -> bool:
            return is_wanted() and self._shared[fragment] == of

        word = hosts.TakeSnapshot(generation=of[0], fragment=fragment, step=of[1], seq=of[2])
        await self._done_by_all(word, lambda host: host.snapshots.get(fragment) == of, is_awaited)
        return is_awaited()

    def took_snapshot(self, host: AttachedHost, said: hosts.SnapshotTaken) -> None:
        of = said.generation, said.step, said.seq
        if self._shared.get(said.fragment) == of:  # else it is late
            host.snapshots[said.fragment] = of

    async def _done_by_all(
        self, word: hosts.OfState, has_done: Callable[[AttachedHost], bool], is_wanted: Callable[[], bool]
    ) -> None:
        """Each is told once it follows, and again where it had to be brought to the state meanwhile."""
        listed, told = self.attached.ready, set[AttachedHost]()

        def is_over() -> bool:
            left = [host for host in listed if self.attached.is_here(host) and not has_done(host)]
            for host in left:
                if not host.follows:
                    told.discard(host)
                elif host not in told:
                    told.add(host)
                    host.say(word)
            return not left or not is_wanted()

        await self.attached.until(is_over)

    async def advance_errors(self, job: out.AdvanceErrors) -> list[str]:
        """What hinders each host; empty for one that has done it."""
        listed, key = self.attached.ready, (job.commit, job.fragment)
        self._advancing.add(key)
        for host in listed:
            word = hosts.AdvanceAtHost(
                commit=job.commit, fragment=job.fragment, base_commit=job.base_commit, error_commits=job.error_commits
            )
            host.say(word)
        try:
            await self.attached.each(listed, lambda host: key in host.advanced)
        finally:
            self._advancing.discard(key)
        lost = [f"host {number} of this site is not here" for number in self.attached.missing]
        said = [(host, host.advanced.pop(key, None)) for host in listed]
        return lost + [f"{host.words} was lost before that" if of is None else of.problem for host, of in said]

    def has_advanced(self, host: AttachedHost, said: hosts.HostErrorsAdvanced) -> None:
        if (key := (said.commit, said.fragment)) in self._advancing:
            host.advanced[key] = said

    async def keep(self, job: out.KeepContributions, is_wanted: Callable[[], bool]) -> Keeping:
        """With audits: each host encodes and keeps what it is to contribute. Raises StateError if one cannot, was lost
        before, or none of it is wanted any more."""
        self._numbers += 1
        listed, number = self.attached.ready, self._numbers
        word = hosts.KeepAtHost(
            number=number,
            sync=job.sync,
            fragment=job.fragment,
            base_commit=job.base_commit,
            error_commits=job.error_commits,
        )
        self._keeping.add(number)
        try:
            await self._done_by_all(word, lambda host: number in host.kept, is_wanted)
        finally:
            self._keeping.discard(number)
            said = [host.kept.pop(number, None) for host in listed]
        for host, of in zip(listed, said, strict=True):
            if of is None or of.problem:
                raise StateError(f"{host.words}: {of.problem if of is not None else 'it was lost, or is late'}")
        if missing := self.attached.missing:
            raise StateError(f"host {missing[0]} of this site is not here")
        covers = [of.cover for of in said if of is not None]
        return Keeping(number, job.fragment, listed, covers)

    def has_kept(self, host: AttachedHost, said: hosts.HostKept) -> None:
        if said.number in self._keeping:
            host.kept[said.number] = said


@dataclass(frozen=True, slots=True)
class Keeping:
    """What all hosts but host 0 keep, by the knots over it; none of them knows those of the others yet."""

    number: int
    fragment: int
    by: Sequence[AttachedHost]
    covers: Sequence[Sequence[bytes]]

    async def put_together(self, tree: HashTree, parts: Sequence[range]) -> None:
        """`tree`: of host 0. It is complete then, and so is that of each host. `parts`: of each host, host 0 first.
        Raises InvalidMessage for what a host cannot keep."""
        for host, part, cover in zip(self.by, parts[1:], self.covers, strict=True):
            if (num := len(knots_over(len(tree.chunks), part))) != len(cover):
                raise InvalidMessage(f"{host.words}: {len(cover)} hashes over what it contributes, {num} are expected")
        knots = (*tree.cover(), *chain.from_iterable(self.covers))
        await run_to_its_end(partial(tree.complete, parts, knots))
        for host in self.by:
            host.say(hosts.KeptBySite(number=self.number, fragment=self.fragment, knots=knots))


def _that_fit(records: list[m.Commit]) -> list[m.Commit]:
    """The newest of them, as many as may be said at once."""
    num_bytes, first = 0, len(records)
    while first > max(0, len(records) - m.MAX_LOG_COMMITS):
        num_bytes += most_bytes(records[first - 1])
        if num_bytes > hosts.MAX_MESSAGE_BYTES // 2:
            break
        first -= 1
    return records[first:]
