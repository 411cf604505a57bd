"""The model on the disk: written beside its place while the run goes on, and put in place once it counts."""

from __future__ import annotations

import logging

from atoll.node.core import endings
from atoll.node.core.context import Context
from atoll.node.core.events import ModelKept, ModelSaved
from atoll.node.core.outputs import DropBest, DropModel, KeepBest, KeepModel, SaveModel
from atoll.node.core.state import Saving
from atoll.protocol import messages as m
from atoll.protocol.errors import StateError


def save(ctx: Context) -> None:
    """Of the commit that the site holds. One at a time: an earlier one that is still being written comes first."""
    site, outer = ctx.site, ctx.site.disk.outer
    assert outer is not None
    if site.kept == outer.commit or (site.saving is not None and site.saving.commit == outer.commit):
        return
    if site.saving is None:
        site.saving = Saving(commit=outer.commit, state_hash=outer.state_hash)
        ctx.emit(SaveModel(commit=outer.commit, run_step=outer.run_step, run_tokens=outer.run_tokens))
    elif not site.disk.final:  # the last one is saved when that is done
        text = (
            f"the model of commit {outer.commit} is not saved: that of commit {site.saving.commit} is still being "
            "written; raise save_every, or save to a faster disk"
        )
        ctx.report(logging.WARNING, text)


def written(ctx: Context, event: ModelSaved) -> None:
    """It is whole, beside its place."""
    ctx.site.saved_elsewhere = event.trouble
    saving = ctx.site.saving
    if saving is not None and saving.commit == event.commit:
        saving.is_written = True


def kept(ctx: Context, event: ModelKept) -> None:
    """It is in its place; one that became void meanwhile does not count."""
    site = ctx.site
    if site.saving is not None and site.saving.commit == event.commit:
        site.kept = event.commit if not site.saving.is_void else None
        _ended(ctx)


def void_after(ctx: Context, commit: int) -> None:
    """States of later commits here are not the run's."""
    site = ctx.site
    if site.saving is not None and site.saving.commit > commit:
        site.saving.is_void = True
    if site.kept is not None and site.kept > commit:
        site.kept = None
    if ctx.settings.best_by:
        site.best = None  # it is asked for again, if there is one
        ctx.emit(DropBest(commit))


def keep_best(ctx: Context, commit: m.Commit) -> None:
    """The commit says which saved model is the best so far."""
    if commit.best is not None and commit.best.commit != ctx.site.best:
        ctx.site.best = commit.best.commit
        ctx.emit(KeepBest(commit.best.commit))


def advance(ctx: Context) -> None:
    """Put the model that is written in its place, or remove it, once it is known whether it counts."""
    disk, saving = ctx.site.disk, ctx.site.saving
    if saving is None or not saving.is_written or saving.is_being_kept:
        return
    if saving.is_void:
        ctx.emit(DropModel(saving.commit))
        _ended(ctx)
    elif not disk.final or disk.outer is None or saving.commit != disk.outer.commit or _counts(ctx, saving):
        saving.is_being_kept = True
        ctx.emit(KeepModel(saving.commit))


def contradicted(ctx: Context, message: m.Finished) -> None:
    """The last state of the run is another one than that of this site, which nobody can mend any more."""
    outer = ctx.site.disk.outer
    assert outer is not None
    _give_up(
        ctx,
        f"the state of the last commit, {outer.commit}, has hash {outer.state_hash.hex()[:12]} here, the run's is "
        f"{message.state_hash.hex()[:12]}: the model is not saved; take that of another site",
    )


def deadline(ctx: Context) -> float | None:
    """When the last model counts, if nobody contradicts."""
    saving = ctx.site.saving
    return None if saving is None or saving.is_being_kept else saving.keep_at


def _counts(ctx: Context, saving: Saving) -> bool:
    """Whether the last model may be put in place: the run's state is this one, or nobody has said otherwise in time."""
    site, finished = ctx.site, ctx.site.finished
    if finished is not None and (finished.commit, finished.state_hash) == (saving.commit, saving.state_hash):
        return True
    if site.is_checked:
        saving.keep_at = None  # counts anew from what is found: the answer to that needs its time
        return False
    if saving.keep_at is None:
        saving.keep_at = ctx.now + ctx.limits.lease_s
    if ctx.now < saving.keep_at:
        return False
    if site.is_disputed:
        text = (
            f"sites hold different states of the last commit, {saving.commit}, and nobody knows whose is right: the "
            "model is not saved; the state is kept"
        )
        _give_up(ctx, text)
        return False
    ctx.report(logging.WARNING, f"nobody has said that the others hold the same state of commit {saving.commit}")
    return True


def _give_up(ctx: Context, text: str) -> None:
    site = ctx.site
    if site.saving is not None or site.kept is not None:
        ctx.emit(DropModel(site.saving.commit if site.saving is not None else site.kept or 0))
    endings.give_up(ctx, text, StateError.exit_code)


def _ended(ctx: Context) -> None:
    site = ctx.site
    site.saving = None
    if site.disk.final and site.disk.outer is not None:
        save(ctx)
