"""The one table from atoll's errors to gRPC status codes, and back."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import Any, NoReturn

import grpc
import grpc.aio

from atoll.protocol.errors import (
    AtollError,
    DigestMismatch,
    HostError,
    InvalidMessage,
    NotYetError,
    PeerError,
    RefusedError,
    StaleError,
    StateError,
)
from atoll.protocol.text import clean, last_line

MAX_DETAILS_CHARACTERS = 1024
LAST_WORD_S = 2.0
"""For whoever is cut off to take the reason."""

# The first row that fits the error; the first row that has the code.
_TABLE: tuple[tuple[type[AtollError], grpc.StatusCode], ...] = (
    (DigestMismatch, grpc.StatusCode.DATA_LOSS),
    (InvalidMessage, grpc.StatusCode.INVALID_ARGUMENT),
    (StaleError, grpc.StatusCode.FAILED_PRECONDITION),
    (RefusedError, grpc.StatusCode.PERMISSION_DENIED),
    (NotYetError, grpc.StatusCode.ABORTED),
    (StateError, grpc.StatusCode.NOT_FOUND),
    (HostError, grpc.StatusCode.INTERNAL),
    (PeerError, grpc.StatusCode.UNAVAILABLE),
    (AtollError, grpc.StatusCode.UNKNOWN),
)

# Codes that gRPC gives by itself.
_FROM_GRPC: dict[grpc.StatusCode, type[AtollError]] = {
    grpc.StatusCode.RESOURCE_EXHAUSTED: InvalidMessage,  # a message over the receiver's bound
    grpc.StatusCode.UNAUTHENTICATED: RefusedError,
    grpc.StatusCode.UNIMPLEMENTED: RefusedError,  # something else listens there
}


def code_of(error: AtollError) -> grpc.StatusCode:
    return next(code for cls, code in _TABLE if isinstance(error, cls))


def details_of(error: AtollError) -> str:
    text = str(error)
    return text if len(text) <= MAX_DETAILS_CHARACTERS else text[: MAX_DETAILS_CHARACTERS - 3] + "..."


def error_of(code: grpc.StatusCode, details: str, where: str) -> AtollError:
    """The error behind a status; `where` names the peer and its address. What has no row is a PeerError."""
    cls = _FROM_GRPC.get(code)
    if cls is None:
        cls = next((cls for cls, row in _TABLE if row is code), PeerError)
    if cls in (HostError, AtollError):  # it is the peer that failed, not this host
        cls = PeerError
    text = last_line(details[:MAX_DETAILS_CHARACTERS]) or "no reason given"
    return cls(f"{where}: {text} ({code.name.lower()})" if cls is PeerError else f"{where}: {text}")


def unanswered(error: grpc.RpcError, address: str) -> PeerError | None:
    """Of a call of a coordinator that did not come to one; None if it did."""
    if error.code() not in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED):
        return None
    return PeerError(no_coordinator(address, reason_of(error)))


def reason_of(error: grpc.RpcError) -> str:
    """The first line of what it says."""
    details = error.details() or ""
    return clean(details.splitlines()[0][:200]) if details else str(error.code().name).lower()


def no_coordinator(address: str, why: str) -> str:
    """With what to look at."""
    return (
        f"no coordinator answers at {address} ({why}); is `atoll coordinator` running there, and is the port open from "
        "here?"
    )


def from_rpc_error(error: grpc.RpcError, where: str) -> AtollError:
    """The error behind an exception of a call."""
    if isinstance(error, grpc.aio.AioRpcError):
        return error_of(error.code(), error.details() or "", where)
    return PeerError(f"{where}: {last_line(str(error))}")


def was_cancelled() -> bool:
    """In a handler of CancelledError: whether the running task is to end. grpc.aio raises the same for a call that the
    other side cancelled."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


async def abort(context: grpc.aio.ServicerContext[Any, Any], error: AtollError) -> NoReturn:
    """End a call with the status of `error`."""
    await context.abort(code_of(error), details_of(error))
    raise AssertionError("abort returned")


async def begin(context: grpc.aio.ServicerContext[Any, Any]) -> None:
    """Of a call with a stream of answers, before the first. grpcio 1.85 sends the call's headers with the first answer,
    and again with the status if that write was cancelled before it ended: then the status cannot be sent, and the other
    side waits for ever."""
    with suppress(grpc.aio.BaseError):  # the call is over
        await context.send_initial_metadata(())


async def cut_off(context: grpc.aio.ServicerContext[Any, Any], error: AtollError) -> NoReturn:
    """The same as `abort`, of a call on which much may have been said: the status waits behind what the other side does
    not read, and the handler does not wait with it."""
    try:
        async with asyncio.timeout(LAST_WORD_S):
            await abort(context, error)
    except TimeoutError:
        raise asyncio.CancelledError(str(error)) from None
