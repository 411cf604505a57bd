"""What a node and its exchange processes say to each other beside protocol/v1/processes.proto: frames, bounds. Pure.

A frame is one of the local socket (`local_protocol.py`): a length, then one ProcessRequest or ProcessResponse.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar, get_args

from google.protobuf.message import DecodeError

from atoll.node.dataplane.payload_file import AttemptKey
from atoll.node.host_protocol import BeginAtHost, CancelAtHost, HostBeat, HurryAtHost
from atoll.node.local_protocol import LENGTH_BYTES, MAX_FRAME_BYTES, MAX_TEXT_CHARACTERS
from atoll.protocol import messages as m
from atoll.protocol import wire
from atoll.protocol.errors import InvalidMessage
from atoll.protocol.fields import bounded
from atoll.protocol.layout import Manifest
from atoll.protocol.v1 import processes_pb2

if TYPE_CHECKING:
    from atoll.protocol.trust.security import Shown

MAX_PROCESSES = 16
"""Of one host, its node among them."""
MAX_FILE_NAME_CHARACTERS = 255
MAX_ENTRIES_BYTES = 16 << 20
"""Where payloads lie, in one message."""


# --- a process to its node


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessReady:
    port: int
    """At which peers reach it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PayloadsStored:
    sync: int
    term: int
    attempt: int
    entries: bytes = bounded(MAX_ENTRIES_BYTES)
    """See `payload_part.py`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessFailed:
    """It cannot go on, and another one would not either."""

    text: str = bounded(MAX_TEXT_CHARACTERS)
    exit_code: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessLog:
    """A line of its log."""

    level: int
    text: str = bounded(1 << 16)


ProcessSaid = (
    ProcessReady | HostBeat | PayloadsStored | m.Done | m.ExchangeFailed | m.Products | ProcessFailed | ProcessLog
)  # fmt: skip


# --- the node to a process


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessShown:
    """What it shows to other sites from now on, as PEM."""

    roots: bytes = bounded(1 << 16)
    certificate: bytes = bounded(1 << 14)
    key: bytes = bounded(1 << 14)

    @classmethod
    def of(cls, shown: Shown) -> ProcessShown:
        return cls(roots=shown.roots, certificate=shown.certificate, key=shown.key)


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessStart:
    """The first word."""

    number: int
    """From 1: number 0 is the node itself."""
    home: bytes = bounded(4096)
    """The folder, as the file system has its name."""
    settings_json: str = bounded(1 << 20)
    listen_on: str = bounded(256)
    num_threads: int
    nice: int
    is_debug: bool
    beat_s: float
    num_processes: int
    """Of the host, the node among them."""
    shown: ProcessShown | None = None
    """None in plain text."""
    proxy: str = bounded(256, default="")
    """HOST:PORT of the HTTP proxy through which it dials; empty without one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessIdentity:
    """Whose word the process's is, to peers that ask: of a site, and its start."""

    site_id: int
    incarnation: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessLayout:
    """What the site holds; the descriptor of SNAPSHOT comes beside it."""

    manifest: Manifest
    chunk_elements: int
    dtypes: tuple[str, ...]
    """Of the workers, for each tensor of the manifest."""
    first_chunk: int
    end_chunk: int
    max_retained_bytes: int
    reduce_buffer_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptInLog:
    sync: int
    term: int
    attempt: int
    fragment: int
    """Of the sync."""
    of_fragment: int = 0
    """For which it is named."""

    @classmethod
    def of(cls, key: AttemptKey, of_fragment: int = 0) -> AttemptInLog:
        return cls(sync=key.sync, term=key.term, attempt=key.attempt, fragment=key.fragment, of_fragment=of_fragment)

    @property
    def key(self) -> AttemptKey:
        return AttemptKey(self.sync, self.term, self.attempt, self.fragment)


@dataclass(frozen=True, slots=True, kw_only=True)
class LastCommit:
    fragment: int
    commit: m.Commit


