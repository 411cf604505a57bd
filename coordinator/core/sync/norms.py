"""How large contributions are, and how far they agree, as the reducers of a commit say: for people who look at the run,
and in memory alone. Nothing is decided by it. Pure.

A reducer's word on who stands out counts for as many chunks as the plan gave it.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from atoll.coordinator.core.sync.attempts import Attempt
from atoll.protocol.messages import Averaged
from atoll.protocol.plans import top_of

MOST_WORDS = 32
"""Reducers that are heard, those with the most chunks: of a thousand, each on a thousand sites, a commit would wait for
the sums."""
NAMED_AFTER = 3
"""Commits in a row in which a site's contribution stood out: one alone is no sign of anything."""


@dataclass(frozen=True, slots=True)
class SiteNorm:
    norm: float
    """Of the site's last contribution, in the chunks of the reducers that are heard."""
    cosine: float | None
    """Of it to the average, in chunks that were looked at closer; None if there was none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Agreement:
    """Of the last commit, in the chunks that were looked at closer: one of each reducer."""

    average_share: float
    """The norm of the average over the mean of the contributions'. Of n that have nothing in common it is near the
    root of 1/n."""
    last_cosine: float
    """Of the average to the one before."""
    codec_error: float
    """What the codec loses of a contribution, relative to it."""


class Norms:
    def __init__(self) -> None:
        self.of_sites: dict[int, SiteNorm] = {}
        self.agreement: Agreement | None = None
        self._in_a_row: Counter[int] = Counter()  # commits, of contributors that stood out in their last one

    def high_in_a_row(self, site_id: int) -> int:
        """Commits in a row, of those with a contribution of the site, in which it stood out in most chunks."""
        return self._in_a_row[site_id]

    def is_named(self, site_id: int) -> bool:
        """Whether people are told of it."""
        return self._in_a_row[site_id] >= NAMED_AFTER

    def note_commit(self, attempt: Attempt) -> list[int]:
        """The sites that are to be named from now on."""
        ids, num_chunks = attempt.ids(), _num_chunks(attempt)
        said = [(num_chunks[i], done.averaged) for i, done in attempt.done.items() if done.averaged]
        words = [(number, word) for number, word in said if number and _is_whole(word, len(ids))]
        if not words:
            return []
        words = sorted(words, key=lambda pair: -pair[0])[:MOST_WORDS]
        named, all_chunks = [], sum(number for number, _ in words)
        closer = [word for _, word in words if word.cosines]
        for place, site_id in enumerate(ids):
            norm = math.sqrt(sum(word.norms[place] * word.norms[place] for _, word in words))
            cosine = _mean([word.cosines[place] for word in closer]) if closer else None
            self.of_sites[site_id] = SiteNorm(norm, cosine)
            high = sum(number * min(1.0, word.num_high[place] / word.num_chunks) for number, word in words)
            self._in_a_row[site_id] = self._in_a_row[site_id] + 1 if 2 * high > all_chunks else 0
            if self._in_a_row[site_id] == NAMED_AFTER:
                named.append(site_id)
        if closer:
            self.agreement = Agreement(
                average_share=_mean([word.average_share for word in closer]),
                last_cosine=_mean([word.last_cosine for word in closer]),
                codec_error=_mean([word.codec_error for word in closer]),
            )
        return named


def _num_chunks(attempt: Attempt) -> Counter[int]:
    """That the plan has each site reduce."""
    ids, found = attempt.ids(), Counter[int]()
    for tree in attempt.plan.trees:
        found[ids[top_of(tree)]] += tree.num_chunks
    return found


def _is_whole(word: Averaged, num_contributors: int) -> bool:
    lengths = {len(word.norms), len(word.num_high)}
    return word.num_chunks > 0 and lengths == {num_contributors} and len(word.cosines) in {0, num_contributors}


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)
