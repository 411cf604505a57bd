"""One (sync, attempt) on one site: sends contributions, reduces its own chunks, collects all payloads."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from concurrent.futures import Executor
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeVar

import grpc.aio

from atoll.node.exchange.peers.counters import Counters, Traffic
from atoll.node.exchange.peers.dialer import Dialer
from atoll.node.exchange.peers.frames import FRAME_BYTES, MIN_FRAME_BYTES, Encoded
from atoll.node.exchange.peers.progress import Pace, Progress, Worth
from atoll.node.exchange.peers.uplink import Uplink
from atoll.node.exchange.sync.ports import PayloadLog, PayloadWriter, SyncData
from atoll.node.exchange.sync.reduction import Share
from atoll.node.exchange.sync.retained import AT_ONCE, Key, Retained, free
from atoll.node.exchange.sync.spill import Spill, Spilled
from atoll.node.exchange.sync.turns import Turns
from atoll.node.exchange.sync.upstream import Upstream
from atoll.protocol.errors import (
    AverageError,
    DigestMismatch,
    HostError,
    InvalidMessage,
    NoRoomError,
    NotYetError,
    PeerError,
    RefusedError,
    StaleError,
)
from atoll.protocol.messages import Header, Member, Plan
from atoll.protocol.plans import is_weighed, plan_digest, weights, with_weights
from atoll.protocol.v1 import peer_pb2

T = TypeVar("T")
REDUCTIONS_AT_ONCE = 16
"""More than the pool has threads; a task for each of a million chunks would hold up the event loop."""
FRAME_RATES = 4
"""A link so many times as fast as the slowest that is accepted brings a frame to each peer within half a stall."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExchangeResult:
    payload_digest: bytes
    tokens: tuple[int, ...]
    """The weight of each contributor, as it was averaged."""
    sent_bytes: int
    received_bytes: int
    stood_out: tuple[int, float, float] | None = None
    """Of the contributions that were averaged here, the site whose was nearest to its limit, its norm and the limit."""


