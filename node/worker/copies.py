"""Copies between a rank's tensors and the host memory that it shares with its node.

A copy between a GPU and host memory is fast only if the memory is registered with the GPU's driver, and it casts on
the host unless both sides have one dtype. So a rank on a GPU registers what it shares, casts on the GPU, and goes
through tensors in pieces, for which it needs little room there. The copies of one device follow each other: `wait`
returns when all are done.
"""

from __future__ import annotations

import mmap
import sys
import weakref
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

PIECE_BYTES = 64 << 20
CPU = torch.device("cpu")


def pieces(*tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """The same rows of each of them, which have one shape: at most PIECE_BYTES of fp32, but at least one row."""
    shape = tensors[0].shape
    if len(shape) == 0 or tensors[0].numel() * 4 <= PIECE_BYTES:
        yield tensors
        return
    num_rows = max(1, PIECE_BYTES // 4 * shape[0] // tensors[0].numel())
    yield from zip(*(torch.split(tensor, num_rows) for tensor in tensors), strict=True)


def to_host(local: Tensor, shared: Tensor) -> None:
    """`shared := local` in the dtype of `shared`, which is in host memory; done after `wait`."""
    for source, target in pieces(local, shared):
        target.copy_(source.to(target.dtype), non_blocking=True)


def to_local(shared: Tensor, local: Tensor) -> None:
    """`local := shared` in the dtype of `local`; done after `wait`."""
    for source, target in pieces(shared, local):
        target.copy_(source.to(target.device, non_blocking=True))


def wait(device: torch.device) -> None:
    """Until the copies are done: what is in shared memory may be read, and changed, by the node."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    elif device.type != "cpu":
        torch.accelerator.synchronize(device.index or 0)


class Registration:
    """Host memory that the driver of a GPU knows, so that the GPU reads and writes it by itself. It lasts until `end`,
    or until nothing refers to this any more."""

    def __init__(self, views: Sequence[Tensor] = (), device: torch.device = CPU) -> None:
        """Of the pages of these tensors in host memory. Nothing without a GPU; says so if the driver refuses."""
        self._ranges: list[tuple[int, int]] = []
        self.end = weakref.finalize(self, _unregister, self._ranges, views)  # the views: nothing is unmapped before
        if device.type != "cuda":
            return
        with torch.cuda.device(device):
            for start, end in page_ranges(views):
                error = int(_driver().cudaHostRegister(start, end - start, 0))
                if error:
                    _forget_error(device)
                    sys.stderr.write(
                        f"atoll: the CUDA driver does not register {end - start} bytes of the memory shared with the "
                        f"node (error {error}): copies at a sync are several times slower. A limit of locked memory "
                        "(ulimit -l, or of the container) is the usual reason\n"
                    )
                    self.end()
                    break
                self._ranges.append((start, end))

    @property
    def num_bytes(self) -> int:
        return sum(end - start for start, end in self._ranges)


def _unregister(ranges: list[tuple[int, int]], views: Sequence[Tensor]) -> None:
    for start, _ in ranges:
        _driver().cudaHostUnregister(start)
    ranges.clear()


def _driver() -> Any:
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]


def _forget_error(device: torch.device) -> None:
    """CUDA keeps the error of a call until somebody asks, and torch asks at the next kernel: it would raise there."""
    try:
        torch.zeros(1, device=device)
    except RuntimeError:
        pass


def page_ranges(views: Iterable[Tensor]) -> list[tuple[int, int]]:
    """The addresses of whole pages that hold these tensors, in order, none twice."""
    found: list[tuple[int, int]] = []
    for start, end in sorted(map(_extent, (view for view in views if view.numel()))):
        first, last = start // mmap.PAGESIZE * mmap.PAGESIZE, -(-end // mmap.PAGESIZE) * mmap.PAGESIZE
        if found and first <= found[-1][1]:
            found[-1] = found[-1][0], max(last, found[-1][1])
        else:
            found.append((first, last))
    return found


def _extent(view: Tensor) -> tuple[int, int]:
    num_elements = 1 + sum((size - 1) * stride for size, stride in zip(view.shape, view.stride(), strict=True))
    return view.data_ptr(), view.data_ptr() + num_elements * view.itemsize
