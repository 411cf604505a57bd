"""Room in host memory for a copy of an optimizer's state, made beside the training.

The first write to each page of gigabytes takes seconds, in which nobody should wait. It is one mapping of its own:
pinned memory of torch's would be rounded up to a power of two for each tensor, what malloc gives shares pages with
others, and private pages that a GPU writes to are copied when the process forks. CUDA's driver gets to know it in
parts, between the steps that it has time for while the GPU computes.
"""

from __future__ import annotations

import mmap
import threading
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from atoll.node.daemon.shared_memory import RESERVE_BYTES, memory_limit
from atoll.node.worker import copies
from atoll.protocol.errors import HostError
from atoll.protocol.text import byte_count

ALIGNMENT_BYTES = 64
PART_BYTES = 256 << 20
"""At least, of what is registered at once: some 8 ms. A tensor is in one part, as a copy may not be of two."""
_Place = tuple[str, torch.Size, torch.dtype, torch.device]
_Layout = tuple[_Place, ...]


@dataclass(slots=True)
class _Made:
    views: dict[str, Tensor] = field(default_factory=dict)
    unregistered: deque[list[Tensor]] = field(default_factory=deque)
    error: str = ""


class HostRoom:
    """Of one rank, for one set of tensors at a time."""

    def __init__(self) -> None:
        self._layout: _Layout = ()
        self._made = _Made()
        self._maker: threading.Thread | None = None
        self._registration: copies.Registration | None = None

    def prepare(self, tensors: Mapping[str, Tensor]) -> None:
        """Begin to make it, unless there is one for such tensors."""
        layout = tuple((name, t.shape, t.dtype, t.device) for name, t in tensors.items())
        if layout == self._layout:
            return
        self._wait()
        self._layout, self._made = layout, _Made()
        self._registration = copies.Registration([], (t.device for t in tensors.values()), "memory for checkpoints")
        # A daemon: a process that ends needs it no more.
        maker = threading.Thread(target=_make, args=(layout, self._made), name="atoll-host-room", daemon=True)
        try:
            maker.start()
        except RuntimeError as error:
            self._made.error = f"no thread to make room for a copy ({error})"
        else:
            self._maker = maker

    def register_part(self) -> None:
        """Of what is made and not registered yet, if there is any; a `copy` that comes earlier registers the rest.

        Not in a thread: a CUDA graph that the script captures meanwhile would be void.
        """
        if self._registration is not None and self._made.unregistered:
            self._registration.add(self._made.unregistered.popleft())

    def copy(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """In host memory; the next call writes to the same. Raises HostError if there is not enough of it."""
        self.prepare(tensors)
        self._wait()
        if self._made.error:
            self._layout = ()  # the next call tries again
            raise HostError(self._made.error)
        views = self._made.views
        while self._made.unregistered:
            self.register_part()
        for name, values in tensors.items():
            views[name].copy_(values)
        return views

    def _wait(self) -> None:
        if self._maker is not None:
            self._maker.join()
            self._maker = None


def _make(layout: _Layout, made: _Made) -> None:
    try:
        parts, num_bytes = _parts(layout)
        limit = memory_limit()
        if num_bytes + RESERVE_BYTES > limit.available_bytes:  # beyond it the kernel kills, and raises nothing
            raise MemoryError(f"{byte_count(limit.available_bytes)} are available, limited by {limit.source}")
        room = torch.frombuffer(mmap.mmap(-1, max(1, num_bytes)), dtype=torch.uint8).zero_()
        for part in parts:
            views = {name: room[start:end].view(dtype).view(shape) for (name, shape, dtype, _), start, end in part}
            made.views |= views
            made.unregistered.append(list(views.values()))
    except Exception as error:  # whatever it is, training goes on without checkpoints
        made.error = f"no host memory for a copy of {len(layout)} tensors: {error}"


def _parts(layout: _Layout) -> tuple[list[list[tuple[_Place, int, int]]], int]:
    """Each tensor with its start and end in the room, by part, of which each begins on a page of its own; and the size
    of the room."""
    parts: list[list[tuple[_Place, int, int]]] = []
    end = first = 0
    for place in layout:
        if not parts or end - first >= PART_BYTES:
            first = end = _aligned(end, mmap.PAGESIZE)
            parts.append([])
        start = _aligned(end, ALIGNMENT_BYTES)
        end = start + place[1].numel() * place[2].itemsize
        parts[-1].append((place, start, end))
    return parts, end


def _aligned(at: int, num_bytes: int) -> int:
    return -(-at // num_bytes) * num_bytes
