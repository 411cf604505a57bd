"""Starts of the guarded `atoll` command as forks of a process that has imported everything and compiled the kernels.

A node's start costs a second and a half of a core, nearly all of it imports, and the tests start hundreds. A fork has
memory, files, sockets, environment and a session of its own; no thread runs in the process that is forked.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import gc
import importlib
import itertools
import json
import os
import queue
import selectors
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from typing import IO

from tests.harness import warm_ranks
from tests.harness.namespace import NAMESPACE
from tests.harness.warm_ranks import ROOM, ROOM_VARIABLE, UNBUFFERED

MAX_MESSAGE_BYTES = 1 << 20
OF_RANKS = ("torch", "torch.distributed.fsdp", "atoll.node.worker.trainer")
OF_NODES = (["node"], ["join"])
WITHOUT_TORCH = "plain_worker.py"
"""A worker that does not import it."""
ONE_THREAD = {"OPENBLAS_NUM_THREADS": "1"}
READY = b"ready"
LOST = "the process that is forked has ended; what it said is among the output of the tests"
NOT_READ = ("PYTEST_CURRENT_TEST", "TORCHINDUCTOR_CACHE_DIR", "OTEL_EXPORTER_OTLP_ENDPOINT", NAMESPACE)
"""Variables that change as tests run, and that nothing reads as it is imported here. torch sets the second one where it
was not set, to what it is anyway, as its compiler is imported: by the first test that needs that."""


class _Ended:
    def __init__(self) -> None:
        self.event = threading.Event()
        self.code: int | None = None


class Forked:
    """What `subprocess.Popen` is of a process that was forked here."""

    def __init__(self, pid: int, stdout: IO[bytes], ended: _Ended) -> None:
        self.pid = pid
        self.stdout: IO[bytes] | None = stdout
        self._ended = ended

    @property
    def returncode(self) -> int | None:
        return self._ended.code

    def poll(self) -> int | None:
        return self._ended.code

    def wait(self, timeout: float | None = None) -> int:
        """Raises subprocess.TimeoutExpired."""
        if not self._ended.event.wait(timeout):
            raise subprocess.TimeoutExpired(f"process {self.pid}", timeout or 0.0)
        assert self._ended.code is not None, f"{LOST}: nobody knows how process {self.pid} ended"
        return self._ended.code

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):  # it ends just now
                os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)


class WarmStart:
    """The side of the tests."""

    def __init__(self, *, has_torch: bool = False) -> None:
        self._environment = lasting(os.environ)
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._server = subprocess.Popen(
                [sys.executable, "-m", "tests.harness.warm_start", str(theirs.fileno()), str(has_torch), ROOM],
                env={**os.environ, **ONE_THREAD, ROOM_VARIABLE: ROOM, UNBUFFERED: "1"},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                start_new_session=True,
            )
        self._lock = threading.Lock()
        self._ended: dict[int, _Ended] = {}
        self._begun: queue.SimpleQueue[int] = queue.SimpleQueue()
        self._is_lost = False
        assert self._socket.recv(MAX_MESSAGE_BYTES) == READY, LOST
        threading.Thread(target=self._listen, daemon=True).start()
        atexit.register(self._socket.close)

    def fits(self, environment: Mapping[str, str]) -> bool:
        """Whether the libraries that the server has imported would see the same variables."""
        return lasting(environment) == self._environment

    def start(self, arguments: Sequence[str], environment: Mapping[str, str]) -> Forked:
        """`atoll ARGUMENTS`, guarded, in a session of its own; its standard output and errors are one pipe."""
        request = {"arguments": list(arguments), "environment": dict(environment), "folder": os.getcwd()}
        with self._lock:
            assert not self._is_lost, LOST
            output, theirs = os.pipe()
            stdout = os.fdopen(output, "rb")
            try:
                socket.send_fds(self._socket, [json.dumps(request).encode()], [theirs])
                pid = self._begun.get()  # 0 if there is none any more
                assert pid, LOST
            except BaseException:
                stdout.close()
                raise
            finally:
                os.close(theirs)
        return Forked(pid, stdout, self._ended[pid])

    def _listen(self) -> None:
        while message := self._received():
            found = json.loads(message)
            if "code" in found:
                ended = self._ended[found["pid"]]
                ended.code = found["code"]
                ended.event.set()
                continue
            self._ended[found["pid"]] = _Ended()
            self._begun.put(found["pid"])
        self._is_lost = True
        self._begun.put(0)
        for ended in self._ended.values():
            ended.event.set()

    def _received(self) -> bytes:
        try:
            return self._socket.recv(MAX_MESSAGE_BYTES)
        except OSError:
            return b""  # closed, as this process ends


@functools.cache
def _servers(has_torch: bool) -> itertools.cycle[WarmStart]:
    """For each process of tests, from its first use on. Two, so that the processes of a run do not all hash alike."""
    return itertools.cycle([WarmStart(has_torch=has_torch), WarmStart(has_torch=has_torch)])


def warm_start(arguments: Sequence[str] = ()) -> WarmStart:
    """For a command with these `arguments`. Where a node's ranks may want it, torch is imported: `warm_ranks`."""
    has_ranks = arguments[:1] in OF_NODES
    return next(_servers(has_ranks and not any(word.endswith(WITHOUT_TORCH) for word in arguments)))


