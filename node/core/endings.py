"""How a node ends: it says so, stops its workers and exits."""

from __future__ import annotations

from atoll.node.core import catching_up, syncs
from atoll.node.core.context import Context
from atoll.node.core.events import Exit, StopWorkers
from atoll.protocol import messages as m

MAX_REASON_CHARACTERS = 1024
"""Of a Leave."""


def give_up(ctx: Context, text: str, code: int) -> None:
    ctx.send(m.Leave(reason=_shortened(text), fatal=True))
    exit(ctx, code, text)


def depart(ctx: Context, reason: str, code: int) -> None:
    ctx.send(m.Leave(reason=_shortened(reason)))
    exit(ctx, code, reason)


def exit(ctx: Context, code: int, text: str) -> None:
    site = ctx.site
    syncs.cancel_exchange(ctx)
    catching_up.cancel_fetch(ctx)
    if site.workers.running:
        ctx.emit(StopWorkers(site.workers.generation))
    site.exited = True
    ctx.emit(Exit(code, text))


def _shortened(text: str) -> str:
    """The first line, which says what happened, and of what a worker printed the end, which says why."""
    if len(text) <= MAX_REASON_CHARACTERS:
        return text
    head = text.partition("\n")[0][: MAX_REASON_CHARACTERS // 2] + "\n...\n"
    return head + text[len(head) - MAX_REASON_CHARACTERS :]
