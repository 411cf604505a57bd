"""The two calls of whoever wants a certificate."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import grpc
import grpc.aio

from atoll.protocol import transport
from atoll.protocol.errors import InvalidMessage, PeerError
from atoll.protocol.machine import Network
from atoll.protocol.status import from_rpc_error, unanswered
from atoll.protocol.trust import certificates
from atoll.protocol.trust.certificates import PrivateKey, PublicKey
from atoll.protocol.trust.invites import Invite
from atoll.protocol.trust.names import Kind, Subject
from atoll.protocol.trust.security import MutualTls, Shown
from atoll.protocol.v1 import session_pb2, session_pb2_grpc

CALL_LIMIT_S = 10.0
MAX_ANSWER_BYTES = 1 << 16
MAX_ROOTS = 8


async def join(
    invite: Invite, key: PrivateKey, subject: Subject, network: Network = transport
) -> session_pb2.JoinResponse:
    """What the run has signed: the certificate of `key` as that of `subject`. Raises PeerError if no coordinator
    answers, RefusedError if it refuses, InvalidMessage for what is not that."""
    shown = Shown(
        roots=certificates.to_pem(invite.root),
        certificate=certificates.to_pem(invite.certificate),
        key=certificates.key_to_pem(invite.key),
    )
    tls = MutualTls(invite.run_id, shown)
    request = session_pb2.JoinRequest(signing_request=certificates.request(key))
    signed: session_pb2.JoinResponse = await _call(tls, invite.addresses, lambda stub: stub.Join, request, network)
    check(signed, key.public_key(), subject)
    return signed


async def renew(tls: MutualTls, addresses: Sequence[str], subject: Subject, network: Network = transport) -> Shown:
    """What `subject`, a site or a relay, shows to sites for the next day, with a new key. Raises as `join` does."""
    return await _renew(tls, addresses, subject, certificates.new_key(), network, is_identity=False)


async def renew_identity(
    tls: MutualTls, addresses: Sequence[str], subject: Subject, network: Network = transport
) -> Shown:
    """What `subject` shows to the coordinator for the next year, with the key that it has. Raises as `join` does."""
    key = certificates.key_from_pem(tls.shown.key)
    return await _renew(tls, addresses, subject, key, network, is_identity=True)


async def _renew(
    tls: MutualTls, addresses: Sequence[str], subject: Subject, key: PrivateKey, network: Network, *, is_identity: bool
) -> Shown:
    request = session_pb2.RenewRequest(signing_request=certificates.request(key), identity=is_identity)
    signed: session_pb2.RenewResponse = await _call(tls, addresses, lambda stub: stub.Renew, request, network)
    check(signed, key.public_key(), subject)
    return Shown(
        roots=certificates.to_pem(*(certificates.from_der(root) for root in signed.roots)),
        certificate=certificates.to_pem(certificates.from_der(signed.certificate)),
        key=certificates.key_to_pem(key),
    )


async def _call(
    tls: MutualTls, addresses: Sequence[str], method: Callable[[Any], Any], request: Any, network: Network
) -> Any:
    """Of the first coordinator that answers."""
    problem = PeerError("no address of a coordinator")
    for address in addresses:
        channel = network.open_channel(
            address, handshake=tls.towards(Kind.COORDINATOR), max_message_bytes=MAX_ANSWER_BYTES
        )
        try:
            stub = session_pb2_grpc.CoordinatorServiceStub(channel)
            return await method(stub)(request, timeout=CALL_LIMIT_S)
        except grpc.aio.AioRpcError as error:
            found = unanswered(error, address) or from_rpc_error(error, f"the coordinator at {address}")
            if not isinstance(found, PeerError):
                raise found from None
            problem = found
        finally:
            await channel.close()
    raise problem


def check(signed: session_pb2.JoinResponse | session_pb2.RenewResponse, key: PublicKey, subject: Subject) -> None:
    """Raises InvalidMessage unless it is a certificate of that key for that subject."""
    certificate = certificates.from_der(signed.certificate)
    if not 1 <= len(signed.roots) <= MAX_ROOTS:
        raise InvalidMessage(f"the coordinator's answer has {len(signed.roots)} roots")
    if (found := certificates.subject_of(certificate)) != subject:
        raise InvalidMessage(f"the coordinator's certificate is for {found}, not for {subject}")
    if certificates.digest_of(certificate) != certificates.key_digest(key):
        raise InvalidMessage("the coordinator's certificate is for another key")
