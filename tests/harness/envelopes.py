"""A response of the coordinator as one message, where the product sends its body and what is around it."""

from __future__ import annotations

from atoll.protocol import messages, wire
from atoll.protocol.v1 import session_pb2


def response(
    body: messages.CoordinatorMessage, header: messages.Header, seq: int, ack: int
) -> session_pb2.SessionResponse:
    envelope = session_pb2.SessionResponse(header=wire.to_proto(header), seq=seq, ack=ack)
    envelope.MergeFromString(wire.response_body(body).data)
    return envelope
