"""The secret by which audits are drawn: its digest is in the audit log before the first draw of a start of the
coordinator, and the secret itself once nothing is drawn with it any more."""

from __future__ import annotations

from atoll.coordinator.core.audit import COORDINATOR
from atoll.coordinator.core.auditing.drawing import COMMITTED, REVEALED, secret_digest
from atoll.coordinator.core.events import DrawingRecord
from atoll.coordinator.core.run import Run


def begin(run: Run, before: DrawingRecord | None, secret: bytes) -> None:
    """At a start, in a run with audits. `before`: of the start before."""
    if run.finished is not None:
        return
    if before is not None:
        run.note(COORDINATOR, f"{REVEALED}{before.secret.hex()}", "in the start before")
    run.auditing.draw_with(secret, run.term)
    run.persist(DrawingRecord(secret))
    run.note(COORDINATOR, f"{COMMITTED}{secret_digest(secret).hex()}", "in this start")


def reveal(run: Run) -> None:
    """At the end of the run."""
    if run.settings.sync.audits:
        run.note(COORDINATOR, f"{REVEALED}{run.auditing.secret.hex()}", "in this start, which was the last")
