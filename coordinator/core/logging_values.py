"""Values come, at commits and from scripts: they go onto curves, which are kept now and then."""

from __future__ import annotations

import logging
from collections.abc import Mapping

from atoll.coordinator.core.curves import MAX_CURVES, SENT_BYTES, TRAINING_LOSS, Point, Series
from atoll.coordinator.core.run import Run
from atoll.coordinator.core.sites.membership import Site
from atoll.protocol.logged import MAX_NAMES
from atoll.protocol.messages import Logged, LoggedValue


def heard(run: Run, site: Site, message: Logged) -> str:
    """What a site logs; why it is refused, empty if it is not."""
    if problem := next((value.problem for value in message.values if value.problem), ""):
        return problem
    for value in message.values:
        _note(run, Series(site.site_id, value.name, value.of_outer), value.step, value.value)
        _judge(run, site, value)
    _keep(run)
    return ""


def _judge(run: Run, site: Site, value: LoggedValue) -> None:
    """Whether it makes a saved model the best one."""
    if run.finished is not None:
        return
    before = run.best.found
    judge = run.members.by_id(before.site_id) if before is not None else None
    if run.best.hear(run.log.records, site.site_id, value, judge_is_here=judge is not None and judge.live):
        assert run.best.found is not None
        text = f"commit {run.best.found.commit}: {value.name} {value.value:g}, by {site.label}"
        run.report(logging.INFO, f"the best saved model so far is that of {text}")
    if text := run.best.telling():
        run.report(logging.WARNING, f"{text} (said once)")


def committed(run: Run, losses: Mapping[int, float]) -> None:
    """The newest commit, and the training loss of its contributors, by site id."""
    for site_id, loss in losses.items():
        _note(run, Series(site_id, TRAINING_LOSS), run.log.run_step, loss)
        said = run.members.known(site_id).heartbeat
        if said.phase:
            _note(run, Series(site_id, SENT_BYTES), run.log.run_step, float(said.sent_bytes))
        run.curves.note_spent(site_id, said.train_s, said.wait_s, _point(run, run.log.run_step, 0.0))
    _keep(run)


def _note(run: Run, series: Series, step: int, value: float) -> None:
    had_room = not run.curves.num_left_out
    run.curves.note(series, _point(run, step, value))
    if had_room and run.curves.num_left_out:
        label = run.members.known(series.site_id).label
        run.report(
            logging.WARNING,
            f"no room for the curve {series.name!r} of {label}: a run has {MAX_CURVES} of them, those of sites that "
            f"have left too, and a site's script {MAX_NAMES} names; it and more that come are left out (said once)",
        )


def _point(run: Run, step: int, value: float) -> Point:
    return Point(step, run.log.run_tokens, round(run.wall_s, 3), value)


def _keep(run: Run) -> None:
    for record in run.curves.due(run.now, is_over=run.finished is not None):
        run.persist(record)
