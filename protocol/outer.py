"""The outer optimizer of a run: what `auto` means, and how its rates change in the course of the run. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from atoll.protocol.changed import settings_with
from atoll.protocol.errors import InvalidMessage
from atoll.protocol.messages import Commit
from atoll.protocol.outer_settings import AUTO, OuterSettings
from atoll.protocol.settings import RunSettings

SHORT_SYNCS = 50
"""Of each parameter: in a run of fewer, outer momentum has not settled before the end (docs/log.md)."""
SAME_RATE, LEAST_RATE = 1e-5, 1e-10
"""A part, and a rate beside which it is none: processors of two kinds differ in the last digits of a cosine, and near
the end of a schedule in more than these."""
FINAL_SHARE = 0.1
"""Of the learning rate, where it decays: what is left of it at the end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OuterStep:
    """What the outer optimizer does in one commit to the tensors of one parameter group."""

    optimizer: str
    learning_rate: float
    momentum: float
    """Of adamw beta1."""
    beta2: float = 0.0
    epsilon: float = 0.0
    weight_decay: float = 0.0
    is_frozen: bool = False
    """The average is one of momenta, and adamw's variance stays as it is (1-bit Adam)."""
    bias: tuple[float, float] = (1.0, 1.0)
    """Of adamw's two moments after so many steps, which began at 0: `1 - beta ** steps`."""


