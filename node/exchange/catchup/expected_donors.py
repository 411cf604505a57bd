"""Donors that this site cannot dial, and that dial it: the streams they opened, each for one request of this site.

Whoever is not expected at this moment is turned away. See docs/decisions/0012-donors-that-dial.md.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Collection
from contextlib import suppress
from dataclasses import dataclass

import grpc
import grpc.aio

from atoll.node.exchange.catchup.donor_client import Answer
from atoll.node.exchange.peers.frames import parse
from atoll.node.exchange.peers.rpc import FETCH_STATE_METHOD, Context
from atoll.protocol.errors import InvalidMessage, PeerError, RefusedError, StaleError
from atoll.protocol.messages import Donor, Header
from atoll.protocol.status import error_of
from atoll.protocol.v1 import peer_pb2

Site = tuple[int, int]  # site id, incarnation

STREAMS_PER_DONOR = 3
"""As many as a donor serves one site at once."""
REOPEN_S = 2.0
"""How long a donor may be without any stream, between two requests."""

_CODES: dict[int, grpc.StatusCode] = {code.value[0]: code for code in grpc.StatusCode}


class DonorStream:
    """Made when a donor has opened it; `over` is set when it has served, or is not wanted or not there any more."""

    def __init__(self, site: Site, context: Context) -> None:
        self.site = site
        self.is_busy = False
        self.over: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.context = context

    def end(self) -> None:
        if not self.over.done():
            self.over.set_result(None)

    async def read(self) -> object:
        """The next message; None if the stream is not wanted or not there any more."""
        reading = asyncio.ensure_future(self.context.read())
        try:
            await asyncio.wait((reading, self.over), return_when=asyncio.FIRST_COMPLETED)
            return reading.result() if reading.done() else None
        finally:
            reading.cancel()


class ExpectedDonors:
    """Lives in one event loop."""

    def __init__(self) -> None:
        self._streams: dict[Site, list[DonorStream]] = {}  # the oldest first
        self._of_state: set[Site] = set()  # to give it
        self._of_audits: Counter[Site] = Counter()  # by how many
        self._changed = asyncio.Event()

    def _notify(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    def expect(self, sites: Collection[Site]) -> None:
        """To give their state, besides those that are here; others that were before are not any more."""
        self._of_state = {*sites, *(site for site in self._of_state if self._streams[site])}
        for site in sites:
            self._streams.setdefault(site, [])
        self._end_unwanted()

    def expect_too(self, sites: Collection[Site]) -> None:
        """For an audit, besides all that are expected, until `forget`."""
        self._of_audits.update(sites)
        for site in sites:
            self._streams.setdefault(site, [])

    def forget(self, sites: Collection[Site]) -> None:
        """An audit is over; another one may still wait for its turn with them."""
        self._of_audits -= Counter(sites)
        self._end_unwanted()

    def dismiss(self) -> None:
        """Nobody is expected any more to give its state."""
        self._of_state.clear()
        self._end_unwanted()

    def _end_unwanted(self) -> None:
        for site in self._streams.keys() - self._of_state - self._of_audits.keys():
            for stream in self._streams.pop(site):
                stream.end()
        self._notify()

    def is_here(self, donor: Donor) -> bool:
        return bool(self._streams.get((donor.site_id, donor.incarnation)))

    def awaits(self, donor: Donor) -> bool:
        """Asked, and not here."""
        return (donor.site_id, donor.incarnation) in self._streams and not self.is_here(donor)

    @property
    def num_here(self) -> int:
        return sum(bool(streams) for streams in self._streams.values())

    async def wait_for_first(self, limit_s: float) -> None:
        """Until a donor is here, but not longer than this."""
        with suppress(TimeoutError):
            async with asyncio.timeout(limit_s):
                while not self.num_here:
                    await self._changed.wait()

    async def take(self, site: Site, where: str) -> DonorStream:
        """One that waits for a request. Raises PeerError if the donor has left."""
        left_at: float | None = None
        while (streams := self._streams.get(site)) is not None:
            if (stream := next((s for s in streams if not s.is_busy), None)) is not None:
                stream.is_busy = True
                return stream
            now = asyncio.get_running_loop().time()
            left_at = None if streams else left_at or now
            try:
                async with asyncio.timeout(None if left_at is None else left_at + REOPEN_S - now):
                    await self._changed.wait()
            except TimeoutError:
                break
        raise PeerError(f"{where}: its connections are gone", site[0])

    async def ask(self, donor: Donor, method: str, request: bytes) -> Answer:
        """Over the next free one of the connections that the donor opened to this site."""
        message = peer_pb2.DonateResponse()
        asked = message.state if method == FETCH_STATE_METHOD else message.payloads
        asked.MergeFromString(request)
        asked.SetInParent()
        where = f"donor site {donor.site_id}, which dialled this site"
        return _Asked(self, (donor.site_id, donor.incarnation), message.SerializeToString(), where)

    def accept(self, message: peer_pb2.DonateOpen, me: Header, context: Context) -> DonorStream:
        """Raises RefusedError for one that is not expected, or not here, or one too many."""
        if (message.to_site_id, message.to_incarnation) != (me.site_id, me.incarnation):
            raise RefusedError(
                f"meant for start {message.to_incarnation} of site {message.to_site_id}, this is start "
                f"{me.incarnation} of site {me.site_id}"
            )
        site = message.header.site_id, message.header.incarnation
        streams = self._streams.get(site)
        if streams is None:
            raise StaleError(f"start {site[1]} of site {site[0]} is not asked to dial this site, or not any more")
        if len(streams) >= STREAMS_PER_DONOR:
            raise RefusedError(f"{len(streams)} streams of site {site[0]} are here already")
        stream = DonorStream(site, context)
        streams.append(stream)
        self._notify()
        return stream

    def gone(self, stream: DonorStream) -> None:
        """Its call has ended."""
        stream.end()
        if stream in (streams := self._streams.get(stream.site, [])):
            streams.remove(stream)
        self._notify()


@dataclass(eq=False)
class _Asked:
    """A request over the next stream that is free."""

    expected: ExpectedDonors
    site: Site
    request: bytes
    where: str
    stream: DonorStream | None = None

    async def read(self) -> bytes | None:
        """The next frame; None if that was all. Raises why the donor did not go on, PeerError if it does not say."""
        try:
            if self.stream is None:
                self.stream = await self.expected.take(self.site, self.where)
                await self.stream.context.write(self.request)
            data = await self.stream.read()
        except grpc.aio.BaseError as error:
            raise PeerError(f"{self.where}: its stream broke ({error})", self.site[0]) from None
        if not isinstance(data, bytes):
            raise PeerError(f"{self.where}: its stream broke", self.site[0])
        message = parse(peer_pb2.DonateRequest, data)
        match message.WhichOneof("body"):
            case "frame":
                return message.frame
            case "end" if message.end.code == grpc.StatusCode.OK.value[0]:
                return None
            case "end":
                code = _CODES.get(message.end.code, grpc.StatusCode.UNKNOWN)
                raise error_of(code, message.end.details, self.where)
        raise InvalidMessage(f"{self.where}: a message that does not belong here")

    def cancel(self) -> None:
        if self.stream is not None:
            self.stream.end()
