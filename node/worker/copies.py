"""Copies between a rank's tensors and the host memory that it shares with its node.

A copy between a GPU and host memory is fast only if the GPU's driver knows the memory, and torch may cast on the host
unless both sides have one dtype. So a rank on a GPU registers what it shares, casts on the GPU, and goes through
tensors in pieces, for which it needs little room there. Each copy is done when its function returns: SEALED and MERGED
follow at once, and then the node reads SNAPSHOT and changes PUBLISH.
"""

from __future__ import annotations

import mmap
import os
import sys
import weakref
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

PIECE_BYTES = 64 << 20


def pieces(*tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """The same rows of each of them, which have one shape: at most PIECE_BYTES of fp32, but at least one row."""
    shape = tensors[0].shape
    if len(shape) == 0 or tensors[0].numel() * 4 <= PIECE_BYTES:
        yield tensors
        return
    num_rows = max(1, PIECE_BYTES // 4 * shape[0] // tensors[0].numel())
    yield from zip(*(torch.split(tensor, num_rows) for tensor in tensors), strict=True)


def to_host(local: Tensor, shared: Tensor) -> None:
    """`shared := local` in the dtype of `shared`, which is in host memory."""
    if local.device.type == "cpu":
        shared.copy_(local)
        return
    for source, target in pieces(local, shared):
        target.copy_(source.to(target.dtype))


def to_local(shared: Tensor, local: Tensor) -> None:
    """`local := shared` in the dtype of `local`."""
    for source, target in pieces(shared, local):
        target.copy_(source.to(target.device))


def are_equal(shared: Tensor, local: Tensor) -> bool:
    """Whether `to_local` would change nothing."""
    return all(
        torch.equal(source.to(target.device).to(target.dtype), target) for source, target in pieces(shared, local)
    )


class Registration:
    """Host memory that the driver of GPUs knows, so that a GPU reads and writes it by itself. It lasts until `end`, or
    until nothing refers to this any more."""

    def __init__(self, views: Sequence[Tensor], devices: Iterable[torch.device], what: str) -> None:
        """Of the pages of these tensors in host memory, which are nobody else's. Nothing where no device is a GPU;
        says so, with `what` the memory is for, if the driver refuses."""
        self._ranges: list[tuple[int, int]] = []
        self._views: list[Tensor] = []  # held, so that nothing is unmapped before
        self._gpu = next((device for device in devices if device.type == "cuda"), None)
        self._what = what
        self.end = weakref.finalize(self, _unregister, self._ranges, self._gpu, os.getpid(), self._views)
        self.add(views)

    def add(self, views: Sequence[Tensor]) -> None:
        """More, whose pages are not those of the ones before. Nothing once the driver has refused."""
        if self._gpu is None or not self.end.alive:
            return
        self._views += views
        for start, end in page_ranges(views):
            error = _call(self._gpu, "cudaHostRegister", start, end - start, 0)
            if error:
                sys.stderr.write(
                    f"atoll: the CUDA driver does not register {end - start} bytes of {self._what} ({error}): copies "
                    "to and from it are several times slower\n"
                )
                self.end()
                break
            self._ranges.append((start, end))


def _unregister(ranges: list[tuple[int, int]], gpu: torch.device | None, pid: int, views: list[Tensor]) -> None:
    if gpu is not None and os.getpid() == pid:  # a fork has no part in it
        for start, _ in ranges:
            _call(gpu, "cudaHostUnregister", start)
    ranges.clear()
    views.clear()


def _call(gpu: torch.device, name: str, *arguments: int) -> str:
    """What CUDA's runtime answers; empty if it did as it was told."""
    with torch.cuda.device(gpu):
        runtime: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        code = int(getattr(runtime, name)(*arguments))
        if not code:
            return ""
        _forget_error(gpu)
        return f"error {code}: {runtime.cudaGetErrorString(runtime.cudaError(code))}"


def _forget_error(gpu: torch.device) -> None:
    """CUDA keeps the error of a call until somebody asks, and torch asks at the next kernel: it would raise there."""
    try:
        torch.zeros(1, device=gpu)
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
