"""The outer optimizer of a run: what `auto` means, and how its rates change in the course of the run. Pure."""

from __future__ import annotations

from dataclasses import replace

from atoll.protocol.messages import Commit
from atoll.protocol.settings import AUTO, OuterSettings, RunSettings

SHORT_SYNCS = 50
"""Of each parameter: in a run of fewer, outer momentum has not settled before the end (docs/log.md)."""
FINAL_SHARE = 0.1
"""Of the learning rate, where it decays: what is left of it at the end."""


def num_syncs(settings: RunSettings) -> int:
    """Of each parameter in the whole run. Where the length is in tokens, a step is taken for that of the built-in
    trainer at `min_sites` sites."""
    steps, trainer = settings.steps, settings.trainer
    if not steps:
        steps = settings.tokens // (settings.min_sites * trainer.batch_size * trainer.sequence)
    return -(-steps // settings.sync.every)


def chosen(settings: RunSettings) -> tuple[OuterSettings, str]:
    """What `auto` chooses for a run, and why."""
    number = num_syncs(settings)
    mean = replace(settings.outer, optimizer="sgd", learning_rate=1.0, momentum=0.0)
    if number < SHORT_SYNCS:
        return mean, f"a plain mean, for {number} syncs of each parameter, fewer than {SHORT_SYNCS}"
    if settings.sync.error_feedback:
        return mean, "a plain mean, as error feedback works against outer momentum"
    momentum = replace(settings.outer, optimizer="nesterov", learning_rate=0.7, momentum=0.9)
    return momentum, f"Nesterov 0.7/0.9 (arXiv 2311.08105), for {number} syncs of each parameter"


def resolved(settings: RunSettings, known: OuterSettings | None = None) -> RunSettings:
    """Without `auto`: as the run began, if it is `known`, or as it is chosen now."""
    if settings.outer.optimizer != AUTO:
        return settings
    now = known or chosen(settings)[0]
    outer = replace(settings.outer, optimizer=now.optimizer, learning_rate=now.learning_rate, momentum=now.momentum)
    if now.optimizer == "sgd":  # which has none to change
        outer = replace(outer, momentum_warmup=0.0, momentum_decay=0.0)
    return replace(settings, outer=outer)


def in_words(settings: RunSettings, outer: OuterSettings) -> str:
    """What `auto` came to, and why."""
    _, why = chosen(settings)
    rates = f"{outer.optimizer}, learning rate {outer.learning_rate:g}, momentum {outer.momentum:g}"
    return why if outer == resolved(settings).outer else f"{rates}, as the run began with it"


def outer_at(outer: OuterSettings, steps: int, tokens: int, record: Commit) -> OuterSettings:
    """With the rates of that commit, in a run of so many steps, or tokens. A pure function of the record, so that all
    sites and the coordinator have the same."""
    if not (outer.warmup or outer.decay or outer.momentum_warmup or outer.momentum_decay):
        return outer
    progress = min(1.0, record.run_step / steps if steps else record.run_tokens / tokens)
    rate = _rise(progress, outer.warmup) * (FINAL_SHARE + (1 - FINAL_SHARE) * _fall(progress, outer.decay))
    momentum = _rise(progress, outer.momentum_warmup) * _fall(progress, outer.momentum_decay)
    return replace(outer, learning_rate=outer.learning_rate * rate, momentum=outer.momentum * momentum)


def _rise(progress: float, share: float) -> float:
    """From 0 to 1 over the first share of the run."""
    return progress / share if progress < share else 1.0


def _fall(progress: float, share: float) -> float:
    """From 1 to 0 over the last share of the run."""
    return (1.0 - progress) / share if 1.0 - progress < share else 1.0
