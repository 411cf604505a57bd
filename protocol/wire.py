"""Dataclasses of messages.py, layout.py and the local protocol <-> protobuf messages of the same name, with every
bound checked.

Generic over the dataclasses' fields; tests/unit/protocol/test_wire.py holds both sides to the same names.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import types
import zlib
from collections.abc import Iterator, Mapping, Sequence
from enum import IntEnum
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

from google.protobuf.message import DecodeError, Message

from atoll.protocol import PROTOCOL_VERSION, layout, messages, text
from atoll.protocol.differences import WHOLE, Same
from atoll.protocol.errors import DigestMismatch, InvalidMessage
from atoll.protocol.v1 import common_pb2, hosts_pb2, local_pb2, processes_pb2, session_pb2

T = TypeVar("T")
_Read = TypeVar("_Read", bound=Message)
DEFAULT_MAX_ITEMS = layout.MAX_TENSORS
DEFAULT_MAX_CHARACTERS = 4096


@functools.cache
def _proto_class(name: str) -> type[Message]:
    module: Any = next((m for m in (common_pb2, local_pb2, hosts_pb2, processes_pb2) if hasattr(m, name)), session_pb2)
    found: type[Message] = getattr(module, name)
    return found


def _check_length(where: str, length: int, least: int, limit: int) -> None:
    if not least <= length <= limit:
        allowed = f"exactly {limit}" if least else f"at most {limit}"
        raise InvalidMessage(f"{where}: {length} items, {allowed} are allowed")


@dataclasses.dataclass(frozen=True, slots=True)
class _Field:
    name: str
    kind: str  # scalar, float, enum, message
    cls: Any
    many: bool
    optional: bool
    least: int
    limit: int
    clean: bool
    """Of messages; a manifest is compared as it is, and refuses such names itself."""


def _fields(cls: type) -> tuple[_Field, ...]:
    found = _FIELDS.get(cls)
    if found is None:
        found = _FIELDS[cls] = _read_fields(cls)
    return found


_FIELDS: dict[type, tuple[_Field, ...]] = {}


def _read_fields(cls: Any) -> tuple[_Field, ...]:
    hints = get_type_hints(cls)
    result = []
    for item in dataclasses.fields(cls):
        hint, many, optional = hints[item.name], False, False
        if get_origin(hint) in (Union, types.UnionType):
            (hint,) = (a for a in get_args(hint) if a is not type(None))
            optional = True
        elif get_origin(hint) is tuple:
            hint, many = get_args(hint)[0], True
        if dataclasses.is_dataclass(hint):
            kind = "message"
        elif issubclass(hint, IntEnum):
            kind = "enum"
        else:
            kind = "float" if hint is float and item.metadata.get("finite", True) else "scalar"
        limit = item.metadata.get("max", DEFAULT_MAX_ITEMS if many else DEFAULT_MAX_CHARACTERS)
        least = item.metadata.get("min", 0)
        clean = hint is str and "max" in item.metadata
        result.append(_Field(item.name, kind, hint, many, optional, least, limit, clean))
    return tuple(result)


def to_proto(value: Any) -> Any:
    """The protobuf message of a dataclass of messages.py or layout.py."""
    cls = type(value)
    out = _proto_class(cls.__name__)()
    for item in _fields(cls):
        part = getattr(value, item.name)
        if item.kind == "message":
            if item.many:
                getattr(out, item.name).extend(to_proto(p) for p in part)
            elif part is not None:
                getattr(out, item.name).CopyFrom(to_proto(part))
                getattr(out, item.name).SetInParent()
        elif item.many:
            getattr(out, item.name).extend(part)
        else:
            setattr(out, item.name, part)
    return out


def from_proto(cls: type[T], message: Message) -> T:
    """The dataclass `cls` of a protobuf message. Raises InvalidMessage if a bound or a value is not acceptable."""
    values: dict[str, Any] = {}
    for item in _fields(cls):
        raw = getattr(message, item.name)
        where = f"{cls.__name__}.{item.name}"
        if item.many or (item.kind == "scalar" and item.cls in (str, bytes)):
            _check_length(where, len(raw), item.least, item.limit)
        if item.kind == "message":
            if item.many:
                values[item.name] = tuple(from_proto(item.cls, m) for m in raw)
            elif item.optional and not message.HasField(item.name):
                values[item.name] = None
            else:
                values[item.name] = from_proto(item.cls, raw)
        elif item.kind == "enum":
            try:
                values[item.name] = item.cls(raw)
            except ValueError:
                raise InvalidMessage(f"{where}: unknown value {raw}") from None
        elif item.many:
            values[item.name] = tuple(raw)
            if item.kind == "float" and not all(map(math.isfinite, raw)):
                raise InvalidMessage(f"{where}: not finite numbers")
        else:
            if item.kind == "float" and not math.isfinite(raw):
                raise InvalidMessage(f"{where}: not a finite number")
            if item.clean and raw:
                raw = text.clean(raw)[: item.limit]
            values[item.name] = raw
    return cls(**values)


def bodies_of(envelope: type[Message], classes: Mapping[str, type]) -> dict[type, str]:
    """Dataclass of each alternative of `body` -> the alternative's name. `classes`: by name, where these are."""
    fields = envelope.DESCRIPTOR.oneofs_by_name["body"].fields
    return {classes[item.message_type.name]: item.name for item in fields if item.message_type is not None}


_ENVELOPES = session_pb2.SessionRequest, session_pb2.SessionResponse
_BODIES = {cls: name for envelope in _ENVELOPES for cls, name in bodies_of(envelope, vars(messages)).items()}
_CLASSES = {name: cls for cls, name in _BODIES.items()}