def num_syncs(settings: RunSettings) -> int:
    """Of each parameter in the whole run. Where the length is in tokens, a step is taken for that of the built-in
    trainer at `min_sites` sites."""
    steps, trainer = settings.steps, settings.trainer
    if not steps:
        steps = settings.tokens // (settings.min_sites * trainer.batch_size * trainer.sequence)
    return -(-steps // settings.sync.every)


def chosen(settings: RunSettings) -> tuple[OuterSettings, str]:
    """What `auto` chooses for a run, and why."""
    if settings.sync.steps_at_nodes:
        trainer = settings.trainer
        adamw = replace(settings.outer, optimizer="adamw", momentum=trainer.beta1, beta2=trainer.beta2)
        return adamw, f"AdamW with beta1 {trainer.beta1:g} and beta2 {trainer.beta2:g}, as the built-in trainer has it"
    number = num_syncs(settings)
    mean = replace(settings.outer, optimizer="sgd", learning_rate=1.0, momentum=0.0)
    if number < SHORT_SYNCS:
        return mean, f"a plain mean, for {number} syncs of each parameter, fewer than {SHORT_SYNCS}"
    if settings.sync.error_feedback or settings.sync.error_feedback_down:
        return mean, "a plain mean, as error feedback works against outer momentum"
    momentum = replace(settings.outer, optimizer="nesterov", learning_rate=0.7, momentum=0.9)
    return momentum, f"Nesterov 0.7/0.9 (arXiv 2311.08105), for {number} syncs of each parameter"


def resolved(settings: RunSettings, known: OuterSettings | None = None) -> RunSettings:
    """Without `auto`: as the run began, if it is `known`, or as it is chosen now."""
    if settings.outer.optimizer != AUTO:
        return settings
    now = known or chosen(settings)[0]
    outer = replace(
        settings.outer,
        optimizer=now.optimizer,
        learning_rate=now.learning_rate,
        momentum=now.momentum,
        beta2=now.beta2,
    )
    if now.optimizer == "sgd":  # which has none to change
        outer = replace(outer, momentum_warmup=0.0, momentum_decay=0.0)
    return replace(settings, outer=outer)


def in_words(settings: RunSettings, outer: OuterSettings) -> str:
    """What `auto` came to, and why."""
    _, why = chosen(settings)
    rates = f"{outer.optimizer}, learning rate {outer.learning_rate:g}, momentum {outer.momentum:g}"
    return why if outer == resolved(settings).outer else f"{rates}, as the run began with it"


def outer_at(settings: RunSettings, record: Commit, group: int = 0) -> OuterStep:
    """In that commit. A pure function of the record, so that all sites and the coordinator have the same.

    Raises InvalidMessage if the record has no rates of that parameter group, or changes what cannot be.
    """
    settings = settings_with(settings, record.changed_json)
    outer, steps, tokens = settings.outer, settings.steps, settings.tokens
    if settings.sync.steps_at_nodes:
        return _with_rates(settings, record, group)
    if not (outer.warmup or outer.decay or outer.momentum_warmup or outer.momentum_decay):
        return OuterStep(optimizer=outer.optimizer, learning_rate=outer.learning_rate, momentum=outer.momentum)
    progress = min(1.0, record.run_step / steps if steps else record.run_tokens / tokens)
    rate = _rise(progress, outer.warmup) * (FINAL_SHARE + (1 - FINAL_SHARE) * _fall(progress, outer.decay))
    momentum = _rise(progress, outer.momentum_warmup) * _fall(progress, outer.momentum_decay)
    return OuterStep(
        optimizer=outer.optimizer, learning_rate=outer.learning_rate * rate, momentum=outer.momentum * momentum
    )


def _with_rates(settings: RunSettings, record: Commit, group: int) -> OuterStep:
    """Where the nodes do the steps: those of a commit, whichever sites were in it."""
    outer, rates = settings.outer, record.rates[2 * group : 2 * group + 2]
    if len(rates) < 2:
        raise InvalidMessage(f"commit {record.commit} has no rates of parameter group {group}")
    return OuterStep(
        optimizer=outer.optimizer,
        learning_rate=rates[0],
        momentum=outer.momentum,
        beta2=outer.beta2,
        epsilon=outer.epsilon,
        weight_decay=rates[1],
        is_frozen=settings.sync.strategy == "momentum" and not settings.sync.moves_variance(record.commit - 1),
        bias=bias_at(settings, record.commit, record.run_step),
    )


def same_rates(said: Sequence[float], others: Sequence[float], *, part: float = 1.0) -> bool:
    """Whether these are the rates of one script, computed on two machines. `part`: of the difference allowed."""
    return len(said) == len(others) and all(
        math.isclose(a, b, rel_tol=part * SAME_RATE, abs_tol=part * LEAST_RATE)
        for a, b in zip(said, others, strict=True)
    )


def bias_at(settings: RunSettings, commit: int, run_step: int) -> tuple[float, float]:
    """Of adamw's two moments at that commit and step of the run. The momentum has moved at each step, the variance in
    commits of gradients alone, and in the run before, if this one was resumed from it."""
    sync, num_gradients = settings.sync, run_step
    if sync.strategy == "momentum":
        # A window that was cut short, as the run seemed to end, takes nothing from what this run has moved.
        of_run_before = max(0, run_step - sync.phases.steps_until(commit))
        num_gradients = of_run_before + sync.phases.num_of_gradients(commit)
    return 1.0 - _power(settings.outer.momentum, run_step), 1.0 - _power(settings.outer.beta2, num_gradients)


def variance_scale(settings: RunSettings, commit: int, run_step: int) -> float:
    """What adamw's variance of that commit is multiplied by for a run that goes on from it, to which all steps before
    are ones that have moved it."""
    moved = bias_at(settings, commit, run_step)[1]
    return (1.0 - _power(settings.outer.beta2, run_step)) / moved if moved else 1.0


def _power(base: float, exponent: int) -> float:
    """By multiplications in binary64, which are the same on every machine; `pow` of a C library need not be."""
    power, square = 1.0, base
    while exponent:
        if exponent & 1:
            power *= square
        square *= square
        exponent >>= 1
    return power


def _rise(progress: float, share: float) -> float:
    """From 0 to 1 over the first share of the run."""
    return progress / share if progress < share else 1.0


def _fall(progress: float, share: float) -> float:
    """From 1 to 0 over the last share of the run."""
    return (1.0 - progress) / share if 1.0 - progress < share else 1.0
