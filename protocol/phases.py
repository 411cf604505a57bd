"""What a sync is of in a run of momenta, by the number of its commit: 1-bit Adam and 0/1 Adam. Pure.

    up to warmup_commits  a step each, of gradients, which move both moments. With gradient_doubling = k they thin out:
                          all of the first k commits are of gradients, every second one of the next 2 k, every fourth
                          one of the next 4 k, and so on; those between are of momenta
    from there on         of momenta, and the variance stays. With local_doubling = k each of the first k commits has
                          one step, each of the next k two steps, which sites do by themselves, then four, and so on

(1-bit Adam, arXiv 2102.02888, section 4; 0/1 Adam, arXiv 2202.06009, algorithm 1 and the policies T_v and T_u of
section 6.) Commits are counted, and not steps, so that the number of a commit says all.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Phases:
    warmup_commits: int
    gradient_doubling: int
    local_doubling: int
    most_local_steps: int

    def is_of_gradients(self, commit: int) -> bool:
        """Whether the variance moves in it."""
        if commit > self.warmup_commits:
            return False
        past, interval = self._in_warmup(commit)
        return past % interval == 0

    def num_of_gradients(self, commit: int) -> int:
        """Commits of gradients up to that one."""
        last = min(commit, self.warmup_commits)
        if not last:
            return 0
        past, interval = self._in_warmup(last)
        return self.gradient_doubling * (interval.bit_length() - 1) + past // interval + 1

    def last_of_momenta(self, commit: int) -> int:
        """The newest one up to that commit which is not of gradients; 0 if there is none."""
        while commit and self.is_of_gradients(commit):
            commit = commit - 1 if self._in_warmup(commit)[1] > 1 else 0
        return commit

    def steps(self, commit: int) -> int:
        """That each site does between the commit before and this one."""
        if not self.local_doubling or commit <= self.warmup_commits:
            return 1
        doubled = (commit - self.warmup_commits - 1) // self.local_doubling
        return min(self.most_local_steps, 1 << min(doubled, self.most_local_steps.bit_length()))

    def is_local(self, commit: int) -> bool:
        """Whether sites do the steps of its window by themselves, with the moments of the commit before."""
        return self.steps(commit) > 1

    def steps_until(self, commit: int) -> int:
        """Of all commits up to that one."""
        steps, left, size = min(commit, self.warmup_commits), max(0, commit - self.warmup_commits), 1
        while left and self.local_doubling and size < self.most_local_steps:
            of_size = min(left, self.local_doubling)
            steps, left, size = steps + of_size * size, left - of_size, min(self.most_local_steps, 2 * size)
        return steps + left * size

    def _in_warmup(self, commit: int) -> tuple[int, int]:
        """Commits before it with the same interval, and that interval between two of gradients."""
        past, of_interval = commit - 1, self.gradient_doubling
        if not of_interval:
            return past, 1
        interval = 1 << (past // of_interval + 1).bit_length() - 1
        return past - of_interval * (interval - 1), interval