@dataclass(frozen=True, slots=True, kw_only=True)
class BeginInProcess:
    """The part of an exchange that concerns the chunks of the process."""

    begun: BeginAtHost
    region_start: int
    region_end: int
    """Of the file of payloads: what is set aside for this process."""
    held: bytes = bounded(MAX_ENTRIES_BYTES, b"")
    """Entries of its chunks that are in the file already."""
    last: tuple[LastCommit, ...] = bounded(m.MAX_FRAGMENTS, ())
    """Of each fragment the last commit up to the base, of those that the log has."""
    left_errors: tuple[AttemptInLog, ...] = bounded(m.MAX_FRAGMENTS, ())
    """The attempts that left errors of averages, of the base."""
    in_force: tuple[AttemptInLog, ...] = bounded(m.MAX_FRAGMENTS, ())
    """See `PayloadLog.attempts_in_force`."""
    kept: str = bounded(MAX_FILE_NAME_CHARACTERS, "")
    """In a run with audits: the file of what this site contributes; empty if it does not."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DropInProcess:
    """The sync is over."""

    sync: int
    in_force: tuple[AttemptInLog, ...] = bounded(m.MAX_FRAGMENTS, ())


@dataclass(frozen=True, slots=True)
class AbandonAll:
    """What is held of all exchanges goes; none of them need be over."""


ProcessTold = (
    ProcessStart | ProcessLayout | BeginInProcess | m.Weights | HurryAtHost | CancelAtHost | DropInProcess | AbandonAll
    | ProcessIdentity | ProcessShown | m.Banned | m.Influences
)  # fmt: skip

_REQUESTS = wire.bodies_of(processes_pb2.ProcessRequest, {cls.__name__: cls for cls in get_args(ProcessSaid)})
_RESPONSES = wire.bodies_of(processes_pb2.ProcessResponse, {cls.__name__: cls for cls in get_args(ProcessTold)})
_Envelope = TypeVar("_Envelope", processes_pb2.ProcessRequest, processes_pb2.ProcessResponse)


def said(message: ProcessSaid) -> bytes:
    """A frame to the node."""
    return _frame(processes_pb2.ProcessRequest(), _REQUESTS[type(message)], message)


def told(message: ProcessTold) -> bytes:
    """A frame to a process."""
    return _frame(processes_pb2.ProcessResponse(), _RESPONSES[type(message)], message)


def heard_of_process(frame: bytes | bytearray) -> ProcessSaid:
    """Raises InvalidMessage."""
    found: ProcessSaid = _parsed(processes_pb2.ProcessRequest(), frame, _REQUESTS)
    return found


def heard_of_node(frame: bytes | bytearray) -> ProcessTold:
    """Raises InvalidMessage."""
    found: ProcessTold = _parsed(processes_pb2.ProcessResponse(), frame, _RESPONSES)
    return found


def _frame(envelope: _Envelope, name: str, message: Any) -> bytes:
    part = getattr(envelope, name)
    part.CopyFrom(wire.to_proto(message))
    part.SetInParent()
    data = envelope.SerializeToString()
    if len(data) > MAX_FRAME_BYTES:
        raise InvalidMessage(f"a message of {len(data)} bytes for an exchange process, at most {MAX_FRAME_BYTES}")
    return len(data).to_bytes(LENGTH_BYTES, "little") + data


def _parsed(envelope: _Envelope, frame: bytes | bytearray, names: dict[type, str]) -> Any:
    try:
        envelope.ParseFromString(bytes(frame))
    except DecodeError:
        raise InvalidMessage("what comes between a node and its exchange process is no message") from None
    body = envelope.WhichOneof("body")
    cls = next((cls for cls, name in names.items() if name == body), None)
    if cls is None:
        raise InvalidMessage("a message of unknown kind between a node and its exchange process")
    return wire.from_proto(cls, getattr(envelope, str(body)))
