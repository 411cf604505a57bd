"""What the demo makes of one status after the other: news in words, traffic over restarts, when to kill. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from atoll.coordinator.core.view.document import RunView, SiteView


@dataclass(slots=True)
class SiteTotals:
    """Counters of a site that go on when its node starts again (a node counts from its own start)."""

    sent_bytes: int = 0
    received_bytes: int = 0
    train_s: float = 0.0
    wait_s: float = 0.0
    _base: tuple[int, int, float, float] = (0, 0, 0.0, 0.0)
    _last: tuple[int, int, float, float] = (0, 0, 0.0, 0.0)

    def observe(self, site: SiteView) -> None:
        now = (site.sent_bytes, site.received_bytes, site.train_s, site.wait_s)
        if any(new < old for new, old in zip(now, self._last, strict=True)):
            sent, received, train_s, wait_s = self._base
            last = self._last
            self._base = (sent + last[0], received + last[1], train_s + last[2], wait_s + last[3])
        self._last = now
        self.sent_bytes, self.received_bytes = self._base[0] + now[0], self._base[1] + now[1]
        self.train_s, self.wait_s = self._base[2] + now[2], self._base[3] + now[3]

    @property
    def utilization(self) -> float | None:
        total_s = self.train_s + self.wait_s
        return self.train_s / total_s if total_s > 0 else None


@dataclass(slots=True)
class Watch:
    """`observe` returns one line for each commit and each change of a state."""

    totals: dict[str, SiteTotals] = field(default_factory=dict)
    hashes: dict[str, tuple[int, str]] = field(default_factory=dict)
    """Name -> the newest commit it reported, and its state hash."""
    _commit: int = 0
    _state: str = ""
    _site_states: dict[str, str] = field(default_factory=dict)

    def observe(self, status: RunView) -> list[str]:
        lines = []
        kind = status.state.split(maxsplit=1)[0].rstrip(":") if status.state else ""
        if status.state != self._state and kind not in ("training", "syncing"):
            lines.append(f"run: {status.state}")
        elif kind == "training" and not self._state.startswith(("training", "syncing")):
            lines.append("run: training")
        self._state = status.state
        for commit in status.commits:
            if commit.commit > self._commit:
                self._commit = commit.commit
                loss = "" if commit.mean_loss is None else f", training loss {commit.mean_loss:.3f}"
                again = f", attempt {commit.attempt}" if commit.attempt > 1 else ""
                lines.append(
                    f"commit {commit.commit}: step {commit.run_step}, {', '.join(commit.contributors)}{loss}{again}"
                )
        for site in status.sites:
            self.totals.setdefault(site.name, SiteTotals()).observe(site)
            if site.last_commit is not None and site.state_hash:
                self.hashes[site.name] = (site.last_commit, site.state_hash)
            if self._site_states.get(site.name) != site.state:
                self._site_states[site.name] = site.state
                lines.append(f"{site.name}: {site.state}")
        return lines


class Act(Enum):
    KILL = "kill"
    RESTART = "restart"
    BACK = "back"


@dataclass(slots=True)
class KillPlan:
    """Kill `victim` after a third of the commits, start it again two commits later, see it catch up."""

    victim: str
    expected_commits: int
    killed_at: int | None = None
    restarted_at: int | None = None
    back_at: int | None = None

    def next_act(self, status: RunView) -> Act | None:
        """What is to be done now; it counts as done."""
        last = status.last_commit
        if self.killed_at is None:
            if last >= max(1, self.expected_commits // 3):
                self.killed_at = last
                return Act.KILL
        elif self.restarted_at is None:
            if last >= self.killed_at + 2 or status.finished:
                self.restarted_at = last
                return Act.RESTART
        elif self.back_at is None:
            contributed = any(
                self.victim in commit.contributors and commit.commit > self.restarted_at for commit in status.commits
            )
            if contributed:
                self.back_at = max(c.commit for c in status.commits if self.victim in c.contributors)
                return Act.BACK
        return None

    def in_words(self) -> str:
        if self.killed_at is None:
            return ""
        text = f"killed at commit {self.killed_at}"
        if self.restarted_at is not None:
            text += f", restarted at {self.restarted_at}"
        if self.back_at is not None:
            return f"{text}, back in commit {self.back_at}"
        return f"{text}, recovering" if self.restarted_at is not None else text
