"""Which saved model is the best by what scripts log of it: decided here, in the order in which their words come, and
said with each commit, so that all sites keep the same one. One site is the judge: sites measure on data of their own,
and what two of them say is not compared while the judge is here."""

from __future__ import annotations

from collections.abc import Sequence
from math import isfinite

from atoll.coordinator.core.records import CommitRecord
from atoll.protocol.logged import Best, LoggedValue
from atoll.protocol.settings import RunSettings

PATIENCE = 3
"""Models that sites save, from a value that is of none of them on, until people are told that none is."""


class BestSoFar:
    """`found`: None while no model is."""

    def __init__(self, settings: RunSettings, of_commit: Best | None) -> None:
        """`of_commit`: as it was known at the last commit."""
        self._settings = settings
        self.found = of_commit
        self._missed_since: int | None = None  # the last saved model, at the first value since one was of such a model
        self.in_vain = ""
        """Why the values of late choose no model, in words; empty while they do, or may yet."""
        self._is_told = False

    def take(self, best: Best | None) -> None:
        """As it was known at the commit to which the run went back."""
        self.found = best
        self._missed_since, self.in_vain = None, ""

    def hear(self, records: Sequence[CommitRecord], site_id: int, value: LoggedValue, *, judge_is_here: bool) -> bool:
        """A value that the site logs; whether it makes another model the best. The next commit says so."""
        before = self.found
        is_asked = value.name == self._settings.best_by and isfinite(value.value)
        if not is_asked or (before is not None and judge_is_here and before.site_id != site_id):
            return False
        if not value.of_outer and before is not None:
            return False  # a script may log both, and has shown that it does
        commit = self._saved_at(records, value.step) if value.of_outer else None
        self._note(self._last_saved(records), is_missed=commit is None)
        if commit is None or (before is not None and not self._is_better(value.value, before.value)):
            return False
        self.found = Best(commit=commit, run_step=value.step, site_id=site_id, value=value.value)
        return True

    def in_words(self, records: Sequence[CommitRecord]) -> str:
        """`in_vain`, or that no value has come at all; empty if neither."""
        is_late = self._settings.best_by and self._last_saved(records) >= PATIENCE * self._settings.save_every
        if not is_late or self.found is not None or self._missed_since is not None:
            return self.in_vain
        return f"no value of {self._settings.best_by} (run.best_by) has come since this start of the coordinator"

    def telling(self) -> str:
        """`in_vain`, once in a start of the coordinator."""
        told, self._is_told = self._is_told, self._is_told or self.in_vain != ""
        return "" if told else self.in_vain

    def _note(self, last_saved: int, *, is_missed: bool) -> None:
        if not is_missed:
            self._missed_since, self.in_vain = None, ""
        elif self._missed_since is None:
            self._missed_since = last_saved
        elif last_saved >= self._missed_since + PATIENCE * self._settings.save_every:
            name, every, kept = self._settings.best_by, self._settings.save_every, self._settings.keep_models
            self.in_vain = (
                f"no value of {name} that came since commit {self._missed_since} is of a saved model, so none of them "
                "can become the best: it is to be logged within site.outer_parameters() where site.commit is a "
                f"multiple of run.save_every = {every}, before sites have saved {kept} more (run.keep_models)"
            )

    def _last_saved(self, records: Sequence[CommitRecord]) -> int:
        last = records[-1].commit.commit if records else 0
        return last - last % self._settings.save_every

    def _saved_at(self, records: Sequence[CommitRecord], run_step: int) -> int | None:
        """The commit at that step whose model sites save, and have among those that they keep; None if there is
        none."""
        every, kept = self._settings.save_every, self._settings.keep_models
        last_saved = self._last_saved(records)
        for record in reversed(records):
            commit = record.commit
            if commit.run_step < run_step or commit.commit <= last_saved - every * kept:
                return None
            if commit.run_step == run_step and commit.commit % every == 0:
                return commit.commit
        return None

    def _is_better(self, value: float, before: float) -> bool:
        return value > before if self._settings.best_is == "highest" else value < before
