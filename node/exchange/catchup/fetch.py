"""Bringing the outer state to the newest commit while the others go on.

A site that lacks a few commits fetches their payloads. Any other fetches chunks from several donors at once, each
checked against the hash list of its version, and each list against the attested state hash; donors may be at different
commits, so chunks may arrive at different versions, and payloads bring all of them to the newest commit. What is on the
disk already is kept if it passes the same checks, so an interrupted fetch goes on where it was.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from concurrent.futures import Executor
from dataclasses import dataclass
from functools import cache, partial
from typing import TypeVar

from atoll.node.dataplane.optim import OuterOptimizer
from atoll.node.dataplane.outer_state import OuterState
from atoll.node.dataplane.outer_update import record_bytes
from atoll.node.dataplane.payload_file import PayloadFile
from atoll.node.dataplane.payload_log import PayloadLog
from atoll.node.exchange.catchup.donor_client import DonorClient
from atoll.node.exchange.catchup.donors import Donors
from atoll.node.exchange.peers.dialer import Key, key_of
from atoll.node.exchange.peers.frames import Encoded
from atoll.node.tasks import together
from atoll.protocol.errors import AtollError, DigestMismatch, PeerError, StateError
from atoll.protocol.layout import chunk_hash
from atoll.protocol.messages import Commit, Donor
from atoll.protocol.plans import payload_hash
from atoll.protocol.spec import max_payload_bytes
from atoll.protocol.threads import run_to_its_end

T = TypeVar("T")
log = logging.getLogger(__name__)

DONORS_ASKED_FOR = 4
"""How often the coordinator is asked for a donor of a commit, before the site goes on from what it has."""
LISTS_ASKED = 8
"""Newest attested commits whose hash lists are asked for; of each donor also that of its own commit."""
APPLIED_AT_ONCE = 8
"""Chunks; a fetch that is cancelled waits for these."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fetched:
    commit: int
    state_hash: bytes
    record: Commit | None
    """Of `commit`; None for commit 0."""


