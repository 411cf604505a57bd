"""The site and its coordinator: from Hello to Welcome and Admitted, through every stream that ends."""

from __future__ import annotations

import logging
from dataclasses import replace

from atoll.node.core import commits, divergence, endings, errors, events, holding, leases, saving, sources, workforce
from atoll.node.core.context import Context
from atoll.node.core.lanes import exchanges, syncs
from atoll.node.core.outputs import Beat, Fulfil
from atoll.protocol import messages as m
from atoll.protocol.errors import InvalidMessage, PeerError, RefusedError
from atoll.protocol.settings import read_settings
from atoll.protocol.time_limits import time_limits

MAX_LOST_REASONS = 8
"""Said in one time away, each once: a stream that opens and ends again and again is a line, not a flood."""


def opened(ctx: Context, _: events.SessionOpened) -> None:
    """A stream is up: Hello is the first word on it, and heartbeats follow."""
    ctx.site.connected = True
    ctx.site.beat_at = ctx.now + ctx.limits.heartbeat_s
    hello(ctx)


def beat_if_due(ctx: Context) -> None:
    """The figures of this site, now and then, whatever else is said."""
    beat_at = ctx.site.beat_at
    if beat_at is not None and ctx.now >= beat_at:
        ctx.site.beat_at = ctx.now + ctx.limits.heartbeat_s
        ctx.emit(Beat())


def hello(ctx: Context) -> None:
    """Also where the coordinator must hear anew what this site holds."""
    disk = ctx.site.disk
    _not_welcomed(ctx)
    message = replace(ctx.identity.hello, branch=disk.branch)
    if (outer := disk.outer) is not None:
        message = replace(message, has_state=True, last_commit=outer.commit, state_hash=outer.state_hash)
    ctx.send(message)


def lost(ctx: Context, event: events.SessionLost) -> None:
    """Training goes on; what was asked is not answered any more."""
    site, reason = ctx.site, event.reason
    _not_welcomed(ctx)
    if reason not in site.lost_because and len(site.lost_because) < MAX_LOST_REASONS:
        meanwhile = "reconnecting to leave" if site.leaving or site.disk.final else "training goes on, reconnecting"
        if not site.workers.generation:
            meanwhile = "trying again"
        what = "lost the coordinator" if site.connected else "no coordinator"
        ctx.report(logging.WARNING, f"{what} ({reason}); {meanwhile}")
        site.lost_because.append(reason)
    site.connected, site.beat_at = False, None
    sources.forget(ctx)
    leases.not_answered(ctx)


def _not_welcomed(ctx: Context) -> None:
    """The time away counts from here, through every stream that opens and ends without a Welcome."""
    ctx.site.welcomed = False
    if ctx.site.away_since is None:
        ctx.site.away_since = ctx.now


def away_too_long(ctx: Context) -> bool:
    """The site ends if nobody has welcomed it for so long."""
    away_since = ctx.site.away_since
    if away_since is None or ctx.now < away_since + ctx.limits.give_up_s:
        return False
    text = f"no coordinator for {ctx.now - away_since:.0f} s; the state is kept, start again"
    endings.exit(ctx, PeerError.exit_code, text)
    return True


def is_of_this_term(ctx: Context, term: int, message: m.CoordinatorMessage) -> bool:
    """What an older coordinator says is said, and not heard."""
    site = ctx.site
    if term < site.term:
        ctx.report(logging.WARNING, f"ignored {type(message).__name__} of term {term}: now in term {site.term}")
        return False
    site.term = term
    return True


def welcome(ctx: Context, message: m.Welcome) -> None:
    """The run's settings are known; workers are started, or offered again."""
    site = ctx.site
    try:
        settings, unknown = read_settings(message.settings_json)
    except InvalidMessage as error:
        endings.exit(ctx, RefusedError.exit_code, str(error))
        return
    if ctx.settings_json and settings != ctx.settings:
        text = "the run's settings changed while this site was in it; start it again"
        endings.exit(ctx, RefusedError.exit_code, text)
        return
    if unknown and message.settings_json != ctx.settings_json:
        keys = ", ".join(unknown)
        ctx.report(logging.INFO, f"the coordinator is newer; this node does not know, and does not need: {keys}")
    ctx.settings = settings
    ctx.settings_json = message.settings_json
    ctx.limits = time_limits(settings.time_limits)
    errors.welcomed(ctx, message)
    site.welcomed = True
    site.away_since = None
    site.lost_because.clear()
    site.last_commit_of_run = message.last_commit
    site.change(message.changed_json)
    if not site.workers.generation and not site.workers.waits:
        workforce.start(ctx)
    elif ctx.joined is not None:
        workforce.offer(ctx)


def admitted(ctx: Context, message: m.Admitted) -> None:
    """As a joiner the site gives up a state that is not the run's and asks for the run's; as the seeder it makes the
    first one. Everything that the coordinator may have missed is said again."""
    site, disk = ctx.site, ctx.site.disk
    site.admitted = True
    sources.forget(ctx)  # what was asked before is not answered
    site.site_id = message.site_id
    site.run_seed = message.run_seed
    site.last_commit_of_run = max(site.last_commit_of_run, message.last_commit)
    is_joiner = message.admitted_as is m.AdmittedAs.JOINER
    if is_joiner and disk.outer is not None:
        sources.cancel_fetch(ctx)
        if holding.distrust(ctx, message.state_hash):
            saving.void_after(ctx, -1)
        commits.forget(ctx)
        syncs.discard_local(ctx)
    if message.admitted_as is m.AdmittedAs.SEEDER and disk.outer is None:
        site.seeding = True
        sources.cancel_fetch(ctx)
    site.seeding = site.seeding and not (is_joiner and disk.outer is None)
    workforce.send_layout(ctx)
    if disk.outer is None and (is_joiner or site.seeding):
        workforce.begin_state(ctx)
    elif disk.outer is not None and disk.outer.commit < site.last_commit_of_run:
        sources.find(ctx)
    _say_where_we_stand(ctx)


def _say_where_we_stand(ctx: Context) -> None:
    """The coordinator drops what it knows."""
    holding.say(ctx)
    if ctx.site.disk.outer is not None:
        syncs.ready_again(ctx)
        divergence.say(ctx)
    exchanges.say_again(ctx)


def refused(ctx: Context, message: m.Refused) -> None:
    """This site may not go on with that coordinator."""
    endings.exit(ctx, RefusedError.exit_code, f"refused by the coordinator: {message.text}")


def manifest_asked(ctx: Context, message: m.SendManifest) -> None:
    """By a coordinator that has no manifest of the run yet."""
    if ctx.joined is not None:
        ctx.emit(Fulfil(message))


def evicted(ctx: Context, message: m.Evicted) -> None:
    """Local progress is discarded, as its samples are open again, and the site joins anew."""
    ctx.report(logging.WARNING, f"evicted ({message.reason}); local progress is discarded, joining again")
    leases.voided(ctx)
    syncs.discard_local(ctx)
    syncs.forget_open(ctx)
    ctx.site.admitted = False
    sources.forget(ctx)
    hello(ctx)


def seeded(ctx: Context) -> None:
    """The starting state is made."""
    ctx.site.seeding = False


def reach(ctx: Context, event: events.PeersProbed) -> None:
    """Who cannot be dialled from here: the next plan goes round them."""
    ctx.site.unreachable_site_ids = event.unreachable_site_ids
    syncs.ready_again(ctx)  # again, if it was said before