class Exchange:
    """Made by `Hub.begin`; `run` it once. It answers its peers until the hub drops the sync or begins another attempt.

    State is changed in the event loop only; `data` and the log are called in threads of `pool`.
    """

    def __init__(
        self,
        plan: Plan,
        data: SyncData,
        share: Share,
        *,
        contributes: bool,
        header: Header,
        log: PayloadLog,
        fsync: bool,
        held: Retained,
        max_retained_bytes: int,
        spill: Spill | None,
        counters: Counters,
        uplink: Uplink,
        pool: Executor,
        connect: Callable[[Member], Awaitable[grpc.aio.Channel]],
        disconnect: Callable[[str], None],
        dialer: Dialer,
    ) -> None:
        self.plan = plan
        self.plan_digest = plan_digest(plan)
        self._weighed = plan  # once `weigh` has brought the weights
        self.data = data
        self.header = header
        self.contributes = contributes
        self.counters = counters
        self.traffic = Traffic()
        self.uplink = uplink
        self.held = held
        self.connect = connect
        self.disconnect = disconnect
        self.dialer = dialer
        self._pool = pool
        self._log = log
        self._fsync = fsync
        self._writer: PayloadWriter | None = None
        self._loop = asyncio.get_running_loop()
        self.pace = Pace(stall_s=plan.stall_limit_s, slowest_bytes_per_s=plan.slowest_bytes_per_s)
        # Progress is seen in whole frames, and a site sends to all others at once.
        fitting = FRAME_RATES * plan.slowest_bytes_per_s * plan.stall_limit_s / 2 / max(1, len(plan.contributors) - 1)
        self.frame_bytes = int(min(FRAME_BYTES, max(MIN_FRAME_BYTES, fitting)))
        self.me = self._own_member()
        self._all_ready = is_weighed(plan)
        for member in plan.contributors:
            if member.tokens:  # the plan's word counts, whatever was heard in an attempt before
                held.weights[member.site_id, member.incarnation] = member.tokens
        self.where = f"run {header.run_id}, sync {plan.sync}, attempt {plan.attempt}"

        self.own_chunks = share.own_chunks
        self.others = share.others
        self.links = [Upstream(self, of_reducer) for of_reducer in share.of_reducers]
        self.turns = Turns(link.member.site_id for link in self.links if self.contributes)
        self._has_room = asyncio.Event()
        if self._fits_retained(share, max_retained_bytes, spill):
            self._has_room.set()
        self._ready = deque(share.complete)  # to be reduced
        self._num_reducing = 0
        self._makes_room = False
        self._lacking, self._num_lacking = share.lacking, share.num_lacking
        self._moved_bytes, self._moved_at = 0, self._loop.time()
        self._received_bytes = dict.fromkeys(self._num_lacking, 0)  # contributions, by site
        self._progress_of = {m.site_id: self.new_progress() for m in self.others}
        self._worth_of_others = {m.site_id: Worth(share.payload_bytes) for m in self.others}
        self._worth_to_others = {site_id: Worth(share.payload_bytes) for site_id in self.members}
        self.payloads: list[Encoded] = []  # reduced here, in the order they were finished
        self.payload_bytes = 0
        self._stored: set[int] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._finished: asyncio.Future[None] = self._loop.create_future()
        self._finished.add_done_callback(lambda f: f.cancelled() or f.exception())  # may fail before anyone awaits
        self.closed: RefusedError | NotYetError | None = None
        """Why peers are turned away; None while they are served."""

    @cached_property
    def members(self) -> dict[int, tuple[Member, bool]]:
        """Who is in the plan, by site id, and whether it contributes. A thousand sites open their streams at once: each
        is looked up, not searched."""
        found = {member.site_id: (member, False) for member in self.plan.receivers}
        found.update((member.site_id, (member, True)) for member in self.plan.contributors)
        return found

    def _own_member(self) -> Member:
        members = self.plan.contributors if self.contributes else self.plan.receivers
        for member in members:
            if member.site_id == self.header.site_id:
                if member.incarnation != self.header.incarnation:
                    raise RefusedError(
                        f"plan of sync {self.plan.sync} is for incarnation {member.incarnation} of this site, "
                        f"this is {self.header.incarnation}"
                    )
                return member
        role = "contributor" if self.contributes else "receiver"
        raise RefusedError(f"plan of sync {self.plan.sync} does not list site {self.header.site_id} as a {role}")

    def _fits_retained(self, share: Share, max_retained_bytes: int, spill: Spill | None) -> bool:
        """Whether it does as things are: contributions of other attempts may be in the way. NoRoomError if the plan is
        too big."""
        need = (len(self.others) + 1) * share.payload_bytes
        if need > max_retained_bytes:
            raise NoRoomError(
                f"{self.where}: this site would hold up to {need} bytes as reducer of {len(self.own_chunks)} chunks, "
                f"its bound is {max_retained_bytes}; raise --max-retained-mib, give it more free disk, or let more "
                "sites reduce"
            )
        on_disk = 0 if spill is None else len(self.others) * share.payload_bytes - spill.memory_limit_bytes
        if spill is not None and on_disk > 0:
            # All payloads of this attempt go to the same disk.
            free_bytes = share.free_bytes + spill.disk_bytes
            if on_disk + share.log_bytes > free_bytes:
                raise NoRoomError(
                    f"{self.where}: this site would hold up to {on_disk} bytes of contributions in {spill.folder}, "
                    f"beside {spill.memory_limit_bytes} in memory, and {share.log_bytes} of payloads, and "
                    f"{free_bytes} are free there; make room, raise --reduce-buffer-mib, or lower --max-retained-mib "
                    "so that other sites reduce more"
                )
        return self.held.num_bytes + need <= max_retained_bytes

    async def make_room(self) -> None:
        """Forgets contributions of other attempts that are in the way. Nobody sends contributions of this one before,
        and no other exchange may be begun meanwhile."""
        if self._has_room.is_set() or self._makes_room:
            await self._has_room.wait()
            return
        self._makes_room = True
        members = {(m.site_id, m.incarnation) for m in self.others}

        def wanted(key: Key) -> bool:
            return self.closed is not None or (key[2] in self._lacking and key[:2] in members)

        try:
            await self.held.keep(wanted, self._pool)
        finally:
            self._has_room.set()

    # --- running

    async def run(self) -> ExchangeResult:
        """Until all payloads are in the log.

        Raises PeerError naming the peer; AverageError naming a tensor, and sites; NonFiniteError, HostError, StateError
        of this site; CancelledError after `cancel`. Contributions that are held stay for the next attempt.
        """
        with self.uplink.exchange():
            return await self._run()

    async def _run(self) -> ExchangeResult:
        try:
            self._raise_if_cancelled()
            await self.make_room()
            await self.held.fit_memory(self._pool)  # streams of the attempt before may have ended before they did
            begun = await self.in_pool(self._begin)
            self._raise_if_cancelled()
            assert begun is not None
            self._writer, done, num_bytes = begun
            self.payloads += done
            self.payload_bytes += num_bytes
            self.turns.start(self._loop.time())
            self._restart_clocks()
            for link in self.links:
                self._spawn(link.run())
            self._spawn(self._watch())
            self._reduce_ready()
            self._check_complete()
            await self._finished
            tokens = self.weights()
            digest = await self.in_pool(lambda: self._seal(tokens))
        except BaseException:
            self.close(NotYetError(f"{self.where} does not run here now"))
            raise
        finally:
            await self._stop_tasks()
        return ExchangeResult(
            payload_digest=digest,
            tokens=tokens,
            sent_bytes=self.traffic.sent_bytes,
            received_bytes=self.traffic.received_bytes,
            stood_out=self._stood_out(),
        )

    def cancel(self) -> None:
        """`run` ends with CancelledError at once; contributions that are held stay."""
        self._finished.cancel()
        for task in self._tasks:
            task.cancel()
        self.close(NotYetError(f"{self.where} was cancelled here"))

    def forget_payloads(self) -> None:
        """It is over. An exchange is part of reference cycles, and the collector may not come for many syncs, as it
        counts objects, not bytes."""
        payloads, self.payloads, self.payload_bytes = self.payloads, [], 0
        free(payloads, self._pool)

    def close(self, reason: RefusedError | NotYetError) -> None:
        """Turn peers away from now on."""
        if self.closed is None or isinstance(reason, RefusedError):
            self.closed = reason
        self._has_room.set()
        self.turns.wake_all()

    def fail(self, error: BaseException) -> None:
        if not self._finished.done():
            self._finished.set_exception(error)

    def in_pool(self, work: Callable[[], T]) -> asyncio.Future[T]:
        return self._loop.run_in_executor(self._pool, work)

    def _spawn(self, coroutine: Coroutine[Any, Any, None]) -> None:
        task = self._loop.create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._task_done)

    def _task_done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self.fail(error)

    async def _stop_tasks(self) -> None:
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _raise_if_cancelled(self) -> None:
        if self._finished.cancelled():
            raise asyncio.CancelledError

    def _begin(self) -> tuple[PayloadWriter, list[Encoded], int] | None:
        """The log of this attempt, the payloads reduced here that an earlier run of it left there, and their bytes.

        None, and nothing in the log, if it was cancelled before its turn came."""
        if self._finished.cancelled():
            return None
        plan, data = self.plan, self.data
        writer = self._log.begin(plan.sync, plan.term, plan.attempt)
        self._stored = set(data.chunks).difference(writer.missing())
        done = []
        for chunk in self.own_chunks:
            if chunk in self._stored:
                payload = writer.read(chunk)
                done.append(Encoded(chunk, payload, data.payload_hash(payload)))
        for link in self.links:
            link.note_stored_before(self._stored)
        for _ in range(len(self._ready) if self._stored else 0):  # nobody else takes from its left before `run` goes on
            if (chunk := self._ready.popleft()) not in self._stored:
                self._ready.append(chunk)
        return writer, done, sum(len(item.data) for item in done)

    def _seal(self, tokens: tuple[int, ...]) -> bytes:
        assert self._writer is not None
        self._writer.seal(self._fsync)
        plan = self._weighed
        if weights(plan) != tokens:  # heard from the contributors, and the plan says nothing yet
            plan = with_weights(plan, tokens)
        return self._writer.digest(plan)

    # --- weights

    def hear_weight(self, member: Member, tokens: int) -> None:
        """From the header of a site's contributions. Raises RefusedError if it is not its weight."""
        if tokens <= 0:
            raise RefusedError(f"{self.where}: site {member.site_id} contributes with {tokens} tokens")
        self.held.weigh(member.site_id, member.incarnation, tokens)

    def weigh(self, plan: Plan) -> None:
        """All contributors are ready, `plan` has their weights: from now on they have to get on."""
        for member in plan.contributors:
            try:
                self.hear_weight(member, member.tokens)
            except RefusedError as error:
                self.fail(self.peer_error(member, f"its Ready says otherwise: {error}", sending=False, phase="weights"))
                return
        self._weighed = plan
        self._all_ready = True
        self._check_complete()

    def _weight_of(self, member: Member) -> int:
        return self.held.weights[member.site_id, member.incarnation]

    def _knows_weights(self) -> bool:
        """Those who reduce hear all weights from the contributors; others wait for the plan that says them."""
        return all((c.site_id, c.incarnation) in self.held.weights for c in self.plan.contributors)

    def weights(self) -> tuple[int, ...]:
        """Of the contributors, once all are known."""
        return tuple(self._weight_of(c) for c in self.plan.contributors)

    # --- contributions that arrive

    def expect_contribution(self, chunk: int) -> int:
        """The bound on its bytes. Raises InvalidMessage if this site does not reduce `chunk`."""
        if chunk not in self._lacking:
            raise InvalidMessage(f"{self.where}: chunk {chunk} is not reduced by site {self.header.site_id}")
        return self.data.max_bytes(chunk)

    def takes_from(self, site_id: int) -> bool:
        """Whether that site contributes to what is reduced here."""
        return site_id in self._num_lacking

    def is_contributor(self, site_id: int) -> bool:
        return self.members.get(site_id, (None, False))[1]

    def is_lacking(self, site_id: int) -> bool:
        """Whether contributions of that site are missing here."""
        return self._num_lacking[site_id] > 0

    def note_contribution_bytes(self, site_id: int, parts: Iterable[peer_pb2.Part]) -> None:
        """What of `parts` is progress of that site."""
        lacking = sum(len(part.data) for part in parts if site_id in self._lacking.get(part.chunk, ()))
        fresh = self._worth_of_others[site_id].of(lacking)
        self._received_bytes[site_id] += fresh
        self._progress_of[site_id].moved(fresh, self._loop.time())
        self.note_moved(fresh)

    def note_given(self, site_id: int, num_bytes: int) -> None:
        """Payloads, to a site that says that it lacks them."""
        self.note_moved(self._worth_to_others[site_id].of(num_bytes))

    def note_sent(self, num_bytes: int) -> None:
        self.traffic.sent_bytes += num_bytes
        self.counters.sent_bytes += num_bytes
        self.uplink.sent(num_bytes)

    def note_moved(self, num_bytes: int) -> None:
        if num_bytes > 0:
            self._moved_bytes, self._moved_at = self._moved_bytes + num_bytes, self._loop.time()
            self.counters.moved_bytes += num_bytes

    def verify(self, items: list[Encoded], check: Callable[[int, bytes], None]) -> None:
        """In a thread: hash and form of encoded chunks. Raises DigestMismatch, InvalidMessage."""
        for item in items:
            if self.data.payload_hash(item.data) != item.hash:
                raise DigestMismatch(f"{self.where}: the bytes of chunk {item.chunk} do not have their hash")
            check(item.chunk, item.data)

    def take_contribution(self, member: Member, item: Encoded) -> None:
        """A verified contribution. Raises InvalidMessage if another one is held."""
        self.held.add(member.site_id, member.incarnation, item)
        self._arrived(member, item.chunk)

    async def fit_memory(self) -> None:
        """What is too much for the memory goes to the disk. Raises HostError, which ends the exchange too."""
        try:
            await self.held.fit_memory(self._pool)
        except HostError as error:
            self.fail(error)
            raise

    async def held_of(self, member: Member) -> list[int]:
        """Chunks whose contribution is here, ascending. A stream of the attempt before may have brought one since
        this attempt began."""
        await self._has_room.wait()
        site_id, incarnation = member.site_id, member.incarnation
        if not self.held.holds_any(site_id, incarnation):
            return []

        def work() -> tuple[list[int], list[int]]:
            found = sorted(c for c in self.held.chunks_of(site_id, incarnation) if c in self._lacking)
            return found, [c for c in found if site_id in self._lacking[c]]

        chunks, not_noted = await self.in_pool(work)
        for place, chunk in enumerate(not_noted, 1):
            self._arrived(member, chunk)
            if place % AT_ONCE == 0:
                await asyncio.sleep(0)
        return chunks

    def _arrived(self, member: Member, chunk: int) -> None:
        lacking = self._lacking[chunk]
        if member.site_id in lacking:
            lacking.remove(member.site_id)
            self._num_lacking[member.site_id] -= 1
            if not lacking:
                self._ready.append(chunk)
                self._reduce_ready()

    def _reduce_ready(self) -> None:
        """As many at once as the threads need; nothing before `run`, or after its end."""
        if self._writer is not None and self.closed is None:
            for _ in range(min(len(self._ready), REDUCTIONS_AT_ONCE - self._num_reducing)):
                self._num_reducing += 1
                self._spawn(self._reduce_some())

    async def _reduce_some(self) -> None:
        """One chunk after the other, while any is ready."""
        try:
            while self._ready:
                chunk = self._ready.popleft()
                if chunk not in self._stored:
                    await self._reduce(chunk)
        finally:
            self._num_reducing -= 1

    async def _reduce(self, chunk: int) -> None:
        contributions = [(self._weight_of(c), self._contribution(c, chunk)) for c in self.plan.contributors]

        def work() -> Encoded:
            try:
                data = self.data.reduce(chunk, contributions)
            except AverageError as error:
                raise self._with_sites(error) from None
            encoded = Encoded(chunk, data, self.data.payload_hash(data))
            assert self._writer is not None
            self._writer.put(chunk, data, encoded.hash)
            return encoded

        encoded = await self.in_pool(work)
        self.payloads.append(encoded)
        self.payload_bytes += len(encoded.data)
        self._note_stored([chunk])
        self.turns.new_payload()

    def _stood_out(self) -> tuple[int, float, float] | None:
        found = self.data.stood_out()
        return None if found is None else (self.plan.contributors[found[0]].site_id, *found[1:])

    def _with_sites(self, error: AverageError) -> AverageError:
        """Which sites' contributions stand out."""
        ids = [c.site_id for c in self.plan.contributors]
        named = tuple((ids[place], norm, limit) for place, norm, limit in error.outliers)
        text = f"{self.where}: {error}"
        if named:
            text += f" of site{'s' if len(named) > 1 else ''} {', '.join(str(site_id) for site_id, _, _ in named)}"
        return AverageError(text, error.tensor, named)

    def _contribution(self, member: Member, chunk: int) -> bytes | Callable[[], bytes]:
        """Or what reads it in a thread. Raises StaleError if it was dropped."""
        if member.site_id == self.me.site_id:
            return lambda: self.data.contribution(chunk)
        held = self.held.get(member.site_id, member.incarnation, chunk)
        if held is None:
            raise StaleError(f"{self.where}: the contribution of site {member.site_id} to chunk {chunk} was dropped")
        return held.read if isinstance(held, Spilled) else held.data

    # --- payloads that arrive

    def is_stored(self, chunk: int) -> bool:
        return chunk in self._stored

    async def store(self, items: list[Encoded]) -> int:
        """Payloads of another reducer; how many were lacking. Raises DigestMismatch, InvalidMessage."""
        fresh = [item for item in items if item.chunk not in self._stored]

        def work() -> None:
            self.verify(fresh, self.data.check_payload)
            assert self._writer is not None
            for item in fresh:
                self._writer.put(item.chunk, item.data, item.hash)

        await self.in_pool(work)
        return self._note_stored([item.chunk for item in fresh])

    def _note_stored(self, chunks: list[int]) -> int:
        before = len(self._stored)
        self._stored.update(chunks)
        self._check_complete()
        return len(self._stored) - before

    def _check_complete(self) -> None:
        if len(self._stored) == len(self.data.chunks) and not self._finished.done():
            if self._knows_weights():
                self._finished.set_result(None)
            # Every reducer has answered, so it has this site's contributions, though a sender may not have come round
            # to noting it; peers wait for that note.
            self.turns.all_sent()

    # --- those who wait for payloads, and for whom this site waits

    def waits_for(self) -> tuple[list[int], list[int]]:
        """Sites whose contributions are missing here, and reducers that have been sent everything and owe payloads: of
        those, the ones that may hold up this site. None while something moves."""
        now = self._loop.time()
        is_over = self.closed is not None or self._finished.done()
        if is_over or not self._all_ready or now - self._moved_at < self.pace.stall_s / 4:
            return [], []
        lacking = [site_id for site_id, count in self._num_lacking.items() if count]
        return lacking, [link.member.site_id for link in self.links if link.all_sent and not link.is_done]

    def waiting(self, for_site_id: int) -> peer_pb2.Waiting | None:
        """For a site that waits for payloads: that contributions of others are missing here, or this site's own are
        still on their way. None: it is this site's turn."""
        lacking = [site_id for site_id, count in self._num_lacking.items() if count]
        unsent = list(self.turns.unsent)
        if not lacking and not unsent:
            return None
        return peer_pb2.Waiting(
            moved_bytes=self._moved_bytes,
            site_ids=lacking or unsent,
            received_bytes=self._received_bytes.get(for_site_id, 0),
        )

    # --- peers that make no progress

    def new_progress(self) -> Progress:
        return Progress(self.pace, self._loop.time(), share=len(self.plan.contributors) - 1)

    def _restart_clocks(self) -> None:
        now = self._loop.time()
        for progress in self._progress_of.values():
            progress.restart(now)
        for link in self.links:
            link.restart_clocks(now)

    async def _watch(self) -> None:
        pause_s = self.pace.stall_s / 8
        deadline = self._loop.time() + self.plan.deadline_s
        looked_at = self._loop.time()
        while True:
            await asyncio.sleep(pause_s)
            now = self._loop.time()
            if not self._all_ready:
                self._restart_clocks()  # the coordinator decides how long those who still train are waited for
                deadline = now + self.plan.deadline_s
            elif now - looked_at > self.pace.stall_s / 2:
                self._restart_clocks()  # it was this process that stood still
                deadline += now - looked_at
            looked_at = now
            for member in self.others:
                problem = self._progress_of[member.site_id].problem(now) if self._num_lacking[member.site_id] else ""
                if problem:
                    raise self._late_contributor(member, problem)
            for link in self.links:
                link.check(now)
            if now >= deadline and (error := self._overdue(is_last=now >= deadline + self.pace.stall_s)) is not None:
                raise error

    def _late_contributor(self, member: Member, problem: str) -> PeerError:
        return self.peer_error(
            member,
            f"{problem}; {self._num_lacking[member.site_id]} of its contributions to the {len(self.own_chunks)} "
            "chunks reduced here are missing",
            sending=False,
            phase="waiting for contributions",
        )

    def _overdue(self, *, is_last: bool) -> PeerError | None:
        """Names whom this site waits for in the end. None before `is_last` if that is a reducer that says that it waits
        itself: it has one more stall to name the others, which ends the attempt. Its word alone blames nobody else."""
        text = f"the attempt is not complete after {self.plan.deadline_s:.0f} s"
        for member in self.others:
            if self._num_lacking[member.site_id]:
                return self._late_contributor(member, text)
        late = [link for link in self.links if not link.is_done]
        if not late:
            return PeerError(f"{self.where}: {text}; this site lacks nothing of others", phase="local")
        link = next((link for link in late if not link.waits_for), None)
        if link is None:
            if not is_last:
                return None
            link = late[0]
            text += f"; it says that it waits for sites {', '.join(map(str, link.waits_for))}, and names none of them"
        return self.peer_error(link.member, text, sending=not link.all_sent, phase=link.phase)

    def peer_error(self, member: Member, text: str, *, sending: bool, phase: str) -> PeerError:
        return PeerError(
            f"site {member.site_id} at {member.address} ({self.where}, {phase}): {text}",
            member.site_id,
            sending=sending,
            phase=phase,
        )
