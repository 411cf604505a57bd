"""A loss that is not finite right after a commit, at a site where it was finite before: the commit's doing or the
script's. The site begins anew from the run's state, and says so; if most sites do, it was the commit, and the run goes
back. Losses that were as before for some steps after the commit speak for the script, but no site alone can tell."""

from __future__ import annotations

from atoll.node.core.context import Context
from atoll.node.core.events import FailureKind, SnapshotSealed, WorkersFailed
from atoll.protocol import messages as m
from atoll.protocol.errors import NonFiniteError


def sealed(ctx: Context, event: SnapshotSealed) -> None:
    """The loss of a window is known, and finite: the workers end at one that is not."""
    if event.num_steps:
        ctx.site.finite_on = ctx.site.version


def begins_anew(ctx: Context, event: WorkersFailed) -> bool:
    """Whether the last window with a finite loss began from an older commit than the one that failed: the site does not
    end, whether the commit or the script is at fault."""
    site = ctx.site
    if event.kind is not FailureKind.FATAL or event.exit_code != NonFiniteError.exit_code or site.disk.outer is None:
        return False
    return None not in (site.finite_on, site.version) and site.finite_on != site.version


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