def lasting(environment: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in environment.items() if name not in NOT_READ}


# --- the process that is forked


def _serve(server: socket.socket) -> None:
    """Returns in each fork, which is to be the command from then on; ends this process once the tests have ended."""
    server.send(READY)
    with selectors.DefaultSelector() as selector:
        selector.register(server, selectors.EVENT_READ)
        while True:
            for key, _ in selector.select():
                if key.fileobj is not server:
                    _, status = os.waitpid(key.data, 0)
                    selector.unregister(key.fileobj)
                    os.close(key.fd)
                    code = os.waitstatus_to_exitcode(status)
                    with contextlib.suppress(BrokenPipeError):  # the tests have ended
                        server.send(json.dumps({"pid": key.data, "code": code}).encode())
                    continue
                message, descriptors, _, _ = socket.recv_fds(server, MAX_MESSAGE_BYTES, 1)
                if not message:
                    sys.exit()
                pid = os.fork()
                if pid == 0:
                    for other in selector.get_map().values():
                        os.close(other.fd)
                    server.detach()
                    return _become(descriptors[0], **json.loads(message))
                os.close(descriptors[0])
                server.send(json.dumps({"pid": pid}).encode())
                selector.register(os.pidfd_open(pid), selectors.EVENT_READ, pid)


def _become(output: int, *, arguments: list[str], environment: dict[str, str], folder: str) -> None:
    os.setsid()
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.close(output)
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    sys.argv[1:] = arguments
    if arguments[:1] in OF_NODES and NAMESPACE not in environment:  # which the node enters alone
        warm_ranks.begin_beside_node()


def _import_all(has_torch: bool) -> None:
    from atoll.cli.main import make_parser
    from atoll.node.daemon.peers import prepare_kernels

    for module in ("atoll.coordinator.main", "atoll.node.daemon.main"):
        importlib.import_module(module)
    for module in OF_RANKS if has_torch else ():
        importlib.import_module(module)
    make_parser()  # which reads the help from the sources
    prepare_kernels()
    assert len(os.listdir("/proc/self/task")) == 1, "a thread would not be in the forks"
    gc.freeze()  # a fork that ends would look through all of it: three quarters of what a short one costs


if __name__ == "__main__":
    from tests.harness import guarded, loop_guard

    loop_guard.install(ends_process=True)
    _import_all(has_torch=sys.argv[2] == "True")
    rank = None
    try:
        _serve(socket.socket(fileno=int(sys.argv[1])))
    except warm_ranks.Becomes as becomes:
        rank = becomes.command
    if rank is None:
        sys.exit(guarded.run())
    warm_ranks.become(rank)
