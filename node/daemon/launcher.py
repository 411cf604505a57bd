"""Starts the workers of a site, passes on what they print, and sees to it that none is left behind.

`torchrun` starts one agent, which starts the ranks; `exec` starts the command itself, once for each rank. `child.py`
stands between the node and each of them, so that a node that is killed takes all processes with it; a node that lives
finds them by a mark in their environment.
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from atoll.node.daemon import child, processes
from atoll.node.daemon.site_log import OUTPUT_LOGGER
from atoll.node.local_protocol import ENV_GENERATION, ENV_SOCKET
from atoll.protocol.errors import ConfigError, HostError

ENV_TREE = "ATOLL_TREE"
"""Marks every process that a generation of workers consists of."""
TRAINER_MODULE = "atoll.node.worker.trainer"
MAX_LINE_BYTES = 8192
NUM_LAST_LINES = 20

_output = logging.getLogger(OUTPUT_LOGGER)


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchConfig:
    launcher: str = "torchrun"
    """torchrun, or exec."""
    command: tuple[str, ...] = ()
    """torchrun: a Python script (or -m, module) and its arguments, empty: the built-in trainer. exec: a command."""
    num_ranks: int = 1
    num_threads: int = 1
    """Of each rank."""
    stop_limit_s: float = 5.0
    """From SIGTERM to SIGKILL."""
    environment: dict[str, str] = field(default_factory=dict)
    """Added to the node's own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkersExit:
    """All processes of a generation are gone, and not because `stop` was called."""

    generation: int
    code: int
    """0 if every rank ended well; else of the first process that did not, negative: killed by that signal."""
    text: str
    """One line on how it ended, then the last lines printed, if any."""


class Launcher:
    """Runs at most one generation of workers. Use it from the main thread, because workers die with the thread that
    started them. `on_exit` is called in the event loop; so is `on_failure`, if this watch over them fails itself.
    """

    def __init__(
        self,
        config: LaunchConfig,
        on_exit: Callable[[WorkersExit], None],
        on_failure: Callable[[BaseException], None],
    ) -> None:
        self._config = config
        self._on_exit = on_exit
        self._on_failure = on_failure
        self._tree: _Tree | None = None
        self._watching: asyncio.Task[None] | None = None
        processes.become_subreaper()

    @property
    def last_lines(self) -> tuple[str, ...]:
        """The last that ranks printed (the agent, if they printed nothing)."""
        return self._tree.last_lines() if self._tree else ()

    async def start(self, generation: int, socket_path: str) -> None:
        """Workers find their node at `socket_path`; the pipes that they print into lie beside it.

        Raises ConfigError if there is no such script or command.
        """
        await self.stop()
        self._tree = tree = _Tree(generation, Path(socket_path).parent)
        try:
            for rank, command in self._commands(tree.folder):
                tree.spawn(command, rank, self._environment(tree, rank, socket_path), self._config.num_ranks)
        except BaseException:
            await self._end(tree)
            raise
        self._watching = asyncio.get_running_loop().create_task(self._watch(tree))
        self._watching.add_done_callback(self._watched)

    async def wait(self, limit_s: float) -> bool:
        """Until all processes have ended, by themselves or by `stop`; False if the limit came first."""
        return self._watching is None or bool((await asyncio.wait({self._watching}, timeout=limit_s))[0])

    async def stop(self) -> None:
        """End all processes: SIGTERM, and SIGKILL after the limit. Idempotent; `on_exit` is not called."""
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

    async def _watch(self, tree: _Tree) -> None:
        code = await tree.first_failure()
        try:
            await self._end(tree)  # the other ranks, and what they started
        except HostError as error:
            code, text = code or 1, str(error)
        else:
            text = _ending(code, tree.last_lines())
        self._watching = None
        self._on_exit(WorkersExit(generation=tree.generation, code=code, text=text))

    def _watched(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            self._on_failure(error)

    async def _end(self, tree: _Tree) -> None:
        await processes.end_tree(tree.mark, self._config.stop_limit_s, tree.own_pids)
        tree.close()

    def _commands(self, folder: Path) -> list[tuple[int | None, list[str]]]:
        """(rank, or None for the agent; command) of each process that the node itself starts."""
        config = self._config
        if config.launcher == "exec":
            if not config.command or shutil.which(config.command[0]) is None:
                raise ConfigError(f"cannot run {' '.join(config.command) or 'an empty command'}: no such program")
            return [(rank, list(config.command)) for rank in range(config.num_ranks)]
        if config.launcher != "torchrun":
            raise ConfigError(f"launcher {config.launcher!r}: choose torchrun or exec")
        script = list(config.command) or ["-m", TRAINER_MODULE]
        if not script[0].startswith("-") and not Path(script[0]).is_file():
            raise ConfigError(f"no such script: {script[0]} (in {os.getcwd()})")
        # torch's own restarts are off: the node restarts, with a new generation.
        agent = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--max-restarts", "0"]
        agent += ["--nproc-per-node", str(config.num_ranks), "--log-dir", str(folder), "--no-python"]
        return [(None, [*agent, *_tied("--output", str(folder)), sys.executable, *script])]

    def _environment(self, tree: _Tree, rank: int | None, socket_path: str) -> dict[str, str]:
        threads = str(max(1, self._config.num_threads))
        name, _, value = tree.mark.partition("=")
        environment = {
            **os.environ,
            "OMP_NUM_THREADS": threads,
            "NUMBA_NUM_THREADS": threads,
            "PYTHONUNBUFFERED": "1",
            **self._config.environment,
            ENV_SOCKET: socket_path,
            ENV_GENERATION: str(tree.generation),
            child.ENV_PARENT: str(os.getpid()),
            name: value,
        }
        if rank is not None:
            environment |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(self._config.num_ranks)}
        return environment


