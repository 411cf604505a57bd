"""Starts the workers of a site, passes on what they print, and sees to it that none is left behind.

The node starts the ranks of its host itself (`python`, `exec`), or has torchrun's agent do it: `rank_commands.py`.
`child.py` stands between the node and each process, so that a node that is killed takes all of them with it; a node
that lives finds them by a mark in their environment.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable
from pathlib import Path

from atoll.node.core.events import WorkersExited
from atoll.node.daemon import child, processes
from atoll.node.daemon.config import NodeConfig
from atoll.node.daemon.discover import local_address_towards
from atoll.node.daemon.interfaces import LOOPBACK, interface_with
from atoll.node.daemon.rank_commands import (
    LOOPBACK_ADDRESS,
    STOP_LIMIT_S,
    Meeting,
    agent_command,
    of_rank,
    on_interface,
    rank_command,
    store_command,
)
from atoll.node.daemon.store_socket import StoreSocket
from atoll.node.daemon.worker_tree import WorkerTree
from atoll.node.local_protocol import ENV_GENERATION, ENV_SOCKET
from atoll.node.tasks import watched
from atoll.protocol.errors import HostError

log = logging.getLogger("atoll.node")

TORCHRUN_IS_OPEN = (
    "torchrun: the store in which the ranks meet listens on every address of this machine, without a password, and "
    "their groups on the interface %s; let nobody else reach its ports, or choose --launcher python"
)

WORKERS_END_LIMIT_S = STOP_LIMIT_S + processes.KILL_ROUNDS * processes.KILL_ROUND_S
"""Of a generation that is told to end."""
SCRIPT_END_S = 600.0
"""How long a script may go on after its workers have left the run."""
LEAVING_SCRIPT_END_S = 20.0
"""The same when a person, or the machine as it goes down, has told the site to leave."""
SCRIPT_NOTICE_S = 5.0
"""After which the node says that it waits for that; leaving Python and torch takes a second or two."""


class Launcher:
    """Runs at most one generation of workers. Use it from the main thread, because workers die with the thread that
    started them. `on_exit` is called in the event loop; so is `on_failure`, if this watch over them fails itself.
    """

    def __init__(
        self,
        config: NodeConfig,
        on_exit: Callable[[WorkersExited], None],
        on_failure: Callable[[BaseException], None],
    ) -> None:
        self._config = config
        self._on_exit = on_exit
        self._on_failure = on_failure
        self._tree: WorkerTree | None = None
        self._store: StoreSocket | None = None
        self.meeting: Meeting | None = None
        """Of the ranks that were started last."""
        self._watching: asyncio.Task[None] | None = None
        self._stopping = asyncio.Lock()
        processes.become_subreaper()

    @property
    def last_lines(self) -> tuple[str, ...]:
        """The last that ranks printed (the agent, if they printed nothing)."""
        return self._tree.last_lines() if self._tree else ()

    async def start(self, generation: int, socket_path: str, meeting: Meeting | None = None) -> None:
        """Workers find their node at `socket_path`; the pipes that they print into lie beside it. `meeting`: of ranks
        that were started on host 0; without it this is that host.

        Raises ConfigError if there is no such script, program or network interface.
        """
        await self.stop()
        self._tree = tree = WorkerTree(generation, Path(socket_path).parent)
        self.meeting = meeting
        try:
            host = LOOPBACK_ADDRESS
            if self._config.site_hosts > 1:
                host = await asyncio.to_thread(local_address_towards, self._config.site_address)
            self._spawn(tree, socket_path, host)
        except BaseException:
            await self._end(tree)
            raise
        self._watching = watched(self._watch(tree), self._on_failure)

    def _spawn(self, tree: WorkerTree, socket_path: str, host: str) -> None:
        """`host`: this machine, as ranks of other hosts find it."""
        config, environment = self._config, self._environment(tree, socket_path)
        if config.launcher == "torchrun":
            agent = agent_command(config, tree.folder)
            log.warning(TORCHRUN_IS_OPEN, config.rank_interface)
            tree.spawn_agent(agent, config.num_ranks, environment | on_interface(config.rank_interface))
            return
        command = rank_command(config)
        without_gpu = environment | {"CUDA_VISIBLE_DEVICES": ""}
        interface = LOOPBACK if config.site_hosts == 1 else config.interface or interface_with(host)
        if self.meeting is None:
            self._store = store = StoreSocket(host, lambda fd: tree.spawn_store(store_command(fd), fd, without_gpu))
            self.meeting = Meeting(address=store.address, group_name=tree.folder.name)
        environment |= on_interface(interface)
        for rank in range(config.num_ranks):
            tree.spawn_rank(command, config.first_rank + rank, environment | of_rank(rank, config, self.meeting))

    async def wait(self, limit_s: float) -> bool:
        """Until all processes have ended, by themselves or by `stop`; False if the limit came first."""
        return self._watching is None or bool((await asyncio.wait({self._watching}, timeout=limit_s))[0])

    async def stop(self) -> None:
        """End all processes: SIGTERM, and SIGKILL after the limit. Idempotent; `on_exit` is not called."""
        async with self._stopping:  # a second caller waits for the end, too
            watching, self._watching = self._watching, None
            if watching is None:
                return
            assert self._tree is not None
            watching.cancel()
            try:
                await asyncio.gather(watching, return_exceptions=True)
                await self._end(self._tree)
            except asyncio.CancelledError:
                self._watching = watching  # not all are gone: the next call ends them
                raise

    async def _watch(self, tree: WorkerTree) -> None:
        code, text = await tree.ended()
        try:
            await self._end(tree)  # the other ranks, and what they started
        except HostError as error:
            code, text = code or 1, str(error)
        else:
            text = "\n".join((text, *tree.last_lines()))
        self._watching = None
        self._on_exit(WorkersExited(generation=tree.generation, code=code, text=text))

    async def _end(self, tree: WorkerTree) -> None:
        if self._store is not None:
            self._store.close()  # before processes are looked for: from here on none is started
            self._store = None
        await processes.end_tree(tree.mark, STOP_LIMIT_S, tree.own_pids)
        tree.close()

    def _environment(self, tree: WorkerTree, socket_path: str) -> dict[str, str]:
        threads = str(self._config.num_rank_threads)
        name, _, value = tree.mark.partition("=")
        return {
            **os.environ,
            "OMP_NUM_THREADS": threads,
            "NUMBA_NUM_THREADS": threads,
            "PYTHONUNBUFFERED": "1",
            ENV_SOCKET: socket_path,
            ENV_GENERATION: str(tree.generation),
            child.ENV_PARENT: str(os.getpid()),
            name: value,
        }


async def script_ended(launcher: Launcher, *, told_to_leave: bool) -> None:
    """The workers have left the run; their script may still evaluate, or write files of its own."""
    if await launcher.wait(SCRIPT_NOTICE_S):
        return
    limit_s = LEAVING_SCRIPT_END_S if told_to_leave else SCRIPT_END_S
    log.info("the workers have left the run; waiting at most %g s for their script, Ctrl-C ends it", limit_s)
    if not await launcher.wait(limit_s):
        log.warning("the script did not end within %g s of leaving the run and is killed", limit_s)
