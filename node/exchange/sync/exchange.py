"""One attempt at one sync on one site: contributions go to the reducers, the own chunks are reduced, and all payloads
are collected in the log. Each part of it owns its state; here they are put together, begun and ended."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Sequence
from dataclasses import InitVar, dataclass

from atoll.node.dataplane.payload_file import AttemptKey
from atoll.node.dataplane.payload_log import AttemptLog
from atoll.node.exchange.peers.dialer import Dialer
from atoll.node.exchange.sync.attempt import Attempt
from atoll.node.exchange.sync.average_errors import AverageErrors
from atoll.node.exchange.sync.collection import Collection
from atoll.node.exchange.sync.influences import Influences
from atoll.node.exchange.sync.multiplication import Products
from atoll.node.exchange.sync.reducer import Made, Reducer
from atoll.node.exchange.sync.reduction import Share
from atoll.node.exchange.sync.retained import Retained
from atoll.node.exchange.sync.roots import Roots, made_tree
from atoll.node.exchange.sync.turns import Turns
from atoll.node.exchange.sync.upstream import Upstream
from atoll.node.exchange.sync.weights import Weights
from atoll.node.tasks import end
from atoll.protocol.errors import NotYetError, PeerError, RefusedError
from atoll.protocol.messages import Averaged, LinkUse, Plan, SignedErrors
from atoll.protocol.plans import heard, with_weights

STALLS_OF_PARTS = 2
"""After the deadline, for other hosts and processes of a site to say whom they wait for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExchangeResult:
    payload_digest: bytes
    tokens: tuple[int, ...]
    """The weight of each contributor, as it was averaged."""
    links: tuple[LinkUse, ...]
    stood_out: tuple[int, float, float] | None = None
    """Of the contributions that were averaged here, the site whose was nearest to its limit, its norm and the limit."""
    averaged: Averaged | None = None
    influences: tuple[int, ...] = ()
    """The same where averages are by influence."""
    payloads_root: bytes = b""
    """With audits: over the payloads that this site made; empty if there are none."""
    errors: SignedErrors | None = None
    """With errors of averages too: the roots over these of this site, not signed yet."""


