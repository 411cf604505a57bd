"""Room in host memory for a copy of an optimizer's state, made beside the training.

The first write to each page of gigabytes, and registering them with a GPU's driver, takes seconds, in which nobody
should wait. It is one piece of memory: pinned memory of torch's own would be rounded up to a power of two for each
tensor.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from atoll.node.worker import copies
from atoll.protocol.errors import HostError
from atoll.protocol.text import byte_count

ALIGNMENT_BYTES = 64
_Layout = tuple[tuple[str, torch.Size, torch.dtype, torch.device], ...]


@dataclass(slots=True)
class _Made:
    views: dict[str, Tensor] = field(default_factory=dict)
    registration: copies.Registration | None = None
    error: str = ""


class HostRoom:
    """Of one rank, for one set of tensors at a time."""

    def __init__(self) -> None:
        self._layout: _Layout = ()
        self._made = _Made()
        self._maker: threading.Thread | None = None

    def prepare(self, tensors: Mapping[str, Tensor]) -> None:
        """Begin to make it, unless there is one for such tensors."""
        layout = tuple((name, t.shape, t.dtype, t.device) for name, t in tensors.items())
        if layout == self._layout:
            return
        self.finish()
        self._layout, self._made = layout, _Made()
        # Not a daemon: the interpreter waits for it at its end.
        self._maker = threading.Thread(target=_make, args=(layout, self._made), name="atoll-host-room")
        self._maker.start()

    def copy(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """In host memory, complete when this returns; the next call writes to the same. Raises HostError if there is
        not enough of it."""
        self.prepare(tensors)
        self.finish()
        if self._made.error:
            self._layout = ()  # the next call tries again
            raise HostError(self._made.error)
        for name, values in tensors.items():
            self._made.views[name].copy_(values, non_blocking=True)
        for device in {values.device for values in tensors.values()}:
            copies.wait(device)
        return self._made.views

    def finish(self) -> None:
        """Until it is made."""
        if self._maker is not None:
            self._maker.join()
            self._maker = None


def _make(layout: _Layout, made: _Made) -> None:
    places, num_bytes = _places(layout)
    try:
        room = torch.empty(num_bytes, dtype=torch.uint8).zero_()
    except (RuntimeError, MemoryError) as error:
        made.error = f"no host memory for a copy of {byte_count(num_bytes)} ({error})"
        return
    for (name, shape, dtype, _), (start, end) in zip(layout, places, strict=True):
        made.views[name] = room[start:end].view(dtype).view(shape)
    gpus = [device for *_, device in layout if device.type == "cuda"]
    if gpus:
        made.registration = copies.Registration([room], gpus[0])


def _places(
    layout: Iterable[tuple[str, torch.Size, torch.dtype, torch.device]],
) -> tuple[Sequence[tuple[int, int]], int]:
    """Of each tensor in the room, and the size of that."""
    found, end = [], 0
    for _, shape, dtype, _ in layout:
        start = -(-end // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
        end = start + shape.numel() * dtype.itemsize
        found.append((start, end))
    return found, end
