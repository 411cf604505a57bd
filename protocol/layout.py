"""The manifest of a model and its cut into chunks. See docs/protocol.md, "Layout".

The canonical order of tensors is by the bytes of their names. The chunk order is by role (TRAINABLE, BUFFER_MEAN,
BUFFER_LOWEST, FROZEN), then by that order; so the chunks that take part in syncs come first and are one range.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from enum import IntEnum
from functools import cached_property
from itertools import accumulate

from atoll.protocol.cuts import as_matrix, block_groups
from atoll.protocol.digest import Digest
from atoll.protocol.errors import ConfigError, InvalidMessage

DEFAULT_CHUNK_ELEMENTS = 1 << 20
MAX_TENSORS = 1 << 20
MAX_CHUNKS = 1 << 22
MAX_FRAGMENTS = 64
MAX_GROUPS = 64
"""Of parameters, each with rates of its own."""
ALIGNMENT_BYTES = 64  # of each tensor in SNAPSHOT and PUBLISH
PAGE_BYTES = 4096  # the same of a large one: so its chunks can be mapped there
LARGE_BYTES = 1 << 16

# safetensors' names of dtypes -> bytes an element
DTYPE_BYTES = {
    "F64": 8, "F32": 4, "F16": 2, "BF16": 2, "I64": 8, "I32": 4, "I16": 2, "I8": 1, "U8": 1, "BOOL": 1,
    "F8_E4M3": 1, "F8_E5M2": 1, "U16": 2, "U32": 4, "U64": 8,
}  # fmt: skip


class Role(IntEnum):
    """What a tensor is to a sync; the numbers are the wire's."""

    TRAINABLE = 1  # averaged pseudo-gradients, outer optimizer
    BUFFER_MEAN = 2  # averaged values
    BUFFER_LOWEST = 3  # the bytes of the lowest contributor
    BUFFER_LOCAL = 4  # each site its own; neither sent nor hashed
    FROZEN = 5  # travels once, with commit 0


CHUNK_ORDER = (Role.TRAINABLE, Role.BUFFER_MEAN, Role.BUFFER_LOWEST, Role.FROZEN)
SYNC_ROLES = CHUNK_ORDER[:3]
FP32_ROLES = (Role.TRAINABLE, Role.BUFFER_MEAN)  # carried as fp32 whatever the tensor's own dtype

