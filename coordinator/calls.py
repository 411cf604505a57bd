"""How the calls of the coordinator's service are read and answered, by the name of the method."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

import grpc

from atoll.coordinator import limits
from atoll.protocol.errors import PeerError
from atoll.protocol.pace import Buckets
from atoll.protocol.status import abort
from atoll.protocol.trust.names import Subject
from atoll.protocol.trust.security import Caller
from atoll.protocol.v1 import session_pb2


def handlers(session: Callable[..., Any], status: Callable[..., Any], operate: Callable[..., Any]) -> dict[str, Any]:
    """Those of every run. Bytes come into a session: malformed ones are counted and answered there instead of vanishing
    inside gRPC. Bytes go out of it: what goes to many sites is encoded once."""
    return {
        "Session": grpc.stream_stream_rpc_method_handler(session),
        "Status": grpc.unary_unary_rpc_method_handler(
            status,
            request_deserializer=session_pb2.StatusRequest.FromString,
            response_serializer=session_pb2.StatusResponse.SerializeToString,
        ),
        "Operate": grpc.unary_unary_rpc_method_handler(
            operate,
            request_deserializer=session_pb2.OperateRequest.FromString,
            response_serializer=session_pb2.OperateResponse.SerializeToString,
        ),
    }


class Paced:
    """Calls of each method, by one certificate's name."""

    def __init__(self) -> None:
        self._buckets = Buckets[tuple[str, Subject]](limits.CALLS_OF_ONE, limits.MAX_SOURCES)

    def take(self, caller: Caller, method: str, now: float) -> None:
        """Raises PeerError for somebody who calls too often: again later is in order."""
        if not self._buckets.take((method, caller.subject), now):
            name, pace = method.rpartition("/")[2], limits.CALLS_OF_ONE
            raise PeerError(f"{caller.subject} calls {name} more than {pace.per_s:g} times a second: try again later")


def all_put_off(why: Callable[[Any], str]) -> dict[str, Any]:
    """Every method: whoever calls is told to try again later. `why`: for the caller of that context."""

    async def put_off(asked: Any, context: Any) -> NoReturn:
        await abort(context, PeerError(why(context)))

    methods = session_pb2.DESCRIPTOR.services_by_name["CoordinatorService"].methods
    return {
        method.name: (
            grpc.stream_stream_rpc_method_handler(put_off)
            if method.client_streaming
            else grpc.unary_unary_rpc_method_handler(put_off)
        )
        for method in methods
    }
