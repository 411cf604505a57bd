"""What the hosts of one site say to each other beside protocol/v1/hosts.proto: names of methods, bounds. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeVar, get_args

from atoll.node.local_protocol import MAX_FRAME_BYTES, MAX_TEXT_CHARACTERS, Piece
from atoll.protocol import messages as m
from atoll.protocol import wire
from atoll.protocol.digest import DIGEST_BYTES
from atoll.protocol.endpoints import MAX_PLACES
from atoll.protocol.errors import InvalidMessage
from atoll.protocol.fields import bounded
from atoll.protocol.hash_tree import MAX_COVER
from atoll.protocol.layout import Manifest
from atoll.protocol.messages import MAX_FRAGMENTS
from atoll.protocol.v1 import hosts_pb2

SERVICE = hosts_pb2.DESCRIPTOR.services_by_name["HostService"].full_name
ATTACH_METHOD = f"/{SERVICE}/Attach"
PUT_METHOD = f"/{SERVICE}/PutSlices"
TAKE_METHOD = f"/{SERVICE}/TakeSlices"
TAKE_FROM_HOST_METHOD = f"/{SERVICE}/TakeFromHost"
PUT_PAYLOADS_METHOD = f"/{SERVICE}/PutPayloads"
TAKE_PAYLOADS_METHOD = f"/{SERVICE}/TakePayloads"

MAX_HOSTS = 1024
MAX_MESSAGE_BYTES = 2 * MAX_FRAME_BYTES
"""A rank's frame and what is around it, or the layout of all ranks."""
HOSTS_VERSION = 2
"""Of these messages. What changes in them raises it: hosts of a site run one release, and sites of a run need not."""
MAX_VERSION_CHARACTERS = 64
KEY_BYTES = 16
MAX_DATA_BYTES = 512 << 10
"""Of slices, in one message."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HostBeat:
    """Said every quarter of a lease; a host or leader that is silent for a lease is lost. The bytes are of a host that
    does not lead, since its start: of exchanges, and what got them on."""

    sent_bytes: int = 0
    received_bytes: int = 0
    moved_bytes: int = 0
    sent_contribution_bytes: int = 0
    """Of `sent_bytes`; so is the next one."""
    sent_average_bytes: int = 0


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
    num_processes: int = 1
    """That exchange, on this host."""
    hosts_version: int = HOSTS_VERSION
    """0: of a release before there were any."""
    atoll_version: str = bounded(MAX_VERSION_CHARACTERS, "")
    """For people."""


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
    """Of the ranks that fail with it; 0: the failure is the host's own."""
    text: str = bounded(MAX_TEXT_CHARACTERS)
    exit_code: int


@dataclass(frozen=True, slots=True, kw_only=True)
class HostReady:
    """The host has read its disk: what that holds, and where peers reach the host."""

    address: str = bounded(256)
    has_state: bool
    commit: int
    state_hash: bytes = bounded(DIGEST_BYTES)
    branch: int
    error_commits: tuple[int, ...] = bounded(MAX_FRAGMENTS, ())
    """Of each fragment: the commit that has advanced the error of this host's chunks; -1: of a part of them."""
    process_addresses: tuple[str, ...] = bounded(m.MAX_ENDPOINTS, ())
    """Of its exchange processes beside its daemon."""
    site_address: str = bounded(256)
    """At which other hosts of the site ask for slices."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StateHeld:
    """What the host's disk holds now."""

    has_state: bool
    commit: int
    state_hash: bytes = bounded(DIGEST_BYTES)
    lacks: str = bounded(MAX_TEXT_CHARACTERS, "")
    """Why the host cannot go on from that by itself."""
    number: int = 0
    """Of the HoldState or RollBackHost that the host has done last."""


@dataclass(frozen=True, slots=True)
class SourcesWanted:
    """What the host was told last does not lead on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StatePublished:
    """What was to be published under that number is in the host's PUBLISH."""

    number: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SnapshotTaken:
    """The host has what it is to send of that snapshot."""

    generation: int
    fragment: int
    step: int
    seq: int


@dataclass(frozen=True, slots=True, kw_only=True)
class HostErrorsAdvanced:
    """Of the chunks of this host, as `ErrorsAdvanced` of the core."""

    commit: int
    fragment: int
    problem: str = bounded(MAX_TEXT_CHARACTERS, "")
    share: float


@dataclass(frozen=True, slots=True, kw_only=True)
class HostKept:
    """What the host is to contribute under that number is encoded and on its disk."""

    number: int
    cover: tuple[bytes, ...] = bounded(MAX_COVER, ())
    """The knots of the site's tree that are over it: `HashTree.cover`."""
    problem: str = bounded(MAX_TEXT_CHARACTERS, "")
    """Why it is of no use; empty: it is."""