class _Tree:
    """The processes of one generation, and the pipes that they print into."""

    def __init__(self, generation: int, parent: Path) -> None:
        self.generation = generation
        self.mark = f"{ENV_TREE}={secrets.token_hex(8)}"
        self.folder = Path(tempfile.mkdtemp(prefix="run-", dir=parent))
        self._roots: list[tuple[subprocess.Popen[bytes], int]] = []  # with pidfd
        self._pipes: dict[str, _Pipe] = {}

    @property
    def own_pids(self) -> frozenset[int]:
        return frozenset(popen.pid for popen, _ in self._roots)

    def spawn(self, command: list[str], rank: int | None, environment: dict[str, str], num_ranks: int) -> None:
        if rank is None:
            for index in range(num_ranks):
                self._open_pipe(f"rank-{index}", f"[rank {index}]")
            name, prefix = "agent", "[torchrun]"
        else:
            name, prefix = f"rank-{rank}", f"[rank {rank}]"
        path = self._open_pipe(name, prefix)
        with open(path, "wb", buffering=0) as output:
            popen = subprocess.Popen(
                [*_tied(), *command],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env=environment,
                start_new_session=True,  # Ctrl-C reaches the node only, and the node decides
            )
        self._roots.append((popen, os.pidfd_open(popen.pid)))

    def _open_pipe(self, name: str, prefix: str) -> Path:
        path = self.folder / name
        os.mkfifo(path, 0o600)
        self._pipes[name] = _Pipe(path, prefix)
        return path

    async def first_failure(self) -> int:
        """Wait until all roots have ended (0) or one has failed (its code)."""
        waiting = {asyncio.ensure_future(_exit_code(popen, fd)) for popen, fd in self._roots}
        try:
            while waiting:
                over, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
                for future in over:
                    if future.result() != 0:
                        return future.result()
            return 0
        finally:
            for future in waiting:
                future.cancel()
            await asyncio.gather(*waiting, return_exceptions=True)

    def last_lines(self) -> tuple[str, ...]:
        ranks = [line for name, pipe in self._pipes.items() if name != "agent" for line in pipe.last_lines]
        return tuple(ranks or (line for pipe in self._pipes.values() for line in pipe.last_lines))

    def close(self) -> None:
        """After the last process is gone: reads what is left in the pipes, and removes them."""
        for popen, fd in self._roots:
            popen.wait()
            os.close(fd)
        for pipe in self._pipes.values():
            pipe.close()
        shutil.rmtree(self.folder)


class _Pipe:
    """What one rank prints, line by line."""

    def __init__(self, path: Path, prefix: str) -> None:
        # Open for writing too, so that there is no end of file between two writers.
        self._fd = os.open(path, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
        self._prefix = prefix
        self._rest = b""
        self.last_lines: deque[str] = deque(maxlen=NUM_LAST_LINES)
        asyncio.get_running_loop().add_reader(self._fd, self._read)

    def _read(self) -> bool:
        try:
            data = os.read(self._fd, 1 << 16)
        except BlockingIOError:
            return False
        *lines, self._rest = (self._rest + data).split(b"\n")
        while len(self._rest) > MAX_LINE_BYTES:
            lines.append(self._rest[:MAX_LINE_BYTES])
            self._rest = self._rest[MAX_LINE_BYTES:]
        for line in lines:
            self._print(line)
        return True

    def _print(self, line: bytes) -> None:
        text = f"{self._prefix} {line[:MAX_LINE_BYTES].decode(errors='replace').rstrip()}"
        self.last_lines.append(text)
        _output.info("%s", text)

    def close(self) -> None:
        while self._read():
            pass
        if self._rest:
            self._print(self._rest)
        asyncio.get_running_loop().remove_reader(self._fd)
        os.close(self._fd)


async def _exit_code(popen: subprocess.Popen[bytes], fd: int) -> int:
    await processes.ended([fd], None)
    return popen.wait()  # at once: it has ended


def _tied(*options: str) -> list[str]:
    return [sys.executable, "-I", "-S", child.__file__, *options, "--"]


def _ending(code: int, last_lines: tuple[str, ...]) -> str:
    if code < 0:
        how = f"were killed by {signal.Signals(-code).name}"
    else:
        how = f"ended with exit code {code}" if code else "ended"
    return "\n".join((f"the workers {how}", *last_lines))
