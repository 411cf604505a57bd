"""The site's workers: starting them, their boundaries, their failures."""

from __future__ import annotations

import logging

from atoll.node.core import answers, divergence, endings, events, leases, syncs
from atoll.node.core.context import Context
from atoll.node.core.events import (
    Answer,
    AnswerKind,
    AnswerWorkers,
    FailureKind,
    MergeMode,
    SeedState,
    SendLayout,
    StartWorkers,
    StopWorkers,
    Values,
)
from atoll.node.core.state import Ask, Snapshot, SnapshotPhase, Workers
from atoll.protocol import messages as m
from atoll.protocol.errors import ConfigError, WorkerError

MAX_CRASHES_WITHOUT_STEP = 3
MAX_CRASHES_IN_A_ROW = 10
"""Without coming to a boundary, however many steps they did: nothing of such a site is ever in a commit."""


def start(ctx: Context) -> None:
    old = ctx.site.workers
    ctx.site.workers = Workers(
        generation=old.generation + 1,
        running=True,
        crashes_without_step=old.crashes_without_step,
        crashes_in_a_row=old.crashes_in_a_row,
    )
    ctx.emit(StartWorkers(ctx.site.workers.generation, ctx.settings_json))


def joined(ctx: Context, event: events.WorkersJoined) -> None:
    workers = ctx.site.workers
    if not workers.is_current(event.generation):
        return
    if ctx.manifest is not None and event.manifest.digest != ctx.manifest.digest:
        endings.give_up(ctx, "the restarted workers built another model than before", ConfigError.exit_code)
        return
    workers.joined = True
    first = ctx.manifest is None
    ctx.manifest = event.manifest
    ctx.data_fingerprint = event.data_fingerprint
    ctx.max_retained_bytes = event.max_retained_bytes
    if not first and ctx.site.admitted:
        send_layout(ctx)
    elif ctx.site.welcomed:
        offer(ctx)


def offer(ctx: Context) -> None:
    assert ctx.manifest is not None
    ctx.send(
        m.Offer(
            manifest_digest=ctx.manifest.digest,
            data_fingerprint=ctx.data_fingerprint,
            max_retained_bytes=ctx.max_retained_bytes,
            bandwidth_bytes_per_s=ctx.identity.bandwidth_bytes_per_s,
        )
    )


def send_layout(ctx: Context) -> None:
    workers = ctx.site.workers
    if workers.joined and not workers.laid_out:
        workers.laid_out = True
        ctx.emit(SendLayout(generation=workers.generation, site_id=ctx.site.site_id, run_seed=ctx.site.run_seed))


def boundary_asked(ctx: Context, event: events.BoundaryAsked) -> None:
    workers = ctx.site.workers
    if not workers.is_current(event.generation):
        return
    if event.step > 0:
        workers.crashes_without_step = workers.crashes_in_a_row = 0
    if event.step > workers.resumed_step:
        workers.step_s = (ctx.now - workers.resumed_at) / (event.step - workers.resumed_step)
    workers.ask = Ask(event.generation, event.step, event.seq)


def sealed(ctx: Context, event: events.SnapshotSealed) -> None:
    site, snapshot = ctx.site, ctx.site.snapshot
    if not site.workers.is_current(event.generation) or snapshot.phase is not SnapshotPhase.WRITING:
        return
    snapshot.phase = SnapshotPhase.SEALED
    snapshot.tokens = event.tokens
    snapshot.num_steps = event.num_steps
    snapshot.mean_loss = event.mean_loss
    snapshot.train_s = event.train_s
    if event.tokens:
        site.num_empty_in_a_row = 0
    divergence.sealed(ctx, event)
    if not leases.sealed(ctx, event):
        return
    site.workers.overrun_left = ctx.settings.overrun_steps or ctx.settings.sync.every
    if site.outer is not None and snapshot.base_commit != site.outer.commit:
        site.snapshot = Snapshot()  # a commit was applied meanwhile: the workers shift, and write it again
        site.workers.sealed_in_vain = True
        return
    if site.outer is not None:
        syncs.ready(ctx)
    elif site.seeding:
        site.seed_asked = True
        ctx.emit(SeedState())
    else:
        site.snapshot = Snapshot()  # another site makes the starting state now


def merged(ctx: Context, event: events.Merged) -> None:
    site, workers = ctx.site, ctx.site.workers
    if not workers.is_current(event.generation) or event.version != workers.offered_version:
        return
    if workers.contributed and workers.offered_mode is not MergeMode.SHIFT:
        workers.contributed = False
    if site.snapshot.phase is SnapshotPhase.CONSUMED:
        site.snapshot = Snapshot()
    workers.version = event.version
    workers.offered_version = None
    if not workers.offered_is_discarded:
        workers.discard_local = False
    workers.offered_is_discarded = False
    workers.wait_s = event.wait_s
    if workers.discard_local:
        return  # they take values next, and the outer state may be on its way to others
    if workers.offered_mode is MergeMode.SHIFT and site.outer is not None and site.outer.commit == event.version:
        syncs.publish(ctx, Values(event.version))  # the next shift and evaluation need the values again


