"""Who may call what: one table, and one helper through which the handlers of every service go. What is not in the table
may be called by nobody."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import wraps
from typing import Any

from atoll.protocol.errors import AtollError, RefusedError
from atoll.protocol.status import abort, begin
from atoll.protocol.trust.names import OF_A_DAY, ROLES, Kind
from atoll.protocol.trust.security import Caller, Security

COORDINATOR = "atoll.protocol.v1.CoordinatorService"
PEER = "atoll.protocol.v1.PeerService"
HOST = "atoll.protocol.v1.HostService"
_SITES = frozenset({Kind.SITE})
_HOSTS = frozenset({Kind.HOST})

MAY_CALL: Mapping[str, frozenset[Kind]] = {
    f"{COORDINATOR}/Join": frozenset({Kind.INVITE}),
    f"{COORDINATOR}/Renew": frozenset(ROLES.values()),
    f"{COORDINATOR}/Watch": frozenset(OF_A_DAY),
    f"{COORDINATOR}/Session": frozenset({Kind.SITE_IDENTITY}),
    f"{COORDINATOR}/Status": frozenset({Kind.SITE_IDENTITY, Kind.HOST_IDENTITY, Kind.VIEWER, Kind.OPERATOR}),
    f"{COORDINATOR}/Measure": frozenset({Kind.SITE_IDENTITY}),
    f"{COORDINATOR}/Operate": frozenset({Kind.OPERATOR}),
    f"{PEER}/Exchange": _SITES | _HOSTS,  # each host of a site exchanges its own chunks
    f"{PEER}/FetchState": _SITES,
    f"{PEER}/FetchPayloads": _SITES,
    f"{PEER}/Donate": _SITES,
    f"{PEER}/Probe": _SITES,
    f"{PEER}/Measure": _SITES,
    f"{PEER}/DialMe": _SITES,
    # Of the hosts of one site alone, see `WITHIN_SITE`.
    f"{HOST}/Attach": frozenset(),
    f"{HOST}/PutSlices": frozenset(),
    f"{HOST}/TakeSlices": frozenset(),
    f"{HOST}/TakeFromHost": frozenset(),
    f"{HOST}/PutPayloads": frozenset(),
    f"{HOST}/TakePayloads": frozenset(),
}
WITHIN_SITE: Mapping[str, frozenset[Kind]] = {
    f"{HOST}/Attach": _HOSTS,
    f"{HOST}/PutSlices": _HOSTS,
    f"{HOST}/TakeSlices": _HOSTS,
    f"{HOST}/TakeFromHost": _HOSTS,
    f"{HOST}/PutPayloads": _HOSTS,
    f"{HOST}/TakePayloads": _HOSTS,
    f"{PEER}/FetchState": _HOSTS,
    f"{PEER}/FetchPayloads": _HOSTS | _SITES,  # host 0 asks others for what they keep for audits
}
"""At the ports where hosts of a site wait for others of the same site: host 0, and the others for slices."""

Refusal = Callable[[Caller], str]
LetIn = Callable[[Caller, str, Any], AbstractContextManager[Any]]


def _nobody_else(caller: Caller) -> str:
    return ""


def _all(caller: Caller, method: str, context: Any) -> AbstractContextManager[None]:
    return nullcontext()


def guarded(
    service: str,
    handlers: Mapping[str, Any],
    security: Security,
    refusal: Refusal = _nobody_else,
    let_in: LetIn = _all,
    *,
    may_call: Mapping[str, frozenset[Kind]] = MAY_CALL,
) -> dict[str, Any]:
    """The handlers of that service, each for those alone that `may_call` it. `refusal`: why this caller may not,
    whatever the table says; empty if it may. `let_in` hears of each call of somebody who may, with the method and the
    call's context, and gives what the call is inside of; it may raise AtollError. In plain text nobody knows who calls,
    and everybody may."""
    checks: dict[str, Any] = {"refusal": refusal, "let_in": let_in, "may_call": may_call}
    return {
        name: handler._replace(**_guarded_behaviour(f"{service}/{name}", handler, security, **checks))
        for name, handler in handlers.items()
    }


def _guarded_behaviour(
    method: str,
    handler: Any,
    security: Security,
    *,
    refusal: Refusal,
    let_in: LetIn,
    may_call: Mapping[str, frozenset[Kind]],
) -> dict[str, Any]:
    kinds = {"unary_unary", "unary_stream", "stream_unary", "stream_stream"}
    ((field, behaviour),) = [(kind, found) for kind in kinds if (found := getattr(handler, kind)) is not None]

    @wraps(behaviour)
    async def checked(asked: Any, context: Any) -> Any:
        try:
            caller = security.caller(context)
            check(method, caller, refusal, may_call)
            lasts = let_in(caller, method, context) if caller is not None else nullcontext()
        except AtollError as error:
            await abort(context, error)
        with lasts:
            if handler.response_streaming:
                await begin(context)
            return await behaviour(asked, context)

    return {field: checked}


def check(
    method: str,
    caller: Caller | None,
    refusal: Refusal = _nobody_else,
    may_call: Mapping[str, frozenset[Kind]] = MAY_CALL,
) -> None:
    """Raises RefusedError."""
    if caller is None:
        return
    allowed = may_call.get(method, frozenset())
    if caller.subject.kind not in allowed:
        raise RefusedError(f"{caller.subject} may not call {method.rpartition('/')[2]}")
    if reason := refusal(caller):
        raise RefusedError(reason)
