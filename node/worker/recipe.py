"""The built-in trainer's recipe, the same in a run and in what it is compared with."""

from __future__ import annotations

import inspect
import math
import warnings
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import Dataset

from atoll.node.worker.data import Text
from atoll.node.worker.optimizers import SGD, kind_of
from atoll.protocol.errors import ConfigError
from atoll.protocol.model_settings import TrainerSettings
from atoll.protocol.settings import RunSettings


def make_optimizer(parameters: Iterable[nn.Parameter], trainer: TrainerSettings) -> torch.optim.AdamW:
    """AdamW of the built-in trainer; weight decay on matrices only."""
    groups = [part for group in _groups(parameters, trainer) for part in _of_one_mesh(group)]
    return torch.optim.AdamW(groups, lr=trainer.learning_rate, betas=(trainer.beta1, trainer.beta2))


def optimizer_of(
    parameters: Iterable[nn.Parameter], settings: RunSettings, *, shares_state: bool = False
) -> torch.optim.Optimizer:
    """The same where each site does its steps; with gradient exchange the run's optimizer, which is at the nodes.
    `shares_state`: among ranks that each have the whole model (ZeRO-1). Raises ConfigError if there is none."""
    trainer, outer = settings.trainer, settings.outer
    if not settings.sync.steps_at_nodes:
        made = make_optimizer(parameters, trainer)
        return zero_1(made) if shares_state else made
    if shares_state:
        raise ConfigError(
            f'--parallel zero=1 with sync.strategy = "{settings.sync.strategy}": the nodes do the steps, and ranks '
            "have no optimizer's state to share; leave out zero"
        )
    if (kind := kind_of(settings.sync, outer)) is SGD:
        return SGD(parameters, lr=trainer.learning_rate, momentum=outer.momentum)
    at_nodes: torch.optim.Optimizer = kind(_groups(parameters, trainer), lr=trainer.learning_rate)
    return at_nodes


def zero_1(like: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """The same steps, of which each rank does those of its part of the parameters, and hands them to the others (ZeRO,
    1910.02054, section 5.1)."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # torch's own, at import
        from torch.distributed.optim import ZeroRedundancyOptimizer

    kind, groups = type(like), [dict(group) for group in like.param_groups]
    known = inspect.signature(kind).parameters  # defaults have more: what AdamW tells Adam, for example
    defaults = {name: value for name, value in like.defaults.items() if name in known}
    return ZeroRedundancyOptimizer(groups, optimizer_class=kind, **defaults)


def _groups(parameters: Iterable[nn.Parameter], trainer: TrainerSettings) -> list[dict[str, Any]]:
    listed = list(parameters)
    matrices = [p for p in listed if p.dim() >= 2]
    vectors = [p for p in listed if p.dim() < 2]
    return [{"params": matrices, "weight_decay": trainer.weight_decay}, {"params": vectors, "weight_decay": 0.0}]


def _of_one_mesh(group: dict[str, Any]) -> list[dict[str, Any]]:
    """torch computes on all tensors of a group together, which those of two meshes cannot be."""
    by_mesh: dict[object, list[nn.Parameter]] = {}
    for parameter in group["params"]:
        by_mesh.setdefault(getattr(parameter, "device_mesh", None), []).append(parameter)
    return [{**group, "params": parameters} for parameters in by_mesh.values()]


class TextWindows(Dataset[Tensor]):
    """The text in pieces of `sequence` predicted bytes or tokens, one after the other: (sequence + 1,) each, uint8 of
    bytes, int64 of tokens.

    Raises ConfigError if there is not one.
    """

    def __init__(self, text: Text, sequence: int) -> None:
        self._text = text
        self._sequence = sequence
        self._num_windows = (len(text) - 1) // sequence
        if self._num_windows < 1:
            raise ConfigError(
                f"the data has {len(text)} bytes or tokens, a sequence {sequence} and one more; lower trainer.sequence "
                "or add data"
            )

    def __len__(self) -> int:
        return self._num_windows

    def __getitem__(self, index: int) -> Tensor:
        return torch.from_numpy(self._text.window(index * self._sequence, self._sequence + 1))


def next_byte_loss(model: nn.Module, windows: Tensor) -> Tensor:
    """Mean cross-entropy in nats of predicting windows[:, 1:] from windows[:, :-1]; windows: (batch, seq + 1)."""
    tokens = windows.long()
    return token_loss(model(tokens[:, :-1]), tokens[:, 1:])


def token_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Mean cross-entropy in nats; logits: (batch, seq, vocab), targets: (batch, seq)."""
    return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())


def learning_rate(trainer: TrainerSettings, step: int, total_steps: int) -> float:
    """Linear warm-up, then cosine decay to a tenth at `total_steps`. `step` counts from 0."""
    if step < trainer.warmup_steps:
        return trainer.learning_rate * (step + 1) / trainer.warmup_steps
    done = min(1.0, (step - trainer.warmup_steps) / max(1, total_steps - trainer.warmup_steps))
    return trainer.learning_rate * (0.1 + 0.45 * (1.0 + math.cos(math.pi * done)))
