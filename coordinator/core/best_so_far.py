"""Which saved model is the best by what scripts log of it: decided here, in the order in which their words come, and
said with each commit, so that all sites keep the same one. One site is the judge: sites measure on data of their own,
and what two of them say is not compared while the judge is here."""

from __future__ import annotations

from collections.abc import Sequence
from math import isfinite

from atoll.coordinator.core.records import CommitRecord
from atoll.protocol.logged import Best, LoggedValue
from atoll.protocol.settings import RunSettings


class BestSoFar:
    """`found`: None while no model is."""

    def __init__(self, settings: RunSettings, of_commit: Best | None) -> None:
        """`of_commit`: as it was known at the last commit."""
        self._settings = settings
        self.found = of_commit

    def take(self, best: Best | None) -> None:
        """As it was known at the commit to which the run went back."""
        self.found = best

    def hear(self, records: Sequence[CommitRecord], site_id: int, value: LoggedValue, *, judge_is_here: bool) -> bool:
        """A value that the site logs; whether it makes another model the best. The next commit says so."""
        before = self.found
        is_asked = value.of_outer and value.name == self._settings.best_by and isfinite(value.value)
        if not is_asked or (before is not None and judge_is_here and before.site_id != site_id):
            return False
        commit = self._saved_at(records, value.step)
        if commit is None or (before is not None and not self._is_better(value.value, before.value)):
            return False
        self.found = Best(commit=commit, run_step=value.step, site_id=site_id, value=value.value)
        return True

    def _saved_at(self, records: Sequence[CommitRecord], run_step: int) -> int | None:
        """The commit at that step whose model sites save, and have among those that they keep; None if there is
        none."""
        every, kept = self._settings.save_every, self._settings.keep_models
        last = records[-1].commit.commit if records else 0
        for record in reversed(records):
            commit = record.commit
            if commit.run_step < run_step or commit.commit <= last - last % every - every * kept:
                return None
            if commit.run_step == run_step and commit.commit % every == 0:
                return commit.commit
        return None

    def _is_better(self, value: float, before: float) -> bool:
        return value > before if self._settings.best_is == "highest" else value < before
