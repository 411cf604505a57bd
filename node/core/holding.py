"""The state that this site holds: it says which, and hears whether other sites hold the same."""

from __future__ import annotations

import logging

from atoll.node.core.context import Context
from atoll.node.core.disk import Outer
from atoll.node.core.outputs import DistrustState
from atoll.protocol import messages as m


def hold(ctx: Context, outer: Outer, *, final: bool = False) -> None:
    """The disk is at this commit now; the coordinator hears of it."""
    ctx.site.disk.hold(outer, final=final)
    ctx.site.is_disputed = ctx.site.is_checked = False  # what was, is another state
    say(ctx)


def say(ctx: Context) -> None:
    """Also on a new stream."""
    outer = ctx.site.disk.outer
    if outer is not None:
        ctx.send(m.Applied(commit=outer.commit, state_hash=outer.state_hash))


def disputed(ctx: Context, message: m.Disputed) -> None:
    """Sites hold different states of the commit that this one holds. A line is said for what changes."""
    site, outer, is_over = ctx.site, ctx.site.disk.outer, message.is_over
    if outer is None or outer.commit != message.commit:
        return
    if not site.is_disputed or site.is_checked == is_over:
        how = "nobody can find out whose is right" if is_over else "whose is right is being found out"
        ctx.report(
            logging.WARNING, f"sites hold different states of commit {outer.commit}, of which this is one: {how}"
        )
    site.is_disputed, site.is_checked = True, not is_over


def distrust(ctx: Context, state_hash: bytes) -> bool:
    """What is held is not the run's state, or too old: it counts no longer, and a check of the disk is queued.

    `state_hash`: what the run's state of that commit has; empty if the coordinator's log does not go back so far.
    Whether the state is wrong.
    """
    site, outer = ctx.site, ctx.site.disk.outer
    assert outer is not None
    reason = "it is older than the coordinator's log"
    if state_hash:
        site.num_wrong_states += 1
        reason = (
            f"the state of commit {outer.commit} here has hash {outer.state_hash.hex()[:12]}, the run's is "
            f"{state_hash.hex()[:12]}"
        )
        ctx.report(logging.ERROR, f"{reason}; repairing it from the other sites")
    site.disk.lose()
    site.disk.add(DistrustState(reason))
    return bool(state_hash)
