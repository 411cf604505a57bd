"""What a script wants back after a crash beside the optimizers' state: schedulers, EMA copies, a data loader's place.

Whatever has `state_dict` and `load_state_dict` is kept, in the rank's checkpoint of the optimizers, if it is of tensors
and plain values: as safetensors and JSON, for nothing that is read may run code.
"""

from __future__ import annotations

import sys
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from atoll.node.worker.step_count import stepping
from atoll.node.worker.stored_state import Part, Slice
from atoll.node.worker.tensors import DTYPE_NAMES
from atoll.protocol.errors import ConfigError

MAX_DEPTH = 32
_FOLLOWING: WeakSet[torch.optim.Optimizer] = WeakSet()
_KINDS: dict[str, Callable[[Any], Any]] = {
    "list": list, "tuple": tuple, "dict": dict, "Counter": Counter, "OrderedDict": OrderedDict,
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class ScriptTensor:
    """One of what is kept, on this rank."""

    name: str
    values: Tensor
    """The local shard of a DTensor."""
    is_sharded: bool

    def described(self) -> dict[str, Any]:
        return {"is_sharded": self.is_sharded}


class ScriptState:
    """`state` of `atoll.join`, as this rank has it."""

    def __init__(self, kept: Mapping[str, Any], optimizers: Sequence[torch.optim.Optimizer]) -> None:
        """Raises ConfigError, naming what cannot be kept."""
        for name, item in kept.items():
            if not callable(getattr(item, "state_dict", None)) or not callable(getattr(item, "load_state_dict", None)):
                raise ConfigError(
                    f'state["{name}"] is {type(item).__name__}, which has no state_dict and load_state_dict; give it '
                    "these two methods, or leave it out"
                )
            if any(item is optimizer for optimizer in optimizers):
                raise ConfigError(f'state["{name}"] is an optimizer given to atoll.join, whose state is kept anyhow')
        self._kept = kept
        self._owners = [o for item in kept.values() for o in (getattr(item, "optimizer", None), *_several(item))]
        # By schedulers that are kept.
        self._rated = [o for o in optimizers if any(o is owner for owner in self._owners)]
        self.taken()

    def has_scheduler_of(self, optimizer: torch.optim.Optimizer) -> bool:
        """Whether what decides the learning rates of that one is kept."""
        inner = stepping(optimizer)
        return any(isinstance(o, torch.optim.Optimizer) and stepping(o) is inner for o in self._owners)

    def taken(self) -> tuple[dict[str, Any], list[ScriptTensor]]:
        """For JSON, and the tensors that it names. Raises ConfigError, naming what is neither."""
        tensors: list[ScriptTensor] = []
        described = {name: _encode(item.state_dict(), name, tensors) for name, item in self._kept.items()}
        rates = [[_rates(group) for group in optimizer.param_groups] for optimizer in self._rated]
        return {"kept": described, "rates": rates}, tensors

    def restore(
        self, path: Path, described: Mapping[str, Any], read: Callable[[Part], Tensor], *, is_own: bool
    ) -> None:
        """From a rank's checkpoint, as its description says: its own, or, where the site has another number of ranks,
        the first one's, which has what is not sharded. Raises what `read` does."""
        found = described.get("script", {"kept": {}, "rates": []})
        parts = {part.name: part for part in parts_of_script(path, described)}
        restored = []
        for name, item in self._kept.items():
            if name not in found["kept"]:
                self._begins_again(name, "the checkpoint does not have it")
                continue
            reading = _Reading(parts, described["tensors"], read)
            value = reading.decode(found["kept"][name], item.state_dict())
            if reading.misfit or (reading.is_sharded and not is_own):
                self._begins_again(name, reading.misfit or "the site has another number of ranks, which share it")
                continue
            item.load_state_dict(value)
            restored.append(name)
        if restored and len(found["rates"]) == len(self._rated):
            for optimizer, groups in zip(self._rated, found["rates"], strict=True):
                for group, rates in zip(optimizer.param_groups, groups, strict=False):
                    _set_rates(group, rates)

    def _begins_again(self, name: str, why: str) -> None:
        sys.stderr.write(f'atoll: state["{name}"] begins again: {why}\n')


def follows_the_run(optimizer: torch.optim.Optimizer) -> None:
    """Its scheduler is set to the run's step, also after a crash."""
    _FOLLOWING.add(stepping(optimizer))


def not_kept(optimizers: Sequence[torch.optim.Optimizer], script: ScriptState | None) -> str:
    """Which optimizers have a scheduler of torch's that begins again after a crash, in words for a person; empty if
    none has. A scheduler marks the step of its optimizer."""
    found = [
        type(optimizer).__name__
        for optimizer in optimizers
        if getattr(stepping(optimizer).step, "_wrapped_by_lr_sched", False)
        and stepping(optimizer) not in _FOLLOWING
        and not (script is not None and script.has_scheduler_of(optimizer))
    ]
    if not found:
        return ""
    return (
        f"the learning-rate scheduler of {', '.join(found)} is not in state=, and begins again after a crash: "
        'atoll.join(..., state={"scheduler": scheduler}) keeps it; one that computes its rates from site.run_share or '
        "site.inner_step alone need not be kept"
    )


class _Reading:
    """Of one thing that is kept."""

    def __init__(
        self, parts: Mapping[str, Part], tensors: Mapping[str, Mapping[str, Any]], read: Callable[[Part], Tensor]
    ) -> None:
        self._parts, self._tensors, self._read = parts, tensors, read
        self.is_sharded = False
        self.misfit = ""

    def decode(self, item: Any, like: object) -> Any:
        """`like`: what the script has now in its place, whose device and sharding a tensor gets."""
        if not isinstance(item, dict):
            return item
        ((kind, value),) = item.items()
        if kind == "tensor":
            return self._tensor(value, like)
        if kind in ("list", "tuple"):
            likes = like if isinstance(like, list | tuple) and len(like) == len(value) else [None] * len(value)
            return _KINDS[kind](self.decode(part, now) for part, now in zip(value, likes, strict=True))
        now = like if isinstance(like, Mapping) else {}
        return _KINDS[kind]({key: self.decode(part, now.get(key)) for key, part in value})

    def _tensor(self, name: str, like: object) -> Tensor:
        item = self._tensors[name]
        values = self._read(self._parts[name])
        self.is_sharded |= item["is_sharded"]
        if not isinstance(like, DTensor):
            if item["is_sharded"]:
                self.misfit = f"{name!r} was sharded, and is not"
            return values.to(like.device) if isinstance(like, Tensor) else values
        if not item["is_sharded"] or like.to_local().shape != values.shape:
            self.misfit = f"{name!r} is sharded otherwise than it was"
            return values
        return DTensor.from_local(
            values.to(like.device), like.device_mesh, like.placements, run_check=False, shape=like.shape,
            stride=like.stride(),
        )  # fmt: skip


def parts_of_script(path: Path, described: Mapping[str, Any]) -> list[Part]:
    """The tensors of what a script keeps, in the file at `path` that is described so."""
    found = []
    for name, item in described["tensors"].items():
        if "is_sharded" in item:
            shape = tuple(item["shape"])
            found.append(
                Part(
                    path=path,
                    name=name,
                    slice=Slice((0,) * len(shape), shape),
                    shape=shape,
                    dtype=item["dtype"],
                    hash=item["hash"],
                    is_slice=False,
                    on_cpu=True,
                )
            )
    return found


def _encode(value: object, path: str, tensors: list[ScriptTensor], depth: int = 0) -> Any:
    """A plain value as itself, all else as {kind: what it has}."""
    if depth > MAX_DEPTH:
        raise ConfigError(f'state: "{path}" is more than {MAX_DEPTH} levels deep')
    if value is None or type(value) in (bool, int, float, str):
        return value
    if isinstance(value, Tensor):
        local = value.to_local() if isinstance(value, DTensor) else value
        if type(local) not in (Tensor, torch.nn.Parameter) or local.dtype not in DTYPE_NAMES or local.is_meta:
            raise ConfigError(f'state: "{path}" is a {type(local).__name__} of {local.dtype}, which cannot be kept')
        if local.layout is not torch.strided:
            raise ConfigError(f'state: "{path}" is {local.layout}, which cannot be kept; make it dense')
        name = f"state/{len(tensors)}/{path}"  # keys have dots in them: two paths may read alike
        tensors.append(ScriptTensor(name=name, values=local.detach(), is_sharded=isinstance(value, DTensor)))
        return {"tensor": name}
    if isinstance(value, list | tuple):
        parts = [_encode(part, f"{path}.{number}", tensors, depth + 1) for number, part in enumerate(value)]
        return {"tuple" if isinstance(value, tuple) else "list": parts}
    if isinstance(value, Mapping) and all(type(key) in (bool, int, float, str) for key in value):
        kind = type(value).__name__ if isinstance(value, Counter | OrderedDict) else "dict"
        parts = [[key, _encode(part, f"{path}.{key}", tensors, depth + 1)] for key, part in value.items()]
        return {kind if kind in _KINDS else "dict": parts}
    raise ConfigError(
        f'state: "{path}" is {type(value).__name__}; tensors, numbers, texts, lists and dictionaries of them can be '
        "kept, as nothing that is read back may run code: give an object whose state_dict has only these"
    )


def _several(item: object) -> Sequence[object]:
    """Of a wrapper of a scheduler."""
    found = getattr(item, "optimizers", ())
    return found if isinstance(found, list | tuple) else ()


def _rates(group: Mapping[str, Any]) -> dict[str, float]:
    return {key: float(group[key]) for key in ("lr", "initial_lr") if key in group}


def _set_rates(group: dict[str, Any], rates: Mapping[str, float]) -> None:
    """A scheduler's next rate is made of the last one."""
    for key, rate in rates.items():
        if isinstance(group.get(key), Tensor):
            group[key].fill_(rate)
        else:
            group[key] = rate