def failed(ctx: Context, event: events.WorkersFailed) -> None:
    site, workers = ctx.site, ctx.site.workers
    if not workers.is_current(event.generation):
        return
    due_to_commit = divergence.is_due_to_commit(ctx, event)
    if event.kind is FailureKind.FATAL and not due_to_commit:
        endings.give_up(ctx, event.text, event.exit_code)
        return
    site.num_crashes += 1
    if site.final or site.leaving:  # new workers would have nothing to do
        workers.running = False
        workers.ask = workers.offered_version = None
        ctx.emit(StopWorkers(workers.generation))
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
    if site.snapshot.phase in (SnapshotPhase.WRITING, SnapshotPhase.CONSUMED):
        site.snapshot = Snapshot()
    if site.seeding and site.outer is None:
        site.snapshot = Snapshot()
    wait_s = _wait_s(ctx, in_a_row)
    if due_to_commit:
        divergence.note(ctx, event)
        wait_s = max(wait_s, ctx.limits.lease_s)  # for the run to go back
    when = f" in {wait_s:g} s, after {in_a_row} crashes in a row" if wait_s else ""
    state = " from the outer state" if site.outer is not None else ""
    how = "end after a commit that may be bad" if due_to_commit else "crashed"
    ctx.report(logging.ERROR, f"workers {how}, restarting them{state}{when}: {event.text}")
    ctx.emit(StopWorkers(workers.generation))
    site.workers = Workers(
        generation=workers.generation,
        crashes_without_step=without_step,
        crashes_in_a_row=in_a_row,
        restart_at=ctx.now + wait_s,
    )
    leases.restarted(ctx)
    restart_if_due(ctx)


def _wait_s(ctx: Context, crashes_in_a_row: int) -> float:
    """Of new workers: none after the first crash, then growing."""
    if crashes_in_a_row == 1:
        return 0.0
    return min(ctx.limits.restart_s * 2.0 ** (crashes_in_a_row - 2), ctx.limits.max_restart_s)


def restart_if_due(ctx: Context) -> None:
    restart_at = ctx.site.workers.restart_at
    if restart_at is not None and ctx.now >= restart_at:
        start(ctx)


def left(ctx: Context, event: events.WorkersLeft) -> None:
    site, workers = ctx.site, ctx.site.workers
    if not workers.is_current(event.generation):
        return
    workers.running = False
    workers.ask = None
    if not site.final and not site.leaving:
        site.leaving = event.reason
        ctx.report(logging.INFO, f"leaving the run: {event.reason}")
        site.leave_deadline = ctx.now + ctx.limits.leave_s


def answer(ctx: Context) -> None:
    site, workers = ctx.site, ctx.site.workers
    away = site.away_since is not None and ctx.now >= site.away_since + ctx.limits.lease_s
    decision = answers.decide(site, away=away, now=ctx.now)
    if isinstance(decision, answers.Hold):
        return
    if isinstance(decision, answers.Publish):
        syncs.publish(ctx, decision.content)
        return
    ask = workers.ask
    assert ask is not None
    workers.ask = None
    note_answer(ctx, decision, ask)
    ctx.emit(AnswerWorkers(generation=ask.generation, step=ask.step, seq=ask.seq, answer=decision))


def note_answer(ctx: Context, answer: Answer, ask: Ask) -> None:
    site, workers = ctx.site, ctx.site.workers
    if answer.kind in (AnswerKind.APPLY, AnswerKind.CONTINUE):
        workers.resumed_at, workers.resumed_step = ctx.now, ask.step
    if answer.kind is AnswerKind.SNAPSHOT:
        site.snapshot = Snapshot(
            phase=SnapshotPhase.WRITING,
            base_commit=site.outer.commit if site.outer else 0,
            step=ask.step,
            generation=ask.generation,
        )
    elif answer.kind is AnswerKind.APPLY:
        workers.offered_version = answer.version
        workers.offered_mode = answer.mode
        workers.target_step = answer.next_step
        if answer.mode is not MergeMode.SHIFT:
            workers.sealed_in_vain = False
        if answer.mode is MergeMode.REPLACE:
            workers.base_step = ask.step
        elif answer.mode is MergeMode.MERGE:
            workers.base_step = site.snapshot.step
    elif answer.kind is AnswerKind.CONTINUE:
        if site.snapshot.phase is SnapshotPhase.SEALED:
            workers.overrun_left -= 1
        workers.target_step = answer.next_step
