"""A record as a row of the store: bytes of its body, and a checksum of all that the row says. Pure."""

from __future__ import annotations

import dataclasses
import json
import types
from base64 import b64decode, b64encode
from typing import Any, Union, cast, get_args, get_origin

from blake3 import blake3

from atoll.coordinator.core.persisted import KINDS, Row, key_of, kind_of
from atoll.protocol import wire
from atoll.protocol.messages import Deposit
from atoll.protocol.strict import field_types

CHECKSUM_BYTES = 16
TERM_BITS = 32
"""A sequence number has the term in which it was given above these."""


def checksum(*values: int | float | str | bytes) -> bytes:
    """Python's repr of these types is exact, and tells them apart."""
    return blake3(repr(values).encode(errors="surrogateescape")).digest(CHECKSUM_BYTES)


def encode(record: Row) -> bytes:
    """JSON by field; messages and bytes in it as base64 of their bytes."""
    return _encoder.encode({name: getattr(record, name) for name in field_types(type(record))}).encode()


def decode(kind: str, body: bytes) -> Row:
    """The record of `encode`. A field that it lacks has its default. Raises InvalidMessage, LookupError, TypeError or
    ValueError for what is no such record."""
    cls: Any = KINDS[kind]
    values, kinds = json.loads(body), field_types(cls)
    made: Row = cls(**{name: _decoded(kinds[name], value) for name, value in values.items()})
    return made


def deposit_of(record: Row, seq: int, kept_at: float) -> Deposit:
    """Not sealed yet."""
    key = key_of(record)
    return Deposit(
        seq=seq,
        record=kind_of(type(record)),
        kind=key.kind,
        number=key.number,
        part=key.part,
        name=key.name,
        body=encode(record),
        kept_at=kept_at,
    )


def _coded(value: Any) -> str:
    return b64encode(value if isinstance(value, bytes) else wire.encode(value)).decode()


_encoder = json.JSONEncoder(default=_coded, separators=(",", ":"))


def _decoded(kind: Any, value: Any) -> Any:
    if get_origin(kind) in (Union, types.UnionType):
        if value is None:
            return None
        (kind,) = (a for a in get_args(kind) if a is not type(None))
    if get_origin(kind) is tuple:
        return tuple(_decoded(get_args(kind)[0], item) for item in value)
    if kind is bytes:
        return b64decode(value, validate=True)
    if dataclasses.is_dataclass(kind):
        return wire.decode(cast(type[Any], kind), b64decode(value, validate=True))
    return value
