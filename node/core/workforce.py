"""The site's workers: starting them, their boundaries, their failures."""

from __future__ import annotations

import logging
from dataclasses import replace

from atoll.node.core import divergence, endings, events, leases, sources
from atoll.node.core import outputs as out
from atoll.node.core.context import Context
from atoll.node.core.events import Answer, AnswerKind, Content, FailureKind, MergeMode, OfSite, Values
from atoll.node.core.host_events import HostsChanged
from atoll.node.core.lanes import answers, exchanges, snapshots, syncs
from atoll.node.core.lanes.lane import Lane, SnapshotPhase
from atoll.node.core.lanes.local_copy import LocalCopy
from atoll.node.core.workers import Workers
from atoll.protocol import messages as m
from atoll.protocol.errors import ConfigError, WorkerError
from atoll.protocol.figures import MAX_CRASH_CHARACTERS
from atoll.protocol.text import last_line

MAX_CRASHES_WITHOUT_STEP = 3
MAX_CRASHES_IN_A_ROW = 10
"""Without coming to a boundary, however many steps they did: nothing of such a site is ever in a commit."""


def start(ctx: Context) -> None:
    """Launch another generation, once all hosts of the site are here."""
    old = ctx.site.workers
    if ctx.site.missing_hosts:
        _replace(ctx, replace(old, running=False, joined=False, laid_out=False, ask=None, restart_at=None, waits=True))
        return
    workers = Workers(
        generation=old.generation + 1,
        running=True,
        crashes_without_step=old.crashes_without_step,
        crashes_in_a_row=old.crashes_in_a_row,
    )
    _replace(ctx, workers)
    ctx.ranks.begin(ctx.site.workers.generation, ctx.now)
    ctx.emit(out.StartWorkers(ctx.site.workers.generation, ctx.settings_json))


def _replace(ctx: Context, workers: Workers) -> None:
    """What those before them held is gone."""
    workers.copies = tuple(LocalCopy() for _ in range(ctx.settings.sync.fragments))
    ctx.site.workers = workers


def end(ctx: Context) -> None:
    """Those that run, at once."""
    ctx.ranks.end()
    ctx.emit(out.StopWorkers(ctx.site.workers.generation))


def heard(ctx: Context, event: events.RankEvent) -> None:
    """What the ranks come to together is handled next, as an event of the site."""
    for item in ctx.ranks.heard(event, ctx.now):
        if isinstance(item, OfSite):
            ctx.happens(item)
        else:
            ctx.emit(item)
    if isinstance(event, events.LayoutSent) and ctx.ranks.num_elsewhere:
        ctx.site.disk.unpublish()  # the buffers of other hosts hold nothing of it, whatever they held before


def joined(ctx: Context, event: events.WorkersJoined) -> None:
    """The first to join are what the site offers; those after a restart must have built the same model."""
    if ctx.joined is not None and event.manifest.digest != ctx.joined.manifest.digest:
        endings.give_up(ctx, "the restarted workers built another model than before", ConfigError.exit_code)
        return
    ctx.site.workers.joined = True
    ctx.site.workers.read_in_place = event.read_in_place and ctx.settings.sync.may_read_in_place
    before, ctx.joined = ctx.joined, event
    goes_on = before is not None and ctx.site.admitted
    if goes_on:
        send_layout(ctx)
    if ctx.site.welcomed and not (goes_on and before is not None and before.endpoints == event.endpoints):
        offer(ctx)  # also where a host has come back at another address


def offer(ctx: Context) -> None:
    """Requires that workers have joined. Also on a new stream."""
    assert ctx.joined is not None
    ctx.send(
        m.Offer(
            manifest_digest=ctx.joined.manifest.digest,
            data_fingerprint=ctx.joined.data_fingerprint,
            max_retained_bytes=ctx.joined.max_retained_bytes,
            bandwidth_bytes_per_s=ctx.identity.bandwidth_bytes_per_s,
            endpoints=ctx.joined.endpoints,
        )
    )


def send_layout(ctx: Context) -> None:
    """Once, when the workers have joined and the site is admitted."""
    workers = ctx.site.workers
    if workers.joined and not workers.laid_out:
        workers.laid_out = True
        ctx.emit(out.SendLayout(generation=workers.generation, site_id=ctx.site.site_id, run_seed=ctx.site.run_seed))
        if not ctx.site.has_model:
            ctx.site.has_model = True
            begin_state(ctx)


def begin_state(ctx: Context) -> None:
    """The first one of a site without any, once it is known whether it makes it or fetches it, and of which model: the
    workers may have gone before they were told that they are admitted."""
    site, disk = ctx.site, ctx.site.disk
    if disk.outer is not None:
        return
    if not site.seeding:
        sources.find(ctx)
    elif site.has_model and ctx.identity.hello.from_saved_model and disk.find(out.SeedState) is None:
        disk.add(out.SeedState())


def boundary_asked(ctx: Context, event: events.BoundaryAsked) -> None:
    """Answered as soon as `answers.decide` has an answer."""
    ctx.site.workers.asked(event, ctx.now)


