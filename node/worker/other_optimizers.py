"""An optimizer that was made anew after `atoll.join`: it trains, and its state is in no checkpoint of the site."""

from __future__ import annotations

from collections.abc import Sequence
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from atoll.protocol.errors import ConfigError


class OtherOptimizers:
    """Of one rank: torch tells of the steps of all optimizers of the process."""

    def __init__(self, given: Sequence[torch.optim.Optimizer]) -> None:
        self._parameters = [{id(p) for group in each.param_groups for p in group["params"]} for each in given]
        self._places: WeakKeyDictionary[torch.optim.Optimizer, int] = WeakKeyDictionary()
        for place, each in enumerate(given):
            for within in optimizers_within(each):
                self._places.setdefault(within, place)
        self._stepped: set[int] = set()  # places of those that did a step since the last call
        self._others: WeakSet[torch.optim.Optimizer] = WeakSet()  # that did one
        self._handle = register_optimizer_step_post_hook(self._after_step)

    def check(self) -> None:
        """At each call of `site.step`. Raises ConfigError, naming it, for an optimizer that did a step of parameters
        in place of the one that `atoll.join` was given for them."""
        stepped, others = set(self._stepped), list(self._others)
        self._stepped.clear()
        self._others.clear()
        for other in others:
            held = {id(p) for group in other.param_groups for p in group["params"]}
            owners = {place for place, own in enumerate(self._parameters) if not own.isdisjoint(held)}
            is_around = any(within in self._places for within in optimizers_within(other))
            if owners and not owners & stepped and not is_around:
                raise ConfigError(
                    f"{type(other).__name__} does the steps of parameters that atoll.join was given another optimizer "
                    "for, so its state is in no checkpoint and the learning rate of a joiner does not rise in it: make "
                    "it before atoll.join, which is given it; what changes later goes into its param_groups"
                )

    def close(self) -> None:
        self._handle.remove()

    def _after_step(self, optimizer: torch.optim.Optimizer, *_of_step: object) -> None:
        if (place := self._places.get(optimizer)) is None:
            self._others.add(optimizer)
        else:
            self._stepped.add(place)


def optimizers_within(optimizer: torch.optim.Optimizer) -> list[torch.optim.Optimizer]:
    """It, and those that its attributes hold, also in lists and dicts."""
    found: dict[int, torch.optim.Optimizer] = {}
    waiting: list[object] = [optimizer]
    while waiting:
        each = waiting.pop()
        if isinstance(each, torch.optim.Optimizer) and id(each) not in found:
            found[id(each)] = each
            waiting += [value for key, value in vars(each).items() if key not in ("state", "param_groups", "defaults")]
        elif isinstance(each, (list, tuple)):
            waiting += [value for value in each if isinstance(value, torch.optim.Optimizer)]
        elif isinstance(each, dict):
            waiting += [value for value in each.values() if isinstance(value, torch.optim.Optimizer)]
    return list(found.values())
