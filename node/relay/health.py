"""Whether a relay lives: asked on a socket in its home, for its owner alone."""

from __future__ import annotations

from pathlib import Path

from atoll.protocol.line_socket import LineServer

ASKED = b"health"


def socket_path(home: Path) -> Path:
    return home / "relay.sock"


def health_server(home: Path) -> LineServer:
    """In the home, whose lock the caller holds. That it answers shows that the relay's event loop turns."""

    async def answer(line: bytes, _: str) -> dict[str, str]:
        problem = "" if line.strip() == ASKED else f"a relay answers {ASKED.decode()} alone"
        return {"problem": problem, "found": ""}

    return LineServer(socket_path(home), answer)
