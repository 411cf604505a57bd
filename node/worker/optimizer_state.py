"""What inner optimizers have learned, as this rank's tensors and plain values, and back into them to the bit."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from atoll.node.worker.tensors import DTYPE_NAMES, ModelTensors, identity
from atoll.protocol.errors import ConfigError

OF_THE_SCRIPT = frozenset({"params", "param_names", "lr", "initial_lr"})
"""Keys of parameter groups that a start of the script decides: a fresh scheduler begins with its own learning rate."""
SELECT_NO_STATE = frozenset({"weight_decay", "dampening", "nesterov", "foreach"})
"""Hyperparameters that may be turned on or off without another state."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StateTensor:
    """One tensor that an optimizer keeps for one parameter."""

    optimizer: int
    parameter: str
    key: str
    is_sharded: bool
    """A DTensor, placed as its parameter is; `values` is the local shard."""
    on_cpu: bool
    """Kept in CPU memory wherever the parameter is, as counts of steps are."""
    values: Tensor

    @property
    def name(self) -> str:
        return f"{self.optimizer}/{self.parameter}/{self.key}"

    def described(self) -> dict[str, Any]:
        """All of it but the values."""
        return {item.name: getattr(self, item.name) for item in fields(self) if item.name != "values"}


def keeps_no_state(optimizers: Sequence[torch.optim.Optimizer]) -> str:
    """Names the optimizer whose state cannot be kept in a checkpoint, and why; empty if there is none."""
    if any(_is_zero(optimizer) and not hasattr(optimizer, "optim") for optimizer in optimizers):
        return "ZeroRedundancyOptimizer(overlap_with_ddp=True), which has its state only after some steps"
    return ""


