"""What a node and its workers agree on beside protocol/v1/local.proto: environment, framing, bounds. Pure.

A frame is a little-endian uint32 length, then one LocalRequest (to the node) or LocalResponse (to a worker).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TypeVar, get_args

from google.protobuf.message import DecodeError

from atoll.protocol import wire
from atoll.protocol.digest import Digest
from atoll.protocol.errors import AtollError, ConfigError, InvalidMessage, NonFiniteError, RefusedError, ScriptNonFinite
from atoll.protocol.fields import bounded, digest
from atoll.protocol.layout import MAX_TENSORS, Manifest
from atoll.protocol.messages import MAX_RATES, Logged
from atoll.protocol.v1 import local_pb2

LOCAL_VERSION = 6
"""Of what a node and its ranks say to each other, and of the layout of what they share: SNAPSHOT, PUBLISH with its
table, records of the outer file. A break of any of it raises it; a rank of another one is refused. Up to 5 it was the
version of all of atoll."""
ENV_SOCKET = "ATOLL_SOCKET"
"""Path of the node's socket. Absent: the script trains alone."""
ENV_GENERATION = "ATOLL_GENERATION"
"""Start count of the node's workers."""

MAX_FRAME_BYTES = 64 << 20
MAX_SKIPPED_STEPS = 64
"""Twice as many as a window has."""
LENGTH_BYTES = 4
NUM_BUFFERS = 2
"""File descriptors beside LocalLayout: SNAPSHOT, then PUBLISH."""
MOST_FDS = NUM_BUFFERS + 1
"""With the folder of the outer file, for ranks that read there."""
MAX_PAGE_BYTES = 1 << 16
TABLE_HEADER_WORDS = 2
MOST_WORD = (1 << 63) - 1
HERE, GONE = 0, -1
"""Entries of the table behind PUBLISH, where ranks read in place: the chunk is in PUBLISH, or nowhere. Else the number
of its page in the outer file, from 1 on. Before them come device and number of that file."""
MAX_TEXT_CHARACTERS = 4096
MAX_CHECKPOINTS = 8
"""That one rank may offer at join."""

FATAL_KINDS: dict[str, type[AtollError]] = {
    "config": ConfigError,
    "non_finite_of_script": ScriptNonFinite,  # before what it is, too
    "non_finite": NonFiniteError,
    "refused": RefusedError,
}
"""Why a rank ends for good, as it says to the node, which then exits with that error's code."""

_Message = TypeVar("_Message", local_pb2.LocalRequest, local_pb2.LocalResponse)


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """A slice of one full tensor, held by one rank: elements `offsets[d]` to `offsets[d] + sizes[d]` of dimension d.

    A size may be 0. `dtype` is the worker's own dtype of it, as in safetensors.
    """

    name: str
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    dtype: str
    first_values: bytes = bounded(64, b"")
    """Of a trainable tensor that the rank holds whole: a hash of some of its values before commit 0."""

    @property
    def is_empty(self) -> bool:
        return 0 in self.sizes


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class CheckpointId:
    """Ranks of a site write a checkpoint at the same step of the same start; later ones compare greater."""

    incarnation: int
    """Of the node."""
    generation: int
    """Of its workers."""
    step: int
    """Of this generation."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointCounts:
    """What became of checkpoints that were due."""

    written: int = 0
    skipped: int = 0
    """The one before was still being written."""
    failed: int = 0

    def __add__(self, other: CheckpointCounts) -> CheckpointCounts:
        return CheckpointCounts(
            written=self.written + other.written,
            skipped=self.skipped + other.skipped,
            failed=self.failed + other.failed,
        )


NO_CHECKPOINTS = CheckpointCounts()


@dataclass(frozen=True, slots=True, kw_only=True)
class RankReadings:
    """What a rank measures of its machine, for people; 0 is said of what is not known."""

    memory_bytes: int = 0
    """Resident, of its process."""
    gpu_used_bytes: int = 0
    """Of its GPU, by whomever."""
    gpu_total_bytes: int = 0
    peak_flops_per_s: float = 0.0
    """Of its GPU, in bfloat16, by the data sheet."""
    trained_tokens: int = 0
    """Of its batches, in this generation."""
    skipped_steps: int = 0
    """Of this generation: left out by the script, or with a loss that is not finite."""


NO_READINGS = RankReadings()


@dataclass(frozen=True, slots=True, kw_only=True)
class Greeting:
    """What every rank hears first: enough to build the model."""

    settings_json: str = bounded(1 << 20)
    data_paths: tuple[str, ...]
    """Empty: the default of the run's data set."""
    checkpoint_folder: str = ""
    """For checkpoints of the inner optimizer; empty: none are wanted."""
    crashed_from: tuple[CheckpointId, ...] = ()
    """Workers that went on from these crashed before their first step."""
    parallel: str = bounded(1 << 10, "")
    """How the ranks share the model: `node/parallel/settings.py`."""


