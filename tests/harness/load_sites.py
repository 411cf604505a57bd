"""Many simulated sites in one process: they speak the session protocol to a real coordinator and train nothing.

Each has a connection of its own. A sync costs them no time but what the coordinator takes: every site says Ready a
moment after the last commit, and Done as soon as it hears a plan.
"""

from __future__ import annotations

import asyncio
import random
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import grpc

from atoll.protocol import PROTOCOL_VERSION, transport, wire
from atoll.protocol import messages as m
from atoll.protocol.digest import Digest
from atoll.protocol.layout import Manifest, Role, TensorSpec
from atoll.protocol.trust import certificates
from atoll.protocol.trust.invites import Invite
from atoll.protocol.trust.joining import join
from atoll.protocol.trust.names import Kind
from atoll.protocol.trust.security import MutualTls, Shown
from atoll.protocol.v1 import session_pb2

SESSION_METHOD = "/atoll.protocol.v1.CoordinatorService/Session"
CONNECTING_AT_ONCE = 64
TOKENS = 100


def hash_of(text: str) -> bytes:
    return Digest("load").text(text).finish()


def name_of(number: int) -> str:
    return f"site-{number:04}"


async def joined(invite: Invite) -> transport.Handshake:
    """Of a site, with the coordinator that has invited it."""
    key = certificates.new_key()
    signed = await join(invite, key, invite.subject)
    shown = Shown(
        roots=certificates.to_pem(invite.root),
        certificate=certificates.to_pem(certificates.from_der(signed.certificate)),
        key=certificates.key_to_pem(key),
    )
    return MutualTls(invite.run_id, shown).towards(Kind.COORDINATOR)


def manifest(num_elements: int) -> Manifest:
    return Manifest.canonical([TensorSpec(name="w", shape=(num_elements,), dtype="F32", role=Role.TRAINABLE)])


@dataclass
class Fleet:
    """What all sites have in common, and what was measured: seconds of this process's clock, by sync."""

    address: str
    run_id: str
    manifest: Manifest
    heartbeat_s: float
    train_s: float
    """From a commit to Ready; each site takes up to a tenth less."""
    handshakes: Mapping[str, transport.Handshake] = field(default_factory=dict)
    """By the site's name; the others are in plain text."""
    last_ready: dict[int, float] = field(default_factory=dict)
    plans: dict[int, list[float]] = field(default_factory=lambda: defaultdict(list))
    last_done: dict[int, float] = field(default_factory=dict)
    commits: dict[int, list[float]] = field(default_factory=lambda: defaultdict(list))
    received_bytes: int = 0
    num_evicted: int = 0
    num_admitted: int = 0
    joined: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when that changes."""
    num_whole_commits: int = 0  # the others left out whom they come from
    connecting: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(CONNECTING_AT_ONCE))

    async def run(self, num_sites: int) -> list[SimulatedSite]:
        """Until the run is over for all of them."""
        sites = [SimulatedSite(self, number) for number in range(num_sites)]
        await all_of([site.run() for site in sites])
        return sites

    def ready_to_plan_s(self) -> list[float]:
        """From the last Ready of a sync to each site's Plan."""
        return sorted(t - self.last_ready[sync] for sync, times in self.plans.items() for t in times)

    def done_to_commit_s(self) -> list[float]:
        return sorted(t - self.last_done[sync] for sync, times in self.commits.items() for t in times)


async def all_of(work: Sequence[Awaitable[None]]) -> None:
    async with asyncio.TaskGroup() as group:
        for item in work:
            group.create_task(_run(item))


async def _run(item: Awaitable[None]) -> None:
    await item


