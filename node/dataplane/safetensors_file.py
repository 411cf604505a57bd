"""Reading and writing .safetensors piece by piece, without torch and without a second copy in memory.

The format: a little-endian u64, a JSON header of that many bytes, then the tensors' bytes without gaps
(https://github.com/huggingface/safetensors#format).
"""

from __future__ import annotations

import itertools
import json
import math
import os
import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from atoll.protocol.disk import disk_error
from atoll.protocol.errors import ConfigError
from atoll.protocol.layout import DTYPE_BYTES

MAX_HEADER_BYTES = 100_000_000  # the format's own limit
_LENGTH = struct.Struct("<Q")

Buffer = bytes | bytearray | memoryview


@dataclass(frozen=True, slots=True)
class Entry:
    name: str
    dtype: str
    shape: tuple[int, ...]
    pieces: Iterable[Buffer]
    """Its bytes, in pieces of any size."""


def write(path: Path, tensors: Iterable[Entry], metadata: Mapping[str, str]) -> None:
    """A new file, on the disk when this returns. Raises HostError if it cannot be written."""
    # The widest dtype first, so that every tensor is aligned to its elements.
    entries = sorted(tensors, key=lambda e: (-DTYPE_BYTES[e.dtype], e.name))
    header: dict[str, Any] = {"__metadata__": dict(metadata)}
    end = 0
    for entry in entries:
        begin, end = end, end + DTYPE_BYTES[entry.dtype] * math.prod(entry.shape)
        header[entry.name] = {"dtype": entry.dtype, "shape": list(entry.shape), "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    try:
        with open(path, "wb") as file:
            file.write(_LENGTH.pack(len(text)) + text)
            written = 0
            for piece in itertools.chain.from_iterable(entry.pieces for entry in entries):
                written += file.write(piece)
            assert written == end, f"{path}: {written} bytes of {end}"
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        raise disk_error(error, path, end) from error


@dataclass(frozen=True, slots=True)
class Stored:
    """A tensor of a file, and where its bytes lie there."""

    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


class Reader:
    """The tensors of a file, by name. Raises ConfigError if it is not there or not such a file; `close` it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._file = path.open("rb", buffering=0)
        except OSError as error:
            raise ConfigError(f"{path}: {error.strerror}; the model is not complete") from None
        try:
            self.tensors, self.metadata = self._parse()
        except BaseException:
            self._file.close()
            raise

    def close(self) -> None:
        self._file.close()

    def num_bytes(self, name: str, dtype: str) -> int:
        """Raises ConfigError if the file has no such tensor of this dtype."""
        found = self.tensors.get(name)
        if found is None or found.dtype != dtype:
            how = f"of {found.dtype}" if found is not None else "not there"
            raise ConfigError(f"{self.path}: {name!r} is {how}, expected {dtype}")
        return found.end - found.begin

    def read(self, name: str, first_byte: int, num_bytes: int) -> bytes:
        found = self.tensors[name]
        if first_byte + num_bytes > found.end - found.begin:
            size = found.end - found.begin
            raise ConfigError(f"{self.path}: {name!r} has {size} bytes, {first_byte + num_bytes} are expected")
        data = os.pread(self._file.fileno(), num_bytes, found.begin + first_byte)
        if len(data) != num_bytes:
            raise ConfigError(f"{self.path}: truncated in {name!r}")
        return data

    def _parse(self) -> tuple[dict[str, Stored], dict[str, str]]:
        size = os.fstat(self._file.fileno()).st_size
        start = self._file.read(_LENGTH.size)
        length = _LENGTH.unpack(start)[0] if len(start) == _LENGTH.size else size
        if length > MAX_HEADER_BYTES or _LENGTH.size + length > size:
            raise ConfigError(f"{self.path}: truncated, or not a .safetensors file")
        try:
            header = json.loads(self._file.read(length))
            metadata = {str(key): str(value) for key, value in header.pop("__metadata__", {}).items()}
            base = _LENGTH.size + length
            tensors = {}
            for name, item in header.items():
                begin, end = (int(n) for n in item["data_offsets"])
                if not 0 <= begin <= end <= size - base:
                    raise ValueError(f"{name!r} lies outside the file")
                shape = tuple(int(n) for n in item["shape"])
                tensors[name] = Stored(str(item["dtype"]), shape, base + begin, base + end)
        except (ValueError, OverflowError, TypeError, KeyError, AttributeError, RecursionError) as error:
            raise ConfigError(f"{self.path}: not a .safetensors file: {error}") from None
        return tensors, metadata
