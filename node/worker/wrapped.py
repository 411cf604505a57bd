"""Optimizers that a trainer has wrapped: what trains is inside, and it alone has the hooks of torch's optimizers."""

from __future__ import annotations

import torch

WRAPPERS = {"AcceleratedOptimizer": "optimizer", "LightningOptimizer": "optimizer"}
"""By the names of classes: the attribute that has the optimizer. Their libraries are not imported here."""


def unwrapped(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """The optimizer inside of what accelerate or Lightning makes of it."""
    while (attribute := WRAPPERS.get(type(optimizer).__name__)) is not None:
        inner = getattr(optimizer, attribute, None)
        if not isinstance(inner, torch.optim.Optimizer):
            break
        optimizer = inner
    return optimizer