HostSaid = (
    HostHello | HostBeat | RankFrame | RankClosed | RanksExited | HostFailed | HostReady | StateHeld | SourcesWanted
    | StatePublished | SnapshotTaken | HostErrorsAdvanced | HostKept | m.Done | m.ExchangeFailed | m.Products
)  # fmt: skip


# --- the leader to a host


@dataclass(frozen=True, slots=True, kw_only=True)
class HostWelcome:
    """The host is in the site, as long as this stream lasts."""

    run_id: str = bounded(128)
    settings_json: str = bounded(1 << 20)
    session: int
    """Names this stream where slices and payloads are moved beside it."""
    incarnation: int
    """Of the site."""
    hosts_version: int = HOSTS_VERSION
    """As in HostHello, and so is the next."""
    atoll_version: str = bounded(MAX_VERSION_CHARACTERS, "")


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
class SiteEnded:
    """The node has: there is nothing more to do."""

    exit_code: int
    text: str = bounded(MAX_TEXT_CHARACTERS)
    scripts_go_on: bool = False
    """Nobody has told the site to leave: its scripts may do what they do after the run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SiteLaidOut:
    """What the ranks of the site hold together."""

    generation: int
    site_id: int
    manifest: Manifest
    chunk_elements: int
    dtypes: tuple[str, ...]
    """Of the workers, for each tensor of the manifest."""
    pieces: tuple[Piece, ...]
    """What ranks of other hosts write of the tensors whose chunks this host has, host by host."""
    num_pieces: tuple[int, ...] = bounded(MAX_HOSTS)
    """Of each host of the site."""
    host_addresses: tuple[str, ...] = bounded(MAX_HOSTS)
    """Of each host, for the others; that of host 0 is known."""
    key: bytes = bounded(KEY_BYTES)
    """Of these ranks: with it hosts ask each other for what they wrote."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HoldState:
    """Be at the newest commit of these. Their one donor is the leader."""

    site_id: int
    sources: m.Sources
    number: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ApplyAtHost:
    commit: m.Commit


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishAtHost:
    """As `Values`, or `Difference` of the core."""

    number: int
    version: int
    fragment: int
    is_difference: bool
    base: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TakeSnapshot:
    """All ranks have sealed it."""

    generation: int
    fragment: int
    step: int
    seq: int


@dataclass(frozen=True, slots=True, kw_only=True)
class AdvanceAtHost:
    """As `AdvanceErrors` of the core, for the chunks of this host."""

    commit: int
    fragment: int
    base_commit: int
    error_commits: tuple[int, ...] = bounded(MAX_FRAGMENTS, ())


@dataclass(frozen=True, slots=True, kw_only=True)
class KeepAtHost:
    """As `KeepContributions` of the core, for the chunks of this host."""

    number: int
    sync: int
    fragment: int
    base_commit: int
    error_commits: tuple[int, ...] = bounded(MAX_FRAGMENTS, ())


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptBySite:
    """What all hosts keep under that number: with it each of them has proofs."""

    number: int
    fragment: int
    knots: tuple[bytes, ...] = bounded(MAX_PLACES * MAX_COVER, ())
    """The cover of each host, one after the other."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RollBackHost:
    last_commit: int
    """That stays; -1: none does."""
    branch: int
    number: int


@dataclass(frozen=True, slots=True, kw_only=True)
class BeginAtHost:
    """As `BeginExchange` of the core, for the chunks of this host."""

    plan: m.Plan
    tokens: int
    weights: tuple[int, ...] = bounded(m.MAX_MEMBERS, ())
    spread_s: float
    in_flight: tuple[int, ...] = bounded(MAX_FRAGMENTS, ())
    error_commits: tuple[int, ...] = bounded(MAX_FRAGMENTS, ())
    site_id: int
    roots: tuple[bytes, ...] = bounded(m.MAX_MEMBERS, ())


@dataclass(frozen=True, slots=True, kw_only=True)
class HurryAtHost:
    sync: int


@dataclass(frozen=True, slots=True, kw_only=True)
class CancelAtHost:
    sync: int
    attempt: int


@dataclass(frozen=True, slots=True, kw_only=True)
class DropAtHost:
    sync: int


OfState = (
    HoldState | ApplyAtHost | PublishAtHost | TakeSnapshot | AdvanceAtHost | KeepAtHost | KeptBySite | RollBackHost
)  # fmt: skip
OfExchange = BeginAtHost | m.Weights | m.Influences | HurryAtHost | CancelAtHost | DropAtHost
HostTold = (
    HostWelcome | HostBeat | RankFrame | RankClosed | StartRanks | StopRanks | SiteEnded | SiteLaidOut | OfState
    | OfExchange
)  # fmt: skip


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
class TakeFromHostRequest:
    """What the ranks of a host that does not lead have sealed, of the tensors of the host that asks."""

    host: int
    """That asks."""
    key: bytes = bounded(KEY_BYTES)
    fragment: int
    step: int
    seq: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PayloadsOf:
    """Those of that attempt."""

    session: int
    sync: int
    term: int
    attempt: int


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