# --- what a rank says to its node: the bodies of LocalRequest


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalHello:
    """A rank's first words."""

    world_size: int
    pid: int
    protocol_version: int
    """LOCAL_VERSION."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalJoin:
    """What a rank offers. Its manifest may lack other ranks' tensors."""

    manifest: Manifest
    pieces: tuple[Piece, ...]
    data_fingerprint: bytes = bounded(64)
    data_rank: int
    """The same on ranks that see the same batch."""
    checkpoints: tuple[CheckpointId, ...] = bounded(MAX_CHECKPOINTS, ())
    """Of its optimizers, that it could go on from."""
    names_are_said: bool = False
    """The script says that the names are those of the whole model, whatever ranks seem to have in common."""
    tied_here: tuple[str, ...] = bounded(MAX_TENSORS, ())
    """Of tensors with several names, those that a module of this rank has."""
    reads_in_place: bool = False
    """It can take outer values from the outer file, where PUBLISH has none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Boundary:
    """A rank asks what to do at `step`, where the last answer said to ask; `seq` counts the questions at one step."""

    step: int
    seq: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PieceHash:
    """`piece_hash` of a shared piece."""

    piece: int
    """Index into the rank's pieces."""
    hash: bytes = digest()


@dataclass(frozen=True, slots=True, kw_only=True)
class SealedReport:
    """This rank's owned pieces are in SNAPSHOT (device copies synchronized)."""

    step: int
    seq: int
    fragment: int
    data_rank: int
    tokens: int
    """Of this rank's batches since the base."""
    loss_sum: float = field(metadata={"finite": False})
    """Over the `num_steps` steps since the last report."""
    num_steps: int
    """0: this rank has no loss (a pipeline stage before the last)."""
    train_s: float
    hashes: tuple[PieceHash, ...] = ()
    """Of each shared piece, in their order, if the SNAPSHOT says `hash_shared`."""
    num_samples_used: int = 0
    """Drawn by this rank and trained on, since the epoch began."""
    rates: tuple[float, ...] = bounded(MAX_RATES, ())
    """With gradient exchange, of each parameter group: learning rate, then weight decay."""
    skipped_steps: tuple[int, ...] = bounded(MAX_SKIPPED_STEPS, ())
    """With gradient exchange, the steps since the base of which nothing is in it: the first of them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MergedReport:
    """This rank has taken `version` from PUBLISH and needs SNAPSHOT no more."""

    version: int
    step: int
    wait_s: float
    """Waited for this sync."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fatal:
    """This rank ends for a reason that a restart does not cure."""

    kind: str = bounded(64)
    """One of FATAL_KINDS."""
    text: str = bounded(MAX_TEXT_CHARACTERS)


@dataclass(frozen=True, slots=True, kw_only=True)
class Busy:
    """This rank makes no steps for a good reason, for at most `limit_s`; empty: no longer."""

    what: str = bounded(MAX_TEXT_CHARACTERS)
    limit_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """From the training loop itself, about once a second."""

    step: int
    steps_per_s: float = field(metadata={"finite": False})
    checkpoints: CheckpointCounts = NO_CHECKPOINTS
    readings: RankReadings = NO_READINGS


@dataclass(frozen=True, slots=True, kw_only=True)
class DataSet:
    """A rank will draw samples of it; the same at all ranks that do."""

    num_samples: int
    batch_size: int
    """Of this rank."""
    batches_ahead: int
    """How many it may fetch before they are trained on."""
    of_shards: bool = False
    """A batch is trained on for as many steps as it takes, and each rank may take another number of them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Draw:
    """At least so many positions of the site's queue, from place `first` on; the answer waits until they are leased."""

    epoch: int
    first: int
    num_samples: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Goodbye:
    """The loader ended, or (`run_over`) the node said STOP."""

    reason: str = bounded(MAX_TEXT_CHARACTERS)
    run_over: bool


