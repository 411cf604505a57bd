"""Slices of tensors on their way between SNAPSHOT or PUBLISH of two hosts: all their bytes, one slice after the other.

Both ends list the same slices, so that nothing but bytes travels, and their hash behind them. A slice is cut into views
of its buffer, so that neither end has a copy of more than one message.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from types import EllipsisType
from typing import Any

import numpy as np
import numpy.typing as npt

from atoll.node.local_protocol import Piece
from atoll.protocol.digest import Digest
from atoll.protocol.errors import InvalidMessage
from atoll.protocol.layout import Layout, Role

Items = npt.NDArray[np.unsignedinteger[Any]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """What of a buffer moves: a fragment, or all of them (`fragment` is their number, where there are several)."""

    fragment: int
    with_frozen: bool
    num_moments: int = 0
    """Behind the values, of trainable tensors."""


def views(layout: Layout, buffer: memoryview, pieces: Iterable[Piece], wanted: Wanted) -> Iterator[Items]:
    """Of `buffer`, what the pieces hold of what is wanted: each slice once, values before moments.

    Raises InvalidMessage for more moments than it has.
    """
    if layout.buffer_bytes + wanted.num_moments * layout.moment_bytes > len(buffer):
        raise InvalidMessage(f"{wanted.num_moments} moments are wanted of a buffer of {len(buffer)} bytes")
    places = {spec.name: place for place, spec in enumerate(layout.manifest.tensors)}
    found = dict.fromkeys((places[p.name], p.offsets, p.sizes) for p in pieces if not p.is_empty)
    listed = [key for key in found if _is_wanted(layout, key[0], wanted)]
    for place, offsets, sizes in listed:
        yield _whole(layout, buffer, place, layout.tensor_offsets_bytes[place])[_box(offsets, sizes)]
    for number in range(wanted.num_moments):
        start = layout.buffer_bytes + number * layout.moment_bytes
        for place, offsets, sizes in listed:
            if layout.manifest.tensors[place].role is Role.TRAINABLE:
                yield _whole(layout, buffer, place, start + layout.moment_offsets_bytes[place])[_box(offsets, sizes)]


def _is_wanted(layout: Layout, place: int, wanted: Wanted) -> bool:
    spec = layout.manifest.tensors[place]
    if spec.role is Role.BUFFER_LOCAL:
        return False
    if spec.role is Role.FROZEN:
        return wanted.with_frozen
    return wanted.fragment in (layout.fragment_of_tensor[spec.name], len(layout.fragments))


def _whole(layout: Layout, buffer: memoryview, place: int, start: int) -> Items:
    """The tensor that lies there."""
    spec = layout.manifest.tensors[place]
    return np.ndarray(spec.shape, f"u{spec.carried_itemsize}", buffer, start)


def _box(offsets: tuple[int, ...], sizes: tuple[int, ...]) -> tuple[slice | EllipsisType, ...]:
    """With an ellipsis the element of a tensor without dimensions is a view too, and no copy."""
    return *(slice(first, first + size) for first, size in zip(offsets, sizes, strict=True)), ...


def cut(view: Items, max_bytes: int) -> Iterator[Items]:
    """In order, views of at most so many bytes (of one element at least), none of them empty."""
    if view.nbytes <= max_bytes or view.size == 1:
        if view.size:
            yield view
        return
    dim = next(d for d, size in enumerate(view.shape) if size > 1)
    step = max(1, max_bytes * view.shape[dim] // view.nbytes)
    before = (slice(None),) * dim
    for first in range(0, view.shape[dim], step):
        yield from cut(view[(*before, slice(first, first + step))], max_bytes)


def messages(views_: Iterable[Items], max_bytes: int, digest: Digest) -> Iterator[bytes]:
    """The bytes of all views, several small ones in one message; `digest` is of all of them at the end."""
    waiting: list[bytes] = []
    num_waiting = 0
    for view in views_:
        for part in cut(view, max_bytes):
            if num_waiting + part.nbytes > max_bytes and waiting:
                yield _joined(waiting, digest)
                waiting, num_waiting = [], 0
            waiting.append(part.tobytes())
            num_waiting += part.nbytes
    if waiting:
        yield _joined(waiting, digest)


def _joined(parts: list[bytes], digest: Digest) -> bytes:
    data = b"".join(parts)
    digest.data(data)
    return data


class Filling:
    """The other end: `take` each message in its order, then `finish` with the hash."""

    def __init__(self, views_: Iterable[Items], max_bytes: int) -> None:
        self._parts = (part for view in views_ for part in cut(view, max_bytes))
        self._digest = new_digest()

    def take(self, data: bytes) -> None:
        """Raises InvalidMessage for bytes that are no whole parts, or beyond the last one."""
        self._digest.data(data)
        place = 0
        while place < len(data):
            part = next(self._parts, None)
            if part is None or place + part.nbytes > len(data):
                raise InvalidMessage(f"{len(data)} bytes of slices do not fit those that are listed here")
            flat = np.frombuffer(data, part.dtype, part.size, place)
            part[...] = flat.reshape(part.shape)
            place += part.nbytes

    def finish(self, expected: bytes) -> None:
        """Raises InvalidMessage if bytes are missing, or are not those that were sent."""
        if next(self._parts, None) is not None:
            raise InvalidMessage("slices ended before all were there")
        if self._digest.finish() != expected:
            raise InvalidMessage("slices changed on their way: their hash is another one")


def new_digest() -> Digest:
    """Of all bytes that move together."""
    return Digest("atoll/slices/v1")
