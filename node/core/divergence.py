"""A loss that is not finite right after a commit, at a site where it was finite before: the commit's doing or the
script's. The site begins anew from the run's state, and says so; if most sites do, it was the commit, and the run goes
back. Losses that were as before for some steps after the commit speak for the script, but no site alone can tell."""

from __future__ import annotations

from atoll.node.core.context import Context
from atoll.node.core.events import FailureKind, SnapshotSealed, WorkersFailed
from atoll.protocol import messages as m
from atoll.protocol.errors import NonFiniteError


def sealed(ctx: Context, event: SnapshotSealed) -> None:
    """A window's loss, if it has one, is finite. A window without one counts as bad; but where the nodes do the steps a
    bad one has no tokens, and one with tokens is of a script that gives its loss now and then."""
    site, is_bad = ctx.site, not (event.tokens and ctx.settings.sync.steps_at_nodes)
    if event.num_steps:
        site.finite_on, site.bad_on = site.version, None
    elif site.bad_on is None and is_bad:
        site.bad_on = site.version


def begins_anew(ctx: Context, event: WorkersFailed) -> bool:
    """Whether the last window with a finite loss began from an older commit than the one that failed, and no bad one
    between them did: the site does not end, whether the commit or the script is at fault. A row of bad windows over
    several commits is not the last one's doing."""
    site = ctx.site
    if event.kind is not FailureKind.FATAL or event.exit_code != NonFiniteError.exit_code or site.disk.outer is None:
        return False
    is_first = None not in (site.finite_on, site.version) and site.finite_on != site.version
    return is_first and site.bad_on in (None, site.version)


def note(ctx: Context, event: WorkersFailed) -> None:
    """Says so, whoever seems at fault. Another window without a finite one before it is the site's own."""
    site = ctx.site
    assert site.version is not None
    site.finite_on = None
    site.diverged = m.Diverged(commit=site.version, text=event.text[:1024])
    say(ctx)


def say(ctx: Context) -> None:
    """Also on a new stream; while the site has applied no later commit but those that may have been in flight then."""
    said, outer = ctx.site.diverged, ctx.site.disk.outer
    if said is not None and outer is not None and outer.commit < said.commit + ctx.settings.sync.most_in_flight:
        ctx.send(said)


def went_back(ctx: Context) -> None:
    """The workers need not wait any longer: they begin from another state."""
    if ctx.site.diverged is not None:
        ctx.site.workers.restart_by(ctx.now)
    ctx.site.diverged = None
