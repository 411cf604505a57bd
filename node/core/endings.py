"""How a node ends: it says so, stops its workers and exits."""

from __future__ import annotations

from atoll.node.core.context import Context
from atoll.node.core.outputs import Beat, Exit
from atoll.protocol import messages as m

MAX_REASON_CHARACTERS = 1024
"""Of a Leave."""


def give_up(ctx: Context, text: str, code: int) -> None:
    """Nothing that the site could do later would help."""
    _say_goodbye(ctx, text, fatal=True)
    exit(ctx, code, text)


def depart(ctx: Context, reason: str, code: int) -> None:
    """At a time at which no other site counts on this one."""
    _say_goodbye(ctx, reason, fatal=False)
    exit(ctx, code, reason)


def _say_goodbye(ctx: Context, reason: str, *, fatal: bool) -> None:
    """With the last figures of this site."""
    if ctx.site.connected:
        ctx.emit(Beat())
    ctx.send(m.Leave(reason=_shortened(reason), fatal=fatal))


def exit(ctx: Context, code: int, text: str) -> None:
    """The first reason counts. What is under way is ended after the event that is handled (`SiteCore.handle`)."""
    if ctx.site.exit is None:
        ctx.site.exit = Exit(code, text)


def leave(ctx: Context, reason: str) -> None:
    """After the sync under way, within a limit."""
    ctx.site.leaving = reason
    ctx.site.leave_deadline = ctx.now + ctx.limits.leave_s


def _shortened(text: str) -> str:
    """The first line, which says what happened, and of what a worker printed the end, which says why."""
    if len(text) <= MAX_REASON_CHARACTERS:
        return text
    head = text.partition("\n")[0][: MAX_REASON_CHARACTERS // 2] + "\n...\n"
    return head + text[len(head) - MAX_REASON_CHARACTERS :]
