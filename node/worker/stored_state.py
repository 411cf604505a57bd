"""What the ranks of a site wrote of their inner optimizers at one checkpoint, and what a rank needs of it, whose slices
may be others now. No file is opened here: descriptions are given."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from atoll.protocol.errors import HostError
from atoll.protocol.layout import DTYPE_BYTES
from atoll.protocol.text import differences

_Key = tuple[int, str]
"""The number of an optimizer, and a parameter of it."""


@dataclass(frozen=True, slots=True)
class Slice:
    """Of one full tensor: elements `offsets[d]` to `offsets[d] + sizes[d]` of dimension d."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    @property
    def num_elements(self) -> int:
        return math.prod(self.sizes)

    def overlap(self, other: Slice) -> Slice:
        """May be empty."""
        pairs = list(zip(self.offsets, self.sizes, other.offsets, other.sizes, strict=True))
        first = tuple(max(a, b) for a, _, b, _ in pairs)
        last = [min(a + size, b + other_size) for a, size, b, other_size in pairs]
        return Slice(first, tuple(max(0, end - start) for start, end in zip(first, last, strict=True)))

    def within(self, outer: Slice) -> tuple[slice, ...]:
        """To take it out of a tensor that holds `outer`."""
        starts = (mine - its for mine, its in zip(self.offsets, outer.offsets, strict=True))
        return tuple(slice(start, start + size) for start, size in zip(starts, self.sizes, strict=True))


@dataclass(frozen=True, slots=True, kw_only=True)
class Needed:
    """Of one optimizer's parameter: the slice that this rank has, and what a state must be of to fit."""

    optimizer: int
    parameter: str
    slice: Slice
    fits: dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """A tensor of state in one rank's file."""

    path: Path
    name: str
    slice: Slice
    """Of the parameter, that the rank had."""
    shape: tuple[int, ...]
    dtype: str
    hash: str
    is_slice: bool
    """The tensor is of that slice; else it is the parameter's as a whole, or only of use to that very slice."""
    on_cpu: bool

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * DTYPE_BYTES[self.dtype]


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """One tensor of state that a rank puts together from `parts`, of which there is at least one."""

    needed: Needed
    key: str
    parts: tuple[Part, ...]

    def places(self, part: Part) -> tuple[tuple[slice, ...], tuple[slice, ...]]:
        """What is taken out of a part, and where it belongs."""
        if not part.is_slice:
            return (), ()
        both = part.slice.overlap(self.needed.slice)
        return both.within(part.slice), both.within(self.needed.slice)


