"""The parts of a node that reach its workers: by a socket, by processes, by shared memory."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from atoll.node.core.events import WorkersExited
from atoll.node.core.ranks.outcomes import GroupEvent
from atoll.node.daemon.home import Home
from atoll.node.daemon.launcher import Launcher
from atoll.node.daemon.local_server import LocalServer
from atoll.node.daemon.plane import DataPlane
from atoll.node.daemon.rank_commands import LaunchConfig
from atoll.protocol.layout import Manifest
from atoll.protocol.settings import RunSettings

OnFailure = Callable[[BaseException], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """How they are made; a simulated site has workers without any of these three."""

    local_server: Callable[[Callable[[GroupEvent], None], OnFailure], LocalServer] = LocalServer
    launcher: Callable[[LaunchConfig, Callable[[WorkersExited], None], OnFailure], Launcher] = Launcher
    data_plane: Callable[[Home, RunSettings, Manifest, int], DataPlane] = DataPlane


REAL_PARTS = Parts()
