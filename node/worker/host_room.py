"""Room in host memory for a copy of an optimizer's state, made beside the training.

The first write to each page of gigabytes takes seconds, in which nobody should wait. It is one mapping of its own:
pinned memory of torch's would be rounded up to a power of two for each tensor, what malloc gives shares pages with
others, and private pages that a GPU writes to are copied when the process forks.
"""

from __future__ import annotations

import mmap
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from atoll.node.daemon.shared_memory import RESERVE_BYTES, memory_limit
from atoll.node.worker import copies
from atoll.protocol.errors import HostError
from atoll.protocol.text import byte_count

ALIGNMENT_BYTES = 64
_Layout = tuple[tuple[str, torch.Size, torch.dtype, torch.device], ...]


@dataclass(slots=True)
class _Made:
    views: dict[str, Tensor] = field(default_factory=dict)
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
        self._registration, self._layout, self._made = None, layout, _Made()
        # A daemon: a process that ends needs it no more.
        maker = threading.Thread(target=_make, args=(layout, self._made), name="atoll-host-room", daemon=True)
        try:
            maker.start()
        except RuntimeError as error:
            self._made.error = f"no thread to make room for a copy ({error})"
        else:
            self._maker = maker

    def copy(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """In host memory; the next call writes to the same. Raises HostError if there is not enough of it."""
        self.prepare(tensors)
        self._wait()
        if self._made.error:
            self._layout = ()  # the next call tries again
            raise HostError(self._made.error)
        views = self._made.views
        if self._registration is None:
            # Not in the thread: a CUDA graph that the script captures meanwhile would be void.
            devices = (values.device for values in tensors.values())
            self._registration = copies.Registration(list(views.values()), devices, "memory for checkpoints")
        for name, values in tensors.items():
            views[name].copy_(values)
        return views

    def _wait(self) -> None:
        if self._maker is not None:
            self._maker.join()
            self._maker = None


def _make(layout: _Layout, made: _Made) -> None:
    try:
        places, num_bytes = _places(layout)
        limit = memory_limit()
        if num_bytes + RESERVE_BYTES > limit.available_bytes:  # beyond it the kernel kills, and raises nothing
            raise MemoryError(f"{byte_count(limit.available_bytes)} are available, limited by {limit.source}")
        room = torch.frombuffer(mmap.mmap(-1, max(1, num_bytes)), dtype=torch.uint8).zero_()
        for (name, shape, dtype, _), (start, end) in zip(layout, places, strict=True):
            made.views[name] = room[start:end].view(dtype).view(shape)
    except Exception as error:  # whatever it is, training goes on without checkpoints
        made.error = f"no host memory for a copy of {len(layout)} tensors: {error}"


def _places(layout: _Layout) -> tuple[list[tuple[int, int]], int]:
    """Of each tensor in the room, and the size of that."""
    found, end = list[tuple[int, int]](), 0
    for _, shape, dtype, _ in layout:
        start = -(-end // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
        end = start + shape.numel() * dtype.itemsize
        found.append((start, end))
    return found, end
