"""What a script does that would go wrong without a word, looked for while it trains: the site names it and ends."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext

import torch
from torch import Tensor

from atoll.node.worker.constant_buffers import ConstantBuffers
from atoll.node.worker.losses import DEFAULT_MAX_SKIPPED
from atoll.node.worker.optimizer_copies import Copies, OptimizerCopies
from atoll.node.worker.optimizers import NodeOptimizer
from atoll.node.worker.other_optimizers import OtherOptimizers
from atoll.node.worker.step_count import MAX_IDLE, StepCount, stepping
from atoll.node.worker.taken_back import TakenBack
from atoll.node.worker.tensors import ModelTensors
from atoll.protocol.errors import ConfigError
from atoll.protocol.layout import Role


class ScriptChecks:
    """Of one rank. Where the nodes do the steps, its optimizers have nothing of their own to look for."""

    def __init__(
        self,
        tensors: ModelTensors,
        optimizers: Sequence[torch.optim.Optimizer],
        max_skipped: int = DEFAULT_MAX_SKIPPED,
        num_fragments: int = 1,
    ) -> None:
        self._tensors, self._optimizers = tensors, optimizers
        own = [optimizer for optimizer in optimizers if not isinstance(optimizer, NodeOptimizer)]
        self.copies = OptimizerCopies(tensors, own)
        self._taken_back = TakenBack(tensors, own, num_fragments) if own else None
        self._steps = StepCount(own, max_skipped) if own else None
        self._others = OtherOptimizers(own) if own else None
        self._constant = ConstantBuffers(tensors.held)
        self._is_unseen_said = False

    @property
    def num_skipped(self) -> int:
        """Calls of `site.step` that stand for no step."""
        return self._steps.num_idle if self._steps is not None else 0

    def is_step(self, loss: Tensor | float | None = None) -> bool:
        """At each call of `site.step`. Raises ConfigError, see `OtherOptimizers`, `StepCount` and `TakenBack`."""
        if self._others is not None:
            self._others.check()
        if self._steps is not None and not self._steps.is_step(loss):
            return False
        if self._taken_back is not None:
            self._taken_back.stepped()
        return True

    def check(self, num_steps: int, num_tokens: int) -> None:
        """Before a snapshot of so many steps of the site, and tokens of this rank. Raises ConfigError, naming the
        parameter, for one that is trained only since join, and for one in whose place the model has another; and where
        a copy of the model is trained in its place.
        """
        check_in_place(self._tensors)
        self._constant.look(num_steps)
        self._tensors.check_trained(self._optimizers)
        if num_tokens:
            self._check_seen()

    def _check_seen(self) -> None:
        """A script may train by other means than torch's optimizers, or another part of it first: so that nothing is
        seen of training is said, once. It is an error only where a window later a copy of all of it is trained."""
        if self._steps is None or self._others is None:
            return
        if (num_calls := self._steps.num_unseen()) <= MAX_IDLE:
            return
        text = (
            f"site.step was called {num_calls} times, and nothing is seen of training: no optimizer given to "
            "atoll.join has done a step, and their parameters have no gradients and the values that they had. The site "
            "contributes zeros, with the weight of its tokens"
        )
        if not self._is_unseen_said:
            self._is_unseen_said = True
            sys.stderr.write(
                f"atoll: {text}: give atoll.join what is trained, and call site.step only after its steps; this is "
                "said once\n"
            )
        elif others := self._others.of_copies():
            raise ConfigError(
                f"{text}, while {others} trains as many parameters of the same shapes, a copy of the model: make the "
                "model and its optimizers before atoll.join, which is given what is trained; where a copy is trained "
                "on purpose, call site.step only after steps of what atoll.join was given"
            )

    def close(self) -> None:
        """Nothing of them is left in the optimizers."""
        for check in (self._steps, self._taken_back, self._others):
            if check is not None:
                check.close()

    @contextmanager
    def no_steps(self) -> Iterator[None]:
        """Within it the parameters are not this site's own, and what a step does to them would be lost."""
        handles = [stepping(o).register_step_pre_hook(_refuse_step) for o in self._optimizers]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    @contextmanager
    def update(self, fragment: int = 0, *, is_restored: bool = False) -> Iterator[Copies]:
        """Within it an update of the fragment is taken: gives the optimizers' copies, which take it too. `is_restored`:
        the optimizers are as a checkpoint had them, and did no step since."""
        taken_back = self._taken_back
        if self._steps is not None:
            self._steps.look()
        with nullcontext() if taken_back is None else taken_back.update(fragment, has_old_state=is_restored):
            yield self.copies.find(is_restored=is_restored)
        self._constant.taken()
        if self._steps is not None:
            self._steps.took()


def _refuse_step(optimizer: torch.optim.Optimizer, *_of_step: object) -> None:
    raise ConfigError(
        f"{type(optimizer).__name__}.step was called within site.outer_parameters(): the model holds the run's values "
        "there and not this site's, which come back after it, so the step would be lost; train outside of it, and copy "
        "the model for what is to be trained from the outer parameters"
    )


def check_in_place(tensors: ModelTensors) -> None:
    """Raises ConfigError, naming it, for a parameter that the model had at `atoll.join` and has no more: another one is
    in its place, or its module is not of the model. A frozen one may go with its module."""
    modules = (module for root in tensors.modules for module in root.modules())
    there = {id(parameter) for module in modules for parameter in module._parameters.values()}
    for held in tensors.held:
        if held.parameter is None:
            continue
        is_gone = id(held.parameter) not in there and held.spec.role is Role.TRAINABLE
        if held.owner._parameters.get(held.key) is not held.parameter or is_gone:
            raise ConfigError(
                f"{held.spec.name!r} is another Parameter than at atoll.join, or its module is gone; the other sites "
                "would get the old one: change values in place (load_state_dict without assign=True, .copy_ under "
                "torch.no_grad), and replace, convert or wrap parameters before atoll.join"
            )
