"""Optimizers that are only passed on to: accelerate's wrapper, which HF's Trainer has, was never initialised as an
optimizer of torch, so it has no hooks and no state of its own."""

from __future__ import annotations

import torch


def unwrapped(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """The one within that has its parameter groups; itself, where it is an optimizer of torch."""
    while isinstance(optimizer, torch.optim.Optimizer) and "_optimizer_step_pre_hooks" not in vars(optimizer):
        inner = [
            value
            for value in vars(optimizer).values()
            if isinstance(value, torch.optim.Optimizer) and value.param_groups is optimizer.param_groups
        ]
        if not inner:
            break
        optimizer = inner[0]
    return optimizer
