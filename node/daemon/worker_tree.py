"""The processes of one generation of workers, and the pipes that they print into."""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import shutil
import signal
import subprocess
import tempfile
from pathlib import Path

from atoll.node.daemon import processes
from atoll.node.daemon.rank_commands import tied
from atoll.node.daemon.rank_output import RankOutput, crash_lines
from atoll.node.daemon.site_log import OUTPUT_LOGGER
from atoll.protocol.text import clean

ENV_TREE = "ATOLL_TREE"
"""Marks every process that a generation of workers consists of."""
MAX_LINE_BYTES = 8192
OWN_SIGNALS = frozenset(
    -number for number in (signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGKILL, signal.SIGSEGV)
)
"""Exit codes of a process that no other one's failure has ended."""
AGENT, STORE = "agent", "store"  # names of pipes, beside rank-N
AGENT_WORDS = "torchrun"

_log = logging.getLogger("atoll.node")
_output = logging.getLogger(OUTPUT_LOGGER)


class WorkerTree:
    """Starts the processes of one generation and waits for their end; `processes.end_tree` ends them by `mark`."""

    def __init__(self, generation: int, parent: Path) -> None:
        self.generation = generation
        self.mark = f"{ENV_TREE}={secrets.token_hex(8)}"
        self.folder = Path(tempfile.mkdtemp(prefix="run-", dir=parent))
        self._roots: list[tuple[subprocess.Popen[bytes], int]] = []  # with pidfd; that of the store is not among them
        self._store: tuple[subprocess.Popen[bytes], int] | None = None
        self._store_lost: asyncio.Future[int] = asyncio.get_running_loop().create_future()  # with its exit code
        self._pipes: dict[str, _Pipe] = {}
        self._ranks: list[str] = []  # of each root; empty where an agent starts the ranks
        self._failed: list[tuple[str, bool]] = []  # ranks that ended badly by themselves; see `crash_lines`

    @property
    def own_pids(self) -> frozenset[int]:
        store = [self._store] if self._store is not None else []
        return frozenset(popen.pid for popen, _ in (*self._roots, *store))

    def spawn_rank(self, command: list[str], rank: int, environment: dict[str, str]) -> None:
        self._roots.append(self._spawn(command, environment, self._open_pipe(f"rank-{rank}", f"rank {rank}")))
        self._ranks.append(f"rank {rank}")

    def spawn_agent(self, command: list[str], num_ranks: int, environment: dict[str, str]) -> None:
        for rank in range(num_ranks):
            self._open_pipe(f"rank-{rank}", f"rank {rank}")
        self._roots.append(self._spawn(command, environment, self._open_pipe(AGENT, AGENT_WORDS)))

    def spawn_store(self, command: list[str], fd: int, environment: dict[str, str]) -> None:
        """At most once, with the socket `fd`. If the store cannot be started, or ends before the ranks, they fail."""
        try:
            self._store = self._spawn(command, environment, self._open_pipe(STORE, "store"), fd)
        except OSError as error:
            _log.error("the store of the ranks' process groups cannot be started: %s", error)
            self._store_lost.set_result(1)
            return
        asyncio.get_running_loop().add_reader(self._store[1], self._store_ended, *self._store)

    def _spawn(
        self, command: list[str], environment: dict[str, str], pipe: Path, *fds: int
    ) -> tuple[subprocess.Popen[bytes], int]:
        with open(pipe, "wb", buffering=0) as output:
            popen = subprocess.Popen(
                [*tied(), *command],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env=environment,
                pass_fds=fds,
                start_new_session=True,  # Ctrl-C reaches the node only, and the node decides
            )
        return popen, os.pidfd_open(popen.pid)

    def _open_pipe(self, name: str, words: str) -> Path:
        path = self.folder / name
        os.mkfifo(path, 0o600)
        self._pipes[words] = _Pipe(path, words)
        return path

    async def ended(self) -> tuple[int, str]:
        """Wait until all ranks (or their agent) have ended, or one of them or their store has failed.

        (0 or the code of what failed, how it ended in words.)
        """
        waiting = {asyncio.ensure_future(_exit_code(popen, fd)) for popen, fd in self._roots}
        try:
            while waiting:
                over, _ = await asyncio.wait({*waiting, self._store_lost}, return_when=asyncio.FIRST_COMPLETED)
                waiting -= over
                codes = [future.result() for future in over if future is not self._store_lost]
                if failed := next((code for code in codes if code != 0), 0):
                    self._note_failed()
                    return failed, f"the workers {_how(failed, 'were')}"
                if self._store_lost in over and waiting:
                    code = self._store_lost.result() or 1
                    return code, f"the store of the workers' process groups {_how(code, 'was')}"
            return 0, "the workers ended"
        finally:
            for future in waiting:
                future.cancel()
            await asyncio.gather(*waiting, return_exceptions=True)

    def _store_ended(self, popen: subprocess.Popen[bytes], fd: int) -> None:
        asyncio.get_running_loop().remove_reader(fd)
        self._store_lost.set_result(popen.wait())  # at once: it has ended

    def _note_failed(self) -> None:
        """The ranks that have failed by now: what others print from here on may be that they were ended."""
        for name, (popen, _) in zip(self._ranks, self._roots, strict=False):
            if code := popen.poll():
                self._failed.append((name, code in OWN_SIGNALS))

    def last_lines(self) -> tuple[str, ...]:
        """Why ranks failed, by what they printed; what else printed, if they printed nothing or lost their store."""
        ranks = {words: pipe.output for words, pipe in self._pipes.items() if words not in (AGENT_WORDS, STORE)}
        others = tuple(
            f"[{words}] {line}"
            for words, pipe in self._pipes.items()
            if words in (AGENT_WORDS, STORE)
            for line in pipe.output.last_lines
        )
        of_ranks = crash_lines(ranks, self._failed)
        return others + of_ranks if self._store_lost.done() else of_ranks or others

    def close(self) -> None:
        """After the last process is gone: reads what is left in the pipes, and removes them."""
        if self._store is not None:
            asyncio.get_running_loop().remove_reader(self._store[1])
            self._roots.append(self._store)
        for popen, fd in self._roots:
            popen.wait()
            os.close(fd)
        for pipe in self._pipes.values():
            pipe.close()
        shutil.rmtree(self.folder)


class _Pipe:
    """What one rank prints, line by line."""

    def __init__(self, path: Path, words: str) -> None:
        # Open for writing too, so that there is no end of file between two writers.
        self._fd = os.open(path, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
        self._words = words
        self._rest = b""
        self._written_ns = 0
        self.output = RankOutput()
        asyncio.get_running_loop().add_reader(self._fd, self._read)

    def _read(self) -> bool:
        # The kernel's note of the last write orders ranks also where this process comes late to read.
        self._written_ns = os.fstat(self._fd).st_mtime_ns
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
        text = _shown(line[:MAX_LINE_BYTES])
        self.output.add(text, self._written_ns)
        _output.info("[%s] %s", self._words, text)

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


def _how(code: int, was: str) -> str:
    if code >= 0:
        return f"ended with exit code {code}"
    named = next((known.name for known in signal.Signals if known == -code), "")
    return f"{was} killed by {named or f'signal {-code}'}"


def _shown(line: bytes) -> str:
    """As a terminal would leave it: of a bar of progress, its last state."""
    return clean(line.decode(errors="replace").rstrip().rsplit("\r", 1)[-1])