def sealed(ctx: Context, event: events.SnapshotSealed) -> None:
    """Requires that the workers were told to write it. The site is ready with it, or makes the starting state of it."""
    site, disk = ctx.site, ctx.site.disk
    lane = next((lane for lane in site.lanes if lane.snapshot.phase is SnapshotPhase.WRITING), None)
    if lane is None:
        return  # given up since they were told to
    divergence.sealed(ctx, event)
    if not leases.sealed(ctx, event):
        return
    snapshots.seal(ctx, lane, event)
    if disk.outer is not None and snapshots.is_outdated(lane, disk.outer):
        snapshots.free(lane)  # a commit of it was applied meanwhile: the workers shift, and write it again
        site.workers.missed()
    elif not lane.snapshot.is_arriving:
        _use(ctx, lane)


def arrived(ctx: Context, event: events.SnapshotArrived) -> None:
    """What ranks of other hosts have written of a sealed snapshot is here: from now on it is as one of one host."""
    if (lane := snapshots.arrive(ctx, event)) is not None:
        _use(ctx, lane)


def _use(ctx: Context, lane: Lane) -> None:
    """Of a snapshot that is sealed and whole."""
    if ctx.site.disk.outer is not None:
        syncs.ready(ctx, lane)
    elif ctx.site.seeding:
        ctx.site.disk.add(out.SeedState())
    else:
        snapshots.free(lane)  # another site makes the starting state now


def merged(ctx: Context, event: events.Merged) -> None:
    """Requires that this version was offered. After a shift PUBLISH holds the values again: the next one, and
    evaluation, start from them."""
    disk, workers = ctx.site.disk, ctx.site.workers
    copy = next((copy for copy in workers.copies if copy.offered is not None), None)
    if copy is None or copy.offered is None or copy.offered.version != event.version:
        return
    offered, goes_on = copy.offered, copy.merged()
    outer = disk.outer
    if outer is not None:
        workers.reach(outer)  # commits of other fragments may have been applied since it was offered
    for lane in ctx.site.lanes:
        if lane.snapshot.is_consumed and not snapshots.is_to_be_merged(workers.copies_of(lane.fragment)):
            snapshots.free(lane)
    is_newest = outer is not None and outer.commit == event.version
    if goes_on and offered.mode is MergeMode.SHIFT and is_newest and disk.running is None:
        _publish(ctx, Values(event.version, offered.fragment))  # else they take values next


def failed(ctx: Context, event: events.WorkersFailed) -> None:
    """Starts new workers, after a pause that grows; ends the site where that would not help."""
    site, workers = ctx.site, ctx.site.workers
    if event.kind is FailureKind.CRASHED:
        ctx.ranks.crashed(event.generation)
    begins_anew = divergence.begins_anew(ctx, event)
    if event.kind is FailureKind.FATAL and not begins_anew:
        endings.give_up(ctx, event.text, event.exit_code)
        return
    site.num_crashes, site.last_crash = site.num_crashes + 1, _in_a_line(event.text)
    if site.disk.final or site.leaving:  # new workers would have nothing to do
        workers.stop()
        end(ctx)
        return
    without_step = 0 if event.num_steps else workers.crashes_without_step + 1
    in_a_row = workers.crashes_in_a_row + 1
    times = ""
    if without_step >= MAX_CRASHES_WITHOUT_STEP:
        times = f"{without_step} times without a step"
    elif in_a_row >= MAX_CRASHES_IN_A_ROW:
        times = f"{in_a_row} times without coming to a boundary"
    if times:
        endings.give_up(ctx, f"the workers crashed {times}: {event.text}", WorkerError.exit_code)
        return
    _free_what_they_had(ctx)
    wait_s = _wait_s(ctx, in_a_row)
    how = "crashed"
    if begins_anew:
        by = "maybe by steps of their own script" if event.by_script else "which may be bad"
        how = f"end since commit {site.version}, {by}"
        divergence.note(ctx, event)
        if not event.by_script:
            wait_s = max(wait_s, ctx.limits.lease_s)  # for the run to go back
    when = f" in {wait_s:g} s, after {in_a_row} crashes in a row" if wait_s else ""
    state = " from the outer state" if site.disk.outer is not None else ""
    ctx.report(logging.ERROR, f"workers {how}, restarting them{state}{when}: {event.text}")
    end(ctx)
    none_yet = Workers(
        generation=workers.generation,
        crashes_without_step=without_step,
        crashes_in_a_row=in_a_row,
        restart_at=ctx.now + wait_s,
    )
    _replace(ctx, none_yet)
    leases.restarted(ctx)
    restart_if_due(ctx)


def _in_a_line(reason: str) -> str:
    """The first line says how they ended, the last one of a traceback why."""
    first, last = last_line(reason.partition("\n")[0]), last_line(reason)
    why = "" if first == last else f": {last[: MAX_CRASH_CHARACTERS // 2]}"
    return first[: MAX_CRASH_CHARACTERS - len(why)] + why