@dataclass(eq=False, kw_only=True)
class Fetch:
    """`run` it once, then close its donors."""

    donors: Donors
    outer: OuterState
    payload_log: PayloadLog
    optimizer: OuterOptimizer
    pool: Executor

    def __post_init__(self) -> None:
        self._index = self.donors.index
        self._layout = self.outer.layout
        self._list_lock = asyncio.Lock()
        self._trusted: set[int] = set()  # chunks whose record is known to be right
        self._asked_alone: Key | None = None  # it gave the right payloads, after several donors together had not
        self._num_fetched = 0

    # --- the whole

    async def run(self) -> Fetched:
        """Brings the outer state to the newest commit that the index, or what the donors hear meanwhile, names and
        somebody has. The payloads of replayed commits end in the log.

        Raises PeerError if nothing moves, StateError if the result does not have the attested hash, HostError for this
        disk.
        """
        await self._in_pool(self._trust_own_state)
        distrusted = False
        while True:
            if await self._in_pool(self._is_replayable):
                if not await self._replay():
                    continue
                fetched = await self._in_pool(self._checked_result)
                if fetched is not None:
                    log.info("at commit %d after fetching %d chunks", fetched.commit, self._num_fetched)
                    return fetched
                if distrusted:
                    raise StateError(
                        f"{self.outer.folder}: the outer state at commit {self.outer.commit} does not have the "
                        "attested hash, though its chunks were fetched anew; this host may compute other bits"
                    )
                distrusted = True
                self._trusted.clear()
            else:
                await self._fetch_chunks()

    def _trust_own_state(self) -> None:
        """A whole state on this disk is right, unless it was attested otherwise."""
        if self._checked_result() is not None:
            self._trusted.update(range(len(self._layout.chunks)))

    def _is_replayable(self) -> bool:
        if self._index.newest < 0 or len(self._trusted) < len(self._layout.chunks):
            return False
        return all(self._index.leads_on(f, version) for f, found in enumerate(self._versions()) for version in found)

    def _versions(self) -> list[set[int]]:
        """Of the chunks of each fragment."""
        versions = self.outer.versions
        return [{v for chunk in chunks if (v := versions[chunk]) is not None} for chunks in self._layout.fragments]

    def _checked_result(self) -> Fetched | None:
        """None if the state does not have its attested hash."""
        commit = self.outer.commit
        if commit is None:
            return None
        found = self.outer.state_hash()
        if self._index.attested.get(commit, found) != found:
            return None
        return Fetched(commit=commit, state_hash=found, record=self._index.commits.get(commit))

    # --- chunks

    async def _fetch_chunks(self) -> None:
        """Every chunk at a version from which the newest commit can be reached."""
        index = self._index
        await self._first_lists()
        await self.donors.share_out(
            await self._in_pool(self._needed),
            self._record_bytes,
            self._fetch_batch,
            lambda donor: donor.commit > index.newest or index.can_replay(donor.commit),
        )

    def _needed(self) -> list[int]:
        """In a thread: chunks that have to be fetched; the others are trusted."""
        versions = self.outer.versions
        lists_with, leads_on = cache(self._index.lists_with), cache(self._index.leads_on)

        def is_right(chunk: int) -> bool:
            fragment, version, value = self._fragment_of(chunk), versions[chunk], self.outer.hash_of(chunk)
            if version is None or not (fragment is None or leads_on(fragment, version)):
                return False
            return any(hashes[chunk] == value for hashes in lists_with(fragment, version))

        needed = [chunk.index for chunk in self._layout.chunks if chunk.num_elements and not is_right(chunk.index)]
        self._trusted = set(range(len(self._layout.chunks))).difference(needed)
        return needed

    def _fragment_of(self, chunk: int) -> int | None:
        """None: it is frozen."""
        return self._layout.fragment_of[chunk] if chunk < self._layout.num_sync_chunks else None

    def _record_bytes(self, chunk: int) -> int:
        return record_bytes(self._layout, self.outer.slots, chunk)

    async def _fetch_batch(self, client: DonorClient, batch: set[int]) -> None:
        async for received in client.chunks(sorted(batch), self._record_bytes):
            await self._take(client, received)
            batch.discard(received.chunk)

    async def _take(self, client: DonorClient, received: Encoded) -> None:
        chunk, version = received.chunk, received.version
        fragment = self._fragment_of(chunk)
        if fragment is not None and not self._index.lists_with(fragment, version):
            await self._list_of(version, client)
        if fragment is not None and not self._index.leads_on(fragment, version):
            raise StateError(f"{client.where}: chunk {chunk} is at commit {version}, which is too old to go on from")
        value = await self._in_pool(lambda: chunk_hash(received.data))
        if not self._index.is_valid(chunk, fragment, version, value):
            raise DigestMismatch(f"{client.where}: chunk {chunk} does not have the hash attested at commit {version}")
        await self._in_pool(lambda: self.outer.put(chunk, version, received.data, value))
        self._trusted.add(chunk)
        self._num_fetched += 1
        self.donors.moved()

    async def _first_lists(self) -> None:
        while not self._useful_lists():
            newest = sorted(self._index.attested, reverse=True)[:LISTS_ASKED]
            asked = [(c, {c.donor.commit} & self._index.attested.keys()) for c in self.donors.usable()]
            # At once: some that are silent, one after the other, would use up the time in which something has to move.
            await together([self._ask_lists(client, sorted({*newest, *own})) for client, own in asked])
            if not self._useful_lists():
                await self.donors.ask_again("no donor has the hash list of an attested commit")

    def _useful_lists(self) -> bool:
        return any(self._index.can_replay(commit) for commit in self._index.lists)

    async def _ask_lists(self, client: DonorClient, commits: list[int]) -> None:
        try:
            found = await client.hash_lists(commits, len(self._layout.chunks))
        except AtollError as error:
            self.donors.failed(client, error)
            return
        for commit, hashes in found.items():
            if await self._in_pool(partial(self._index.add_list, commit, hashes)):
                self.donors.moved()
            else:
                self.donors.failed(
                    client, DigestMismatch(f"{client.where}: its hash list of commit {commit} is not attested")
                )

    async def _list_of(self, version: int, client: DonorClient) -> None:
        """The list of a version that a donor has reached meanwhile; waits until it is attested."""
        async with self._list_lock:
            while version not in self._index.lists:
                if version in self._index.attested:
                    for asked in [client, *(c for c in self.donors.usable() if c is not client)]:
                        await self._ask_lists(asked, [version])
                        if version in self._index.lists:
                            return
                    raise StateError(f"no donor has the hash list of commit {version} any more")
                if version < self._index.newest:
                    raise StateError(f"{client.where}: a chunk at commit {version}, which is not attested")
                await self.donors.ask_again(f"commit {version} is not attested yet")
                if version > self._index.newest:
                    raise StateError(f"{client.where}: a chunk at commit {version}, of which nobody knows")

    # --- payloads

    async def _replay(self) -> bool:
        """The commits that are lacking. False if payloads are not to be had: then chunks must be fetched."""
        newest, history, versions = self._index.newest, self._index.history, await self._in_pool(self._versions)
        newest_here = max((max(found) for found in versions if found), default=0)
        needed = [history.between(f, min(found), newest) for f, found in enumerate(versions) if found]
        for number in sorted({number for commits in needed for number in commits}):
            record = self._index.commits[number]
            await self._in_pool(partial(self._lead_log_to, number - 1))
            if number > newest_here and not await self._is_obtainable(record):
                log.info("nobody has the payloads of commit %d; this site goes on from commit %d", number, number - 1)
                return True
            try:
                file = await self._payloads(record)
            except StateError as error:
                log.info("%s; fetching chunks instead", error)
                self._index.unavailable.add(number)
                return False
            await self._apply(record, file)
        await self._in_pool(partial(self._lead_log_to, newest))
        return True

    def _lead_log_to(self, commit: int) -> None:
        touched = self._index.history.touched(commit)
        assert touched is not None, "what is needed is known"
        self.payload_log.lead_to(touched)

    async def _is_obtainable(self, record: Commit) -> bool:
        """False if its payloads are neither here nor at a donor: after a power cut nobody may have them any more."""
        for _ in range(DONORS_ASKED_FOR):
            has_all = await self._in_pool(lambda: not self.payload_log.open_commit(record).missing())
            if has_all or any(d.commit >= record.commit for d in self._index.donors):
                return True
            await self.donors.ask_again(f"no donor holds commit {record.commit}")
        return False

    async def _payloads(self, record: Commit) -> PayloadFile:
        """The payloads of a commit in the log, committed there. Raises StateError if no donor has them."""
        if self._asked_alone is None and (file := await self._payloads_from(record, None)) is not None:
            return file
        # One of the donors sent something else: all from one of them, each in turn, and none of them holds up the rest.
        keys = [key_of(donor) for donor in self._index.donors if donor.commit >= record.commit]
        for key in sorted(keys, key=lambda key: key != self._asked_alone):
            self.donors.moved()  # each has a time of its own
            try:
                file = await self._payloads_from(record, key)
            except (PeerError, StateError) as error:
                log.info("%s", error)
                continue
            if file is not None:
                self._asked_alone = key
                return file
        raise StateError(f"no donor has payloads of commit {record.commit} with the digest of its record")

    async def _payloads_from(self, record: Commit, only: Key | None) -> PayloadFile | None:
        """From `only` this donor, or from all. None if they do not have the digest of the record."""
        # What is here of several donors may be wrong.
        file = await self._in_pool(lambda: self.payload_log.open_commit(record, anew=only is not None))
        missing = await self._in_pool(file.missing)

        async def fetch(client: DonorClient, batch: set[int]) -> None:
            await self._fetch_payload_batch(client, record, file, batch)

        def may(donor: Donor) -> bool:
            return donor.commit >= record.commit and only in (None, key_of(donor))

        lack = f"no donor has the payloads of commit {record.commit}"
        await self.donors.share_out(missing, partial(self._payload_bytes, record), fetch, may, all_may_lack=lack)

        def finish() -> bool:
            if file.digest(record) != record.payload_digest:
                return False
            file.seal()
            self.payload_log.commit(record)
            return True

        if await self._in_pool(finish):
            return file
        self.donors.counters.refuse(DigestMismatch("payloads"))
        return None

    def _payload_bytes(self, record: Commit, chunk: int) -> int:
        spec = self._layout.chunks[chunk]
        itemsize = spec.num_bytes // spec.num_elements
        return max_payload_bytes(spec.role, spec.num_elements, itemsize, len(record.contributors))

    async def _fetch_payload_batch(
        self, client: DonorClient, record: Commit, file: PayloadFile, batch: set[int]
    ) -> None:
        def store(items: list[Encoded]) -> None:
            for item in items:
                if payload_hash(item.data) != item.hash:
                    raise DigestMismatch(f"{client.where}: the payload of chunk {item.chunk} does not have its hash")
                file.put(item.chunk, item.data, item.hash)

        async for items in client.payloads(record.commit, sorted(batch), partial(self._payload_bytes, record)):
            if items:
                self.donors.moved()
            await self._in_pool(lambda items=items: store(items))  # type: ignore[misc]
            batch.difference_update(item.chunk for item in items)

    async def _apply(self, record: Commit, file: PayloadFile) -> None:
        chunks, fragment_of = self._layout.chunks_of(record.fragment), self._layout.fragment_of
        history = self._index.history

        def at_the_commit_before() -> list[int]:
            versions = self.outer.versions
            before = [history.before(fragment, record.commit) for fragment in range(len(self._layout.fragments))]
            return [chunk for chunk in chunks if versions[chunk] == before[fragment_of[chunk]]]

        behind, update = iter(await self._in_pool(at_the_commit_before)), self.optimizer.at(record)

        async def work() -> None:
            for chunk in behind:
                await self._in_pool(lambda chunk=chunk: self.outer.apply(chunk, file.read(chunk), update))  # type: ignore[misc]

        # Nothing may be written after the end: the disk may be rolled back next.
        await together([work() for _ in range(APPLIED_AT_ONCE)])
        self.donors.moved()

    async def _in_pool(self, work: Callable[[], T]) -> T:
        return await run_to_its_end(work, self.pool)
