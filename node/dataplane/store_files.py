"""The files of a chunk store: what they are of (JSON), the index, and the places of the records, mapped into memory."""

from __future__ import annotations

import json
import mmap
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from atoll.node.dataplane.chunk_index import ChunkIndex
from atoll.node.dataplane.places import MAX_SPARES, SPARES, PlaceMap
from atoll.protocol.disk import Disk, disk_error, sync_folder
from atoll.protocol.errors import StateError

_MAX_META_BYTES = 1 << 16
_SPARES = "spares"

Bytes = npt.NDArray[np.uint8]


class TornState(StateError):
    """The files are not whole: what is left of them is no store, and may be made anew."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreKind:
    """What a store holds."""

    name: str
    """Of its files."""
    what: str
    """In messages, such as "outer state"."""
    identity: Mapping[str, Any]
    """Words and numbers by name, all of which the files must have: format, run, model ..."""
    key: bytes
    """The same in few bytes: entries of another key do not count."""
    record_bytes: Sequence[int]
    """Of each chunk."""
    name_of: Callable[[int], str]
    """The tensor of a chunk, for messages."""


def opened(folder: Path, kind: StoreKind, places: PlaceMap, *, to_write: bool = True) -> tuple[ChunkIndex, Bytes]:
    """Index and records. One process alone writes there: the node holds its home. Raises TornState if they are not
    whole."""
    index = _mapped(path_of(folder, kind.name, "index"), ChunkIndex.size_bytes(len(kind.record_bytes)), to_write)
    records = _mapped(path_of(folder, kind.name, "chunks"), places.file_bytes, to_write)
    return ChunkIndex(memoryview(index), kind.key), np.frombuffer(records, np.uint8)


def exists(folder: Path, name: str) -> bool:
    return path_of(folder, name, "json").exists()


def create(folder: Path, kind: StoreKind, places: PlaceMap, disk: Disk) -> None:
    """Files without a record, instead of what was there. Raises HostError if the disk has no room for them."""
    discard(folder, kind.name)
    disk.allocate(path_of(folder, kind.name, "chunks"), places.file_bytes)
    disk.allocate(path_of(folder, kind.name, "index"), ChunkIndex.size_bytes(len(kind.record_bytes)))
    meta = {**kind.identity, _SPARES: places.num_spares}
    disk.write_whole(path_of(folder, kind.name, "json"), json.dumps(meta, indent=1).encode(), fsync=True)


def places_in(folder: Path, kind: StoreKind) -> PlaceMap:
    """Of the store that is there. Raises TornState if there is no description, StateError if it is of another store
    than `kind`."""
    path = path_of(folder, kind.name, "json")
    try:
        with path.open("rb") as file:
            found = json.loads(file.read(_MAX_META_BYTES))
    except (OSError, ValueError) as error:
        raise TornState(f"{path}: not an {kind.what} ({error})") from None
    if not isinstance(found, dict) or not found:
        raise TornState(f"{path}: not an {kind.what}")
    for key, value in kind.identity.items():
        theirs = found.get(key)
        if theirs != value:
            raise StateError(
                f"{path}: the {kind.what} there has {key} {theirs!r}, this run has {value!r}; "
                "choose another folder with --home, or remove this one"
            )
    num_spares = found.get(_SPARES, SPARES)  # stores of earlier versions do not say it
    if type(num_spares) is not int or not 1 <= num_spares <= MAX_SPARES:
        raise TornState(f"{path}: {num_spares!r} spare places of each size")
    return PlaceMap(kind.record_bytes, num_spares)


def discard(folder: Path, name: str) -> None:
    """Removes it for good: after a power cut it does not come back."""
    for suffix in ("json", "index", "chunks"):
        path_of(folder, name, suffix).unlink(missing_ok=True)
    if folder.exists():
        sync_folder(folder)


def path_of(folder: Path, name: str, suffix: str) -> Path:
    return folder / f"{name}.{suffix}"


def _mapped(path: Path, size_bytes: int, to_write: bool) -> mmap.mmap:
    """Raises TornState if the file is not there, or smaller."""
    try:
        with path.open("r+b" if to_write else "rb", buffering=0) as file:
            if os.fstat(file.fileno()).st_size < size_bytes:
                raise TornState(f"{path}: truncated")
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_WRITE if to_write else mmap.ACCESS_READ)
    except FileNotFoundError as error:
        raise TornState(f"{path}: {error.strerror}") from None
    except OSError as error:
        raise disk_error(error, path) from error
