"""The model of a script, learned by starting it until all its ranks have joined. Nothing of a run is touched."""

from __future__ import annotations

import asyncio

from atoll.node.core.events import WorkersExited, WorkersFailed, WorkersJoined, WorkersLost
from atoll.node.core.ranks.group import WorkerGroup
from atoll.node.core.ranks.liveness import StepTimes
from atoll.node.core.ranks.outcomes import GroupEvent
from atoll.node.daemon.config import NodeConfig
from atoll.node.daemon.launcher import Launcher
from atoll.node.daemon.local_server import LocalServer
from atoll.node.local_protocol import Greeting
from atoll.protocol.errors import WorkerError
from atoll.protocol.layout import Manifest
from atoll.protocol.settings import RunSettings, settings_to_json

GENERATION = 1


async def model_of_script(config: NodeConfig, settings: RunSettings, limit_s: float) -> Manifest:
    """Raises WorkerError if the script ends, fails or takes longer before `atoll.join`; ConfigError if there is none.
    Its processes are gone when this returns."""
    found: asyncio.Future[Manifest] = asyncio.get_running_loop().create_future()

    def failed(error: BaseException) -> None:
        if not found.done():
            found.set_exception(error)

    def happened(event: GroupEvent) -> None:
        if isinstance(event, WorkersJoined) and not found.done():
            found.set_result(event.manifest)
        elif isinstance(event, WorkersFailed | WorkersLost):
            failed(WorkerError(f"the script cannot join: {event.text}"))

    def ended(end: WorkersExited) -> None:
        failed(WorkerError(f"the script did not come to atoll.join: {end.text}"))

    server = LocalServer(happened, failed)
    launcher = Launcher(config, ended, failed)
    await server.start()
    try:
        server.begin(
            WorkerGroup(GENERATION, config.num_ranks, asyncio.get_running_loop().time(), StepTimes()),
            Greeting(
                settings_json=settings_to_json(settings),
                data_paths=tuple(str(path) for path in config.data_paths),
            ),
        )
        await launcher.start(GENERATION, server.path)
        async with asyncio.timeout(limit_s):
            return await found
    except TimeoutError:
        raise WorkerError(f"the script did not come to atoll.join within {limit_s:.0f} s") from None
    finally:
        await launcher.stop()
        await server.close()
