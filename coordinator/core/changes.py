"""What an operator has set, for the commits that follow (docs/decisions/0072-settings-that-change.md)."""

from __future__ import annotations

from atoll.coordinator.core.records import ChangedRecord
from atoll.protocol import changed
from atoll.protocol.settings import RunSettings


class Changes:
    """`changed_json`: what is not as the run began."""

    def __init__(self, settings: RunSettings, set_last: ChangedRecord | None, of_commit: str) -> None:
        """`set_last`: since the last commit, of which `of_commit` is what is changed."""
        self._settings = settings
        self.changed_json = set_last.changed_json if set_last is not None else of_commit

    @property
    def now(self) -> RunSettings:
        """As they are for the next commit."""
        return changed.settings_with(self._settings, self.changed_json)

    @property
    def in_words(self) -> str:
        """Empty if all is as the run began."""
        return changed.in_words(self._settings, self.changed_json)

    def take(self, changed_json: str) -> None:
        """From the next commit on."""
        self.changed_json = changed_json
