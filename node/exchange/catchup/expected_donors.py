"""Donors that this site cannot dial, and that dial it: the streams they opened, each for one request of this site.

Whoever is not expected at this moment is turned away. See docs/decisions/0012-donors-that-dial.md.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Collection

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
        self.over: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._context = context

    def end(self) -> None:
        if not self.over.done():
            self.over.set_result(None)

    async def ask(self, request: bytes, where: str) -> None:
        try:
            await self._context.write(request)
        except grpc.aio.BaseError as error:
            raise PeerError(f"{where}: its stream broke ({error})", self.site[0]) from None

    async def read(self, where: str) -> bytes | None:
        """The next frame; None if that was all. Raises why the donor did not go on, PeerError if it does not say."""
        reading = asyncio.ensure_future(self._context.read())
        try:
            await asyncio.wait((reading, self.over), return_when=asyncio.FIRST_COMPLETED)
            data = reading.result() if reading.done() else None
        except grpc.aio.BaseError as error:
            raise PeerError(f"{where}: its stream broke ({error})", self.site[0]) from None
        finally:
            reading.cancel()
        if not isinstance(data, bytes):
            raise PeerError(f"{where}: its stream broke", self.site[0])
        message = parse(peer_pb2.DonateRequest, data)
        match message.WhichOneof("body"):
            case "frame":
                return message.frame
            case "end" if message.end.code == grpc.StatusCode.OK.value[0]:
                return None
            case "end":
                raise error_of(_CODES.get(message.end.code, grpc.StatusCode.UNKNOWN), message.end.details, where)
        raise InvalidMessage(f"{where}: a message that does not belong here")


class _Streams:
    """Of one donor."""

    def __init__(self) -> None:
        self.idle: deque[DonorStream] = deque()
        self.busy: list[DonorStream] = []
        self.changed = asyncio.Event()

    def notify(self) -> None:
        self.changed.set()
        self.changed = asyncio.Event()

    def __len__(self) -> int:
        return len(self.idle) + len(self.busy)


class ExpectedDonors:
    """Lives in one event loop."""

    def __init__(self) -> None:
        self._streams: dict[Site, _Streams] = {}
        self._arrived = asyncio.Event()

    def expect(self, sites: Collection[Site]) -> None:
        """Besides those that are here; others that were expected before are not any more."""
        for site in [site for site, streams in self._streams.items() if not streams and site not in sites]:
            del self._streams[site]
        for site in sites:
            self._streams.setdefault(site, _Streams())

    def dismiss(self) -> None:
        """Nobody is expected any more."""
        for streams in self._streams.values():
            for stream in [*streams.idle, *streams.busy]:
                stream.end()
            streams.notify()
        self._streams.clear()

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
        try:
            async with asyncio.timeout(limit_s):
                while not self.num_here:
                    self._arrived.clear()
                    await self._arrived.wait()
        except TimeoutError:
            return

    async def take(self, site: Site, where: str) -> DonorStream:
        """One that waits for a request. Raises PeerError if the donor has left."""
        while (streams := self._streams.get(site)) is not None and not streams.idle:
            try:
                async with asyncio.timeout(None if streams.busy else REOPEN_S):
                    await streams.changed.wait()
            except TimeoutError:
                break
        if streams is None or not streams.idle:
            raise PeerError(f"{where}: its connections are gone", site[0])
        stream = streams.idle.popleft()
        streams.busy.append(stream)
        return stream

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
        streams.idle.append(stream)
        streams.notify()
        self._arrived.set()
        return stream

    def gone(self, stream: DonorStream) -> None:
        """Its call has ended."""
        stream.end()
        streams = self._streams.get(stream.site)
        if streams is None:
            return
        for some in (streams.idle, streams.busy):
            if stream in some:
                some.remove(stream)
        streams.notify()


class _Asked:
    """A request over the next stream that is free."""

    def __init__(self, expected: ExpectedDonors, site: Site, request: bytes, where: str) -> None:
        self._expected = expected
        self._site = site
        self._request = request
        self._where = where
        self._stream: DonorStream | None = None

    async def read(self) -> bytes | None:
        if self._stream is None:
            self._stream = await self._expected.take(self._site, self._where)
            await self._stream.ask(self._request, self._where)
        return await self._stream.read(self._where)

    def cancel(self) -> None:
        if self._stream is not None:
            self._stream.end()
