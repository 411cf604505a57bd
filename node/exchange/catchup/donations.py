"""The donor's side of a transfer that the donor dials: it calls a site that cannot dial it, and answers its requests.

See docs/decisions/0012-donors-that-dial.md. What is asked is answered by the same `DonorServer` as a dialled request.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass, field

import grpc
import grpc.aio

from atoll.node.exchange.catchup.donor_server import MAX_REQUESTS, DonorServer
from atoll.node.exchange.catchup.expected_donors import STREAMS_PER_DONOR
from atoll.node.exchange.peers.dialer import Dialer, Purpose
from atoll.node.exchange.peers.frames import parse
from atoll.node.exchange.peers.rpc import DONATE_METHOD, NotRead, Stream, open_stream, write_within
from atoll.node.tasks import end, together
from atoll.protocol import wire
from atoll.protocol.errors import AtollError, InvalidMessage, StaleError
from atoll.protocol.messages import Header, Member
from atoll.protocol.status import code_of, details_of, from_rpc_error, was_cancelled
from atoll.protocol.v1 import peer_pb2

log = logging.getLogger(__name__)

MAX_SITES = MAX_REQUESTS
"""Dialled at once; as many as can be served. Others ask again."""
IDLE_S = 30.0
"""A site that asks for nothing for so long is asked whether it still expects this one (an audit may wait for its turn),
but left if others may want the place. One that does not take the end of an answer is left."""


@dataclass(eq=False, kw_only=True)
class Donations:
    """Lives in one event loop. `donor` raises NotYetError while there is nothing to give."""

    identity: Callable[[], Header]
    dialer: Dialer
    donor: Callable[[], DonorServer]
    _dialled: dict[Member, asyncio.Task[None]] = field(default_factory=dict, init=False)

    def dial(self, member: Member) -> None:
        """Once, however often it is asked for."""
        if member in self._dialled:
            return
        if len(self._dialled) >= MAX_SITES:
            log.info("site %d is not dialled: %d others are", member.site_id, len(self._dialled))
            return
        task = asyncio.get_running_loop().create_task(self._serve(member))
        self._dialled[member] = task
        task.add_done_callback(lambda _: self._dialled.pop(member, None))

    async def close(self) -> None:
        await end(self._dialled.values())

    async def _serve(self, member: Member) -> None:
        """Until that site wants nothing more, or cannot be reached."""
        where = f"site {member.site_id} at {member.address}, which asked to be dialled"
        try:
            channel = await self.dialer.channel(member, Purpose.DONATE)
        except AtollError as error:
            log.info("%s: %s", where, error)
            return
        try:
            await together([self._streams(channel, member, where) for _ in range(STREAMS_PER_DONOR)])
        finally:
            self.dialer.disconnect(member, Purpose.DONATE)

    async def _streams(self, channel: grpc.aio.Channel, member: Member, where: str) -> None:
        """One after the other."""
        try:
            while await self._one(channel, member, where):
                pass
        except StaleError as error:
            log.debug("%s", error)  # it has all that it wanted
        except NotRead as error:
            log.warning("%s", error)
        except AtollError as error:
            log.info("%s", error)

    async def _one(self, channel: grpc.aio.Channel, member: Member, where: str) -> bool:
        """One request, or none for a while. False if there is none any more. Raises one of atoll's errors if the site
        is not to be had."""
        call = open_stream(channel, DONATE_METHOD)
        asked = False
        try:
            me = wire.to_proto(self.identity())
            opened = peer_pb2.DonateOpen(header=me, to_site_id=member.site_id, to_incarnation=member.incarnation)
            async with asyncio.timeout(IDLE_S):
                await call.write(peer_pb2.DonateRequest(open=opened).SerializeToString())
            try:
                async with asyncio.timeout(IDLE_S):
                    data = await call.read()
            except TimeoutError:
                return len(self._dialled) < MAX_SITES  # whom the site expects no more it turns away
            if not isinstance(data, bytes):
                return False
            asked = True
            self.dialer.reached(member)
            await self._answer(call, data, where)
            async with asyncio.timeout(IDLE_S):
                await call.done_writing()
                await call.read()  # all is taken when the other side ends the stream
        except TimeoutError:
            return False
        except (grpc.RpcError, asyncio.InvalidStateError) as error:
            if asked or not isinstance(error, grpc.RpcError):
                return asked  # it does not want the rest, and may have another request
            self.dialer.failed(member)
            raise from_rpc_error(error, where) from None
        except asyncio.CancelledError:
            if was_cancelled():
                raise
            return False
        finally:
            call.cancel()
        return True

    async def _answer(self, call: Stream, data: bytes, where: str) -> None:
        """Raises NotRead; what is wrong with the request is the answer."""

        async def write(frame: bytes) -> None:
            await call.write(peer_pb2.DonateRequest(frame=frame).SerializeToString())

        ended = peer_pb2.DonateEnd()
        try:
            request = parse(peer_pb2.DonateResponse, data)
            if (body := request.WhichOneof("body")) is None:
                raise InvalidMessage("a request for nothing")
            await self.donor().give(getattr(request, body), write, where)
        except NotRead:
            raise
        except AtollError as error:
            ended = peer_pb2.DonateEnd(code=code_of(error).value[0], details=details_of(error))
        await write_within(IDLE_S, call.write, peer_pb2.DonateRequest(end=ended).SerializeToString(), where)