_LAYER = re.compile(r"(?<![^.])[0-9]{1,9}(?![^.])")  # a number between dots


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorSpec:
    """A full (unsharded) tensor. `dtype` is its own dtype for buffers and frozen tensors, F32 for trainable ones."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    role: Role
    group: int = 0
    """Of a trainable tensor, with gradient exchange: the parameter group whose rates it has."""

    @property
    def num_elements(self) -> int:
        return math.prod(self.shape)

    @property
    def carried_itemsize(self) -> int:
        """Bytes an element in SNAPSHOT, PUBLISH and the outer state."""
        return 4 if self.role in FP32_ROLES else DTYPE_BYTES[self.dtype]


@dataclass(frozen=True, slots=True, kw_only=True)
class TiedName:
    alias: str
    name: str


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """All tensors in canonical order, each once; `tied` names the aliases of tied weights.

    Raises InvalidMessage if names repeat, the order is not canonical, or a dtype or size is not supported.
    """

    tensors: tuple[TensorSpec, ...]
    tied: tuple[TiedName, ...] = ()

    def __post_init__(self) -> None:
        if len(self.tensors) > MAX_TENSORS:
            raise InvalidMessage(f"manifest: {len(self.tensors)} tensors, at most {MAX_TENSORS} are supported")
        previous = b""
        for i, spec in enumerate(self.tensors):
            name = spec.name.encode()
            if i and name <= previous:
                raise InvalidMessage(f"manifest: {spec.name!r} is out of canonical order or listed twice")
            previous = name
            if not spec.name.isprintable():
                raise InvalidMessage(f"manifest: the name {spec.name!r} has characters that do not print")
            if spec.dtype not in DTYPE_BYTES:
                raise InvalidMessage(f"manifest: {spec.name!r} has dtype {spec.dtype}, which is not supported")
            if spec.role is Role.TRAINABLE and spec.dtype != "F32":
                raise InvalidMessage(f"manifest: trainable {spec.name!r} must be listed as F32, not {spec.dtype}")
            if spec.role is Role.BUFFER_MEAN and spec.dtype not in ("F32", "F16", "BF16"):
                raise InvalidMessage(f"manifest: buffer {spec.name!r} of dtype {spec.dtype} cannot be averaged")
            if spec.group and (spec.role is not Role.TRAINABLE or spec.group >= MAX_GROUPS):
                raise InvalidMessage(f"manifest: {spec.name!r} cannot be in parameter group {spec.group}")
            if len(spec.shape) > 16 or any(n < 0 or n >= 1 << 48 for n in spec.shape) or spec.num_elements >= 1 << 48:
                raise InvalidMessage(f"manifest: {spec.name!r} has an impossible shape {spec.shape}")
        for tied in self.tied:
            if not (tied.alias.isprintable() and tied.name.isprintable()):
                raise InvalidMessage(f"manifest: the name {tied.alias!r} has characters that do not print")

    @classmethod
    def canonical(cls, tensors: list[TensorSpec], tied: list[TiedName] | None = None) -> Manifest:
        """A manifest of tensors in any order."""
        return cls(
            tensors=tuple(sorted(tensors, key=lambda t: t.name.encode())),
            tied=tuple(sorted(tied or [], key=lambda t: t.alias.encode())),
        )

    @cached_property
    def digest(self) -> bytes:
        digest = Digest("atoll/manifest/v1").uint(len(self.tensors))
        for spec in self.tensors:
            digest.text(spec.name).uint(len(spec.shape))
            for size in spec.shape:
                digest.uint(size)
            digest.text(spec.dtype).uint(spec.role)
        digest.uint(len(self.tied))
        for tied in self.tied:
            digest.text(tied.alias).text(tied.name)
        if any(spec.group for spec in self.tensors):  # manifests of before have the digests that they had
            for spec in self.tensors:
                digest.uint(spec.group)
        return digest.finish()

    @cached_property
    def buffer_bytes(self) -> int:
        """Of SNAPSHOT, and of the values in PUBLISH."""
        return max(_places(self.tensors)[1], ALIGNMENT_BYTES)

    @cached_property
    def num_groups(self) -> int:
        """Of parameters, from the first to the last that has a tensor."""
        return 1 + max((spec.group for spec in self.tensors), default=0)

    @cached_property
    def num_trainable(self) -> int:
        return sum(t.num_elements for t in self.tensors if t.role is Role.TRAINABLE)


def _aligned_bytes(spec: TensorSpec) -> int:
    """In SNAPSHOT and PUBLISH."""
    return -(-spec.num_elements * spec.carried_itemsize // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


def _places(specs: Sequence[TensorSpec]) -> tuple[list[int], int]:
    """Where each tensor begins in SNAPSHOT and PUBLISH, and where the last one ends."""
    starts, end = [], 0
    for spec in specs:
        num_bytes = _aligned_bytes(spec)
        if num_bytes >= LARGE_BYTES:
            end = -(-end // PAGE_BYTES) * PAGE_BYTES
        starts.append(end)
        end += num_bytes
    return starts, end


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """A block of one tensor: its elements in row-major order of the block.

    In the tensor, and so in SNAPSHOT and PUBLISH, they are one strip of consecutive elements where the block has all
    columns, and one strip a row where it has not.
    """

    index: int
    tensor: int  # index into manifest.tensors
    role: Role
    first_element: int  # within the tensor
    num_elements: int
    num_strips: int  # equally long
    stride_elements: int  # from the first element of a strip to the next strip's
    offset_bytes: int  # of its first element, in SNAPSHOT and PUBLISH
    num_bytes: int  # there, and of its values in the outer state

    @property
    def strip_elements(self) -> int:
        return self.num_elements // self.num_strips

    @property
    def row_elements(self) -> int:
        """Of a row of the block."""
        return self.strip_elements if self.num_strips > 1 else min(self.stride_elements, self.num_elements)

    @property
    def strip_starts(self) -> range:
        """The first element of each strip, within the tensor."""
        return range(
            self.first_element, self.first_element + self.num_strips * self.stride_elements, self.stride_elements
        )


def chunk_runs(manifest: Manifest, chunk_elements: int) -> Iterator[tuple[TensorSpec, int, int]]:
    """(tensor, number of chunks, elements of each), in the order of chunks: at most four a tensor, however large."""
    for role in CHUNK_ORDER:
        for spec in manifest.tensors:
            if spec.role is role:
                for group in block_groups(spec.shape, chunk_elements):
                    yield spec, group.num_blocks, group.num_rows * group.num_columns


def num_chunks(manifest: Manifest, chunk_elements: int) -> int:
    """Of the whole model. Raises ConfigError if they are more than any run may have."""
    total = sum(count for _, count, _ in chunk_runs(manifest, chunk_elements))
    if total > MAX_CHUNKS:
        raise ConfigError(f"{total} chunks, at most {MAX_CHUNKS} are supported; raise sync.chunk_elements")
    return total


def fragments_of(manifest: Manifest, num_fragments: int) -> dict[str, int]:
    """The fragment of each tensor that takes part in syncs, by name: see docs/protocol.md, "Fragments".

    Raises ConfigError if one of several has no elements.
    """
    found, empty = _placed(manifest, num_fragments)
    if num_fragments > 1 and empty:
        most = next(fewer for fewer in range(num_fragments - 1, 0, -1) if fewer == 1 or not _placed(manifest, fewer)[1])
        raise ConfigError(
            f"sync.fragments = {num_fragments} does not fit this model: fragment {empty[0]} would be empty, because "
            f"whole tensors are in one, by their layers; choose sync.fragments = {most}"
        )
    return found


def _placed(manifest: Manifest, num_fragments: int) -> tuple[dict[str, int], list[int]]:
    """And the fragments that have no elements."""
    found: dict[str, int] = {}
    num_bytes = [0] * num_fragments

    def place(spec: TensorSpec) -> tuple[bool, int]:
        layered = _LAYER.search(spec.name) is not None
        return not layered, 0 if layered else -spec.num_elements * spec.carried_itemsize

    for spec in sorted((spec for spec in manifest.tensors if spec.role in SYNC_ROLES), key=place):
        layer = _LAYER.search(spec.name)  # strided, as in streaming DiLoCo (2501.18512)
        fragment = int(layer[0]) % num_fragments if layer else num_bytes.index(min(num_bytes))
        found[spec.name] = fragment
        num_bytes[fragment] += spec.num_elements * spec.carried_itemsize
    return found, [fragment for fragment in range(num_fragments) if not num_bytes[fragment]]


def check_fragment(fragment: int, num_fragments: int) -> None:
    """For one that a message names. A sync of all fragments has the number after the last one's; where there is one
    fragment it is 0. Raises InvalidMessage."""
    if fragment >= num_fragments + (num_fragments > 1):
        raise InvalidMessage(f"fragment {fragment}: this run has {num_fragments}, from 0 on")


class Layout:
    """The chunks of a manifest, and where each tensor lies in SNAPSHOT and PUBLISH.

    `chunks[:num_sync_chunks]` take part in syncs; the rest is frozen. An empty tensor has one empty chunk.
    """

    def __init__(
        self, manifest: Manifest, chunk_elements: int = DEFAULT_CHUNK_ELEMENTS, num_fragments: int = 1
    ) -> None:
        if not 1 <= chunk_elements <= 1 << 24:
            raise ConfigError(f"sync.chunk_elements is {chunk_elements}; choose 1 to {1 << 24}")
        self.manifest = manifest
        self.chunk_elements = chunk_elements
        self.tensor_offsets_bytes = tuple(_places(manifest.tensors)[0])
        self.buffer_bytes = manifest.buffer_bytes
        moments = [_aligned_bytes(spec) if spec.role is Role.TRAINABLE else 0 for spec in manifest.tensors]
        *self.moment_offsets_bytes, self.moment_bytes = accumulate(moments, initial=0)
        """Where each tensor lies in one of the moments behind PUBLISH's values, which have trainable ones alone."""
        num_chunks(manifest, chunk_elements)
        chunks: list[Chunk] = []
        self.num_sync_chunks = 0
        for role in CHUNK_ORDER:
            for i, spec in enumerate(manifest.tensors):
                if spec.role is role:
                    chunks += self._blocks(len(chunks), i)
            if role is Role.BUFFER_LOWEST:
                self.num_sync_chunks = len(chunks)
        self.chunks = tuple(chunks)
        self.sync_chunks = tuple(c.index for c in chunks[: self.num_sync_chunks] if c.num_elements)
        """Those that travel in syncs."""
        self.frozen_chunks = tuple(c.index for c in chunks[self.num_sync_chunks :])
        self.fragment_of_tensor = fragments_of(manifest, num_fragments)
        """Of each tensor that takes part in syncs, by name."""
        self.fragment_of = tuple(self.fragment_of_tensor[self.name_of(chunk)] for chunk in range(self.num_sync_chunks))
        """Of each chunk that takes part in syncs."""
        members: list[list[int]] = [[] for _ in range(num_fragments)]
        for chunk in self.sync_chunks:
            members[self.fragment_of[chunk]].append(chunk)
        self.fragments = tuple(map(tuple, members))
        """Of each fragment, those that travel in its syncs."""

    def in_moment(self, chunk: Chunk) -> Chunk:
        """The same trainable chunk, as it lies in a moment."""
        moved = self.moment_offsets_bytes[chunk.tensor] - self.tensor_offsets_bytes[chunk.tensor]
        return replace(chunk, offset_bytes=chunk.offset_bytes + moved)

    def chunks_of(self, fragment: int) -> tuple[int, ...]:
        """Those that travel in its syncs, ascending; the number after the last fragment's is of all together. Raises
        InvalidMessage if there is no such fragment."""
        check_fragment(fragment, len(self.fragments))
        return self.fragments[fragment] if fragment < len(self.fragments) else self.sync_chunks

    def travels(self, chunk: int, fragment: int) -> bool:
        """Whether it is one of these."""
        is_one = 0 <= chunk < self.num_sync_chunks and fragment in (self.fragment_of[chunk], len(self.fragments))
        return is_one and self.chunks[chunk].num_elements > 0

    def wire_dtype(self, chunk: Chunk) -> str:
        """In which its values travel in syncs."""
        return self.manifest.tensors[chunk.tensor].dtype if chunk.role is Role.BUFFER_LOWEST else "F32"

    def _blocks(self, first_chunk: int, tensor: int) -> Iterator[Chunk]:
        spec = self.manifest.tensors[tensor]
        _, columns = as_matrix(spec.shape)
        for group in block_groups(spec.shape, self.chunk_elements):
            num_elements = group.num_rows * group.num_columns
            is_one_strip = group.num_columns == columns or not num_elements
            for row in group.first_rows:
                for column in group.first_columns:
                    first = row * columns + column
                    yield Chunk(
                        index=first_chunk,
                        tensor=tensor,
                        role=spec.role,
                        first_element=first,
                        num_elements=num_elements,
                        num_strips=1 if is_one_strip else group.num_rows,
                        stride_elements=max(columns, 1),
                        offset_bytes=self.tensor_offsets_bytes[tensor] + first * spec.carried_itemsize,
                        num_bytes=num_elements * spec.carried_itemsize,
                    )
                    first_chunk += 1

    def name_of(self, chunk: int) -> str:
        return self.manifest.tensors[self.chunks[chunk].tensor].name


def state_hash(manifest: Manifest, slots: tuple[str, ...], chunk_hashes: list[bytes]) -> bytes:
    """The hash of an outer state: manifest, names of slots and the hash of each chunk (values and slots) in order."""
    return state_digest(manifest, slots, len(chunk_hashes)).digests(b"".join(chunk_hashes)).finish()


def state_digest(manifest: Manifest, slots: tuple[str, ...], num_chunks: int) -> Digest:
    """`state_hash` before the hashes of chunks: it goes on with `digests`."""
    digest = Digest("atoll/state/v1").data(manifest.digest).uint(len(slots))
    for slot in slots:
        digest.text(slot)
    return digest.uint(num_chunks)


def chunk_hash(data: bytes | bytearray | memoryview) -> bytes:
    """The hash of a chunk's bytes in the outer state: its values, then each slot in order."""
    return Digest("atoll/chunk/v1").data(data).finish()


def chunk_digest(num_bytes: int) -> Digest:
    """`chunk_hash` before the bytes: it goes on with `more`."""
    return Digest("atoll/chunk/v1").uint(num_bytes)
