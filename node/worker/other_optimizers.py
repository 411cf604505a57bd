"""An optimizer that was made anew after `atoll.join`: it trains, and its state is in no checkpoint of the site."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_post_hook

from atoll.protocol.errors import ConfigError

IN_A_ROW = 17
"""Calls of `site.step` after which an optimizer is taken for one in place of another. For fewer the other one may rest:
by a guard, or by a GradScaler, which leaves out 16 steps at most until its scale is 1, while an inner loop makes
throw-away optimizers."""


class OtherOptimizers:
    """Of one rank: torch tells of the steps of all optimizers of the process."""

    def __init__(self, given: Sequence[torch.optim.Optimizer]) -> None:
        self._owned = {id(parameter) for each in given for parameter in _parameters(each)}
        self._shapes = _shapes(given)
        self._places = WeakKeyDictionary({each: place for place, each in enumerate(given)})
        for is_deep in (False, True):  # an object may be shared, and lead to those within another one
            for place, each in enumerate(given):
                for within in optimizers_within(each, is_deep=is_deep):
                    self._places.setdefault(within, place)
        self._stepped: set[int] = set()  # places of those that did a step since the last call
        self._others: WeakSet[torch.optim.Optimizer] = WeakSet()  # that did one
        self._at_last_call: WeakSet[torch.optim.Optimizer] = WeakSet()  # those of the call before
        # By id of a parameter: calls with a step of another one, since the last one of an optimizer that holds it.
        self._in_a_row: dict[int, int] = {}
        self._handle = register_optimizer_step_post_hook(self._after_step)

    def check(self) -> None:
        """At each call of `site.step`. Raises ConfigError, naming it, for an optimizer that does the steps of
        parameters in place of the one that `atoll.join` was given for them."""
        stepped, others = set(self._stepped), list(self._others)
        self._stepped.clear()
        self._at_last_call, self._others = self._others, WeakSet()
        if not others and not self._in_a_row:
            return
        # As their groups are now: an optimizer that was made for half of the parameters may have taken them out there.
        its_own = {id(p) for each, place in self._places.items() if place in stepped for p in _parameters(each)}
        for own in its_own & self._in_a_row.keys():
            del self._in_a_row[own]
        replaced: dict[int, torch.optim.Optimizer] = {}
        for other in others:
            its = [id(p) for p in _parameters(other) if id(p) in self._owned]
            if its and not any(within in self._places for within in optimizers_within(other, is_deep=True)):
                replaced |= dict.fromkeys(its, other)
        for parameter, other in replaced.items():
            self._in_a_row[parameter] = self._in_a_row.get(parameter, 0) + 1
            if self._in_a_row[parameter] >= IN_A_ROW:
                raise ConfigError(
                    f"{type(other).__name__} does the steps of parameters that atoll.join was given another optimizer "
                    "for, so its state is in no checkpoint and the learning rate of a joiner does not rise in it: make "
                    "it before atoll.join, which is given it; what changes later goes into its param_groups"
                )

    def of_copies(self) -> str:
        """Those that had done a step at the last call, if together they train what looks like a copy of all that
        `atoll.join` was given, and nothing of that; else empty."""
        others = sorted(self._at_last_call, key=lambda each: type(each).__name__)
        is_apart = self._owned.isdisjoint(id(parameter) for each in others for parameter in _parameters(each))
        are_copies = is_apart and _shapes(others) == self._shapes
        return " and ".join(type(each).__name__ for each in others) if are_copies else ""

    def close(self) -> None:
        self._handle.remove()

    def _after_step(self, optimizer: torch.optim.Optimizer, *_of_step: object) -> None:
        if (place := self._places.get(optimizer)) is None:
            self._others.add(optimizer)
        else:
            self._stepped.add(place)


def _parameters(optimizer: torch.optim.Optimizer) -> Iterator[Tensor]:
    return (parameter for group in optimizer.param_groups for parameter in group["params"])


def _shapes(optimizers: Iterable[torch.optim.Optimizer]) -> Counter[torch.Size]:
    """Of what they train, each parameter once."""
    trained = {id(p): p.shape for each in optimizers for p in _parameters(each) if p.requires_grad}
    return Counter(trained.values())


def optimizers_within(optimizer: torch.optim.Optimizer, *, is_deep: bool) -> list[torch.optim.Optimizer]:
    """It, and those that its attributes hold, also in lists and dicts; with `is_deep` also those that an object among
    its attributes holds so."""
    found: dict[int, torch.optim.Optimizer] = {}
    waiting = [optimizer]
    while waiting:
        each = waiting.pop()
        if id(each) in found:
            continue
        found[id(each)] = each
        values = [value for key, value in vars(each).items() if key not in ("state", "param_groups", "defaults")]
        if is_deep:
            objects = [value for value in values if not isinstance(value, torch.optim.Optimizer)]
            values += [held for value in objects for held in _attributes(value)]
        waiting += [within for value in values for within in _optimizers_in(value)]
    return list(found.values())


def _attributes(value: object) -> list[object]:
    found = getattr(value, "__dict__", None)
    return list(found.values()) if isinstance(found, dict) else []


def _optimizers_in(value: object) -> list[torch.optim.Optimizer]:
    """`value`, or its items, if it is a list or dict."""
    items = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else [value]
    return [item for item in items if isinstance(item, torch.optim.Optimizer)]
