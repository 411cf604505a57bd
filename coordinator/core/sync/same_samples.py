"""Sites that train the same samples, which a script does that draws its batches with one seed everywhere: as all begin
a window from the same parameters, their losses are the same number. For people who look at the run, and in memory
alone. Pure.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping

NAMED_AFTER = 8
"""Commits in a row with the same loss: fewer may be chance where losses take few values."""
COARSE_BITS = 16
"""A loss of so few significant bits takes few values: one in bfloat16 has 8, one in float16 11, one in float32 24."""
REMEMBERED = 64
"""Commits. A loss that comes again within them takes few values too, as an error rate or a mean of coarse losses."""


def in_words(first: str, other: str) -> str:
    """`first`, `other`: of a pair, as people know them."""
    return (
        f"{first} and {other} had the same loss, to the last digit, in {NAMED_AFTER} commits and more: they train the "
        "same samples, so together they do the work of one; a script that draws its batches by itself seeds them with "
        "site.seed, or reads by site.loader"
    )


class SameSamples:
    def __init__(self) -> None:
        self._num_commits = 0
        self._seen: dict[float, int] = {}  # the last commit of each loss, as `_num_commits` counts; the oldest first
        self._in_a_row: Counter[tuple[int, int]] = Counter()  # commits, by site and the first one with its loss

    def forget(self) -> None:
        """All of it."""
        self._seen.clear()
        self._in_a_row.clear()

    def pairs(self) -> list[tuple[int, int]]:
        """Sites that people are told of, each after the first site that has the same losses."""
        return sorted(pair for pair, number in self._in_a_row.items() if number >= NAMED_AFTER)

    def note_commit(self, losses: Mapping[int, float]) -> list[tuple[int, int]]:
        """`losses`: the mean of each contributor's window. Gives the pairs that are to be told of from now on.

        A loss says nothing if it is not finite, coarse, or was seen in another commit, of whichever site: a pair that
        has it stays as it is.
        """
        told = {i: loss for i, loss in losses.items() if not _is_coarse(loss) and loss not in self._seen}
        self._remember(losses.values())
        first: dict[float, int] = {}
        now = {(first[loss], i) for i, loss in sorted(told.items()) if first.setdefault(loss, i) != i}
        for first_id, i in self._in_a_row.keys() - now:
            if i in told or (i in losses and losses.get(first_id) != losses[i]):
                del self._in_a_row[first_id, i]
        self._in_a_row.update(now)
        return sorted(pair for pair in now if self._in_a_row[pair] == NAMED_AFTER)

    def _remember(self, losses: Iterable[float]) -> None:
        self._num_commits += 1
        for loss in losses:
            self._seen.pop(loss, None)
            self._seen[loss] = self._num_commits
        while self._seen and self._seen[oldest := next(iter(self._seen))] <= self._num_commits - REMEMBERED:
            del self._seen[oldest]


def _is_coarse(loss: float) -> bool:
    """Also what is not finite, and 0."""
    return not math.isfinite(loss) or (math.frexp(loss)[0] * 2**COARSE_BITS).is_integer()
