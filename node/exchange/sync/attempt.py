"""One attempt at one sync on this site, as all its parts know it: plan and members, threads and tasks, what has moved,
and whether it is over."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Executor
from contextlib import suppress
from dataclasses import InitVar, dataclass
from typing import TypeVar

from atoll.node.dataplane.sync_data import SyncData
from atoll.node.exchange.peers.counters import Counters
from atoll.node.exchange.peers.frames import FRAME_BYTES, MIN_FRAME_BYTES, NOT_FOLLOWING, Encoded
from atoll.node.exchange.peers.link_use import LinkUses
from atoll.node.exchange.peers.progress import Pace, Progress
from atoll.node.exchange.peers.uplink import Uplink
from atoll.node.exchange.sync.pacing import Pacing
from atoll.node.exchange.sync.reduction import MAX_STREAMS, Share
from atoll.node.tasks import Tasks
from atoll.protocol.errors import DigestMismatch, NotYetError, PeerError, RefusedError
from atoll.protocol.messages import Header, Member, Plan
from atoll.protocol.plans import plan_digest

T = TypeVar("T")
PACED_FRAMES, MIN_PACED_FRAME_BYTES = 128, 16 << 10
"""What a paced attempt sends is so many frames at least, unless they would be smaller: each goes at once, at the link's
rate."""
FRAME_RATES = 4
"""A link so many times as fast as the slowest that is accepted brings a frame to each peer within half a stall."""


@dataclass(eq=False)
class Attempt:
    """Its state is changed in the event loop only."""

    plan: Plan
    data: SyncData
    header: Header
    tokens: int
    """This site's weight."""
    pool: Executor
    counters: Counters
    uplink: Uplink
    share: InitVar[Share]
    spread_s: InitVar[float] = 0.0
    """In which it may send what it has to send; 0: as fast as it goes."""

    def __post_init__(self, share: Share, spread_s: float) -> None:
        """Raises RefusedError unless the plan lists this start of this site."""
        plan = self.plan
        self.digest = plan_digest(plan)
        self.where = f"run {self.header.run_id}, sync {plan.sync}, attempt {plan.attempt}"
        self.members = {member.site_id: (member, False) for member in plan.receivers}
        self.members.update((member.site_id, (member, True)) for member in plan.contributors)
        """Who is in the plan, by site id, and whether it contributes. A thousand sites open their streams at once: each
        is looked up, not searched."""
        header = self.header
        if header.site_id not in self.members:
            raise RefusedError(f"plan of sync {plan.sync} does not list site {header.site_id}")
        self.me, self.contributes = self.members[header.site_id]
        if self.me.incarnation != header.incarnation:
            raise RefusedError(
                f"plan of sync {plan.sync} is for incarnation {self.me.incarnation} of this site, this is "
                f"{header.incarnation}"
            )
        self.pace = Pace(stall_s=plan.stall_limit_s, slowest_bytes_per_s=plan.slowest_bytes_per_s)
        self.num_contributors = len(plan.contributors)
        self.place = plan.contributors.index(self.me) if self.contributes else None
        """Of this site among them."""
        self.num_others = self.num_contributors - 1
        # Progress is seen in whole frames, and a site sends to all others at once.
        peer_bytes_per_s = FRAME_RATES * plan.slowest_bytes_per_s / max(1, self.num_others)
        # Contributions to the other reducers, and the own payloads to all others.
        num_bytes = share.sent_bytes + (len(self.members) - 1) * share.own.payload_bytes
        self.frame_bytes = int(min(FRAME_BYTES, max(MIN_FRAME_BYTES, peer_bytes_per_s * plan.stall_limit_s / 2)))
        if spread_s:
            self.frame_bytes = min(self.frame_bytes, max(MIN_PACED_FRAME_BYTES, num_bytes // PACED_FRAMES))
        self.links = LinkUses()
        self.loop = asyncio.get_running_loop()
        # Each peer, receivers too, has as much a second; each stream, up or down, has a frame within half a stall.
        round_bytes = 2 * max(MAX_STREAMS, len(self.members)) * self.frame_bytes
        self.pacing = Pacing(
            num_bytes=num_bytes,
            spread_s=spread_s,
            least_bytes_per_s=max(peer_bytes_per_s * (len(self.members) - 1), round_bytes / (plan.stall_limit_s / 2)),
            now=self.loop.time(),
        )
        self._turn, self._hurried = asyncio.Lock(), asyncio.Event()
        self.moved_bytes, self.moved_at = 0, self.loop.time()
        self.finished: asyncio.Future[None] = self.loop.create_future()
        self.finished.add_done_callback(lambda f: f.cancelled() or f.exception())  # may fail before anyone awaits
        self.closed: RefusedError | NotYetError | None = None
        """Why peers are turned away; None while they are served."""
        self.tasks = Tasks(self.fail)
        """What one of them raises ends the attempt."""

    # --- who is in it

    def is_contributor(self, site_id: int) -> bool:
        return self.members.get(site_id, (None, False))[1]

    def peer_error(self, member: Member, text: str, *, sending: bool, phase: str) -> PeerError:
        where = f"site {member.site_id} at {member.address} ({self.where}, {phase})"
        return PeerError(f"{where}: {text}", member.site_id, sending=sending, phase=phase)

    # --- its work

    def in_pool(self, work: Callable[[], T]) -> asyncio.Future[T]:
        return self.loop.run_in_executor(self.pool, work)

    def fail(self, error: BaseException) -> None:
        if not self.finished.done():
            self.finished.set_exception(error)

    def cancel(self) -> None:
        self.finished.cancel()
        for task in self.tasks:
            task.cancel()

    def close(self, reason: RefusedError | NotYetError) -> None:
        if self.closed is None or isinstance(reason, RefusedError):
            self.closed = reason

    def verify(self, items: list[Encoded], check: Callable[[int, bytes], None]) -> None:
        """In a thread: hash and form of encoded chunks. Raises DigestMismatch, InvalidMessage."""
        for item in items:
            if self.data.payload_hash(item.data) != item.hash:
                raise DigestMismatch(f"{self.where}: the bytes of chunk {item.chunk} do not have their hash")
            check(item.chunk, item.data)

    # --- at which pace

    async def turn(self, frame: bytes) -> bytes:
        """Returns the frame when it may be sent; in the order of asking. One that has waited does not show the link."""
        waits = self._turn.locked()
        async with self._turn:
            while (delay_s := self.pacing.delay_s(self.loop.time())) > 0:
                waits = True
                self._hurried.clear()
                with suppress(TimeoutError):
                    async with asyncio.timeout(delay_s):
                        await self._hurried.wait()
            self.pacing.sent(len(frame), self.loop.time())
        await self.uplink.within_cap(len(frame))  # whoever measures the link is to find what this site gives of it
        return frame + NOT_FOLLOWING if waits else frame

    @property
    def spare_ms(self) -> int:
        """How long no contributor that this site knows of needs payloads; 0: one waits."""
        return self.pacing.spare_ms(self.loop.time())

    def hurry(self, spare_ms: int = 0) -> None:
        """A contributor can do without payloads for no longer than this."""
        self.pacing.hurry(spare_ms, self.loop.time())
        self._hurried.set()

    # --- what moved

    def sent_contribution(self, num_bytes: int) -> None:
        """To a reducer."""
        self.counters.sent_contribution_bytes += num_bytes
        self._sent(num_bytes)

    def sent_average(self, num_bytes: int) -> None:
        """To anybody."""
        self.counters.sent_average_bytes += num_bytes
        self._sent(num_bytes)

    def _sent(self, num_bytes: int) -> None:
        self.counters.sent_bytes += num_bytes
        self.uplink.sent(num_bytes)

    def received(self, num_bytes: int) -> None:
        self.counters.received_bytes += num_bytes

    def moved(self, num_bytes: int) -> None:
        """Chunk data that got a site on."""
        if num_bytes > 0:
            self.moved_bytes, self.moved_at = self.moved_bytes + num_bytes, self.loop.time()
            self.counters.moved_bytes += num_bytes

    def new_progress(self) -> Progress:
        """Of one peer in one direction, from now on."""
        return Progress(self.pace, self.loop.time(), share=self.num_others)
