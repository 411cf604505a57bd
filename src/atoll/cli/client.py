"""Asks a coordinator how the run stands."""

from __future__ import annotations

import json
from typing import Any

from atoll.protocol.errors import InvalidMessage, PeerError

ANSWER_LIMIT_S = 10.0


def fetch_status(address: str, limit_s: float = ANSWER_LIMIT_S, *, data_ranges: bool = False) -> dict[str, Any]:
    """The document of /status.json; `data_ranges` adds every range of samples.

    Raises ConfigError for what is no address, PeerError if nobody answers.
    """
    import grpc

    from atoll.protocol.addresses import parse_address
    from atoll.protocol.transport import MAX_SESSION_MESSAGE_BYTES, channel_options
    from atoll.protocol.v1 import session_pb2, session_pb2_grpc

    parse_address(address)
    with grpc.insecure_channel(address, options=channel_options(MAX_SESSION_MESSAGE_BYTES)) as channel:
        stub = session_pb2_grpc.CoordinatorServiceStub(channel)
        try:
            response = stub.Status(session_pb2.StatusRequest(data_ranges=data_ranges), timeout=limit_s)
        except grpc.RpcError as error:
            raise PeerError(
                f"no coordinator answers at {address} ({_reason(error)}); is `atoll coordinator` running there, "
                "and is the port open from here?"
            ) from None
    try:
        document = json.loads(response.json)
    except ValueError as error:
        raise InvalidMessage(f"the coordinator at {address} sent a status that is not JSON: {error}") from None
    if not isinstance(document, dict):
        raise InvalidMessage(f"the coordinator at {address} sent a status that is not a JSON object")
    return document


def _reason(error: Any) -> str:
    details = error.details() or ""
    return details.splitlines()[0][:200] if details else str(error.code().name).lower()