def _keeper(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """Whose `state` this rank has: of a ZeroRedundancyOptimizer, the one over this rank's part of the parameters. Its
    hyperparameters come from the outer one at each step."""
    if _is_zero(optimizer):
        inner: torch.optim.Optimizer = optimizer.optim  # type: ignore[attr-defined]
        return inner
    return optimizer


def _is_zero(optimizer: torch.optim.Optimizer) -> bool:
    """torch's; importing its module takes seconds, and a script that uses it has done so."""
    module = sys.modules.get("torch.distributed.optim.zero_redundancy_optimizer")
    return module is not None and isinstance(optimizer, module.ZeroRedundancyOptimizer)


class OptimizerState:
    """The state of all optimizers of one rank, which `keeps_no_state` has nothing against. Made when the script has not
    trained yet."""

    def __init__(self, tensors: ModelTensors, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        self._optimizers = optimizers
        self._keepers = [_keeper(optimizer) for optimizer in optimizers]
        names = {identity(held.parameter): held.spec.name for held in tensors.held if held.parameter is not None}
        self._named: list[list[dict[str, Tensor]]] = [
            [{names[identity(p)]: p for p in group["params"]} for group in keeper.param_groups]
            for keeper in self._keepers
        ]
        self._parameters = [{name: p for group in groups for name, p in group.items()} for groups in self._named]
        self._pieces = {held.spec.name: held.piece for held in tensors.held}
        self._first_groups = self._groups()

    def layout(self) -> dict[str, Any]:
        """What the state belongs to, as JSON gives it back; state fits only where this is the same."""
        return {
            "optimizers": [type(optimizer).__name__ for optimizer in self._optimizers],
            "groups": [[list(group) for group in groups] for groups in self._named],
            "slices": {
                name: [list(piece.offsets), list(piece.sizes), piece.dtype, parameter.device.type]
                for parameters in self._parameters
                for name, parameter in parameters.items()
                for piece in [self._pieces[name]]
            },
            "switches": [[_switches(group) for group in groups] for groups in self._first_groups],
        }

    def tensors(self) -> list[StateTensor]:
        """Sharing the storage of the optimizers' own. Raises ConfigError, naming what cannot be kept in a file."""
        return [
            _state_tensor(index, name, key, value, parameter)
            for index, name, parameter, state in self._states()
            for key, value in state.items()
            if isinstance(value, Tensor)
        ]

    def values(self) -> dict[str, Any]:
        """All that is no tensor, for JSON. Raises ConfigError."""
        plain: list[list[Any]] = []
        for index, name, _, state in self._states():
            for key, value in state.items():
                if isinstance(value, Tensor):
                    continue
                if not isinstance(key, str) or not (value is None or isinstance(value, bool | int | float | str)):
                    raise ConfigError(
                        f"{type(self._optimizers[index]).__name__} keeps {key!r} of {name!r} "
                        f"as {type(value).__name__}; only tensors and plain values can be kept in a checkpoint"
                    )
                plain.append([index, name, key, value])
        return {"state": plain, "first_groups": self._first_groups, "groups": self._groups()}

    @torch.no_grad()
    def placed(self, item: StateTensor) -> StateTensor:
        """With values as the optimizer would have made them: the parameter's device, order in memory and placement.

        Raises KeyError or ConfigError if there is no such parameter.
        """
        parameter = self._parameters[item.optimizer][item.parameter]
        like = parameter.to_local() if isinstance(parameter, DTensor) else parameter
        device = torch.device("cpu") if item.on_cpu else like.device
        if item.values.shape == like.shape:
            result = torch.empty_like(like, dtype=item.values.dtype, device=device, requires_grad=False)
        else:
            result = torch.empty(item.values.shape, dtype=item.values.dtype, device=device)
        result.copy_(item.values)
        if item.is_sharded:
            if not isinstance(parameter, DTensor):
                raise ConfigError(f"{item.name!r} is sharded, its parameter is not")
            result = DTensor.from_local(
                result,
                parameter.device_mesh,
                parameter.placements,
                run_check=False,
                shape=parameter.shape,
                stride=parameter.stride(),
            )
        return replace(item, values=result)

    def restore(self, tensors: Sequence[StateTensor], values: Mapping[str, Any]) -> None:
        """Put back what `tensors` (now `placed`) and `values` gave, in place of all state.

        The same `layout` is the caller's duty.
        """
        states: list[dict[str, dict[str, Any]]] = [{} for _ in self._optimizers]
        for item in tensors:
            states[item.optimizer].setdefault(item.parameter, {})[item.key] = item.values
        for index, name, key, value in values["state"]:
            states[index].setdefault(name, {})[key] = value
        for keeper, by_name, parameters in zip(self._keepers, states, self._parameters, strict=True):
            keeper.state.clear()
            keeper.state.update({parameters[name]: state for name, state in by_name.items()})
        self._restore_groups(values["first_groups"], values["groups"])

    def _states(self) -> list[tuple[int, str, Tensor, dict[Any, Any]]]:
        found = []
        for index, (keeper, parameters) in enumerate(zip(self._keepers, self._parameters, strict=True)):
            kept = [(name, p, keeper.state[p]) for name, p in parameters.items() if p in keeper.state]
            if len(kept) != len(keeper.state):
                raise ConfigError(
                    f"{type(keeper).__name__} keeps state for something that is not a parameter, or twice for tied "
                    "ones; it cannot be kept in a checkpoint"
                )
            found += [(index, name, p, state) for name, p, state in kept]
        return found

    def _groups(self) -> list[list[dict[str, Any]]]:
        """Plain hyperparameters, as JSON gives them back."""
        groups = [
            [{k: v for k, v in g.items() if k not in OF_THE_SCRIPT and _is_plain(v)} for g in optimizer.param_groups]
            for optimizer in self._optimizers
        ]
        result: list[list[dict[str, Any]]] = json.loads(json.dumps(groups))
        return result

    def _restore_groups(self, first: list[list[dict[str, Any]]], last: list[list[dict[str, Any]]]) -> None:
        """What changed in training goes on from there, unless the script now starts with another value."""
        for optimizer, now, then, kept in zip(self._optimizers, self._first_groups, first, last, strict=True):
            for group, at_start, at_first, values in zip(optimizer.param_groups, now, then, kept, strict=True):
                for key, value in values.items():
                    if at_start.get(key) == at_first.get(key) and at_start.get(key) != value:
                        group[key] = tuple(value) if isinstance(group.get(key), tuple) else value


def _switches(group: Mapping[str, Any]) -> dict[str, Any]:
    """What is on (not None, False or 0), because what an optimizer keeps may depend on it: amsgrad, centered, momentum,
    fused (which counts steps on the GPU)."""

    def on(value: Any) -> Any:
        return [on(item) for item in value] if isinstance(value, list) else bool(value)

    return {key: on(value) for key, value in group.items() if value and key not in SELECT_NO_STATE}


def _is_plain(value: object) -> bool:
    if isinstance(value, list | tuple):
        return all(_is_plain(item) for item in value)
    return value is None or isinstance(value, bool | int | float | str)


def _state_tensor(index: int, name: str, key: object, value: Tensor, parameter: Tensor) -> StateTensor:
    where = f"the optimizer's {key!r} of {name!r}"
    is_sharded = isinstance(value, DTensor)
    if isinstance(value, DTensor):
        if not isinstance(parameter, DTensor) or (value.device_mesh, value.placements, value.shape) != (
            parameter.device_mesh,
            parameter.placements,
            parameter.shape,
        ):
            raise ConfigError(f"{where} is sharded otherwise than its parameter; it cannot be kept in a checkpoint")
        value = value.to_local()
    if not isinstance(key, str) or value.dtype not in DTYPE_NAMES or value.layout is not torch.strided:
        raise ConfigError(f"{where} is of {value.dtype} and {value.layout}; it cannot be kept in a checkpoint")
    return StateTensor(
        optimizer=index,
        parameter=name,
        key=key,
        is_sharded=is_sharded,
        on_cpu=value.device.type == "cpu",
        values=value.detach(),
    )
