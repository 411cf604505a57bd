"""Steps are what the optimizers do, and not how often `site.step` is called: once a microbatch, or after a step that a
GradScaler left out, a call stands for no step, and its tokens have no weight in the average."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence

import torch
from torch import Tensor

from atoll.node.worker.local_steps import local_of
from atoll.node.worker.losses import DEFAULT_MAX_SKIPPED
from atoll.node.worker.optimizer_copies import sample_places
from atoll.protocol.errors import ConfigError, NonFiniteError

MAX_IDLE = 32
"""Calls without a step; more are an error where they are a third of all."""
NUM_TENSORS = 8
"""That tell whether parameters moved between two calls."""


class StepCount:
    """Of one rank's optimizers. Until one of them has done a step that torch tells of, a call is believed, unless
    gradients lie there unused."""

    def __init__(self, optimizers: Sequence[torch.optim.Optimizer], max_in_a_row: int = DEFAULT_MAX_SKIPPED) -> None:
        self._parameters = [p for o in optimizers for group in o.param_groups for p in group["params"]]
        self._handles = [stepping(optimizer).register_step_post_hook(self._after_step) for optimizer in optimizers]
        self._stepped = self._has_stepped = self._is_believed = False
        self._num_calls = self.num_idle = self._in_a_row = 0
        self._max_in_a_row = max_in_a_row
        self._at_idle: list[Tensor] = []  # values at the last call, if that was without a step
        self._taken: list[Tensor] = []  # values of the last update
        self._has_moved = False  # since an update

    def is_step(self, loss: Tensor | float | None = None) -> bool:
        """At each call of `site.step`: whether it stands for a step. Raises ConfigError where calls without one go
        on, NonFiniteError if the loss tells why."""
        self._num_calls += 1
        if self._is_believed or self._stepped or not (self._has_stepped or self._has_gradients()):
            self._stepped, self._at_idle, self._in_a_row = False, [], 0
            return True
        before, self._at_idle = self._at_idle, self._sample()
        if before and not all(map(torch.equal, before, self._at_idle)):
            self._is_believed = True  # a captured graph, a step of the script's own: torch's hook is not called
            self.close()
            sys.stderr.write("atoll: steps of the optimizer are not seen, so each call of site.step counts as one\n")
            return True
        self.num_idle += 1
        self._in_a_row += 1
        goes_on = self.num_idle > MAX_IDLE and 3 * self.num_idle >= self._num_calls
        if goes_on or self._in_a_row >= self._max_in_a_row:
            if self._in_a_row >= self._max_in_a_row:
                advice = (
                    "where a GradScaler leaves steps out, its scale does not settle: look for values that are not "
                    f"finite (atoll.join(..., max_skipped={self._max_in_a_row}) is the limit for calls in a row)"
                )
            else:
                advice = f"more than {MAX_IDLE} such calls are an error where they are a third of all"
            is_finite = loss is None or math.isfinite(float(loss.detach() if isinstance(loss, Tensor) else loss))
            raise (ConfigError if is_finite else NonFiniteError)(
                f"site.step was called {self._num_calls} times, and in {self.num_idle} of them no optimizer given to "
                "atoll.join had done a step since the call before: call site.step once after each optimizer.step(), "
                f"with the tokens of all its microbatches; {advice}"
            )
        if self.num_idle == 1:
            sys.stderr.write(
                "atoll: site.step was called without a step of the optimizer since the call before (a microbatch, or a "
                "step that was left out): such calls do not count, nor do their tokens, and that is said once. They "
                f"are an error if {self._max_in_a_row} follow each other, or if more than {MAX_IDLE} are a third of "
                "all calls\n"
            )
        return False

    @property
    def is_seen(self) -> bool:
        """Whether anything was seen of training: a step, a gradient, or values that the script has changed."""
        return self._has_stepped or self.num_idle > 0 or self._has_moved

    def look(self) -> None:
        """Before an update is taken: whether the script has changed values since the last one."""
        if self._taken and not self.is_seen:
            self._has_moved = not all(map(torch.equal, self._taken, self._sample(len(self._parameters))))

    def took(self) -> None:
        """The parameters have the values of an update."""
        self._taken = [] if self.is_seen else self._sample(len(self._parameters))

    def num_unseen(self) -> int:
        """Before a snapshot: calls, if nothing was seen of training and there is something to look at; else 0."""
        self.look()
        return self._num_calls if self._taken and not self.is_seen else 0

    def close(self) -> None:
        for handle in self._handles:
            handle.remove()

    def _after_step(self, optimizer: torch.optim.Optimizer, *_of_step: object) -> None:
        found_inf = getattr(optimizer, "found_inf", None)  # a GradScaler's word to a fused optimizer, which obeys
        self._stepped |= found_inf is None or not bool(found_inf)
        self._has_stepped = True

    def _has_gradients(self) -> bool:
        return any(parameter.grad is not None for parameter in self._parameters)

    @torch.no_grad()
    def _sample(self, num_tensors: int = NUM_TENSORS) -> list[Tensor]:
        locals_ = [local_of(parameter) for parameter in self._parameters if local_of(parameter).numel()]
        chosen = locals_[:: max(1, len(locals_) // num_tensors)][:num_tensors]
        return [local[sample_places(local)].clone() if local.dim() else local.clone() for local in chosen]


def stepping(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """The one whose steps torch tells of: a wrapper that did not call `Optimizer.__init__` has one within."""
    seen: set[int] = set()
    while not hasattr(type(optimizer).step, "hooked") and id(optimizer) not in seen:
        seen.add(id(optimizer))
        inner = [value for value in vars(optimizer).values() if isinstance(value, torch.optim.Optimizer)]
        optimizer = inner[0] if inner else optimizer
    return optimizer


def all_stepping(optimizer: torch.optim.Optimizer) -> list[torch.optim.Optimizer]:
    """The same of a wrapper around several; `optimizer` where there is none."""
    found: dict[int, torch.optim.Optimizer] = {}
    seen: set[int] = set()
    waiting = [optimizer]
    while waiting:
        each = waiting.pop()
        if hasattr(type(each).step, "hooked"):
            found[id(each)] = each
        elif id(each) not in seen:
            seen.add(id(each))
            waiting += [value for value in vars(each).values() if isinstance(value, torch.optim.Optimizer)]
    return list(found.values()) or [optimizer]
