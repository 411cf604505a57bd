"""Hears from the coordinator, as long as a process lives, which roots are in force, who is banned, who else may serve
the run, and which tokens of viewers it knows."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any

import grpc
import grpc.aio

from atoll.protocol import transport
from atoll.protocol.digest import DIGEST_BYTES, Digest
from atoll.protocol.errors import AtollError, ConfigError, InvalidMessage, PeerError
from atoll.protocol.machine import Network
from atoll.protocol.messages import MAX_BANNED
from atoll.protocol.status import from_rpc_error, was_cancelled
from atoll.protocol.trust import certificates
from atoll.protocol.trust.certificates import Certificate
from atoll.protocol.trust.invites import check_addresses
from atoll.protocol.trust.joining import MAX_ROOTS
from atoll.protocol.trust.names import Kind
from atoll.protocol.trust.security import MutualTls
from atoll.protocol.trust.tokens import MAX_ID_CHARACTERS, MAX_TOKENS
from atoll.protocol.v1 import session_pb2, session_pb2_grpc

log = logging.getLogger(__name__)

MAX_SAID_BYTES = 8 << 20
FIRST_WAIT_S, MOST_WAIT_S = 0.5, 10.0
"""Before the coordinator is asked again."""


def roots_digest(roots: Sequence[bytes]) -> bytes:
    """By which the coordinator knows that these are trusted; the order counts."""
    digest = Digest("atoll/roots/v1")
    for root in roots:
        digest.data(root)
    return digest.finish()[:DIGEST_BYTES]


@dataclass(frozen=True, slots=True)
class News:
    """What a coordinator says to all that watch."""

    roots: list[Certificate]
    """Those that are in force, the one that signs first."""
    banned: tuple[str, ...]
    """Names of sites."""
    coordinators: tuple[str, ...]
    """Addresses of all that may serve the run; empty if only this one is known to."""
    tokens: frozenset[str] | None
    """Ids of viewers' tokens that were given out and not taken back; None from a coordinator that does not say it."""


def read(said: session_pb2.WatchResponse) -> News:
    """Raises InvalidMessage."""
    if not 1 <= len(said.roots) <= MAX_ROOTS or len(said.banned) > MAX_BANNED:
        raise InvalidMessage(f"{len(said.roots)} roots and {len(said.banned)} names that are banned")
    if len(said.tokens.ids) > MAX_TOKENS or any(len(token_id) > MAX_ID_CHARACTERS for token_id in said.tokens.ids):
        raise InvalidMessage(f"{len(said.tokens.ids)} tokens, or an id of more than {MAX_ID_CHARACTERS} characters")
    roots = [certificates.from_der(root) for root in said.roots]
    if len({certificates.salt_of(root) for root in roots}) != 1:
        raise InvalidMessage("roots of several runs")
    try:
        if said.coordinators:
            check_addresses(said.coordinators)
    except ConfigError as error:
        raise InvalidMessage(str(error)) from None
    known = frozenset(said.tokens.ids) if said.HasField("tokens") else None
    return News(roots, tuple(said.banned), tuple(said.coordinators), known)


async def watch(
    tls: MutualTls,
    addresses: Callable[[], Sequence[str]],
    heed: Callable[[News], Awaitable[None]],
    network: Network = transport,
) -> None:
    """Until it is cancelled. `addresses`: of coordinators, as far as they are known by now. `heed` returns when roots
    and bans are in force here."""
    wait_s, told = FIRST_WAIT_S, ""
    while True:
        for address in addresses():
            try:
                await _watch(tls, address, heed, network)
            except Exception as error:  # whatever it is: nobody waits for this, and a root may be replaced
                if not isinstance(error, PeerError) and str(error) != told:
                    told, is_fault = str(error), not isinstance(error, AtollError)
                    level = logging.ERROR if is_fault else logging.WARNING
                    log.log(level, "it is not known who is banned: %s", told, exc_info=is_fault)
            else:
                wait_s, told = FIRST_WAIT_S, ""
        await asyncio.sleep(wait_s)
        wait_s = min(2.0 * wait_s, MOST_WAIT_S)


async def _watch(
    tls: MutualTls,
    address: str,
    heed: Callable[[News], Awaitable[None]],
    network: Network,
) -> None:
    """Returns when a coordinator that was heard ends it. Raises PeerError if it was not, RefusedError,
    InvalidMessage."""
    channel = network.open_channel(address, handshake=tls.towards(Kind.COORDINATOR), max_message_bytes=MAX_SAID_BYTES)
    num_heard = 0
    try:
        call: Any = session_pb2_grpc.CoordinatorServiceStub(channel).Watch()
        while (said := await call.read()) is not grpc.aio.EOF:
            await heed(read(said))
            num_heard += 1
            await call.write(session_pb2.WatchRequest(roots_digest=roots_digest(said.roots)))
    except grpc.aio.AioRpcError as error:
        found = from_rpc_error(error, f"the coordinator at {address}")
        if not num_heard or not isinstance(found, PeerError):
            raise found from None
    except (asyncio.InvalidStateError, asyncio.CancelledError):
        if was_cancelled():
            raise
    finally:
        await channel.close()
