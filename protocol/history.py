"""Which commits touched which fragment. Pure, and the same in coordinator and node.

A commit touches the chunks of one fragment, or of all (a run's last). So the state at commit n is each chunk at the
last commit <= n that touched its fragment, and the base of a commit is the one of the same fragment before it. With one
fragment these are n and n - 1, whatever a log holds.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence

from atoll.protocol.errors import StateError
from atoll.protocol.layout import check_fragment
from atoll.protocol.messages import Commit

_ENDLESS = range(1 << 62)


class History:
    """What a log of commits tells of it. It does not change: a longer log has another one."""

    def __init__(self, touched: Sequence[int] = (0,), later: Iterable[int] = ()) -> None:
        """`touched`: of each fragment the last commit that touched it, when the newest of these was the last commit;
        `later`: the fragment of each commit after that one. Raises InvalidMessage if there is no such fragment."""
        self.last = max(touched)
        """The last commit that is known."""
        self._commits: list[Sequence[int]] = [_ENDLESS]  # of each fragment, ascending
        if len(touched) == 1:
            self.last = _ENDLESS[-1]
            return
        commits = [[commit] for commit in touched]
        for fragment in later:
            self.last += 1
            check_fragment(fragment, len(commits))
            for its_commits in commits[fragment : fragment + 1] or commits:
                its_commits.append(self.last)
        self._commits = [*commits]

    @classmethod
    def of_log(cls, touched: Sequence[int], records: Mapping[int, Commit]) -> History:
        """Of the commits after those `touched`, as far as there is no gap."""

        def later() -> Iterable[int]:
            number = max(touched)
            while (record := records.get(number := number + 1)) is not None:
                yield record.fragment

        return cls(touched, later())

    def touched(self, commit: int) -> tuple[int, ...] | None:
        """Of each fragment, `touch` at that commit; None if that is not known of all."""
        fragments = range(len(self._commits))
        is_known = commit <= self.last and all(self._commits[f][0] <= commit for f in fragments)
        return tuple(self.touch(f, commit) for f in fragments) if is_known else None

    def commit_of(self, touched: Sequence[int]) -> int | None:
        """The commit at which the fragments were touched last so; None if none is known."""
        commit = max(touched)
        return commit if self.touched(commit) == tuple(touched) else None

    # All that follow raise StateError for what is not known.

    def touch(self, fragment: int, commit: int) -> int:
        """The last commit <= `commit` that touched the fragment."""
        return self._commits[fragment][self._num_until(fragment, commit) - 1]

    def before(self, fragment: int, commit: int) -> int:
        """The commit of the fragment before `commit`."""
        return self.touch(fragment, commit - 1)

    def following(self, fragment: int, commit: int) -> int:
        """The first commit after `commit` that touches the fragment: the next one of the log, if none has."""
        place = self._num_until(fragment, commit)
        commits = self._commits[fragment]
        return commits[place] if place < len(commits) else self.last + 1

    def between(self, fragment: int, after: int, last: int) -> Sequence[int]:
        """The commits after `after`, up to `last`, that touched the fragment: none where these are one."""
        if after == last:
            return ()
        return self._commits[fragment][self._num_until(fragment, after) : self._num_until(fragment, last)]

    def _num_until(self, fragment: int, commit: int) -> int:
        """Of the known commits of the fragment."""
        commits = self._commits[fragment]
        if not commits[0] <= commit <= self.last:
            raise StateError(f"which commit touched fragment {fragment} last at commit {commit} is not known here")
        return commit + 1 if commits is _ENDLESS else bisect_right(commits, commit)
