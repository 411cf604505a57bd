"""Asks a coordinator how the run stands, and reads what it answers."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from atoll.coordinator.core.view.document import RunView
from atoll.protocol.errors import ConfigError, InvalidMessage, PeerError
from atoll.protocol.strict import build, field_types
from atoll.protocol.text import clean, last_line

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
    return read_document(response.json, address)


def read_document(text: str, address: str) -> dict[str, Any]:
    """Raises InvalidMessage."""
    try:
        document = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InvalidMessage(f"the coordinator at {address} sent a status that is not JSON: {error}") from None
    if not isinstance(document, dict):
        raise InvalidMessage(f"the coordinator at {address} sent a status that is not a JSON object")
    return document


def _reason(error: Any) -> str:
    details = error.details() or ""
    return details.splitlines()[0][:200] if details else str(error.code().name).lower()


def parse_status(document: Mapping[str, Any]) -> RunView:
    """Raises InvalidMessage if something is missing or of another type; what is not known here is left alone."""
    # Errors have room for all of a traceback.
    shown = {key: _printable(document[key], key == "errors") for key in field_types(RunView) if key in document}
    try:
        return build(RunView, shown, "status", unknown=[])
    except ConfigError as error:
        raise InvalidMessage(f"{error}; is the coordinator of another version?") from None


def _printable(value: Any, is_long: bool) -> Any:
    """Names and reasons come from other machines: nothing in them may steer a terminal."""
    if isinstance(value, str):
        return clean(value) if is_long else last_line(value)
    if isinstance(value, list):
        return [_printable(item, is_long) for item in value]
    if isinstance(value, dict):
        return {key: _printable(item, is_long) for key, item in value.items()}
    return value
