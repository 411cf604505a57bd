"""Whom failed exchanges of one sync are blamed on: what distinct sites report of each other. Pure.

A failed link has two ends. The one that lacks what the other owes has seen something; the one that could not send may
have the fault itself. So a site that several others lack contributions or payloads of is found before those that it
accuses. A site that is a receiver by then counts no more, neither what it said nor what others said of it: else the
innocent peers of a silent site would be blamed for it again with every attempt.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence

Pair = tuple[int, int]
"""(reporter, peer)"""


class Blame:
    def __init__(self) -> None:
        self.num_failures = 0
        """Attempts that could not be exchanged."""
        self._times: Counter[Pair] = Counter()
        self._lacking: set[Pair] = set()  # the reporter lacks what the peer owes

    def note(self, failing: Mapping[Pair, bool]) -> None:
        """An attempt has failed. `failing`: of each pair, whether the reporter lacks what the peer owes."""
        self.num_failures += 1
        self._times.update(failing.keys())
        self._lacking.update(pair for pair, lacks in failing.items() if lacks)

    def of(self, site_id: int) -> int:
        """In how many failed exchanges the site had a part."""
        return sum(times for pair, times in self._times.items() if site_id in pair)

    def num_accusers(self, site_id: int) -> int:
        """How many sites said that they could not exchange with it."""
        return len({reporter for reporter, peer in self._times if peer == site_id})

    def to_demote(self, ids: Sequence[int], quorum: int) -> list[int]:
        """Those of the contributors that are to receive only, the most blamed first; at least a quorum is left.

        At once, whoever most of the others lack something of. After the second failure, the most blamed one.
        """
        left = list(ids)
        found: list[int] = []
        while len(left) > max(1, quorum):
            worst = max(left, key=lambda i: (*self._rank(i, left), i))
            accusers = self._accusers(worst, left, self._lacking)
            is_sure = len(accusers) >= 2 and 2 * len(accusers) > len(left) - 1
            is_due = not found and self.num_failures >= 2 and any(self._rank(worst, left))
            if not is_sure and not is_due:
                break
            left.remove(worst)
            found.append(worst)
        return found

    def _rank(self, site_id: int, among: Collection[int]) -> tuple[int, int, int, int]:
        """How many distinct sites lack something of it, if several do; with how many it failed, how many named it, and
        how often. One accuser alone may be the culprit: who fails with several is suspected before each of them."""
        here = {pair: n for pair, n in self._times.items() if site_id in pair and set(pair) <= set(among)}
        lacking = self._accusers(site_id, among, self._lacking)
        partners = {i for pair in here for i in pair if i != site_id}
        accusers = self._accusers(site_id, among, here)
        return len(lacking) if len(lacking) > 1 else 0, len(partners), len(accusers), sum(here.values())

    @staticmethod
    def _accusers(site_id: int, among: Collection[int], pairs: Collection[Pair]) -> set[int]:
        return {reporter for reporter, peer in pairs if peer == site_id and reporter in among}
