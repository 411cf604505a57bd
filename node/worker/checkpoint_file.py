"""The file of one checkpoint of this rank's inner optimizers: safetensors, with a description and a hash over all."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor

from atoll.node.dataplane import safetensors_file
from atoll.node.worker.optimizer_state import StateTensor
from atoll.node.worker.pieces import TORCH_DTYPES
from atoll.node.worker.tensors import DTYPE_NAMES
from atoll.protocol.digest import Digest
from atoll.protocol.errors import ConfigError, HostError

READ_BYTES = 64 << 20
KEY = "atoll"
"""Of the description in a file's metadata."""
HASH_KEY = "hash"


def new_digest(text: str) -> Digest:
    """To which the bytes of all tensors are added, in the order of the description."""
    return Digest("atoll/optimizer-checkpoint/v1").text(text)


def write(path: Path, text: str, tensors: Sequence[StateTensor]) -> None:
    """`text` describes `tensors`, which are in host memory. Raises HostError if it cannot be written."""
    by_name = {item.name: as_bytes(item.values) for item in tensors}
    digest = new_digest(text)
    for data in by_name.values():
        digest.data(data)
    entries = [
        safetensors_file.Entry(
            item.name, DTYPE_NAMES[item.values.dtype], tuple(item.values.shape), [by_name[item.name]]
        )
        for item in tensors
    ]
    safetensors_file.write(path, entries, {KEY: text, HASH_KEY: digest.finish().hex()})


def as_bytes(values: Tensor) -> memoryview:
    data: memoryview = values.reshape(-1).view(torch.uint8).numpy().data
    return data


def read_tensor(
    reader: safetensors_file.Reader, name: str, shape: tuple[int, ...], dtype: str, at: Callable[[int], None]
) -> Tensor:
    """`at` is told each time how many bytes have been read.

    Raises HostError if a value is not finite; ConfigError or RuntimeError if there is no such tensor.
    """
    values = torch.empty(shape, dtype=TORCH_DTYPES[dtype])
    data = as_bytes(values)
    if reader.num_bytes(name, dtype) != data.nbytes:
        raise ConfigError(f"{name!r} has {reader.num_bytes(name, dtype)} bytes, {data.nbytes} are expected")
    for first in range(0, data.nbytes, READ_BYTES):
        at(first)
        part = data[first : first + READ_BYTES]
        part[:] = reader.read(name, first, part.nbytes)
    if values.is_floating_point() and not torch.isfinite(values if values.itemsize > 1 else values.float()).all():
        raise HostError(f"{reader.path}: {name!r} holds values that are not finite")
    return values
