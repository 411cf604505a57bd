"""What parameter groups keep beside parameters and learning rates, for JSON: plain values, and small tensors, as some
optimizers count their steps there."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from atoll.node.worker.local_steps import local_of
from atoll.node.worker.tensors import DTYPE_NAMES, TORCH_DTYPES
from atoll.protocol.errors import ConfigError

MAX_ELEMENTS = 4096


def is_kept(value: object) -> bool:
    if isinstance(value, list | tuple):
        return all(is_kept(item) for item in value)
    if isinstance(value, Tensor):
        return _is_small(value)
    return value is None or isinstance(value, bool | int | float | str)


def check(optimizer: torch.optim.Optimizer) -> None:
    """Raises ConfigError, naming it, for a tensor in a group that cannot be kept."""
    for number, group in enumerate(optimizer.param_groups):
        for key, value in group.items():
            if key != "params" and not is_kept(value) and _has_tensor(value):
                raise ConfigError(
                    f"{type(optimizer).__name__} keeps {key!r} of parameter group {number} as a tensor of more than "
                    f"{MAX_ELEMENTS} elements, of a kind of its own, in a dict, or in a list with more than plain "
                    "values; it cannot be kept in a checkpoint"
                )


def encode(value: Any) -> Any:
    """A tensor as {"tensor": [dtype, shape, values, whether in CPU memory]}."""
    if isinstance(value, Tensor):
        values = value.detach().cpu()
        flat = (values if values.dtype in (torch.float64, torch.int64) else _widened(values)).flatten().tolist()
        return {"tensor": [DTYPE_NAMES[value.dtype], list(value.shape), flat, value.device.type == "cpu"]}
    return [encode(item) for item in value] if isinstance(value, list | tuple) else value


def decode(value: Any, now: object, parameters: Sequence[Tensor]) -> Any:
    """`now`: what the group has there; a tensor is made where that is, or where the parameters are."""
    if isinstance(value, dict):
        dtype, shape, flat, on_cpu = value["tensor"]
        device = torch.device("cpu") if on_cpu or not parameters else local_of(parameters[0]).device
        found = torch.tensor(flat, dtype=torch.float64 if dtype.startswith(("F", "BF")) else None)
        found = found.to(TORCH_DTYPES[dtype]).reshape(shape).to(device)
        if isinstance(now, Tensor) and now.shape == found.shape:
            now.detach().copy_(found)  # captured graphs read it where it lies
            return now
        return found
    if isinstance(value, list):
        items = now if isinstance(now, list | tuple) and len(now) == len(value) else [None] * len(value)
        decoded = [decode(item, mine, parameters) for item, mine in zip(value, items, strict=True)]
        return tuple(decoded) if isinstance(now, tuple) else decoded
    return value


def _is_small(value: Tensor) -> bool:
    return type(value) is Tensor and value.numel() <= MAX_ELEMENTS and value.dtype in DTYPE_NAMES


def _has_tensor(value: object) -> bool:
    if isinstance(value, list | tuple | dict):
        return any(map(_has_tensor, value.values() if isinstance(value, dict) else value))
    return isinstance(value, Tensor)


def _widened(values: Tensor) -> Tensor:
    """Each value to the bit, in a type that Python has."""
    return values.to(torch.float64 if values.is_floating_point() else torch.int64)
