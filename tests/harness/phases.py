"""Phases of a run of momenta, and a site's own steps in them, written out."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from atoll.protocol.sync_settings import SyncSettings

F32 = npt.NDArray[np.float32]


def is_of_gradients(sync: SyncSettings, commit: int) -> bool:
    """In a run of momenta."""
    found, interval = 1, 1
    while found <= sync.warmup_commits:
        for _ in range(sync.gradient_doubling or sync.warmup_commits):
            if found == commit:
                return found <= sync.warmup_commits
            found += interval
        interval *= 2
    return False


def local_steps(sync: SyncSettings, commit: int) -> int:
    """Of a window, where the nodes do the steps."""
    steps = 1
    if sync.strategy == "momentum" and sync.local_doubling:
        for _ in range((commit - sync.warmup_commits - 1) // sync.local_doubling):
            steps = min(2 * steps, sync.most_local_steps)
    return steps


def mean_momentum(momentum: F32, beta1: float, gradients: Sequence[F32], rates: Sequence[float]) -> F32:
    """Of a site that does a step with each of these gradients, at that learning rate."""
    total = np.zeros_like(momentum)
    for gradient, rate in zip(gradients, rates, strict=True):
        momentum = np.float32(beta1) * momentum + np.float32(1 - beta1) * gradient
        total = total + np.float32(rate) * momentum
    found: F32 = total / np.float32(sum(rates))
    return found
