"""Writing on a gRPC call that the other side may end meanwhile."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import Any

import grpc
from grpc._cython import cygrpc  # type: ignore[attr-defined]

ENDED = (grpc.RpcError, asyncio.InvalidStateError)
"""What `write` raises where the other side has ended the call: with an error, or without one."""


async def write(call: Any, message: Any) -> None:
    """As `call.write`, whose error is "Internal error from Core" where the call ends while it writes: what the other
    side says of it then comes a moment later, and is lost. Raises that."""
    if not call.done():
        await call._metadata_sent.wait()
    if not call.done():
        serializer = call._request_serializer
        try:
            await call._cython_call.send_serialized_message(serializer(message) if serializer else message)
            return
        except cygrpc.InternalError:
            pass
    await call._raise_for_status()
    raise asyncio.InvalidStateError("the other side has ended the call, without an error")


async def done_writing(call: Any) -> None:
    """As `call.done_writing`, whether or not the other side has ended the call."""
    with suppress(cygrpc.InternalError):
        await call.done_writing()
