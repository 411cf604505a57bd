"""How a node ends: it says so, stops its workers and exits."""

from __future__ import annotations

from atoll.node.core import catching_up, syncs
from atoll.node.core.context import Context
from atoll.node.core.events import Exit, StopWorkers
from atoll.protocol import messages as m


def give_up(ctx: Context, text: str, code: int) -> None:
    ctx.send(m.Leave(reason=text[:1024], fatal=True))
    exit(ctx, code, text)


def depart(ctx: Context, reason: str, code: int) -> None:
    ctx.send(m.Leave(reason=reason[:1024]))
    exit(ctx, code, reason)


def exit(ctx: Context, code: int, text: str) -> None:
    site = ctx.site
    syncs.cancel_exchange(ctx)
    catching_up.cancel_fetch(ctx)
    if site.workers.running:
        ctx.emit(StopWorkers(site.workers.generation))
    site.exited = True
    ctx.emit(Exit(code, text))