@dataclass(eq=False, kw_only=True)
class Exchange:
    """Made by `Hub.begin`; `run` it once. It answers its peers until the hub drops the sync or begins another
    attempt."""

    attempt: Attempt
    share: InitVar[Share]
    said: InitVar[Sequence[int]]
    """The weights of the contributors; nothing before they are said."""
    said_roots: InitVar[Sequence[bytes]]
    """With audits, what they contribute; the same."""
    log: AttemptLog
    retained: Retained
    errors: AverageErrors
    has_room: InitVar[bool]
    dialer: Dialer
    multiplied: Callable[[Products], None]
    """See `Reducer`."""

    def __post_init__(self, share: Share, said: Sequence[int], said_roots: Sequence[bytes], has_room: bool) -> None:
        attempt, retained = self.attempt, self.retained
        self._made = share.made
        self._deadline = math.inf
        self.weights = Weights(attempt, said, retained.weights)
        self.roots = Roots(attempt, said_roots, retained.roots)
        self.influences = Influences(attempt)
        self.turns = Turns(r.parent for r in share.of_others if r.parent and attempt.contributes)
        self.collection = Collection(attempt, self.log, self._check_complete)
        self.reducer = Reducer(
            attempt=attempt,
            share=share,
            weights=self.weights,
            roots=self.roots,
            influences=self.influences,
            multiplied=self.multiplied,
            retained=retained,
            collection=self.collection,
            errors=self.errors,
            turns=self.turns,
            has_room=has_room,
        )
        self.upstreams = [
            Upstream(
                attempt=attempt,
                reduction=reduction,
                reducer=self.reducer,
                collection=self.collection,
                turns=self.turns,
                dialer=self.dialer,
            )
            for reduction in share.of_others
        ]

    @property
    def plan(self) -> Plan:
        return self.attempt.plan

    async def run(self) -> ExchangeResult:
        """Until all payloads are in the log.

        Raises PeerError naming the peer; AverageError naming a tensor, and sites; NonFiniteError, HostError, StateError
        of this site; CancelledError after `cancel`. Contributions that are held stay for the next attempt.
        """
        with self.attempt.uplink.exchange():
            try:
                return await self._run()
            except BaseException:
                self.close(NotYetError(f"{self.attempt.where} does not run here now"))
                raise
            finally:
                await end(self.attempt.tasks)

    async def _run(self) -> ExchangeResult:
        attempt = self.attempt
        await self.reducer.make_room()
        try:
            restored = await attempt.in_pool(self._begin)
        finally:
            if attempt.finished.cancelled():
                raise asyncio.CancelledError
        self.collection.open()
        for upstream in self.upstreams:
            attempt.tasks.spawn(upstream.run())
        attempt.tasks.spawn(self.watch())
        self.reducer.start(*restored)
        self._check_complete()
        await attempt.finished
        tokens = self.weights.vector()
        averaged = with_weights(attempt.plan, tokens, self.influences.vector)
        digest = await attempt.in_pool(lambda: self.collection.seal(averaged))
        root, errors = await attempt.in_pool(self._roots)
        return ExchangeResult(
            payload_digest=digest,
            tokens=tokens,
            influences=self.influences.vector,
            links=attempt.links.longest(),
            stood_out=self.reducer.stood_out(),
            averaged=attempt.data.averaged() if attempt.me.site_id in heard(attempt.plan) else None,
            payloads_root=root,
            errors=errors,
        )

    def _roots(self) -> tuple[bytes, SignedErrors | None]:
        """In a thread, once all are in the log: over the payloads that this site made, at all of its places, and over
        the errors of them. A process that has its own chunks alone says none."""
        if not self.attempt.data.is_audited or self.attempt.data.keeps_own_alone:
            return b"", None
        root, audited = made_tree(self.collection.file, self._made).root, self.errors.audited
        if not root or audited is None:
            return root, None
        before, after = audited.sign(AttemptKey.of(self.plan), self._made)
        return root, SignedErrors(before=before, after=after)

    def _begin(self) -> tuple[list[Made], int]:
        self.collection.begin()
        for upstream in self.upstreams:
            upstream.restore()
        return self.reducer.restore()

    def _check_complete(self) -> None:
        if self.collection.is_complete and not self.attempt.finished.done():
            if self.weights.are_known and self.roots.are_told and self.influences.are_told:
                self.attempt.finished.set_result(None)
            # Every reducer has answered, so it has this site's contributions, though a sender may not have come round
            # to noting it; peers wait for that note.
            self.turns.all_sent()

    async def watch(self) -> None:
        """Raises PeerError naming whoever makes no progress, or holds up this site until the attempt's deadline."""
        loop, stall_s = self.attempt.loop, self.attempt.pace.stall_s
        self._begin_anew()
        looked_at = loop.time()
        while True:
            await asyncio.sleep(stall_s / 8)
            now = loop.time()
            if not self.weights.all_ready:
                self._begin_anew()  # the coordinator decides how long those who still train are waited for
            elif now - looked_at > stall_s / 2:
                self._restart_clocks()  # it was this process that stood still
                self._deadline += now - looked_at
            looked_at = now
            self.reducer.check(now)
            for upstream in self.upstreams:
                upstream.check(now)
            late_s = now - self._deadline
            if late_s >= 0 and (error := self._overdue(num_stalls=int(late_s / stall_s))) is not None:
                raise error

    def _begin_anew(self) -> None:
        self._restart_clocks()
        self._deadline = self.attempt.loop.time() + self.plan.deadline_s

    def _restart_clocks(self) -> None:
        now = self.attempt.loop.time()
        self.reducer.restart_clocks(now)
        for upstream in self.upstreams:
            upstream.restart_clocks(now)

    def _overdue(self, *, num_stalls: int) -> PeerError | None:
        """Names whom this site waits for in the end. None in the first stall if that is a reducer that says that it
        waits itself: it has one more stall to name the others, which ends the attempt. Its word alone blames nobody
        else. None for one more where only other parts of this site wait: each of them names whom it waits for."""
        attempt = self.attempt
        text = f"the attempt is not complete after {attempt.plan.deadline_s:.0f} s"
        if (error := self.reducer.overdue(text)) is not None:
            return error
        late = [upstream for upstream in self.upstreams if not upstream.is_done and not upstream.is_before_average]
        if not late:
            if not self.influences.are_told:
                return None  # the coordinator evicts whoever holds up all others
            if attempt.data.own is not None and num_stalls < STALLS_OF_PARTS:
                return None
            return PeerError(f"{attempt.where}: {text}; this site lacks nothing of others", phase="local")
        blamed = next((upstream for upstream in late if not upstream.waits_for), None)
        if blamed is None:
            if not num_stalls:
                return None
            blamed = late[0]
            text += f"; it says that it waits for sites {', '.join(map(str, blamed.waits_for))}, and names none of them"
        return attempt.peer_error(blamed.parent, text, sending=not blamed.all_sent, phase=blamed.phase)

    def weigh(self, weights: Sequence[int], roots: Sequence[bytes] = ()) -> None:
        """All contributors are ready, with these weights: from now on they have to get on. `roots`: none if a commit
        says it."""
        for place, (member, tokens) in enumerate(zip(self.plan.contributors, weights, strict=True)):
            try:
                self.weights.hear(member, tokens)
                for root in roots[place : place + 1]:
                    self.roots.hear(member, root)
            except RefusedError as error:
                text = f"its Ready says otherwise: {error}"
                self.attempt.fail(self.attempt.peer_error(member, text, sending=False, phase="weights"))
                return
        self.weights.are_told()
        self.roots.all_told()
        self._check_complete()

    def influence(self, influences: Sequence[int]) -> None:
        """What each contributor counts: reducers average from now on, and have to get on."""
        if not self.influences.are_told:
            self.influences.tell(influences)
            self._begin_anew()
            self.reducer.reduce_ready()
            self._check_complete()

    def cancel(self) -> None:
        """`run` ends with CancelledError at once; contributions that are held stay."""
        self.attempt.cancel()
        self.close(NotYetError(f"{self.attempt.where} was cancelled here"))

    def close(self, reason: RefusedError | NotYetError) -> None:
        """Turn peers away from now on."""
        self.attempt.close(reason)
        self.collection.close()
        self.reducer.close()
        self.turns.wake_all()

    def waits_for(self) -> tuple[list[int], list[int]]:
        """Sites whose contributions are missing here, and reducers that have been sent everything and owe payloads: of
        those, the ones that may hold up this site. None while something moves."""
        attempt = self.attempt
        is_over = attempt.closed is not None or attempt.finished.done()
        moves = attempt.loop.time() - attempt.moved_at < attempt.pace.stall_s / 4
        if is_over or moves or not self.weights.all_ready:
            return [], []
        waiting = [upstream for upstream in self.upstreams if upstream.all_sent and not upstream.is_done]
        owing = [upstream.parent.site_id for upstream in waiting if not upstream.is_before_average]
        return self.reducer.missing_site_ids, owing
