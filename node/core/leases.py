"""The site's leased positions as a queue that its ranks draw from: what is used, asked for, and drawn again.

Places in the queue are counted from 0 in each epoch. Ranks use it from the front, so "used" is one number. An epoch
ends when what was drawn in it and is in no snapshot counts no longer: the workers were restarted, or progress is
discarded.
"""

from __future__ import annotations

from atoll.node.core import endings, events
from atoll.node.core.context import Context
from atoll.node.core.lanes.lane import Snapshot
from atoll.node.core.outputs import AnswerDraw
from atoll.node.core.state import DataQueue
from atoll.protocol import messages as m
from atoll.protocol.errors import ConfigError
from atoll.protocol.messages import DataRange
from atoll.protocol.ranges import Ranges
from atoll.protocol.sample_order import MAX_POSITION


def announced(ctx: Context, event: events.DataAnnounced) -> None:
    """The ranks are about to draw."""
    ctx.site.data.announced = event
    ctx.site.data.per_step = 0 if event.of_shards else event.round_samples


def draw_asked(ctx: Context, event: events.DrawAsked) -> None:
    """Answered as soon as so much is leased. A rank that draws what a commit lists ends the site."""
    data = ctx.site.data
    if event.epoch == data.epoch and event.first < data.first:
        text = f"rank {event.rank} draws samples again that a commit lists"
        endings.give_up(ctx, text, ConfigError.exit_code)
        return
    data.draws[event.rank] = event


def granted(ctx: Context, message: m.Leases) -> None:
    """The whole list. What it lacks is in a commit that is here or on its way."""
    data, leased = ctx.site.data, Ranges(message.ranges)
    if data.asked is not None:
        data.short_of = data.asked if leased.num_samples < data.asked else None
    data.asked = None
    _append(data, leased.minus(data.leased))
    data.leased.update(leased)


def not_answered(ctx: Context) -> None:
    """The session in which leases were asked for is over."""
    ctx.site.data.asked = ctx.site.data.short_of = None


# --- what becomes of drawn samples


def sealed(ctx: Context, event: events.SnapshotSealed) -> bool:
    """How far into the queue the snapshot was trained. False: that cannot be, the site ends."""
    data = ctx.site.data
    if not data.used <= event.samples_used <= data.end:
        text = (
            f"the workers say they used {event.samples_used} samples, after {data.used} at the last boundary; "
            f"{data.end} were leased"
        )
        endings.give_up(ctx, text, ConfigError.exit_code)
        return False
    if event.step > data.step and data.per_step:
        data.per_step = max(data.per_step, -(-(event.samples_used - data.used) // (event.step - data.step)))
    data.used, data.step = event.samples_used, event.step
    return True


def trained_on(ctx: Context, snapshot: Snapshot) -> tuple[DataRange, ...]:
    """What the snapshot that is sealed now lists: positions that were used and are in no commit, but for those of other
    snapshots that were in flight when the ranks were told to write it."""
    data = ctx.site.data
    return data.leased.common(data.between(data.first, data.used)).minus(snapshot.others).as_tuple()


def committed(ctx: Context, snapshot: Snapshot) -> None:
    """What the snapshot was trained on is leased no longer, and no part of the next one."""
    data = ctx.site.data
    data.leased.difference_update(snapshot.ranges)
    while snapshot.data_epoch == data.epoch and data.queue:
        item = data.queue[0]
        left = next(iter(data.leased.within(item.first, item.end)), None)
        first = item.end if left is None else left.first
        data.first += first - item.first
        data.queue[:1] = [] if left is None else [DataRange(first=first, num_samples=item.end - first)]
        if left is not None:
            break


def restarted(ctx: Context) -> None:
    """New workers: all that is leased is drawn from the start, but for a snapshot that still counts."""
    sealed = [lane.snapshot.ranges for lane in ctx.site.lanes if lane.snapshot.is_sealed]
    _next_epoch(ctx, tuple(item for ranges in sealed for item in ranges))
    ctx.site.data.announced = None
    ctx.site.data.draws.clear()


def discarded(ctx: Context) -> None:
    """The workers go on from the outer state; what they were trained on since is still leased, and drawn again."""
    _next_epoch(ctx, ())


def voided(ctx: Context) -> None:
    """Evicted: others have the leases now."""
    ctx.site.data.leased = Ranges()
    ctx.site.data.asked = ctx.site.data.short_of = None


def _next_epoch(ctx: Context, reserved: tuple[DataRange, ...]) -> None:
    data = ctx.site.data
    data.epoch += 1
    data.queue = []
    data.first = data.end = data.used = data.step = 0
    data.reserved = Ranges(reserved)
    _append(data, data.leased.minus(reserved))


def _append(data: DataQueue, ranges: Ranges) -> None:
    data.queue += ranges
    data.end += ranges.num_samples


# --- after every event


def advance(ctx: Context) -> None:
    """Ask for leases if the ranks may need more, and answer the draws that can be."""
    site, data = ctx.site, ctx.site.data
    snapshots = [lane.snapshot for lane in site.lanes if lane.snapshot.is_sealed]
    if data.reserved and all(snapshot.data_epoch == data.epoch for snapshot in snapshots):
        # The snapshots of former workers are over: what no commit lists of them is drawn again.
        _append(data, data.leased.common(data.reserved))
        data.reserved = Ranges()
    _ask(ctx)
    for rank, draw in list(data.draws.items()):
        if draw.epoch != data.epoch or site.disk.final:
            # On the way to a boundary where it hears that this counts no longer: any samples will do.
            ranges: tuple[DataRange, ...] = (DataRange(first=0, num_samples=draw.num_samples),)
        elif draw.first + draw.num_samples <= data.end:
            ranges = data.between(draw.first, data.end)
        else:
            continue
        del data.draws[rank]
        drawn = AnswerDraw(generation=draw.generation, rank=rank, epoch=draw.epoch, first=draw.first, ranges=ranges)
        ctx.ranks.drawn(drawn, ctx.now)
        ctx.emit(drawn)


def _ask(ctx: Context) -> None:
    """Two times the steps that a site leases for (H) and the overrun beyond what was used at the last boundary: enough
    to reach the next one and the overrun when the coordinator is away, even if it goes before it has answered. Of
    shards, what is fetched ahead alone: nobody knows how many steps one takes, and a site that leases more of them than
    it can train on takes them from the others."""
    site, data, settings = ctx.site, ctx.site.data, ctx.settings
    if data.announced is None or data.asked is not None or site.disk.final or (site.leaving and not data.draws):
        return
    if not (site.connected and site.welcomed and site.admitted):
        return
    window = data.per_step * settings.sync.leased_steps
    overrun = data.per_step * settings.most_overrun_steps
    needed = data.used + 2 * window + overrun + data.announced.rounds_ahead * data.announced.round_samples
    for draw in data.draws.values():
        if draw.epoch == data.epoch:
            needed = max(needed, draw.first + draw.num_samples + window)
    wanted = min(data.leased.num_samples + needed - data.end, MAX_POSITION)
    if needed > data.end and wanted != data.short_of:  # else the same answer would come, at once
        data.asked = wanted
        ctx.send(m.LeaseRequest(num_samples=data.announced.num_samples, wanted=data.asked))
