"""Whether a node can do its work: asked on a socket in its home, for its owner alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

from atoll.node.core.site import SiteCore
from atoll.node.relay.attached import Attached
from atoll.protocol.line_socket import LineServer

ASKED = b"health"


def socket_path(home: Path) -> Path:
    return home / "node.sock"


def health_server(home: Path, obstacles: Callable[[], Iterator[str]]) -> LineServer:
    """In the home, whose lock the caller holds. That it answers shows that the node's event loop turns."""

    async def answer(line: bytes, _: str) -> dict[str, str]:
        if line.strip() != ASKED:
            return {"problem": f"a node answers {ASKED.decode()} alone", "found": ""}
        return {"problem": "", "found": "; ".join(obstacles())}

    return LineServer(socket_path(home), answer)


def obstacles_of(core: SiteCore, attached: Attached | None = None) -> Iterator[str]:
    site = core.site
    if not site.welcomed:
        yield "there is no session with the coordinator"
    elif not site.site_id:
        yield f"the site is not in the run yet ({core.phase})"
    if attached is not None and not attached.is_attached:
        yield f"it is not attached to its relay: {attached.problem}"
    if site.workers.restart_at is not None:
        yield f"workers crashed {site.workers.crashes_in_a_row} times in a row, and are started again later"
