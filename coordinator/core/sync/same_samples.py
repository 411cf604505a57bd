"""Sites that train the same samples, which a script does that draws its batches with one seed everywhere: as all begin
a window from the same parameters, their losses are the same number. For people who look at the run, and in memory
alone. Pure.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping

NAMED_AFTER = 3
"""Commits in a row with the same loss: one alone may be chance."""


def in_words(first: str, other: str) -> str:
    """`first`, `other`: of a pair, as people know them."""
    return (
        f"{first} and {other} had the same loss, to the last digit, in {NAMED_AFTER} commits and more: they train the "
        "same samples, so together they do the work of one; a script that draws its batches by itself seeds them with "
        "site.seed, or reads by site.loader"
    )


class SameSamples:
    def __init__(self) -> None:
        self._last: dict[int, float] = {}  # mean loss by site
        self._in_a_row: Counter[tuple[int, int]] = Counter()  # commits, by site and the first one with its loss

    def forget(self) -> None:
        """All of it."""
        self._last.clear()
        self._in_a_row.clear()

    def pairs(self) -> list[tuple[int, int]]:
        """Sites that people are told of, each after the first site that has the same losses."""
        return sorted(pair for pair, number in self._in_a_row.items() if number >= NAMED_AFTER)

    def note_commit(self, losses: Mapping[int, float]) -> list[tuple[int, int]]:
        """`losses`: the mean of each contributor's window. Gives the pairs that are to be told of from now on.

        A loss that is not finite, that is 0, or that does not move says nothing.
        """
        told = {i: loss for i, loss in losses.items() if math.isfinite(loss) and loss not in (0.0, self._last.get(i))}
        self._last.update(losses)
        first: dict[float, int] = {}
        now = {(first[loss], i) for i, loss in sorted(told.items()) if first.setdefault(loss, i) != i}
        for pair in [pair for pair in self._in_a_row if pair not in now and pair[1] in losses]:
            del self._in_a_row[pair]
        self._in_a_row.update(now)
        return sorted(pair for pair in now if self._in_a_row[pair] == NAMED_AFTER)
