"""The calls by which somebody comes to a certificate: Join by an invite, once, and Renew by an identity."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any

import grpc

from atoll.coordinator.authority import Authority
from atoll.coordinator.core.core import Core
from atoll.coordinator.core.events import Answer, Asked, InviteAsked, JoinAsked, RenewAsked
from atoll.coordinator.noting import TOLD_TO_END, refused
from atoll.protocol.addresses import is_unspecified
from atoll.protocol.errors import AtollError, ConfigError, InvalidMessage, PeerError, RefusedError
from atoll.protocol.status import abort
from atoll.protocol.trust import certificates
from atoll.protocol.trust.certificates import PublicKey
from atoll.protocol.trust.invites import MAX_ADDRESSES, check_addresses
from atoll.protocol.trust.names import OF_A_DAY, ROLES
from atoll.protocol.trust.security import Caller, Security
from atoll.protocol.v1 import session_pb2

KINDS = {kind: role for role, kind in ROLES.items()}


class Enrolment:
    """Beside a core, which decides; `ask` brings it what a person or an invite asks for, and its answer once that is
    kept."""

    def __init__(
        self, authority: Authority, security: Security, core: Core, ask: Callable[[Asked], Awaitable[Answer]]
    ) -> None:
        self._authority = authority
        self._security = security
        self._core = core
        self._ask = ask
        self.address_of: Callable[[str], str] = lambda peer: ""
        """From where the connection that gRPC knows as that has come; empty if it is not known."""

    @property
    def handlers(self) -> dict[str, Any]:
        """By the method's name."""
        return {
            "Join": grpc.unary_unary_rpc_method_handler(
                self.join,
                request_deserializer=session_pb2.JoinRequest.FromString,
                response_serializer=session_pb2.JoinResponse.SerializeToString,
            ),
            "Renew": grpc.unary_unary_rpc_method_handler(
                self.renew,
                request_deserializer=session_pb2.RenewRequest.FromString,
                response_serializer=session_pb2.RenewResponse.SerializeToString,
            ),
        }

    def refusal(self, caller: Caller) -> str:
        """Why somebody whose certificate is in order may call nothing any more; empty if it may."""
        subject = caller.subject
        role = KINDS.get(subject.kind)
        now_s = self._authority.machine.wall_time()
        return self._core.refusal(role, subject.name, caller.key_digest, now_s) if role is not None else ""

    async def invite(self, asked: InviteAsked, own: str, shared: tuple[str, ...] = ()) -> Answer:
        """With the invite or the token as what was found, once the run knows it. `own`: where this coordinator is
        reached, if nobody says where; `shared`: where all are that share the store."""
        authority = self._authority
        try:
            said = _reachable(asked.addresses or (own,)) if not asked.is_token else ()
            addresses = tuple(dict.fromkeys((*said, *shared)))[:MAX_ADDRESSES]
        except (ConfigError, InvalidMessage) as error:
            return await refused(self._ask, asked, str(error))
        asked = replace(asked, invite_id=authority.new_invite_id())
        answer = await self._ask(asked)
        if answer.problem:
            return answer
        try:
            made = authority.token(asked) if asked.is_token else authority.invite(asked, addresses)
        except AtollError as error:  # the root has expired; what the run knows now is of no use to anybody
            return await refused(self._ask, asked, str(error), how="failed")
        return replace(answer, found=made)

    @property
    def root_pem(self) -> str:
        """The run's roots, by which everybody knows everybody, the one that signs first; no secret."""
        return certificates.to_pem(*map(certificates.from_der, self._authority.roots)).decode()

    @property
    def root_until_s(self) -> float:
        """When the run's root that signs expires, in seconds since 1970."""
        return self._authority.root.certificate.not_valid_after_utc.timestamp()

    def may_look(self, token: str) -> bool:
        """Whether whoever shows this is a viewer."""
        found = self._authority.token_of(token)
        return found is not None and found.token_id in self._core.token_ids

    async def join(self, request: session_pb2.JoinRequest, context: Any) -> session_pb2.JoinResponse:
        try:
            key = certificates.requested_key(request.signing_request)
            invite = self._caller(context).subject
            came_from, digest = self.address_of(context.peer()), certificates.key_digest(key)
            answer = await self._ask(JoinAsked(invite_id=invite.name, key_digest=digest, came_from=came_from))
            _check(answer)
        except AtollError as error:
            await abort(context, error)
        role, _, name = answer.found.partition("/")
        last_start = self._core.last_start(name) if role == "site" else 0
        certificate = self._authority.certify(key, ROLES[role], name)
        return session_pb2.JoinResponse(certificate=certificate, roots=self._authority.roots, incarnation=last_start)

    async def renew(self, request: session_pb2.RenewRequest, context: Any) -> session_pb2.RenewResponse:
        try:
            key = certificates.requested_key(request.signing_request)
            caller = self._caller(context)
            kind = caller.subject.kind
            if request.identity:
                await self._renew_identity(caller, key)
            elif kind in OF_A_DAY:
                kind = OF_A_DAY[kind]
            else:
                raise RefusedError(f"{caller.subject} gets no certificate for sites")
        except AtollError as error:
            await abort(context, error)
        certificate = self._authority.certify(key, kind, caller.subject.name)
        return session_pb2.RenewResponse(certificate=certificate, roots=self._authority.roots)

    async def _renew_identity(self, caller: Caller, key: PublicKey) -> None:
        """Kept before it is signed: who has not renewed is known by that. The key stays, by which the run knows it.
        Raises RefusedError."""
        if certificates.key_digest(key) != caller.key_digest:
            raise RefusedError(
                f"the identity of {caller.subject} is renewed with its own key alone: join with an invite"
            )
        subject = caller.subject
        asked = RenewAsked(role=KINDS[subject.kind], name=subject.name, key_digest=caller.key_digest)
        _check(await self._ask(asked))

    def _caller(self, context: Any) -> Caller:
        """Raises RefusedError."""
        caller = self._security.caller(context)
        if caller is None:
            raise RefusedError("this coordinator is in plain text, where nobody is certified")
        return caller


def _check(answer: Answer) -> None:
    """Raises PeerError, where again later with the same key is in order, or RefusedError."""
    if answer.problem:
        raise (PeerError if answer.problem == TOLD_TO_END else RefusedError)(answer.problem)


def _reachable(addresses: tuple[str, ...]) -> tuple[str, ...]:
    """Raises ConfigError or InvalidMessage for what nobody reaches."""
    check_addresses(addresses)
    for address in addresses:
        if is_unspecified(address):
            raise ConfigError(
                f"{address} is every address of this machine: say where sites reach it, with `atoll invite "
                "--address HOST:PORT` or `atoll coordinator --advertise HOST:PORT`"
            )
    return addresses
