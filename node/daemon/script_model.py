"""The model of a script and how its ranks share it, learned by starting it until all have joined. Nothing of a run is
touched."""

from __future__ import annotations

import asyncio

from atoll.node.core.events import RankEvent, RankLost, WorkersExited, WorkersFailed
from atoll.node.core.outputs import MergePieces, RefuseRank
from atoll.node.core.ranks.generations import Generations
from atoll.node.core.ranks.pieces import SitePieces, site_pieces
from atoll.node.daemon.config import NodeConfig
from atoll.node.daemon.launcher import Launcher
from atoll.node.daemon.local_server import LocalServer
from atoll.node.local_protocol import Greeting, LocalJoin
from atoll.node.parallel.settings import check_site
from atoll.protocol.errors import WorkerError
from atoll.protocol.settings import RunSettings, settings_to_json

GENERATION = 1


async def model_of_script(config: NodeConfig, settings: RunSettings, limit_s: float) -> SitePieces:
    """Raises WorkerError if the script ends, fails or takes longer before `atoll.join`; ConfigError if there is none.
    Its processes are gone when this returns."""
    loop = asyncio.get_running_loop()
    found: asyncio.Future[tuple[LocalJoin, ...]] = loop.create_future()
    ranks = Generations(config.num_ranks, loop.time())
    ranks.begin(GENERATION, loop.time())

    def failed(error: BaseException) -> None:
        if not found.done():
            found.set_exception(error)

    def happened(event: RankEvent) -> None:
        for item in ranks.heard(event, loop.time()):
            match item:
                case MergePieces(ranks=joined) if not found.done():
                    found.set_result(joined)
                case WorkersFailed(text=text):
                    failed(WorkerError(f"the script cannot join: {text}"))
                case RefuseRank():
                    server.execute(item)
        if isinstance(event, RankLost):
            failed(WorkerError(f"the script cannot join: rank {event.rank} {event.text}"))

    def ended(end: WorkersExited) -> None:
        failed(WorkerError(f"the script did not come to atoll.join: {end.text}"))

    if not config.command:
        check_site(config.parallel, config.num_ranks, settings)
    server = LocalServer(happened, failed)
    launcher = Launcher(config, ended, failed)
    await server.start()
    try:
        data_paths = tuple(str(path) for path in config.data_paths)
        settings_json = settings_to_json(settings)
        greeting = Greeting(settings_json=settings_json, data_paths=data_paths, parallel=config.parallel)
        server.begin(GENERATION, greeting)
        await launcher.start(GENERATION, server.path)
        async with asyncio.timeout(limit_s):
            pieces = await asyncio.to_thread(site_pieces, await found)
        if isinstance(pieces, str):
            raise WorkerError(f"the script cannot join: {pieces}")
        return pieces
    except TimeoutError:
        raise WorkerError(f"the script did not come to atoll.join within {limit_s:.0f} s") from None
    finally:
        await launcher.stop()
        await server.close()