class SimulatedSite:
    def __init__(self, fleet: Fleet, number: int) -> None:
        self.fleet = fleet
        self.name = name_of(number)
        self.commits: list[int] = []
        self.finished = False
        self._random = random.Random(number)
        self._outgoing: asyncio.Queue[m.SiteMessage | None] = asyncio.Queue()
        self._site_id = self._seq = self._ack = self._term = 0
        self._applied = -1
        self._plan = (0, 0)
        self._timers: list[asyncio.TimerHandle] = []

    async def run(self) -> None:
        channel = transport.open_channel(
            self.fleet.address,
            handshake=self.fleet.handshakes.get(self.name),
            max_message_bytes=transport.MAX_SESSION_MESSAGE_BYTES,
        )
        async with self.fleet.connecting:
            await channel.channel_ready()
        call: Any = channel.stream_stream(SESSION_METHOD)(self._requests())  # type: ignore[arg-type]
        self._say(m.Hello(name=self.name, key=hash_of(self.name), address="127.0.0.1:1", deposits_to=1))
        beat = asyncio.create_task(self._beat())
        try:
            async for data in call:
                self.fleet.received_bytes += len(data)
                envelope = session_pb2.SessionResponse.FromString(data)
                self._ack, self._term = envelope.seq, envelope.header.term
                self._received(envelope)
        except grpc.aio.AioRpcError:
            if not self.finished:  # else the coordinator ended the stream while its last message was on its way
                raise
        finally:
            beat.cancel()
            for timer in self._timers:
                timer.cancel()
            await channel.close()

    async def _requests(self) -> AsyncIterator[bytes]:
        while (message := await self._outgoing.get()) is not None:
            self._seq += 1
            header = m.Header(
                protocol_version=PROTOCOL_VERSION,
                run_id=self.fleet.run_id,
                term=self._term,
                site_id=self._site_id,
                incarnation=1,
            )
            yield wire.to_bytes(wire.request(message, header, self._seq, self._ack))

    async def _beat(self) -> None:
        while True:
            await asyncio.sleep(self.fleet.heartbeat_s * self._random.uniform(0.8, 1.0))
            self._say(m.Heartbeat(phase="training", inner_step=len(self.commits), progress=len(self.commits)))

    def _say(self, message: m.SiteMessage) -> None:
        self._outgoing.put_nowait(message)

    # --- what it hears

    def _received(self, envelope: session_pb2.SessionResponse) -> None:
        match envelope.WhichOneof("body"):
            case "welcome":
                self._say(m.Offer(manifest_digest=self.fleet.manifest.digest, max_retained_bytes=1 << 42))
            case "send_manifest":
                for part in wire.manifest_parts(wire.encode(self.fleet.manifest)):
                    self._say(part)
            case "admitted":
                self._site_id = envelope.admitted.site_id
                self.fleet.num_admitted += 1
                self.fleet.joined.set()
                if m.AdmittedAs(envelope.admitted.admitted_as) is m.AdmittedAs.SEEDER:
                    self._apply(0)
                else:
                    self._say(m.FindSources(has_state=False, after_commit=0))
            case "sources":
                if envelope.sources.donors and self._applied < 0:
                    self._apply(0)
            case "open":
                self._train(envelope.open.sync)
            case "weights":
                self._exchanged(envelope.weights)
            case "commit":
                self.fleet.num_whole_commits += not envelope.same_contributors
                self._committed(envelope.commit)
            case "abandoned":
                self._train(envelope.abandoned.next.sync)
            case "evicted":
                self.fleet.num_evicted += 1
            case "finished":
                self.finished = True
                self._say(m.Leave(reason="the run is complete"))
                self._outgoing.put_nowait(None)

    def _apply(self, commit: int) -> None:
        self._applied = commit
        self._say(m.Applied(commit=commit, state_hash=hash_of(f"state {commit}")))

    def _train(self, sync: int) -> None:
        delay_s = self.fleet.train_s * self._random.uniform(0.9, 1.0)
        self._timers = [asyncio.get_running_loop().call_later(delay_s, self._ready, sync)]

    def _ready(self, sync: int) -> None:
        self.fleet.last_ready[sync] = asyncio.get_running_loop().time()
        self._say(m.Ready(sync=sync, tokens=TOKENS, num_steps=1))

    def _exchanged(self, plan: Any) -> None:
        """`plan`: its weights."""
        if (plan.sync, plan.attempt) <= self._plan:
            return
        self._plan = plan.sync, plan.attempt
        now = asyncio.get_running_loop().time()
        self.fleet.plans[plan.sync].append(now)
        self.fleet.last_done[plan.sync] = now
        self._say(
            m.Done(
                sync=plan.sync,
                attempt=plan.attempt,
                term=plan.term,
                payload_digest=hash_of(f"payloads {plan.sync}"),
                last_commit=self._applied,
                state_hash=hash_of(f"state {self._applied}"),
                tokens=tuple(plan.tokens),
            )
        )

    def _committed(self, commit: Any) -> None:
        self.fleet.commits[commit.sync].append(asyncio.get_running_loop().time())
        self.commits.append(commit.commit)
        self._apply(commit.commit)
        if commit.HasField("next"):
            self._train(commit.next.sync)
