"""What the demo makes of one status after the other: news in words, traffic over restarts, when to kill. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field

from atoll.coordinator.core.view.document import RunView, SiteView

COUNTERS = ("sent_bytes", "received_bytes", "train_s", "wait_s")


@dataclass(slots=True)
class SiteTotals:
    """Counters of a site that go on when its node starts again (a node counts from its own start)."""

    sent_bytes: int = 0
    received_bytes: int = 0
    train_s: float = 0.0
    wait_s: float = 0.0
    _last: SiteView | None = None

    def observe(self, site: SiteView) -> None:
        last, self._last = self._last, site
        if last is not None and any(getattr(site, name) < getattr(last, name) for name in COUNTERS):
            last = None
        for name in COUNTERS:
            more = getattr(site, name) - (0 if last is None else getattr(last, name))
            setattr(self, name, getattr(self, name) + more)

    @property
    def utilization(self) -> float | None:
        total_s = self.train_s + self.wait_s
        return self.train_s / total_s if total_s > 0 else None


@dataclass(slots=True)
class Watch:
    """`observe` returns one line for each commit and each change of a state."""

    totals: dict[str, SiteTotals] = field(default_factory=dict)
    _commit: int = 0
    _state: str = ""
    _site_states: dict[str, str] = field(default_factory=dict)

    def observe(self, status: RunView) -> list[str]:
        lines = []
        state = "training" if status.state_kind in ("training", "syncing") else status.state
        if state != self._state:
            self._state = state
            lines.append(f"run: {state}")
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
            if self._site_states.get(site.name) != site.state:
                self._site_states[site.name] = site.state
                lines.append(f"{site.name}: {site.state}")
        return lines


ACTS = ("killed at commit", "restarted at", "back in commit")


@dataclass(slots=True)
class KillPlan:
    """Kill `victim` after a third of the commits, start it again two commits later, see it catch up."""

    victim: str
    expected_commits: int
    done: list[int] = field(default_factory=list)
    """Of ACTS, in their order: at which commit."""

    @property
    def is_over(self) -> bool:
        return len(self.done) == len(ACTS)

    def is_due(self, status: RunView) -> bool:
        """Whether the next act is; it counts as done."""
        at = status.last_commit
        match self.done:
            case []:
                due = at >= max(1, self.expected_commits // 3)
            case [killed_at]:
                due = at >= killed_at + 2 or status.finished
            case [_, restarted_at]:
                at = max((c.commit for c in status.commits if self.victim in c.contributors), default=0)
                due = at > restarted_at
            case _:
                due = False
        if due:
            self.done.append(at)
        return due

    def in_words(self) -> str:
        said = [f"{act} {at}" for act, at in zip(ACTS, self.done, strict=False)]
        return ", ".join([*said, "recovering"] if len(said) == 2 else said)
