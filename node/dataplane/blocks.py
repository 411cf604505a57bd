"""The bytes of a chunk in SNAPSHOT and PUBLISH: tensors lie whole there, so a block of columns is one strip a row."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from atoll.node.dataplane.store_files import Bytes
from atoll.protocol.codecs import scratch
from atoll.protocol.layout import Chunk


def strips(buffer: Bytes, chunk: Chunk) -> npt.NDArray[np.uint8]:
    """A view of a chunk that has elements: (strips, bytes of a strip)."""
    stride_bytes = chunk.stride_elements * chunk.num_bytes // chunk.num_elements
    shape = (chunk.num_strips, chunk.num_bytes // chunk.num_strips)
    return np.ndarray(shape, np.uint8, buffer, chunk.offset_bytes, (stride_bytes, 1))


def gathered(buffer: Bytes, chunk: Chunk) -> Bytes:
    """The chunk's bytes, 1-D: a view of `buffer` if they are one strip, else a copy, valid until this thread's next."""
    found = strips(buffer, chunk)
    if chunk.num_strips == 1:
        return found.reshape(-1)
    copy = scratch.array("gathered", chunk.num_bytes)
    copy.reshape(found.shape)[:] = found
    return copy


def scatter(values: Bytes, buffer: Bytes, chunk: Chunk) -> None:
    """Writes the chunk's bytes, 1-D, to where they belong."""
    place = strips(buffer, chunk)
    place[:] = values.reshape(place.shape)