def _free_what_they_had(ctx: Context) -> None:
    """Snapshots that are sealed and whole stay: they may still be contributed."""
    for lane in ctx.site.lanes:
        snapshot = lane.snapshot
        if not snapshot.is_sealed or snapshot.is_arriving or (ctx.site.seeding and ctx.site.disk.outer is None):
            snapshots.free(lane)


def hosts_changed(ctx: Context, event: HostsChanged) -> None:
    """Without one of its hosts a site has no workers; it is in the run still, and follows the others. That counts as
    no crash: new workers begin from the outer state when all hosts are here."""
    site, workers = ctx.site, ctx.site.workers
    site.missing_hosts = event.missing
    for lane in site.lanes if event.missing else ():
        exchanges.host_lost(ctx, lane, event.text)
    if not event.missing:
        if workers.waits and not (site.leaving or site.disk.final):
            start(ctx)
    elif workers.running:
        ctx.report(logging.ERROR, f"{event.text}; the workers of this site stop until it is back")
        _free_what_they_had(ctx)
        end(ctx)
        if site.disk.final or site.leaving:  # new workers would have nothing to do
            workers.stop()
            return
        start(ctx)
        leases.restarted(ctx)
    elif event.text:
        ctx.report(logging.WARNING, event.text)


def blamed(ctx: Context, text: str) -> None:
    """As if they had crashed: whatever they were told, new ones begin from the outer state, and not without end."""
    ctx.report(logging.ERROR, text)
    workers, kind = ctx.site.workers, FailureKind.CRASHED
    if workers.running:
        failed(ctx, events.WorkersFailed(generation=workers.generation, kind=kind, text=text))


def _wait_s(ctx: Context, crashes_in_a_row: int) -> float:
    """Of new workers: none after the first crash, then growing."""
    if crashes_in_a_row == 1:
        return 0.0
    return min(ctx.limits.restart_s * 2.0 ** (crashes_in_a_row - 2), ctx.limits.max_restart_s)


def restart_if_due(ctx: Context) -> None:
    """New workers, once the pause after a crash is over."""
    restart_at = ctx.site.workers.restart_at
    if restart_at is not None and ctx.now >= restart_at:
        start(ctx)


def exited(ctx: Context, event: events.WorkersExited) -> None:
    """A crash, unless they have left the run or the site has ended: then a person is told of an end that is none."""
    ctx.ranks.exited(event.generation)
    if ctx.site.workers.running and ctx.site.exit is None:
        _crashed(ctx, event.generation, event.text)
    elif event.code:
        ctx.report(logging.ERROR, f"after they had left the run {event.text}")


def crash_if_overdue(ctx: Context) -> None:
    """Ranks that have lost a connection and do not exit, or that hang."""
    workers = ctx.site.workers
    if workers.running and (overdue := ctx.ranks.overdue(ctx.now, ctx.limits)) is not None:
        _crashed(ctx, workers.generation, overdue.text, rank=overdue.rank)


def _crashed(ctx: Context, generation: int, text: str, *, rank: int | None = None) -> None:
    """The shell, which knows what they printed last, says the rest in `WorkersFailed`. `rank`: if none has exited."""
    crash = out.DescribeCrash(
        generation=generation, text=text, num_steps=ctx.ranks.num_steps, has_exited=rank is None, rank=rank
    )
    ctx.emit(crash)


def left(ctx: Context, event: events.WorkersLeft) -> None:
    """Their script goes on, or ends; without being told to, they leave the run, and so does the site."""
    site = ctx.site
    site.workers.stop()
    if not site.disk.final and not site.leaving:
        ctx.report(logging.INFO, f"leaving the run: {event.reason}")
        endings.leave(ctx, event.reason)


def answer(ctx: Context) -> None:
    """Requires an open question. Emits its answer, what PUBLISH must hold first, or nothing yet."""
    site, workers, ask = ctx.site, ctx.site.workers, ctx.site.workers.ask
    assert ask is not None
    away = site.away_since is not None and ctx.now >= site.away_since + ctx.limits.lease_s
    decision = answers.decide(site, ctx.settings, away=away, now=ctx.now)
    if isinstance(decision, out.PublishState):
        if not ctx.ranks.all_ask:
            return  # the others may be looking at what PUBLISH holds
        _publish(ctx, decision.content)
        decision = answers.decide(site, ctx.settings, away=away, now=ctx.now)
    if isinstance(decision, Answer):
        workers.told(ask, decision, ctx.now)
        if decision.kind is AnswerKind.APPLY:
            workers.offer(decision, step=ask.step)
        elif decision.kind is AnswerKind.SNAPSHOT:
            snapshots.write(ctx, site.lanes[decision.fragment], ask)
        ctx.emit(ctx.ranks.answer(ask, decision, ctx.now))
    else:
        exchanges.hurry(ctx)


def _publish(ctx: Context, content: Content) -> None:
    """Requires that nothing works on the disk."""
    ctx.emit(ctx.site.disk.begin(out.PublishState(content)))