class StoredState:
    """Of all ranks. What its methods raise names tensor and reason."""

    def __init__(self, files: Mapping[Path, Mapping[str, Any]], own: Path | None = None) -> None:
        """`files`: descriptions as `LocalCheckpoints` writes them. `own`: the one that this rank wrote, if the site had
        as many ranks."""
        self.run_step = max((file["run_step"] for file in files.values()), default=0)
        """At which ranks wrote it."""
        self._own = own
        self._own_slices: dict[_Key, Slice] = {}
        """Whose state the own file has, if there was any."""
        self._fits: dict[_Key, dict[str, Any]] = {}
        self._groups: dict[_Key, dict[str, Any]] = {}
        self._parts: dict[_Key, dict[str, list[Part]]] = {}
        self._copies: dict[int, set[str]] = {}
        self._plain: dict[_Key, dict[str, list[tuple[Path, Any]]]] = {}
        for path, file in files.items():
            slices = {name: dict(item) for name, item in file["slices"].items()}
            places = {
                name: Slice(tuple(item.pop("offsets")), tuple(item.pop("sizes"))) for name, item in slices.items()
            }
            for index, optimizer in enumerate(file["optimizers"]):
                self._copies.setdefault(index, set()).update(optimizer.get("copies", ()))
                if path == own:
                    self._own_slices = {(index, n): places[n] for n in optimizer["written"]} | self._own_slices
                for group in optimizer["groups"]:
                    for name in group["names"]:
                        self._groups.setdefault((index, name), group)
                        if name in slices:
                            kind = {"optimizer": optimizer["kind"], "switches": group["switches"]}
                            self._fits.setdefault((index, name), kind | slices[name])
            for name, item in file["tensors"].items():
                if "optimizer" not in item:
                    continue  # the script's own
                index, parameter, key = item["optimizer"], item["parameter"], item["key"]
                part = Part(
                    path=path,
                    name=name,
                    slice=places[parameter],
                    shape=tuple(item["shape"]),
                    dtype=item["dtype"],
                    hash=item["hash"],
                    is_slice=item["is_slice"],
                    on_cpu=item["on_cpu"],
                )
                self._parts.setdefault((index, parameter), {}).setdefault(key, []).append(part)
            for index, parameter, key, value in file["plain"]:
                self._plain.setdefault((index, parameter), {}).setdefault(key, []).append((path, value))

    def plain(self, needed: Needed) -> dict[str, Any]:
        """What is kept of it that is no tensor. Raises HostError if ranks had different values, of which none is this
        rank's."""
        at = needed.optimizer, needed.parameter
        found = {}
        for key, values in self._plain.get(at, {}).items():
            mine = [value for path, value in values if not self._is_own(needed) or path == self._own]
            if any(value != mine[0] for value in mine):
                raise HostError(f"{key!r} of {needed.parameter!r} differs from rank to rank, and no rank is as it was")
            found.update({key: mine[0]} if mine else {})
        return found

    def tells_of(self, needed: Needed) -> bool:
        """Whether one of the files would have its state if there is any; files that are not here may have it."""
        return self._is_own(needed) or (needed.optimizer, needed.parameter) in self._parts

    def _is_own(self, needed: Needed) -> bool:
        """This rank wrote the state of this very slice."""
        return self._own_slices.get((needed.optimizer, needed.parameter)) == needed.slice

    def group(self, optimizer: int, parameter: str) -> Mapping[str, Any]:
        """Hyperparameters of the group that it was in: "first" when its script began, and "now"."""
        return self._groups[optimizer, parameter]

    def copies(self, optimizer: int) -> set[str]:
        """Keys of its state under which it has copies of parameters."""
        return self._copies.get(optimizer, set())

    def wanted(self, needed: Iterable[Needed]) -> list[Wanted]:
        """Raises HostError if the state is of another model or optimizer, or does not have all of a slice."""
        found = []
        for item in needed:
            at = item.optimizer, item.parameter
            if at not in self._fits:
                raise HostError(f"it has no {item.parameter!r}; it is of another model or optimizer")
            if changed := differences(self._fits[at], item.fits, f"{item.parameter}"):
                raise HostError(f"it is of another model or optimizer: {changed[0]}")
            self.plain(item)
            for key, parts in self._parts.get(at, {}).items():
                if self._is_own(item):
                    found += [Wanted(needed=item, key=key, parts=(part,)) for part in parts if part.path == self._own]
                else:
                    found.append(Wanted(needed=item, key=key, parts=_parts_of(item, key, parts)))
        return found


def _parts_of(needed: Needed, key: str, parts: list[Part]) -> tuple[Part, ...]:
    """Which of them make up the slice, each element once. Raises HostError."""
    what = f"{key!r} of {needed.parameter!r}"
    distinct = list({part.slice: part for part in reversed(parts)}.values())
    if all(part.is_slice for part in parts):
        overlaps = [part for part in distinct if part.slice.overlap(needed.slice).num_elements]
        if sum(part.slice.overlap(needed.slice).num_elements for part in overlaps) != needed.slice.num_elements:
            raise HostError(f"no rank wrote {what} for all of the slice at {list(needed.slice.offsets)}")
        return tuple(overlaps) or (distinct[0],)
    same = [part for part in distinct if part.slice == needed.slice]
    is_of_all = math.prod(parts[0].shape) == 1 and len({part.hash for part in parts}) == 1
    if not same and not is_of_all:
        raise HostError(f"{what} belongs to slices that ranks do not have any more")
    return tuple(same or distinct)[:1]
