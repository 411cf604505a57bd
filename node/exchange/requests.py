"""Checks that every request of a peer passes first. Pure."""

from __future__ import annotations

from atoll.protocol import PROTOCOL_VERSION
from atoll.protocol.errors import RefusedError
from atoll.protocol.v1 import common_pb2


def check_header(header: common_pb2.Header, run_id: str) -> None:
    """Raises RefusedError with both values for another run or protocol version."""
    if header.protocol_version != PROTOCOL_VERSION:
        raise RefusedError(
            f"protocol version {header.protocol_version}, this node speaks {PROTOCOL_VERSION}; update the older one"
        )
    if header.run_id != run_id:
        raise RefusedError(f"run {header.run_id[:64]!r}, this node is in run {run_id!r}")
