"""Tensors that share memory without being one tensor: an update of one of them would overwrite the other's."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from atoll.protocol.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Place:
    """A tensor that a sync writes, on this rank."""

    name: str
    tensor: Tensor
    is_frozen: bool
    """Written once, with values that overlap as the memory does."""

    @property
    def first_byte(self) -> int:
        return self.tensor.data_ptr()

    @property
    def end_byte(self) -> int:
        steps = zip(self.tensor.shape, self.tensor.stride(), strict=True)
        return self.first_byte + (sum((size - 1) * stride for size, stride in steps) + 1) * self.tensor.itemsize


def check_shared_storage(places: Iterable[Place]) -> None:
    """Raises ConfigError, naming them, for a pair of tensors, or for elements of one, in the same memory."""
    open_places: list[Place] = []  # that end behind the beginning of the next
    for place in sorted((p for p in places if p.tensor.numel()), key=lambda p: (str(p.tensor.device), p.first_byte)):
        steps = zip(place.tensor.shape, place.tensor.stride(), strict=True)
        if any(size > 1 and stride == 0 for size, stride in steps):
            raise ConfigError(
                f"{place.name!r} is expanded: several of its elements are the same memory; give each its own before "
                "atoll.join, with .clone(memory_format=torch.contiguous_format)"
            )
        device = place.tensor.device
        open_places = [p for p in open_places if p.tensor.device == device and p.end_byte > place.first_byte]
        for other in open_places:
            if not (place.is_frozen and other.is_frozen) and _share_elements(place, other):
                first, second = sorted((place.name, other.name), key=str.encode)
                raise ConfigError(
                    f"{first!r} and {second!r} share memory without being the same tensor (a transpose or a part): the "
                    "update of one would overwrite the other's. Tie weights as one Parameter (a.weight = b.weight) and "
                    "transpose where it is used, or give each memory of its own with .clone()"
                )
        open_places.append(place)


def _share_elements(a: Place, b: Place) -> bool:
    """Of two whose ranges of bytes overlap; those of strided tensors may lie between each other."""
    if a.tensor.is_contiguous() and b.tensor.is_contiguous():
        return True
    itemsize = a.tensor.itemsize
    if b.tensor.itemsize != itemsize or (a.first_byte - b.first_byte) % itemsize:
        return True
    begin, end = min(a.first_byte, b.first_byte), max(a.end_byte, b.end_byte)
    is_taken = torch.zeros((end - begin) // itemsize, dtype=torch.bool)
    in_a, in_b = (
        is_taken.as_strided(p.tensor.shape, p.tensor.stride(), (p.first_byte - begin) // itemsize) for p in (a, b)
    )
    in_a.fill_(True)
    return bool(in_b.any())
