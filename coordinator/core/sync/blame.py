"""Whom failed exchanges of one sync are blamed on: what distinct sites report of each other. Pure.

A failed link has two ends. The one that lacks what the other owes has seen something; the one that could not send may
have the fault itself. So a site that several others lack contributions or payloads of is found before those that it
accuses. A site that is a receiver by then counts no more, neither what it said nor what others said of it: else the
innocent peers of a silent site would be blamed for it again with every attempt.

A site that fails with one other site in each sync, and with another one each time, is found by the links that failed
in the syncs before: whoever it fails with has failed with it alone.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

Pair = tuple[int, int]
"""(reporter, peer)"""

MAX_NAMED = 16
"""Pairs in one reason."""


def in_words(pairs: Collection[Pair]) -> str:
    """The first ones, for people."""
    more = f", and {len(pairs) - MAX_NAMED} more" if len(pairs) > MAX_NAMED else ""
    return ", ".join(f"{a} with {b}" for a, b in sorted(pairs)[:MAX_NAMED]) + more


def partners_of(pairs: Iterable[Pair]) -> defaultdict[int, set[int]]:
    """Of each site, those with whom it is in a pair."""
    partners: defaultdict[int, set[int]] = defaultdict(set)
    for a, b in pairs:
        partners[a].add(b)
        partners[b].add(a)
    return partners


@dataclass(frozen=True, slots=True)
class Demotion:
    site_id: int
    num_accusers: int
    """Contributors that said that they could not exchange with it. One alone may be the culprit."""


class Blame:
    def __init__(self, earlier: Collection[Pair] = ()) -> None:
        """`earlier`: what failed in the syncs before."""
        self.num_failures = 0
        """Attempts that could not be exchanged."""
        self._earlier = tuple(earlier)
        self._times: Counter[Pair] = Counter()
        self._parts: Counter[int] = Counter()
        self._lacking: set[Pair] = set()  # the reporter lacks what the peer owes

    def note(self, failing: Mapping[Pair, bool]) -> None:
        """An attempt has failed. `failing`: of each pair, whether the reporter lacks what the peer owes."""
        self.num_failures += 1
        self._times.update(failing.keys())
        self._parts.update(site_id for pair in failing for site_id in pair)
        self._lacking.update(pair for pair, lacks in failing.items() if lacks)

    @property
    def pairs(self) -> Collection[Pair]:
        """Of all attempts."""
        return self._times.keys()

    def of(self, site_id: int) -> int:
        """In how many failed exchanges the site had a part."""
        return self._parts[site_id]

    def to_demote(self, ids: Sequence[int], quorum: int) -> list[Demotion]:
        """Those of the contributors that are to receive only, the most blamed first; at least a quorum is left.

        At once, whoever most of the others lack something of, or who fails with one after the other in each sync. After
        the second failure, the most blamed one.
        """
        left = list(ids)
        tally = _Tally(self._times, self._lacking, left)
        found: list[Demotion] = []
        while len(left) > max(1, quorum):
            worst = max(left, key=lambda i: (*tally.rank(i), i))
            num_lacking = len(tally.lacking[worst])
            is_sure = num_lacking >= 2 and 2 * num_lacking > len(left) - 1
            if not is_sure and not found and self.num_failures == 1:
                worst = self._who_fails_again(tally)
            is_due = not found and (self.num_failures >= 2 or worst != 0) and any(tally.rank(worst))
            if not is_sure and not is_due:
                break
            found.append(Demotion(worst, len(tally.accusers[worst])))
            left.remove(worst)
            tally.remove(worst)
        return found

    def _who_fails_again(self, tally: _Tally) -> int:
        """The site that has failed with more others than each of those with whom it fails now; 0 if there is none."""
        partners = partners_of((*self._earlier, *self._times))
        num = {site_id: len(partners[site_id]) for site_id, now in tally.partners.items() if now}
        failed_before = {site_id for pair in self._earlier for site_id in pair}
        more = [i for i in failed_before & num.keys() if num[i] > max(1, *(num[peer] for peer in tally.partners[i]))]
        return max(more, key=lambda i: (num[i], i), default=0)


class _Tally:
    """What was said among the contributors that are left."""

    def __init__(self, times: Mapping[Pair, int], lacking: Collection[Pair], among: Collection[int]) -> None:
        known = set(among)
        self._times: dict[Pair, int] = {}
        self.accusers: defaultdict[int, set[int]] = defaultdict(set)
        self.lacking: defaultdict[int, set[int]] = defaultdict(set)
        self._num: Counter[int] = Counter()
        for (reporter, peer), num in times.items():
            if reporter not in known or peer not in known:
                continue
            self._times[reporter, peer] = num
            self.accusers[peer].add(reporter)
            if (reporter, peer) in lacking:
                self.lacking[peer].add(reporter)
            self._num.update({reporter: num, peer: num})
        self.partners = partners_of(self._times)

    def rank(self, site_id: int) -> tuple[int, int, int, int]:
        """How many distinct sites lack something of it, if several do; with how many it failed, how many named it, and
        how often. One accuser alone may be the culprit: who fails with several is suspected before each of them."""
        num_lacking = len(self.lacking[site_id])
        return (
            num_lacking if num_lacking > 1 else 0,
            len(self.partners[site_id]),
            len(self.accusers[site_id]),
            self._num[site_id],
        )

    def remove(self, site_id: int) -> None:
        """It receives only: what it said, and what was said of it, counts no more."""
        for peer in self.partners.pop(site_id, ()):
            self.partners[peer].discard(site_id)
            self.accusers[peer].discard(site_id)
            self.lacking[peer].discard(site_id)
            self._num[peer] -= self._times.get((site_id, peer), 0) + self._times.get((peer, site_id), 0)
