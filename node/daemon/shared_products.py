"""Inner products of contributions, of all parts of a site: what the site says is their sum, in the order of its parts.
Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import reduce
from operator import add

from atoll.node.exchange.sync.multiplication import Products

OWN = 0
"""The part that leads."""

AttemptKey = tuple[int, int, int]  # sync, term, attempt


@dataclass(slots=True)
class _Awaited:
    parts: Sequence[int]
    """Those that take part, ascending; the one that leads is before them."""
    said: dict[int, Products] = field(default_factory=dict)
    then: Callable[[Products], None] | None = None


class SharedProducts:
    def __init__(self) -> None:
        self._awaited: dict[AttemptKey, _Awaited] = {}

    def expect(self, key: AttemptKey, parts: Sequence[int]) -> None:
        """From now on they take part in that attempt, which may be begun again: then all of them say theirs anew."""
        self._awaited[key] = _Awaited(sorted(parts))

    def forget(self, sync: int) -> None:
        """It is over, or another attempt at it begins."""
        for key in [key for key in self._awaited if key[0] == sync]:
            del self._awaited[key]

    def made(self, key: AttemptKey, products: Products, then: Callable[[Products], None]) -> None:
        """By the one that leads. `then` hears the sum once all parts have said theirs; at once if none takes part."""
        awaited = self._awaited.get(key)
        if awaited is None:
            then(products)
            return
        awaited.said[OWN], awaited.then = products, then
        self._look(awaited)

    def heard(self, key: AttemptKey, part: int, products: Products) -> None:
        """By another one."""
        if (awaited := self._awaited.get(key)) is not None and part in awaited.parts:
            awaited.said[part] = products
            self._look(awaited)

    def _look(self, awaited: _Awaited) -> None:
        if awaited.then is not None and awaited.said.keys() >= {OWN, *awaited.parts}:
            then, awaited.then = awaited.then, None  # once
            said = (awaited.said[part] for part in (OWN, *awaited.parts))
            then(tuple(reduce(add, column) for column in zip(*said, strict=True)))  # `sum` differs between versions
