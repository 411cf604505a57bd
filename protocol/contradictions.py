"""Settings that contradict each other: which, and what to choose. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

from atoll.protocol.codecs.table import SPARSE
from atoll.protocol.errors import ConfigError

if TYPE_CHECKING:
    from atoll.protocol.settings import ModelSettings, OuterSettings, SyncSettings, TrainerSettings


def check_model(model: ModelSettings, trainer: TrainerSettings) -> None:
    """Of the built-in model and its trainer. Raises ConfigError."""
    if model.dim % model.num_heads or (model.dim // model.num_heads) % 2:
        raise ConfigError(
            f"model.dim = {model.dim} and model.num_heads = {model.num_heads}: "
            "each head needs the same, even width; make dim a multiple of 2 * num_heads"
        )
    if model.num_heads % model.num_kv_heads:
        raise ConfigError(f"model.num_kv_heads = {model.num_kv_heads} must divide model.num_heads = {model.num_heads}")
    if trainer.sequence > model.max_sequence:
        raise ConfigError(
            f"trainer.sequence = {trainer.sequence} is longer than model.max_sequence = {model.max_sequence}"
        )


def check_outer(outer: OuterSettings, strategy: str) -> None:
    """Of the outer step, with that strategy of syncs. Raises ConfigError."""
    if outer.optimizer == "adamw" and strategy == "diloco":
        raise ConfigError(
            'outer.optimizer = "adamw" is for gradients: choose sync.strategy = "gradient", or "nesterov" or "sgd"'
        )
    scheduled = (outer.warmup, outer.decay, outer.momentum_warmup, outer.momentum_decay)
    if strategy == "momentum" and outer.optimizer not in ("auto", "adamw"):
        raise ConfigError(
            f'outer.optimizer = "{outer.optimizer}" with sync.strategy = "momentum" (1-bit Adam): choose "adamw"'
        )
    if strategy != "diloco" and (outer.learning_rate != 1 or any(scheduled)):
        raise ConfigError(
            f"outer.learning_rate = {outer.learning_rate} or a schedule of the outer step with sync.strategy = "
            f'"{strategy}": the learning rate is the one that the training script gives its optimizer; leave them out'
        )
    if outer.optimizer == "auto" and (outer.learning_rate, outer.momentum) != (1.0, 0.0):
        raise ConfigError(
            f'outer.learning_rate = {outer.learning_rate}, outer.momentum = {outer.momentum}: outer.optimizer = "auto" '
            'chooses them itself; leave them out, or choose "nesterov" or "sgd"'
        )
    if outer.optimizer == "sgd" and (outer.momentum or outer.momentum_warmup or outer.momentum_decay):
        raise ConfigError(
            f'outer.momentum = {outer.momentum}: outer.optimizer = "sgd" has none; choose "nesterov", or momentum 0 '
            "without a schedule"
        )


def _check_gradient(sync: SyncSettings) -> None:
    """What exchanges at every step has no steps between."""
    wanted = {"every": 1, "fragments": 1, "overlap_steps": 0}
    for key, value in wanted.items():
        if (found := getattr(sync, key)) != value:
            raise ConfigError(
                f'sync.{key} = {found} with sync.strategy = "{sync.strategy}", which exchanges at every step: '
                f"choose {value}"
            )
    if sync.merge != "keep":
        raise ConfigError(f'sync.merge = "{sync.merge}" with sync.strategy = "{sync.strategy}": choose "keep"')
    if sync.strategy == "momentum" and not sync.warmup_commits:
        raise ConfigError(
            'sync.warmup_commits = 0 with sync.strategy = "momentum": the variance would stay 0; choose a sixth of the '
            "run's steps"
        )
    if sync.strategy == "momentum" and sync.codec_up in SPARSE:
        raise ConfigError(
            f'sync.strategy = "momentum" with codec {sync.codec_up}: what is not sent would be a momentum of 0; choose '
            '"gradient", or another codec'
        )


def check_sync(sync: SyncSettings) -> None:
    """Of syncs. Raises ConfigError."""
    if sync.strategy != "momentum" and sync.warmup_commits:
        raise ConfigError(
            f'sync.warmup_commits = {sync.warmup_commits} with sync.strategy = "{sync.strategy}", without warm-up: '
            'choose 0, or "momentum"'
        )
    if sync.steps_at_nodes:
        _check_gradient(sync)
    if sync.overlap_steps > sync.every:
        raise ConfigError(
            f"sync.overlap_steps = {sync.overlap_steps} is more than sync.every = {sync.every}: the next sync of the "
            f"same parameters begins so many steps after this one; choose at most {sync.every}"
        )
    if sync.fragments > sync.every:
        raise ConfigError(
            f"sync.fragments = {sync.fragments} is more than sync.every = {sync.every}: each fragment has a sync of "
            f"its own every {sync.every} steps, with a step or more between two; choose at most {sync.every} fragments"
        )
    if sync.codec_up in SPARSE and sync.down:
        raise ConfigError(
            f'sync.down = "{sync.down}" with codec {sync.codec_up}, whose pseudo-gradients go to all sites themselves: '
            "choose no sync.down"
        )
    if sync.codec_down in SPARSE:
        raise ConfigError(
            f'sync.codec = "{sync.codec}" with sync.up = "{sync.up}": averages of {sync.up} cannot travel as '
            f"{sync.codec}; choose another sync.codec, or a sync.down"
        )
    if sync.mean_over != "senders" and sync.codec_up not in SPARSE:
        raise ConfigError(
            f'sync.mean_over = "{sync.mean_over}" with codec {sync.codec_up}, which sends every element: choose '
            f'"senders", or codec {SPARSE[0]}'
        )
    if sync.robust == "trim" and sync.codec_up in SPARSE:
        raise ConfigError(
            f'sync.robust = "trim" with codec {sync.codec_up}, which sends few elements: choose "clip", or another '
            "codec"
        )
    if sync.robust != "trim" and sync.trim != 1:
        raise ConfigError(
            f'sync.trim = {sync.trim} with sync.robust = "{sync.robust}", which cuts nothing: choose "trim"'
        )
    if sync.error_feedback and sync.codec_up == "fp32":
        raise ConfigError(
            f"sync.error_feedback = {sync.error_feedback} with codec fp32, which loses nothing: choose 0, or another "
            "sync.codec or sync.up"
        )
    if sync.merge == "mix" and not sync.alpha:
        raise ConfigError(
            'sync.merge = "mix" and sync.alpha = 0: the local copy would have no weight, and what it was trained '
            'meanwhile be lost; choose an alpha between 0 and 1, for example 0.5, or merge "keep"'
        )
    if sync.merge == "keep" and sync.alpha:
        raise ConfigError(f'sync.alpha = {sync.alpha}: sync.merge = "keep" has no weights; choose "mix" or alpha 0')
