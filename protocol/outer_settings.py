"""The settings of the outer step. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from atoll.protocol.bounds import one_of, within
from atoll.protocol.errors import ConfigError

OUTER_OPTIMIZERS = ("nesterov", "sgd", "adamw", "signsgd")
FOR_GRADIENTS = ("adamw", "signsgd")
AUTO = "auto"
"""The outer optimizer is chosen as the run begins: `outer.py`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OuterSettings:
    optimizer: str = one_of((AUTO, *OUTER_OPTIMIZERS), "nesterov")
    """auto, nesterov, sgd, adamw or signsgd, the last two for gradients. auto chooses once, as the run begins, by its
    length: a plain mean for a short run, Nesterov 0.7/0.9 for a long one; where the nodes do the steps AdamW as the
    built-in trainer has it. A run.toml that says nothing of the outer step has it."""
    learning_rate: float = within(0, 100, 1.0, open_low=True)
    momentum: float = within(0, 1, 0.0, open_high=True)
    """At 0 (and learning rate 1) the outer step is a plain mean, best for short runs: docs/log.md. Below about 50
    syncs use 0 to 0.3; 0.9 (with learning rate 0.7) is for thousands of steps. Of adamw it is beta1."""
    beta2: float = within(0, 1, 0.95, open_high=True)
    """Of adamw alone."""
    epsilon: float = within(1e-30, 1, 1e-8)
    """Of adamw alone."""
    warmup: float = within(0, 1, 0.0)
    """Share of the run in which the learning rate rises from 0, evenly."""
    decay: float = within(0, 1, 0.0)
    """Share of the run, at its end, in which the learning rate falls to a tenth, evenly."""
    momentum_warmup: float = within(0, 1, 0.0)
    """Share of the run in which the momentum rises from 0, evenly."""
    momentum_decay: float = within(0, 1, 0.0)
    """Share of the run, at its end, in which the momentum falls to 0, evenly."""


def check_outer(outer: OuterSettings, strategy: str) -> None:
    """With that strategy of syncs. Raises ConfigError, naming the key and what to choose."""
    if outer.optimizer in FOR_GRADIENTS and strategy == "diloco":
        raise ConfigError(
            f'outer.optimizer = "{outer.optimizer}" is for gradients: choose sync.strategy = "gradient", or "nesterov" '
            'or "sgd"'
        )
    scheduled = (outer.warmup, outer.decay, outer.momentum_warmup, outer.momentum_decay)
    if strategy == "momentum" and outer.optimizer not in (AUTO, "adamw"):
        raise ConfigError(
            f'outer.optimizer = "{outer.optimizer}" with sync.strategy = "momentum" (1-bit Adam): choose "adamw"'
        )
    if strategy != "diloco" and (outer.learning_rate != 1 or any(scheduled)):
        raise ConfigError(
            f"outer.learning_rate = {outer.learning_rate} or a schedule of the outer step with sync.strategy = "
            f'"{strategy}": the learning rate is the one that the training script gives its optimizer; leave them out'
        )
    if outer.optimizer == AUTO and (outer.learning_rate, outer.momentum) != (1.0, 0.0):
        raise ConfigError(
            f'outer.learning_rate = {outer.learning_rate}, outer.momentum = {outer.momentum}: outer.optimizer = "auto" '
            'chooses them itself; leave them out, or choose "nesterov" or "sgd"'
        )
    if outer.optimizer in ("sgd", "signsgd") and (outer.momentum or outer.momentum_warmup or outer.momentum_decay):
        raise ConfigError(
            f'outer.momentum = {outer.momentum}: outer.optimizer = "{outer.optimizer}" has none; choose "nesterov", or '
            "momentum 0 without a schedule"
        )
