"""What the demo makes of one status after the other: news in words, traffic over restarts, when to kill. Pure."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from atoll.cli.demo_report import Totals
from atoll.coordinator.core.view.document import RunView, SiteView
from atoll.protocol.text import last_line


@dataclass(slots=True)
class Watch:
    """`observe` returns one line for each commit and each change of a state."""

    losses: list[float | None] = field(default_factory=list)
    """Of the commits that were seen, in their order: the mean of the window before each."""
    _sites: dict[tuple[str, int], SiteView] = field(default_factory=dict)  # each start of a node: it counts from there
    _commit: int = 0
    _state: str = ""
    _site_states: dict[str, str] = field(default_factory=dict)
    _num_commits: Counter[str] = field(default_factory=Counter)  # that a site contributed to
    _crashes: dict[tuple[str, int], int] = field(default_factory=dict)  # of workers, in each start of a node
    _same_samples: set[str] = field(default_factory=set)  # what was said of them

    def observe(self, status: RunView) -> list[str]:
        lines = []
        state = "training" if status.state_kind in ("training", "syncing") else status.state
        if state != self._state:
            self._state = state
            lines.append(f"run: {state}")
        for commit in status.commits:
            if commit.commit > self._commit:
                self._commit = commit.commit
                self.losses.append(commit.mean_loss)
                self._num_commits.update(set(commit.contributors))
                loss = "" if commit.mean_loss is None else f", training loss {commit.mean_loss:.3f}"
                again = f", attempt {commit.attempt}" if commit.attempt > 1 else ""
                lines.append(
                    f"commit {commit.commit}: step {commit.run_step}, {', '.join(commit.contributors)}{loss}{again}"
                )
        for site in status.sites:
            self._sites[site.name, site.incarnation] = site
            if site.telemetry.num_crashes > self._crashes.get((site.name, site.incarnation), 0):
                self._crashes[site.name, site.incarnation] = site.telemetry.num_crashes
                why = last_line(site.telemetry.last_crash)
                why = f": {why}" if why else ""
                lines.append(f"{site.name}: its workers crashed or hung{why}; logs/{site.name}.log has all of it")
            if self._site_states.get(site.name) != site.state:
                self._site_states[site.name] = site.state
                lines.append(f"{site.name}: {site.state}")
        lines += [text for text in status.same_samples if text not in self._same_samples]
        self._same_samples |= set(status.same_samples)
        return lines

    @property
    def last_commit(self) -> int:
        """The last one that was seen; 0 before the first."""
        return self._commit

    def num_crashes(self, name: str) -> int:
        """Of a site's workers, in all starts of its node."""
        return sum(number for (known, _), number in self._crashes.items() if known == name)

    def num_commits(self, name: str) -> int:
        """That a site contributed to, as far as they were seen."""
        return self._num_commits[name]

    def totals(self, name: str = "") -> Totals:
        """Of all starts of a site; without a name, of all sites."""
        seen = [site for (known, _), site in self._sites.items() if name in ("", known)]
        train_s, wait_s = sum(site.train_s for site in seen), sum(site.wait_s for site in seen)
        return Totals(
            sent_bytes=sum(site.sent_bytes for site in seen),
            received_bytes=sum(site.received_bytes for site in seen),
            utilization=train_s / (train_s + wait_s) if train_s + wait_s > 0 else None,
        )


ACTS = ("killed at commit", "restarted at", "back in commit")
AWAY_COMMITS = 2
SLOWER_START = 1.5
"""Beside sites that train."""


@dataclass(slots=True)
class KillPlan:
    """Kill `victim` after a third of the commits, start it again two commits later, see it catch up. On a fast machine
    kill it earlier, so that it is back before the end."""

    victim: str
    expected_commits: int
    started_s: float
    """When the sites were."""
    done: list[int] = field(default_factory=list)
    """Of ACTS, in their order: at which commit."""
    _first: tuple[int, float] | None = None
    """The first commit that was seen, and when."""

    @property
    def is_over(self) -> bool:
        return len(self.done) == len(ACTS)

    def is_due(self, status: RunView, now_s: float) -> bool:
        """Whether the next act is; it counts as done."""
        at = status.last_commit
        if self._first is None and at:
            self._first = at, now_s
        match self.done:
            case []:
                due = at >= max(1, self.expected_commits // 3) or self._is_late(at, now_s)
            case [killed_at]:
                due = at >= killed_at + AWAY_COMMITS or status.finished
            case [_, restarted_at]:
                at = max((c.commit for c in status.commits if self.victim in c.contributors), default=0)
                due = at > restarted_at
            case _:
                due = False
        if due:
            self.done.append(at)
        return due

    def _is_late(self, at: int, now_s: float) -> bool:
        """Whether the commits that are left hardly suffice for a site to be away, to start and to contribute, if that
        takes as long as the first start, first window included."""
        if self._first is None or at == self._first[0]:
            return False
        first, first_s = self._first
        start_commits = (first_s - self.started_s) * (at - first) / (now_s - first_s)
        return at + AWAY_COMMITS + SLOWER_START * start_commits + 1 >= self.expected_commits

    def in_words(self) -> str:
        said = [f"{act} {at}" for act, at in zip(ACTS, self.done, strict=False)]
        return ", ".join([*said, "recovering"] if len(said) == 2 else said)
