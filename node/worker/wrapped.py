"""Optimizers that a trainer has wrapped: what trains is inside, and it alone has the hooks of torch's optimizers."""

from __future__ import annotations

import torch


def unwrapped(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """The optimizer inside of what accelerate or Lightning makes of it; itself, where it is one of torch."""
    while not (isinstance(optimizer, torch.optim.Optimizer) and "_optimizer_step_pre_hooks" in vars(optimizer)):
        inner = getattr(optimizer, "optimizer", None)
        if not isinstance(inner, torch.optim.Optimizer):
            break
        optimizer = inner
    return optimizer
