"""The run as people see it, made of the core's state. What it consists of is in `document`."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any, TypeVar

from atoll.coordinator.core.run import Run
from atoll.coordinator.core.sites.conduct import Cause
from atoll.coordinator.core.sites.membership import NO_TELEMETRY, Site, Standing
from atoll.coordinator.core.sync import outcomes, reach, same_samples
from atoll.coordinator.core.sync.syncs import Sync
from atoll.coordinator.core.view.data_ranges import data_view
from atoll.coordinator.core.view.document import (
    BestView,
    CommitView,
    CurveView,
    LinkView,
    LoggedView,
    RunView,
    SiteView,
    SyncView,
)
from atoll.protocol.addresses import is_plain
from atoll.protocol.figures import Readings
from atoll.protocol.plans import weights
from atoll.protocol.spec import codecs_of, too_many_bundled
from atoll.protocol.text import last_line

V = TypeVar("V", RunView, SiteView, SyncView, CommitView)
RECENT_COMMITS = 20
SHOWN_AT_THE_DOOR = 16
"""Of the sites that have said Hello and were never admitted, the first ones; the others are a number."""
SHOWN_SILENT = 8
SHOWN_SAME = 4
SHOWN_LINKS = 4
SHOWN_GONE = 16
"""Of the sites that have gone, the last ones, with why they went."""


def state_in_words(run: Run) -> str:
    """One line: waiting for state, waiting for sites 1 of 2, training, syncing, paused: ..., finished: ...."""
    return "".join(_state(run))


def _state(run: Run) -> tuple[str, str]:
    """The kind of it, and the rest."""
    if run.finished is not None:
        return "finished", f": {last_line(run.finished.reason)}"
    if not run.lanes:
        start = outcomes.wait_for_start(run)
        return "waiting", f" for {start.reason}" if start is not None else ""
    if reason := next((w.reason for w in run.waits if w.is_pause), ""):
        return "paused", f": {last_line(reason)}"
    ending = f" (the last sync{' but one' if outcomes.is_followed(run) else ''})" if run.stop_reason else ""
    if any(sync.is_exchanged for sync in run.lanes.values()):
        return "syncing", ending
    if all(site.applied is None for site in run.members.live()):
        return "paused", f": {last_line(next(iter(run.lanes.values())).wait)}"
    return "training", ending


def _best(run: Run) -> BestView | None:
    if (best := run.best.found) is None:
        return None
    site = run.members.by_id(best.site_id)
    name = site.name if site is not None else f"site {best.site_id}"
    return BestView(commit=best.commit, run_step=best.run_step, site=name, name=run.settings.best_by, value=best.value)


def view_of(run: Run, now: float) -> RunView:
    """`now` is own time."""
    attested = run.log.newest_attested()
    blind, agreement, sync = reach.not_dialled_by(run), run.norms.agreement, run.settings.sync
    codec_up, codec_down = codecs_of(sync)
    return _view(
        RunView,
        (run, run.log, run.members, run.changes.now, sync),
        state=state_in_words(run),
        state_kind=_state(run)[0],
        finished=run.finished is not None,
        last_commit=run.log.last,
        changed=run.changes.in_words,
        best=_best(run),
        best_in_vain=run.best.in_words(run.log.records),
        sync_every=sync.window_steps(0, run.log.last) if sync.steps_at_nodes else sync.every,
        num_parameters=run.manifest.manifest.num_trainable if run.manifest else 0,
        num_evicted=run.evictions.total(),
        evictions=tuple((cause.value, run.evictions[cause]) for cause in Cause),
        state_hash=run.log.attested[attested].hex() if attested is not None else "",
        attested_commit=attested,
        banned=tuple(f"{name}: {record.reason}" for name, record in sorted(run.banned.items())),
        errors=run.failures.texts,
        num_failed=run.failures.num,
        excluded=tuple(record.reason for record in run.left_out.recent),
        high=tuple(
            outcomes.norm_in_words(run, site) for site in run.members.live() if run.norms.is_named(site.site_id)
        ),
        same_samples=tuple(
            same_samples.in_words(*(run.members.known(i).label for i in pair))
            for pair in run.same_samples.pairs()[:SHOWN_SAME]
            if all((site := run.members.by_id(i)) is not None and site.live for i in pair)
        ),
        contribution_bytes=run.chunk_sizes.total_bytes,
        average_share=agreement.average_share if agreement else None,
        last_cosine=agreement.last_cosine if agreement else None,
        codec_error=agreement.codec_error if agreement else None,
        num_audits_right=run.auditing.num_right,
        num_audits_wrong=run.auditing.num_wrong,
        num_audits_unknown=run.auditing.num_unknown,
        audit_silence=tuple(
            f"{site.label} did not give what audits asked it for {times} times"
            for site_id, times in run.auditing.silent.most_common(SHOWN_SILENT)
            if (site := run.members.by_id(site_id)) is not None
        ),
        codec_up=codec_up,
        codec_down=codec_down,
        too_many_bundled=_too_many_bundled(run),
        store_stuck_s=0.0,
        syncs=tuple(_sync_view(run, s) for s in sorted(run.lanes.values(), key=lambda s: s.open.run_step)),
        sites=tuple(_site_view(run, s, now, blind.get(s.site_id, ())) for s in _shown(run)),
        slow_links=tuple(
            LinkView(
                sender=run.members.known(link.sender).name,
                receiver=run.members.known(link.receiver).name,
                bytes_per_s=link.bytes_per_s,
            )
            for link in run.links.slowest(SHOWN_LINKS)
            if min(run.links.share(link.sender), run.links.share(link.receiver)) < 1
        ),
        num_at_the_door=run.members.num_at_the_door(),
        num_gone=len(run.members.gone()),
        commits=_commit_views(run),
        data=data_view(run),
        losses=tuple(run.log.losses.values()),
    )


def _too_many_bundled(run: Run) -> str:
    """Of those that contributed to the newest commit."""
    advice = too_many_bundled(run.settings.sync.codec_up, len(run.log.contributors(run.log.last)))
    return f"{advice}, in another run: the codec of this one stays" if advice else ""


def _view(cls: type[V], sources: tuple[object, ...], **others: Any) -> V:
    """What is not among `others` is in the first of the sources that has it, by the same name."""
    names = [item.name for item in fields(cls) if item.name not in others]
    same = {name: next(getattr(s, name) for s in sources if hasattr(s, name)) for name in names}
    return cls(**same, **others)


def _shown(run: Run) -> list[Site]:
    gone = sorted(run.members.gone(), key=lambda s: s.heard_at)[-SHOWN_GONE:]
    here = [s for s in run.members.sites.values() if s.standing is not Standing.OUT or s.stream is not None]
    at_the_door = [s for s in here if not s.site_id]
    here = [s for s in here if s.site_id] + at_the_door[:SHOWN_AT_THE_DOOR]
    return sorted(here + gone, key=lambda s: (s.site_id or 1 << 32, s.name))


def _site_view(run: Run, site: Site, now: float, not_dialled_by: tuple[str, ...]) -> SiteView:
    heartbeat = site.heartbeat
    total_s = heartbeat.train_s + heartbeat.wait_s
    applied, state_hash = site.applied, site.state_hash
    kind, rest = _site_state(site)
    norm = run.norms.of_sites.get(site.site_id)
    if site.standing is Standing.OUT and site.left_with is not None:
        applied, state_hash = site.left_with
    return _view(
        SiteView,
        (site, heartbeat),
        state=kind + rest,
        state_kind=kind,
        connected=site.stream is not None,
        phase=last_line(heartbeat.phase),
        telemetry=_telemetry(site),
        has_told=site.telemetry != NO_TELEMETRY,
        loss=heartbeat.loss or None,  # the wire says 0 where there is none
        utilization=heartbeat.train_s / total_s if total_s > 0 else None,
        last_commit=applied,
        state_hash=state_hash.hex(),
        endpoints=tuple(endpoint.address for endpoint in site.endpoints),
        silent_s=round(max(0.0, now - site.heard_at), 3),
        doing=last_line(heartbeat.doing),
        not_dialled_by=not_dialled_by if site.live else (),
        up_bytes_per_s=run.links.up_bytes_per_s(site.site_id),
        down_bytes_per_s=run.links.down_bytes_per_s(site.site_id),
        contributes_every=run.resting.every(site.site_id),
        extra_s=round(run.resting.extra_s(site.site_id), 3),
        norm=norm.norm if norm else None,
        cosine=norm.cosine if norm else None,
        influence=_influence(run, site),
        high_in_a_row=run.norms.high_in_a_row(site.site_id),
        logged=tuple(
            LoggedView(name=series.name, of_outer=series.of_outer, step=point.step, value=point.value)
            for series, point in (run.curves.newest(site.site_id) if site.site_id else ())
        ),
    )


def curve_views(run: Run) -> tuple[CurveView, ...]:
    """Of all sites that are known."""
    names = {s.site_id: s.name for s in run.members.sites.values()}
    return tuple(
        CurveView(site=names[series.site_id], name=series.name, of_outer=series.of_outer, points=points)
        for series, points in run.curves.all()
        if series.site_id in names
    )


def _influence(run: Run, site: Site) -> float | None:
    last = run.log.record(run.log.last)
    contributors = last.commit.contributors if last is not None else ()
    found = next((c.influence for c in contributors if c.site_id == site.site_id), 0)
    return found / sum(c.influence for c in contributors) if found else None


def _telemetry(site: Site) -> Readings:
    """As it said it, but for an address that is none."""
    said = site.telemetry
    return said if is_plain(said.metrics_address) else replace(said, metrics_address="")


def _site_state(site: Site) -> tuple[str, str]:
    """The kind of it, and the rest."""
    if site.live and site.stream is None:
        return "away", ""
    if site.standing is Standing.OUT:
        return "gone", f": {last_line(site.evicted or site.gone) or 'not here since the coordinator was started'}"
    return {
        Standing.NEW: "starting",
        Standing.SEEDER: "making the starting state",
        Standing.JOINER: "fetching state",
        Standing.MEMBER: "catching up" if site.catching_up else "member",
    }[site.standing], ""


def _sync_view(run: Run, sync: Sync) -> SyncView:
    names = {s.site_id: s.name for s in run.members.sites.values()}
    plan = sync.attempt.plan if sync.attempt else None
    return _view(
        SyncView,
        (sync.open, sync),
        attempt=plan.attempt if plan else 0,
        fragment=_fragment_in_words(run, sync.open.fragment),
        ready=tuple(names[i] for i in sorted(sync.ready)),
        contributors=tuple(names[c.site_id] for c in plan.contributors) if plan else (),
        receivers=tuple(names[r.site_id] for r in plan.receivers) if plan else (),
        done=tuple(names[i] for i in sorted(sync.attempt.done)) if sync.attempt else (),
    )


def _fragment_in_words(run: Run, fragment: int) -> str:
    num = run.settings.sync.fragments
    if num == 1:
        return ""
    return f"{fragment} of {num}" if fragment < num else "all"


def _commit_views(run: Run) -> tuple[CommitView, ...]:
    names = {s.site_id: s.name for s in run.members.sites.values()}
    return tuple(
        _view(
            CommitView,
            (r.commit, r),
            tokens=sum(weights(r.commit)),
            contributors=tuple(names.get(c.site_id, str(c.site_id)) for c in r.commit.contributors),
            state_hash=run.log.attested.get(r.commit.commit, b"").hex(),
        )
        for r in run.log.records[-RECENT_COMMITS:]
    )
