"""The file of one checkpoint of a rank's inner optimizers: safetensors, with a description in which each tensor has its
hash, and a hash of the description."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from atoll.node.dataplane import safetensors_file
from atoll.node.worker.stored_state import Part
from atoll.node.worker.tensors import DTYPE_NAMES, TORCH_DTYPES
from atoll.protocol.digest import Digest
from atoll.protocol.errors import ConfigError, HostError

READ_BYTES = 64 << 20


class KeptTensor(Protocol):
    """One that a checkpoint has."""

    @property
    def name(self) -> str: ...
    @property
    def values(self) -> Tensor: ...
    def described(self) -> dict[str, Any]:
        """All of it but the values, for JSON."""


_KEY = "atoll"
"""Of the description in a file's metadata."""
_HASH_KEY = "hash"


def describe(about: Mapping[str, Any], tensors: Sequence[KeptTensor]) -> str:
    """`about` with what each tensor is, as JSON. `tensors` are in host memory."""
    described = {
        item.name: item.described()
        | {
            "shape": list(item.values.shape),
            "dtype": DTYPE_NAMES[item.values.dtype],
            "hash": _hash(as_bytes(item.values)),
        }
        for item in tensors
    }
    return json.dumps({**about, "tensors": described})


def write(path: Path, text: str, tensors: Sequence[KeptTensor]) -> None:
    """`text` describes `tensors`. Raises HostError if it cannot be written."""
    entries = [
        safetensors_file.Entry(
            item.name, DTYPE_NAMES[item.values.dtype], tuple(item.values.shape), [as_bytes(item.values)]
        )
        for item in tensors
    ]
    safetensors_file.write(path, entries, {_KEY: text, _HASH_KEY: _text_hash(text)})


def read_description(path: Path) -> dict[str, Any]:
    """Raises HostError or ConfigError if it is not as it was written."""
    with closing(safetensors_file.Reader(path)) as reader:
        text = reader.metadata.get(_KEY, "")
        if _text_hash(text) != reader.metadata.get(_HASH_KEY):
            raise HostError("its description does not have its own hash; the disk or a crash damaged it")
        described: dict[str, Any] = json.loads(text)
        for name, item in described["tensors"].items():
            reader.num_bytes(name, item["dtype"])
        return described


def read_tensor(
    reader: safetensors_file.Reader, part: Part, at: Callable[[int], None], *, is_finite: bool = True
) -> Tensor:
    """In host memory. `at` is told each time how many bytes have been read.

    Raises HostError unless it is as it was written, and finite where that `is_finite`; ConfigError or RuntimeError if
    there is no such tensor.
    """
    values = torch.empty(part.shape, dtype=TORCH_DTYPES[part.dtype])
    data = as_bytes(values)
    if reader.num_bytes(part.name, part.dtype) != data.nbytes:
        raise ConfigError(
            f"{part.name!r} has {reader.num_bytes(part.name, part.dtype)} bytes, {data.nbytes} are expected"
        )
    for first in range(0, data.nbytes, READ_BYTES):
        at(first)
        piece = data[first : first + READ_BYTES]
        piece[:] = reader.read(part.name, first, piece.nbytes)
    check(values, part, is_finite=is_finite)
    return values


def check(values: Tensor, part: Part, *, is_finite: bool) -> None:
    """Raises HostError unless they are as they were written, and finite where that `is_finite`."""
    if _hash(as_bytes(values)) != part.hash:
        raise HostError(f"{part.path}: {part.name!r} does not have its own hash; the disk or a crash damaged it")
    if not is_finite:
        return
    if values.is_floating_point() and not torch.isfinite(values if values.itemsize > 1 else values.float()).all():
        raise HostError(f"{part.path}: {part.name!r} holds values that are not finite")


def as_bytes(values: Tensor) -> memoryview:
    data: memoryview = values.reshape(-1).view(torch.uint8).numpy().data
    return data


def _hash(data: memoryview) -> str:
    return Digest("atoll/optimizer-tensor/v1").data(data).finish().hex()


def _text_hash(text: str) -> str:
    return Digest("atoll/optimizer-checkpoint/v2").text(text).finish().hex()
