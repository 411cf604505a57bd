"""Where the elements of a chunk lie in its tensor, and its bytes in SNAPSHOT and PUBLISH: element by element, as
docs/protocol.md says it, and not as the data plane does it."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from atoll.protocol.layout import Chunk


def elements_of(chunk: Chunk) -> npt.NDArray[np.int64]:
    """Within the tensor, in the order in which they are in the chunk."""
    rows = np.arange(chunk.num_strips).reshape(-1, 1) * chunk.stride_elements
    columns = np.arange(chunk.num_elements // chunk.num_strips)
    return (chunk.first_element + rows + columns).ravel()


def _places(chunk: Chunk) -> npt.NDArray[np.int64]:
    """Its bytes in a shared buffer."""
    if not chunk.num_elements:
        return np.empty(0, np.int64)
    itemsize = chunk.num_bytes // chunk.num_elements
    first = chunk.offset_bytes - itemsize * chunk.first_element  # of the tensor
    return (first + itemsize * elements_of(chunk).reshape(-1, 1) + np.arange(itemsize)).ravel()


def cut_out(buffer: memoryview | bytes, chunk: Chunk) -> bytes:
    return np.frombuffer(buffer, np.uint8)[_places(chunk)].tobytes()


def paste(buffer: memoryview, chunk: Chunk, data: bytes) -> None:
    np.frombuffer(buffer, np.uint8)[_places(chunk)] = np.frombuffer(data, np.uint8)
