"""The chunks that this site averages: contributions come in, are averaged once all of a chunk are there, and the
payloads wait for the sites that take them."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import InitVar, dataclass

import numpy as np

from atoll.node.dataplane.averages import Contributions
from atoll.node.dataplane.payload_file import AttemptKey
from atoll.node.dataplane.products import products_of
from atoll.node.exchange.peers.frames import Encoded
from atoll.node.exchange.peers.progress import Worth
from atoll.node.exchange.sync.attempt import Attempt
from atoll.node.exchange.sync.average_errors import AverageErrors
from atoll.node.exchange.sync.collection import Collection
from atoll.node.exchange.sync.influences import Influences
from atoll.node.exchange.sync.multiplication import Multiplication, Products
from atoll.node.exchange.sync.reduction import Share
from atoll.node.exchange.sync.retained import AT_ONCE, Key, Retained, free
from atoll.node.exchange.sync.roots import Roots
from atoll.node.exchange.sync.spill import Spilled
from atoll.node.exchange.sync.turns import Turns
from atoll.node.exchange.sync.weights import Weights
from atoll.protocol.errors import AverageError, HostError, InvalidMessage, PeerError, StaleError, StateError
from atoll.protocol.messages import Member
from atoll.protocol.plans import reducing
from atoll.protocol.v1 import peer_pb2

REDUCTIONS_AT_ONCE = 16
"""More than the pool has threads; a task for each of a million chunks would hold up the event loop."""


MADE_IN_MEMORY_BYTES = 64 << 20
"""Of the payloads of one attempt. The log has them all, and those beyond are read there when they are sent."""


@dataclass(frozen=True, slots=True)
class Made:
    """A payload that is in the log."""

    chunk: int
    hash: bytes
    num_bytes: int
    data: bytes | None
    """None: in the log alone."""


@dataclass(eq=False, kw_only=True)
class Reducer:
    """Of one attempt. It averages from `start` on, and answers its peers before and after."""

    attempt: Attempt
    share: InitVar[Share]
    weights: Weights
    roots: Roots
    influences: Influences
    multiplied: Callable[[Products], None]
    """Called once, in the event loop, where averages are by influence and the plan has this site reduce."""
    retained: Retained
    collection: Collection
    errors: AverageErrors
    turns: Turns
    has_room: InitVar[bool]
    """Beside the contributions of other attempts that are retained; else `make_room` comes first."""

    def __post_init__(self, share: Share, has_room: bool) -> None:
        self.own = share.own
        self.payloads: list[Made] = []  # in the order they were finished
        self.payload_bytes = 0
        self._in_memory_bytes = 0  # of these
        self._has_room = asyncio.Event()
        if has_room:
            self._has_room.set()
        self._makes_room = False
        self._is_started = False
        self._missing, self._num_missing = share.missing, share.num_missing
        self._ready = deque(share.complete)  # to be reduced
        self._num_reducing = 0
        self._multiplication: Multiplication | None = None
        if not self.influences.are_told and self.attempt.me.site_id in reducing(self.attempt.plan):
            chunks = [chunk for chunk in self.own.chunks if self._is_by_influence(chunk)]
            multiply, made = self._multiply, self.multiplied
            self._multiplication = Multiplication(attempt=self.attempt, chunks=chunks, multiply=multiply, made=made)
            self._multiplication.complete(share.complete)
        self._received_bytes = dict.fromkeys(share.num_missing, 0)  # by child
        self._progress = {site_id: self.attempt.new_progress() for site_id in share.num_missing}
        self._worth_of = {site_id: Worth(share.own.num_bytes) for site_id in share.num_missing}
        self._worth_to = {site_id: Worth(share.own.payload_bytes) for site_id in self.attempt.members}

    # --- before it averages, and after

    async def make_room(self) -> None:
        """Forgets contributions of other attempts that are in the way. Nobody sends contributions of this one before,
        and no other exchange may be begun meanwhile."""
        if self._has_room.is_set() or self._makes_room:
            await self._has_room.wait()
            return
        self._makes_room = True
        children = {(child.site_id, child.incarnation) for child in self.own.children}

        def wanted(key: Key) -> bool:
            return self.attempt.closed is not None or (key[2] in self._missing and key[:2] in children)

        try:
            await self.retained.keep(wanted)
        finally:
            self._has_room.set()

    def restore(self) -> tuple[list[Made], int]:
        """In a thread: payloads that an earlier run of this attempt left in the log, and their bytes."""
        done = []
        for chunk in self.own.chunks:
            if self.collection.has(chunk):
                payload = self.collection.file.read(chunk)
                done.append(self._made(Encoded(chunk, payload, self.attempt.data.payload_hash(payload))))
        for _ in range(len(self._ready) if done else 0):  # nobody else takes from its left before `start`
            if not self.collection.has(chunk := self._ready.popleft()):
                self._ready.append(chunk)
        return done, sum(item.num_bytes for item in done)

    def start(self, restored: list[Made], num_bytes: int) -> None:
        self.payloads += restored
        self.payload_bytes += num_bytes
        self._is_started = True
        if self._multiplication is not None:
            self._multiplication.start()
        self.reduce_ready()

    def close(self) -> None:
        """The attempt is over."""
        self._has_room.set()

    def forget_payloads(self) -> None:
        """An exchange is part of reference cycles, and the collector may not come for many syncs, as it counts objects,
        not bytes."""
        payloads, self.payloads, self.payload_bytes = self.payloads, [], 0
        free(payloads, self.attempt.pool)

    # --- contributions that arrive

    def expect(self, chunk: int) -> int:
        """The bound on the bytes of a contribution. Raises InvalidMessage if this site does not reduce `chunk`."""
        if chunk not in self._missing:
            site_id = self.attempt.me.site_id
            raise InvalidMessage(f"{self.attempt.where}: chunk {chunk} is not reduced by site {site_id}")
        return self.attempt.data.max_bytes(chunk)

    def takes_from(self, site_id: int) -> bool:
        """Whether that site contributes to what is reduced here."""
        return site_id in self._num_missing

    def misses(self, site_id: int) -> bool:
        """Whether contributions of that site are missing here."""
        return self._num_missing[site_id] > 0

    async def misses_any(self, site_id: int, ids: range) -> bool:
        """The same of some chunks."""
        missing = self._missing
        return self.misses(site_id) and await self.attempt.in_pool(
            lambda: any(chunk in ids and site_id in missing[chunk] for chunk in self.own.chunks)
        )

    @property
    def missing_site_ids(self) -> list[int]:
        return [site_id for site_id, count in self._num_missing.items() if count]

    async def held_of(self, child: Member) -> list[int]:
        """Chunks whose contribution is here, ascending. A stream of the attempt before may have brought one since
        this attempt began."""
        await self._has_room.wait()
        site_id, incarnation = child.site_id, child.incarnation
        if not self.retained.holds_any(site_id, incarnation):
            return []

        def work() -> tuple[list[int], list[int]]:
            found = sorted(c for c in self.retained.chunks_of(site_id, incarnation) if c in self._missing)
            return found, [c for c in found if site_id in self._missing[c]]

        chunks, not_noted = await self.attempt.in_pool(work)
        for place, chunk in enumerate(not_noted, 1):
            self._arrived(site_id, chunk)
            if place % AT_ONCE == 0:
                await asyncio.sleep(0)
        return chunks

    def hear(self, site_id: int, parts: Iterable[peer_pb2.Part]) -> None:
        """What of `parts` is progress of that child."""
        missing = sum(len(part.data) for part in parts if site_id in self._missing.get(part.chunk, ()))
        fresh = self._worth_of[site_id].of(missing)
        self._received_bytes[site_id] += fresh
        self._progress[site_id].moved(fresh, self.attempt.loop.time())
        self.attempt.moved(fresh)

    async def take(self, child: Member, items: list[Encoded]) -> None:
        """Whole contributions. Raises DigestMismatch, InvalidMessage; HostError, which ends the attempt too."""
        attempt, retained, start = self.attempt, self.retained, (child.site_id, child.incarnation)
        fresh = [item for item in items if retained.is_new(*start, item)]

        def work() -> list[Encoded | Spilled]:
            attempt.verify(items, attempt.data.check)
            self.roots.check(child, items)
            return retained.kept(fresh)

        try:
            kept = await attempt.in_pool(work)
        except HostError as error:
            attempt.fail(error)
            raise
        for item in kept:  # each, whatever is wrong with others: it takes room
            retained.add(*start, item)
        for item in items:  # the same chunk may have come twice, or on a stream of the attempt before
            retained.is_new(*start, item)
            self._arrived(child.site_id, item.chunk)

    def _arrived(self, site_id: int, chunk: int) -> None:
        missing = self._missing[chunk]
        if site_id in missing:
            missing.remove(site_id)
            self._num_missing[site_id] -= 1
            if not missing:
                self._ready.append(chunk)
                if self._multiplication is not None:
                    self._multiplication.complete([chunk])
                self.reduce_ready()

    # --- averaging

    def reduce_ready(self) -> None:
        """As many at once as the threads need; nothing before `start`, before influences are told, or after the end."""
        if self._is_started and self.influences.are_told and self.attempt.closed is None:
            for _ in range(min(len(self._ready), REDUCTIONS_AT_ONCE - self._num_reducing)):
                self._num_reducing += 1
                self.attempt.tasks.spawn(self._reduce_some())

    async def _reduce_some(self) -> None:
        """One chunk after the other, while any is ready."""
        try:
            while self._ready:
                chunk = self._ready.popleft()
                if not self.collection.has(chunk):
                    await self._reduce(chunk)
        finally:
            self._num_reducing -= 1

    async def _reduce(self, chunk: int) -> None:
        attempt = self.attempt
        weight_of = self.influences.of if self._is_by_influence(chunk) else self.weights.of
        contributions = [(weight_of(c), self._contribution(c, chunk)) for c in attempt.plan.contributors]

        def work() -> Encoded:
            try:
                data = self._average(chunk, contributions)
            except AverageError as error:
                raise self._with_sites(error) from None
            encoded = Encoded(chunk, data, attempt.data.payload_hash(data))
            self.collection.file.put(chunk, data, encoded.hash)
            return encoded

        encoded = await attempt.in_pool(work)
        self.payloads.append(self._made(encoded))
        self.payload_bytes += encoded.num_bytes
        self.collection.note([chunk])
        self.turns.new_payload()

    def _multiply(self, chunk: int) -> Products:
        """In a thread."""
        data, spec = self.attempt.data, self.attempt.data.layout.chunks[chunk]
        contributions = [(1, self._contribution(c, chunk)) for c in self.attempt.plan.contributors]
        return products_of(data.travels.of(spec.role), spec.num_elements, contributions)

    def _is_by_influence(self, chunk: int) -> bool:
        """Whether what a contribution to it counts is its influence, not its tokens."""
        data = self.attempt.data
        return data.travels.of(data.layout.chunks[chunk].role).by_influence

    def _average(self, chunk: int, contributions: Contributions) -> bytes:
        """In a thread: with what was lost of the last average of the chunk, if that was made here."""
        data, plan = self.attempt.data, self.attempt.plan
        if not data.keeps_left_over(chunk):
            return data.reduce(chunk, contributions)
        fragment = data.layout.fragment_of[chunk]
        earlier, audited = self.collection.log.attempt_of(fragment, plan.base_commit), self.errors.audited
        if audited is not None:
            earlier = audited.counting(earlier, plan.term)
        error = self.errors.of(chunk, earlier)
        if audited is not None:
            error = audited.whole(chunk, earlier, error)
        left = np.empty(data.layout.chunks[chunk].num_elements, np.float32)
        payload = data.reduce(chunk, contributions, error, left)
        self.errors.keep(AttemptKey.of(plan), chunk, left)
        if audited is not None:
            audited.note(AttemptKey.of(plan), chunk, earlier, error, left)
        return payload

    def _contribution(self, member: Member, chunk: int) -> bytes | Callable[[], bytes]:
        """Or what reads it in a thread. Raises StaleError if it was dropped."""
        if member.site_id == self.attempt.me.site_id:
            return lambda: self.attempt.data.contribution(chunk)
        found = self.retained.get(member.site_id, member.incarnation, chunk)
        if found is None:
            where = self.attempt.where
            raise StaleError(f"{where}: the contribution of site {member.site_id} to chunk {chunk} was dropped")
        return found.read if isinstance(found, Spilled) else found.data

    def _with_sites(self, error: AverageError) -> AverageError:
        """Which sites' contributions stand out."""
        ids = [c.site_id for c in self.attempt.plan.contributors]
        named = tuple((ids[place], norm, limit) for place, norm, limit in error.outliers)
        text = f"{self.attempt.where}: {error}"
        if named:
            text += f" of site{'s' if len(named) > 1 else ''} {', '.join(str(site_id) for site_id, _, _ in named)}"
        return AverageError(text, error.tensor, named)

    def stood_out(self) -> tuple[int, float, float] | None:
        """Of all contributions that were averaged here, the site whose was nearest to its limit, its norm and the
        limit."""
        found = self.attempt.data.stood_out()
        return None if found is None else (self.attempt.plan.contributors[found[0]].site_id, *found[1:])

    # --- those who wait for payloads

    def _made(self, payload: Encoded) -> Made:
        """It stays in memory while there is room for it."""
        stays = self._in_memory_bytes + payload.num_bytes <= MADE_IN_MEMORY_BYTES
        self._in_memory_bytes += payload.num_bytes if stays else 0
        return Made(payload.chunk, payload.hash, payload.num_bytes, payload.data if stays else None)

    async def encoded(self, made: Sequence[Made]) -> list[Encoded]:
        """To be sent. Raises HostError, which ends the attempt too; why the attempt is closed, if it is."""
        attempt, read = self.attempt, self.collection.file.read

        def work() -> list[Encoded]:
            return [Encoded(m.chunk, read(m.chunk) if m.data is None else m.data, m.hash) for m in made]

        if all(m.data is not None for m in made):
            return work()
        try:
            return await attempt.in_pool(work)
        except (StateError, HostError) as error:
            if attempt.closed is not None:  # its file is gone
                raise attempt.closed from None
            broken = HostError(f"{error}, which this node has written in {attempt.where}; look after its disk")
            attempt.fail(broken)
            raise broken from None

    def given(self, site_id: int, num_bytes: int) -> None:
        """Payloads, to a site that says that it lacks them."""
        self.attempt.moved(self._worth_to[site_id].of(num_bytes))

    def waiting(self, for_site_id: int) -> peer_pb2.Waiting | None:
        """For a site that waits for payloads: that contributions of others are missing here, or this site's own are
        still on their way. None: it is this site's turn."""
        site_ids = self.missing_site_ids or self.turns.unsent_site_ids
        if not site_ids:
            return None
        return peer_pb2.Waiting(
            moved_bytes=self.attempt.moved_bytes,
            site_ids=site_ids,
            received_bytes=self._received_bytes.get(for_site_id, 0),
            spare_ms=self.attempt.spare_ms,
        )

    # --- children that make no progress

    def restart_clocks(self, now: float) -> None:
        """What was before is not held against the children."""
        for progress in self._progress.values():
            progress.restart(now)

    def check(self, now: float) -> None:
        """Raises PeerError if a child makes no progress."""
        for child in self.own.children:
            if self.misses(child.site_id) and (problem := self._progress[child.site_id].problem(now)):
                raise self._late(child, problem)

    def overdue(self, text: str) -> PeerError | None:
        """Of the first child whose contributions are missing."""
        late = next((child for child in self.own.children if self.misses(child.site_id)), None)
        return None if late is None else self._late(late, text)

    def _late(self, child: Member, problem: str) -> PeerError:
        return self.attempt.peer_error(
            child,
            f"{problem}; {self._num_missing[child.site_id]} of its contributions to the {len(self.own.chunks)} "
            "chunks reduced here are missing",
            sending=False,
            phase="waiting for contributions",
        )