_Envelope = TypeVar("_Envelope", session_pb2.SessionRequest, session_pb2.SessionResponse)


def _with_body(envelope: _Envelope, body: Any) -> _Envelope:
    target = getattr(envelope, _BODIES[type(body)])
    target.CopyFrom(to_proto(body))
    target.SetInParent()
    return envelope


def request(body: messages.SiteMessage, header: messages.Header, seq: int, ack: int) -> session_pb2.SessionRequest:
    return _with_body(session_pb2.SessionRequest(header=to_proto(header), seq=seq, ack=ack), body)


# --- bytes of a session: an envelope, and the checksum of all its bytes at their end

_CHECKSUM_TAG = bytes((session_pb2.SessionRequest.CHECKSUM_FIELD_NUMBER << 3 | 5,))  # 5: four bytes follow
_CHECKSUM_FIELD_BYTES = 5
_READ_WITHOUT_CHECKSUM = ("hello", "refused")


def to_bytes(envelope: session_pb2.SessionRequest | session_pb2.SessionResponse) -> bytes:
    data = envelope.SerializeToString()
    return data + _checksum_field(zlib.crc32(data))


def _checksum_field(checksum: int) -> bytes:
    return _CHECKSUM_TAG + checksum.to_bytes(4, "little")


def parse(cls: type[_Envelope], data: bytes) -> _Envelope:
    """The envelope of these bytes. Raises DigestMismatch if they are not those that were sent, InvalidMessage if they
    are and are no envelope.

    Hello and Refused of another protocol version come as they are: they are to be refused, and heard, by name.
    """
    end = len(data) - _CHECKSUM_FIELD_BYTES
    is_whole = end >= 0 and data[end:] == _checksum_field(zlib.crc32(memoryview(data)[:end]))
    envelope = cls()
    try:
        envelope.ParseFromString(data)
    except DecodeError as error:
        if is_whole:
            raise InvalidMessage(f"{len(data)} bytes that are no session message: {error}") from None
        envelope.Clear()
    if not is_whole and not _is_of_another_version(envelope):
        raise DigestMismatch(f"{len(data)} bytes whose checksum is wrong: they changed on their way")
    return envelope


def _is_of_another_version(envelope: session_pb2.SessionRequest | session_pb2.SessionResponse) -> bool:
    """Two flipped bits away from an envelope of this version: the one of its version, and the one of its checksum."""
    return (
        envelope.header.protocol_version not in (0, PROTOCOL_VERSION)
        and not envelope.checksum
        and envelope.WhichOneof("body") in _READ_WITHOUT_CHECKSUM
    )


@dataclasses.dataclass(frozen=True, slots=True)
class Body:
    """The part of a response that is the same for many sites, and its checksum."""

    data: bytes
    checksum: int


def response_body(body: messages.CoordinatorMessage, same: Same = WHOLE) -> Body:
    """What `response_around` takes: what goes to many sites is encoded once, and read once for its checksum."""
    envelope = session_pb2.SessionResponse(same_contributors=same.contributors, same_trees=same.trees)
    data = _with_body(envelope, body).SerializeToString()
    return Body(data, zlib.crc32(data))


def response_around(body: Body, header: messages.Header, seq: int, ack: int, coordinators: Sequence[str] = ()) -> bytes:
    """The bytes of a response: encoded messages that follow each other are one message with the fields of both.
    The body is first, so that its checksum goes on over what is this stream's own."""
    own = session_pb2.SessionResponse(header=to_proto(header), seq=seq, ack=ack, coordinators=coordinators)
    around = own.SerializeToString()
    return body.data + around + _checksum_field(zlib.crc32(around, body.checksum))


def left_out(envelope: session_pb2.SessionResponse) -> Same:
    """What its body lacks and `differences.complete` adds."""
    return Same(contributors=envelope.same_contributors, trees=envelope.same_trees)


def unpack(envelope: session_pb2.SessionRequest | session_pb2.SessionResponse) -> tuple[messages.Header, Any]:
    """Header and body of an envelope. Raises InvalidMessage if there is no known body or a bound is exceeded."""
    name = envelope.WhichOneof("body")
    if name is None or name not in _CLASSES:
        raise InvalidMessage("a session message without a known body")
    header = from_proto(messages.Header, envelope.header)
    return header, from_proto(_CLASSES[name], getattr(envelope, name))


def encode(value: Any) -> bytes:
    """Bytes of one dataclass, for a store. Not for digests."""
    data: bytes = to_proto(value).SerializeToString()
    return data


def decode(cls: type[T], data: bytes) -> T:
    return from_proto(cls, _read(_proto_class(cls.__name__), data))


def _read(cls: type[_Read], data: bytes) -> _Read:
    try:
        return cls.FromString(data)
    except DecodeError as error:
        raise InvalidMessage(f"{cls.DESCRIPTOR.name}: {error}") from None


def manifest_parts(data: bytes) -> Iterator[messages.ManifestPart]:
    """An encoded manifest as messages, in order."""
    for first in range(0, len(data), messages.MANIFEST_PART_BYTES):
        part = data[first : first + messages.MANIFEST_PART_BYTES]
        yield messages.ManifestPart(first_byte=first, total_bytes=len(data), data=part)


def decode_manifest(data: bytes, max_tensors: int | None = None) -> layout.Manifest:
    """Raises InvalidMessage, before it makes anything of tensors that are too many."""
    message = _read(common_pb2.Manifest, data)
    if max_tensors is not None and len(message.tensors) > max_tensors:
        raise InvalidMessage(f"it has {len(message.tensors)} tensors")
    return from_proto(layout.Manifest, message)
