"""A node that means harm: `python hostile_node.py KIND node ...`, see tests/harness/hostile.py for the kinds."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from atoll.__main__ import run
from atoll.node.core import events as e
from atoll.node.core import outputs as out
from atoll.node.core.site import SiteCore
from atoll.node.exchange.auditing import Auditor
from atoll.node.exchange.hub import Hub
from atoll.node.exchange.sync.exchange import Exchange
from atoll.protocol import messages as m

sys.path.insert(0, str(Path(__file__).parents[2]))
from tests.harness import hostile

DOES = {"mute": hostile.is_never_ready, "ready": hostile.exchanges_nothing}
FALSE = ("false", "false-buffers")
SPOILS_BUNDLES = {"scale": hostile.with_a_scale_too_large, "narrow": hostile.of_narrow_rows}
WITH_ERRORS = {"made-up": hostile.adds_made_up_errors, "silent": hostile.gives_no_errors}


async def denies(self: Auditor, asked: m.AuditChunk) -> m.ChunkAudited:
    """Whoever made it: when it is asked itself, too."""
    return m.ChunkAudited(number=asked.number, outcome=m.AuditOutcome.RIGHT, payload_hash=bytes(32))


def misbehave(kind: str) -> None:
    handle, begin, serve = SiteCore.handle, Hub.begin, Hub.serve

    def handle_so(self: SiteCore, event: e.Event, now: float) -> list[out.Output]:
        return [output for output in handle(self, event, now) if DOES[kind](output)]

    def begin_so(self: Hub, *args: Any, **options: Any) -> Exchange:
        exchange = begin(self, *args, **options)
        if kind in FALSE:
            hostile.averages_falsely(exchange, lies=lambda: True, lied=lambda: None, buffers_alone=kind != FALSE[0])
        elif kind in SPOILS_BUNDLES:
            hostile.contributes_what_spoils_bundles(exchange, SPOILS_BUNDLES[kind])
        else:
            hostile.only_waits(exchange, hostile.others, claims_to_move=True, tells_the_coordinator=True)
        return exchange

    def serve_so(self: Hub, *args: Any, **options: Any) -> None:
        serve(self, *args, **options)
        WITH_ERRORS[kind](self)

    if kind in DOES:
        SiteCore.handle = handle_so  # type: ignore[method-assign]
    elif kind in ("waiting", *FALSE, *SPOILS_BUNDLES):
        Hub.begin = begin_so  # type: ignore[method-assign]
        Auditor.audit = denies  # type: ignore[method-assign]
    elif kind in WITH_ERRORS:
        Hub.serve = serve_so  # type: ignore[method-assign]
        Auditor.audit = denies  # type: ignore[method-assign]
    else:
        sys.exit(f"hostile_node.py: there is no {kind!r}, there are {', '.join(hostile.KINDS)}")


if __name__ == "__main__":
    misbehave(sys.argv.pop(1))
    sys.exit(run())
