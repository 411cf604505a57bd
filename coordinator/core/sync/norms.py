"""How large contributions are, and how far they agree, as the reducers of a commit say: for people who look at the run,
and in memory alone. Nothing is decided by it. Pure.

A norm is high above `sync.clip` times the median. A reducer's word on that counts for as many chunks as the plan
gave it, of all that the reducers have that are asked.
"""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from atoll.coordinator.core.sync.attempts import Attempt
from atoll.protocol.messages import Averaged
from atoll.protocol.plans import heard

ROUNDING = 1e-3
"""Of a cosine."""
NAMED_AFTER = 3
"""Commits in a row in which a site's norm was high: one alone is no sign of anything. Of zeros, so many of each
fragment: in some of them a script may train nothing."""


@dataclass(frozen=True, slots=True)
class SiteNorm:
    norm: float
    """Of the site's last contribution, in the chunks of the reducers that are heard."""
    cosine: float | None
    """Of the last one that was looked at closer to its average; None if there was none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Agreement:
    """Of the last commit that was looked at closer, in one chunk of each reducer. None: nobody knows."""

    average_share: float | None
    """The norm of the average over the mean of the contributions'. Of n that have nothing in common it is near the
    root of 1/n."""
    last_cosine: float | None
    """Of the average to the one before."""
    codec_error: float | None
    """What the codec loses of a contribution, relative to it."""


class Norms:
    def __init__(self, num_fragments: int) -> None:
        self._most_zeros = NAMED_AFTER * num_fragments
        self.of_sites: dict[int, SiteNorm] = {}
        self.agreement: Agreement | None = None
        self._in_a_row: Counter[int] = Counter()  # commits, of contributors with a high norm in their last one
        self._zeros_in_a_row: Counter[int] = Counter()  # the same of a norm of 0 in all chunks

    def forget(self) -> None:
        """All of it."""
        self.of_sites.clear()
        self.agreement = None
        self._in_a_row.clear()
        self._zeros_in_a_row.clear()

    def high_in_a_row(self, site_id: int) -> int:
        """Commits in a row, of those with a contribution of the site, in which its norm was high in most chunks."""
        return self._in_a_row[site_id]

    def is_named(self, site_id: int) -> bool:
        """Whether people are told of it."""
        return self._in_a_row[site_id] >= NAMED_AFTER or self.is_zero(site_id)

    def is_zero(self, site_id: int) -> bool:
        """Whether it contributes nothing again and again."""
        return self._zeros_in_a_row[site_id] >= self._most_zeros

    def note_commit(self, attempt: Attempt) -> list[int]:
        """The sites that are to be named from now on."""
        ids, num_chunks = attempt.ids(), heard(attempt.plan)
        said = [(number, attempt.done[i].averaged) for i, number in num_chunks.items() if i in attempt.done]
        words = [(number, word) for number, word in said if word is not None and _can_be(word, len(ids))]
        if not words:
            return []
        named, all_chunks = [], sum(num_chunks.values())
        closer = [word for _, word in words if word.cosines]
        are_all = sum(number for number, _ in words) == sum(tree.num_chunks for tree in attempt.plan.trees)
        for place, site_id in enumerate(ids):
            norm = math.sqrt(sum(word.norms[place] * word.norms[place] for _, word in words))
            before = self.of_sites.get(site_id)
            cosine = _median([word.cosines[place] for word in closer]) if closer or before is None else before.cosine
            self.of_sites[site_id] = SiteNorm(norm, cosine)
            high = sum(number * word.num_high[place] / word.num_chunks for number, word in words)
            self._in_a_row[site_id] = self._in_a_row[site_id] + 1 if 2 * high > all_chunks else 0
            self._zeros_in_a_row[site_id] = self._zeros_in_a_row[site_id] + 1 if are_all and norm == 0 else 0
            if self._in_a_row[site_id] == NAMED_AFTER or self._zeros_in_a_row[site_id] == self._most_zeros:
                named.append(site_id)
        if closer:
            self.agreement = Agreement(
                average_share=_median([word.average_share for word in closer]),
                last_cosine=_median([cosine for word in closer for cosine in word.last_cosine]),
                codec_error=_median([lost for _, word in words for lost in word.codec_error]),
            )
        return named


def _can_be(word: Averaged, num_contributors: int) -> bool:
    """Whether it speaks of all contributors, and says nothing that no average has."""
    cosines = (*word.cosines, *word.last_cosine)
    return (
        word.num_chunks > 0
        and len(word.norms) == len(word.num_high) == num_contributors
        and len(word.cosines) in {0, num_contributors}
        and min((*word.norms, *word.codec_error, word.average_share)) >= 0
        and max(word.num_high) <= word.num_chunks
        and all(abs(cosine) <= 1 + ROUNDING for cosine in cosines)
    )


def _median(values: Sequence[float]) -> float | None:
    """No single reducer decides it."""
    return statistics.median(values) if values else None
