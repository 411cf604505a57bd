"""Sources in parts: what a site that was away for long has to hear does not fit one session message. Pure.

A thousand contributors take some 30 KB of each commit, and a log has up to 4096 of these. The first part has the
attestations and the donors; `more` says that another part follows on the same stream.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from atoll.protocol.errors import InvalidMessage
from atoll.protocol.messages import MAX_LOG_COMMITS, Commit, Sources

MAX_PART_BYTES = 8 << 20
"""Of commits, each counted at the most that it can take; one that takes more is a part of its own."""
MAX_ITEMS = 1 << 23
"""Contributors and ranges of all commits of one answer: what a node keeps in memory while it puts them together."""
# At most, on the wire: numbers of 10 bytes, their tags, the length of the message that holds them.
_COMMIT_BYTES = 512
_MEMBER_BYTES = 4 * 256 + 64
_LINE_BYTES = 32
_RANGE_BYTES = 32
_NUMBER_BYTES = 10


def most_bytes(commit: Commit) -> int:
    """What a commit takes on the wire, at most."""
    num_ranges = sum(len(line.ranges) for line in commit.done)
    return (
        _COMMIT_BYTES
        + len(commit.contributors) * _MEMBER_BYTES
        + len(commit.done) * _LINE_BYTES
        + num_ranges * _RANGE_BYTES
        + (len(commit.error_commits) + len(commit.rates)) * _NUMBER_BYTES
    )


def split(sources: Sources) -> Iterator[Sources]:
    """The parts of an answer, in order; one, if it is small."""
    begun = replace(sources, commits=(), more=True)
    commits: list[Commit] = []
    num_bytes = 0
    for commit in sources.commits:
        size_bytes = most_bytes(commit)
        if commits and num_bytes + size_bytes > MAX_PART_BYTES:
            yield replace(begun, commits=tuple(commits))
            begun, commits, num_bytes = Sources(more=True), [], 0
        commits.append(commit)
        num_bytes += size_bytes
    yield replace(begun, commits=tuple(commits), more=False)


class Parts:
    """Puts the parts of an answer together, on one stream."""

    def __init__(self) -> None:
        self._clear()

    def _clear(self) -> None:
        self._begun: Sources | None = None
        self._commits: list[Commit] = []
        self._num_items = 0

    def add(self, part: Sources) -> Sources | None:
        """The whole answer, once its last part is here. Raises InvalidMessage if it is larger than any may be."""
        self._begun = self._begun or part
        self._commits += part.commits
        self._num_items += sum(len(c.contributors) + sum(1 + len(d.ranges) for d in c.done) for c in part.commits)
        if len(self._commits) > MAX_LOG_COMMITS or self._num_items > MAX_ITEMS:
            raise InvalidMessage(
                f"Sources with {len(self._commits)} commits and {self._num_items} contributors and ranges, at most "
                f"{MAX_LOG_COMMITS} and {MAX_ITEMS} are allowed"
            )
        if part.more:
            return None
        whole = replace(self._begun, commits=tuple(self._commits), more=False)
        self._clear()
        return whole