Said = (
    LocalHello | LocalJoin | Boundary | SealedReport | MergedReport | Fatal | Busy | Progress | DataSet | Draw | Goodbye
    | Logged
)  # fmt: skip
_BODIES = wire.bodies_of(local_pb2.LocalRequest, {cls.__name__: cls for cls in get_args(Said)})
_CLASSES: dict[str, type[Said]] = {name: cls for cls, name in _BODIES.items()}


def pack(generation: int, rank: int, said: Said) -> local_pb2.LocalRequest:
    """The request that says it."""
    body = {_BODIES[type(said)]: wire.to_proto(said)}
    return local_pb2.LocalRequest(generation=generation, rank=rank, **body)


def unpack(request: local_pb2.LocalRequest) -> Said:
    """Raises InvalidMessage if there is no known body or a bound is exceeded."""
    name = request.WhichOneof("body")
    if name is None:
        raise InvalidMessage(f"rank {request.rank} sent a message of unknown kind")
    return wire.from_proto(_CLASSES[name], getattr(request, name))


# --- what the node says to it


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalLayout:
    """What a rank is told when its site is admitted, beside the manifest of the whole site."""

    site_id: int
    incarnation: int
    run_seed: int
    data_seed: int
    """Less than 2**63."""
    chunk_elements: int
    owned_pieces: tuple[int, ...]
    """Indices into the rank's pieces: what it writes of these is the site's."""
    shared_pieces: tuple[int, ...]
    """Indices of pieces that other ranks hold too: hashed (`piece_hash`) for a SNAPSHOT with `hash_shared`."""
    kept_pieces: tuple[int, ...] = ()
    """Indices of pieces that it writes to SNAPSHOT, which is its host's, and whose state in the optimizer it writes to
    checkpoints: what ranks of a host have alike is shared out."""
    reader: int = 0
    """Place of this rank's data rank among the site's."""
    num_readers: int = 1
    checkpoint: CheckpointId | None = None
    """The newest that every rank offered."""
    outer_name: str = ""
    """Of the file of records in the folder that is passed, if the ranks read there; PUBLISH is a file then, with a
    table behind its values."""


def encode_frame(message: local_pb2.LocalRequest | local_pb2.LocalResponse) -> bytes:
    data = message.SerializeToString()
    if len(data) > MAX_FRAME_BYTES:
        raise InvalidMessage(f"local message of {len(data)} bytes, at most {MAX_FRAME_BYTES} are allowed")
    return len(data).to_bytes(LENGTH_BYTES, "little") + data


def frame_size(header: bytes | bytearray) -> int:
    """Bytes that follow. Raises InvalidMessage before anything is allocated for them."""
    size = int.from_bytes(header, "little")
    if size > MAX_FRAME_BYTES:
        raise InvalidMessage(f"local message of {size} bytes, at most {MAX_FRAME_BYTES} are allowed")
    return size


def decode(cls: type[_Message], data: bytes | bytearray) -> _Message:
    message = cls()
    try:
        message.ParseFromString(bytes(data))
    except DecodeError as error:
        raise InvalidMessage(f"local message of {len(data)} bytes: {error}") from None
    return message


def piece_hash(data: bytes | bytearray | memoryview) -> bytes:
    """The hash of a shared piece's bytes as SNAPSHOT carries them: fp32, row-major."""
    return Digest("atoll/piece/v1").data(data).finish()


def data_seed(run_seed: int, site_id: int, incarnation: int, generation: int) -> int:
    """`site.seed` of the first ranks, for random choices of one generation of workers; 63 bits."""
    digest = Digest("atoll/data-seed/v1").uint(run_seed).uint(site_id).uint(incarnation).uint(generation)
    return int.from_bytes(digest.finish()[:8], "little") >> 1


def values_bytes(buffer_bytes: int) -> int:
    """Of the values in PUBLISH, up to where the table begins: at a page, whatever its size is."""
    return -(-buffer_bytes // MAX_PAGE_BYTES) * MAX_PAGE_BYTES


def words_of(device: int, number: int) -> tuple[int, int]:
    """Of a file, in words of 8 bytes with a sign: some file systems have numbers beyond these."""
    return device & MOST_WORD, number & MOST_WORD


def table_bytes(num_chunks: int) -> int:
    """Words of 8 bytes."""
    return 8 * (TABLE_HEADER_WORDS + num_chunks)
