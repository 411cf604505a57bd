"""What the hosts of one site say to each other beside protocol/v1/hosts.proto: names of methods, bounds. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeVar, get_args

from atoll.node.local_protocol import MAX_FRAME_BYTES, MAX_TEXT_CHARACTERS
from atoll.protocol import wire
from atoll.protocol.errors import InvalidMessage
from atoll.protocol.fields import bounded
from atoll.protocol.v1 import hosts_pb2

SERVICE = hosts_pb2.DESCRIPTOR.services_by_name["HostService"].full_name
ATTACH_METHOD = f"/{SERVICE}/Attach"
PUT_METHOD = f"/{SERVICE}/PutSlices"
TAKE_METHOD = f"/{SERVICE}/TakeSlices"

MAX_HOSTS = 1024
MAX_MESSAGE_BYTES = MAX_FRAME_BYTES + (1 << 10)
"""A rank's frame and what is around it."""
MAX_DATA_BYTES = 512 << 10
"""Of slices, in one message."""


@dataclass(frozen=True, slots=True)
class HostBeat:
    """Said every quarter of a lease; a host or leader that is silent for a lease is lost."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankFrame:
    """A frame of the local socket, without its length."""

    connection: int
    """Of a rank to its host, as the host counts them."""
    data: bytes = bounded(MAX_FRAME_BYTES)


@dataclass(frozen=True, slots=True, kw_only=True)
class RankClosed:
    """The connection of a rank, at its other end; `text` says how, where it is known."""

    connection: int
    text: str = bounded(MAX_TEXT_CHARACTERS, "")


# --- a host to its leader


@dataclass(frozen=True, slots=True, kw_only=True)
class HostHello:
    """A host's first words."""

    protocol_version: int
    site_name: str = bounded(64)
    host: int
    """From 1; the leader is host 0."""
    num_hosts: int
    num_ranks: int
    """On this host."""
    machine: str = bounded(256, "")
    """What it is called, for people."""
    process: bytes = bounded(64, b"")
    """Of this start of the host alone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RanksExited:
    """Those of this host have ended, by themselves."""

    generation: int
    code: int
    text: str = bounded(1 << 18)


@dataclass(frozen=True, slots=True, kw_only=True)
class HostFailed:
    """The host cannot go on, and new workers would not help."""

    generation: int
    text: str = bounded(MAX_TEXT_CHARACTERS)
    exit_code: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SlicesTaken:
    """What was published under that number is in the host's PUBLISH."""

    number: int


HostSaid = HostHello | HostBeat | RankFrame | RankClosed | RanksExited | HostFailed | SlicesTaken


# --- the leader to a host


@dataclass(frozen=True, slots=True, kw_only=True)
class HostWelcome:
    """The host is in the site, as long as this stream lasts."""

    run_id: str = bounded(128)
    settings_json: str = bounded(1 << 20)
    session: int
    """Names this stream where slices are moved beside it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StartRanks:
    """In place of those before."""

    generation: int
    store_address: str = bounded(256)
    """At which the ranks of all hosts meet."""
    group_name: str = bounded(256)


@dataclass(frozen=True, slots=True, kw_only=True)
class StopRanks:
    """Of this generation, whatever they do."""

    generation: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SlicesPublished:
    """PUBLISH of the site holds what this generation of ranks is to take next."""

    generation: int
    number: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SiteEnded:
    """The node has: there is nothing more to do."""

    exit_code: int
    text: str = bounded(MAX_TEXT_CHARACTERS)


HostTold = HostWelcome | HostBeat | RankFrame | RankClosed | StartRanks | StopRanks | SlicesPublished | SiteEnded


# --- slices


@dataclass(frozen=True, slots=True, kw_only=True)
class SlicesPut:
    """What follows is what this rank sealed."""

    session: int
    generation: int
    rank: int
    step: int
    seq: int
    fragment: int
    with_frozen: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class SlicesOpen:
    """What follows is of PUBLISH: of this fragment, and so many moments of its trainable tensors."""

    fragment: int
    with_frozen: bool
    num_moments: int


_REQUESTS = wire.bodies_of(hosts_pb2.AttachRequest, {cls.__name__: cls for cls in get_args(HostSaid)})
_RESPONSES = wire.bodies_of(hosts_pb2.AttachResponse, {cls.__name__: cls for cls in get_args(HostTold)})
_Envelope = TypeVar("_Envelope", hosts_pb2.AttachRequest, hosts_pb2.AttachResponse)


def said(message: HostSaid) -> hosts_pb2.AttachRequest:
    """As it travels to the leader."""
    return _pack(hosts_pb2.AttachRequest(), _REQUESTS, message)


def told(message: HostTold) -> hosts_pb2.AttachResponse:
    """As it travels to a host."""
    return _pack(hosts_pb2.AttachResponse(), _RESPONSES, message)


def heard_of_host(envelope: hosts_pb2.AttachRequest) -> HostSaid:
    """Raises InvalidMessage if there is no known body or a bound is exceeded."""
    found: HostSaid = _unpack(envelope, _REQUESTS)
    return found


def heard_of_leader(envelope: hosts_pb2.AttachResponse) -> HostTold:
    """Raises InvalidMessage if there is no known body or a bound is exceeded."""
    found: HostTold = _unpack(envelope, _RESPONSES)
    return found


def _pack(envelope: _Envelope, names: Mapping[type, str], message: Any) -> _Envelope:
    part = getattr(envelope, names[type(message)])
    part.CopyFrom(wire.to_proto(message))
    part.SetInParent()
    return envelope


def _unpack(envelope: hosts_pb2.AttachRequest | hosts_pb2.AttachResponse, names: Mapping[type, str]) -> Any:
    body = envelope.WhichOneof("body")
    cls = next((cls for cls, name in names.items() if name == body), None)
    if cls is None:
        raise InvalidMessage("a message of unknown kind between the hosts of this site")
    return wire.from_proto(cls, getattr(envelope, str(body)))
