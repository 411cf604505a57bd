"""An operator sets something while the run goes on (docs/decisions/0072-settings-that-change.md)."""

from __future__ import annotations

import logging

from atoll.coordinator.core.records import ChangedRecord
from atoll.coordinator.core.run import Run
from atoll.protocol import changed
from atoll.protocol.errors import ConfigError


def ask(run: Run, name: str, value: str) -> tuple[str, str]:
    """Why that cannot be done; else what is changed by now."""
    if run.finished is not None:
        return "the run is over", ""
    here = [site for site in run.members.sites.values() if site.live or site.stream is not None]
    if unheard := [site.label for site in here if site.hello is None]:
        return f"{', '.join(unheard)} has not come back since the coordinator started; ask again when it has", ""
    older = [site.label for site in here if site.hello is not None and not site.hello.takes_changes]
    if older:
        return f"{', '.join(older)} would not hear of it: an older version of atoll; upgrade it, or evict it", ""
    try:
        changed_json = changed.with_change(run.settings, run.changes.changed_json, name, value)
    except ConfigError as error:
        return str(error), ""
    now, log = changed.settings_with(run.settings, changed_json), run.log
    if 0 < now.steps <= log.run_step or 0 < now.tokens <= log.run_tokens:
        return f"the run is at step {log.run_step} and {log.run_tokens} tokens; `atoll stop` ends it", ""
    run.changes.take(changed_json)
    run.persist(ChangedRecord(changed_json))
    found = run.changes.in_words or "all is as the run began"
    run.report(logging.WARNING, f"from commit {log.next} on: {found}")
    return "", found
