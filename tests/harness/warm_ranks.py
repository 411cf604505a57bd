"""Starts of ranks, and of their store, as forks of a process that has imported torch.

A rank's start costs two seconds of a core and more, nearly all of it the import of torch, and the tests start hundreds.
A node that is itself a fork (`warm_start`) has a child beside it, which runs no thread and waits. For each process that
the node starts this child makes a fork of itself that is a child of the node, as what the node starts is: with its
session, its pipes, its environment and its command, also in /proc, where the node looks for them. It is the guard of
node/daemon/child.py, and what that one becomes goes on here, without exec, if it is Python. All ranks of a node have
the same seed of hashes, and the guard of event loops; those of the launcher's own tests (`test_parallel_sites.py`) are
executed.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import json
import os
import resource
import runpy
import signal
import socket
import subprocess
import sys
import traceback
import types
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

MAX_MESSAGE_BYTES = 1 << 20
MAX_FDS = 16
ROOM = "x" * (1 << 15)
"""A word of the command of the process that is forked, and a variable: there /proc has those of each fork."""
ROOM_VARIABLE = "ATOLL_TESTS_ROOM"
BESIDE_A_NODE = [sys.executable, "-m", "tests.harness.warm_ranks"]
"""The command, as /proc has it, of the process that waits there; there is no such module to run."""
READ_AT_IMPORT = ("GOMP_", "KMP_", "LD_", "MALLOC_", "MKL_", "NUMBA_", "OMP_", "PYTHON", "TORCH_")
"""Beginnings of variables that libraries, or Python, look at as they start."""
UNBUFFERED = "PYTHONUNBUFFERED"
SET_BY_THE_NODE = ("NUMBA_NUM_THREADS", UNBUFFERED)
"""No kernel has threads, and the process that is forked has the other one."""
_SYS_CLONE = {"x86_64": 56, "aarch64": 220}.get(os.uname().machine)
_CLONE_PARENT = 0x00008000
_PR_SET_PDEATHSIG = 1


_execvp = os.execvp


class Becomes(BaseException):
    """In place of exec: this process is to be that command."""

    def __init__(self, command: list[str]) -> None:
        self.command = command


class Rank:
    """What the node uses of `subprocess.Popen`."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None

    def poll(self) -> int | None:
        return self._waited(os.WNOHANG)

    def wait(self) -> int:
        code = self._waited(0)
        assert code is not None
        return code

    def _waited(self, options: int) -> int | None:
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, options)
            self.returncode = os.waitstatus_to_exitcode(status) if pid else None
        return self.returncode


class WarmRanks:
    """The side of the node."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._environment = _looked_at(os.environ)

    def popen(self, command: Sequence[str], *, env: Mapping[str, str], stdout: Any, pass_fds: Any, **other: Any) -> Any:
        from atoll.node.daemon import child

        tied = [sys.executable, "-I", "-S", child.__file__, "--"]
        if list(command[: len(tied)]) != tied or not _is_python(command[len(tied) :]) or not self._fits(env):
            return subprocess.Popen(command, env=env, stdout=stdout, pass_fds=pass_fds, **other)
        request = {
            "command": list(command),
            "environment": dict(env),
            "fds": list(pass_fds),
            "folder": os.getcwd(),
            "most_fds": resource.getrlimit(resource.RLIMIT_NOFILE),
        }
        socket.send_fds(self._connection, [json.dumps(request).encode()], [stdout.fileno(), *pass_fds])
        return Rank(int(self._connection.recv(64)))

    def _fits(self, environment: Mapping[str, str]) -> bool:
        return _looked_at(environment) == self._environment


def _looked_at(environment: Mapping[str, str]) -> dict[str, str]:
    return {k: value for k, value in environment.items() if k.startswith(READ_AT_IMPORT) and k not in SET_BY_THE_NODE}


def _is_python(command: Sequence[str]) -> bool:
    """Whether it is a script or a module, of this environment."""
    words = [word for word in command[1:] if word != "-P"]
    return command[0] == sys.executable and bool(words) and (not words[0].startswith("-") or words[0] == "-m")


def begin_beside_node() -> None:
    """In the process that is to be a node, before it has a thread. Returns in it, and in each fork that is a rank,
    which is `Becomes`."""
    from atoll.node.daemon import worker_tree

    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    node = os.getpid()
    if os.fork() == 0:
        ours.close()
        _serve(theirs, node)
    theirs.close()
    ranks = WarmRanks(ours)
    starts: Any = worker_tree
    starts.subprocess = types.SimpleNamespace(Popen=ranks.popen, DEVNULL=subprocess.DEVNULL)


def _serve(server: socket.socket, node: int) -> None:
    """Ends with the node. Raises Becomes in each fork."""
    _libc().prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    os.setsid()  # what ends the node's group does not end it: the node ends its ranks
    _show(arguments=BESIDE_A_NODE)
    nothing = os.open(os.devnull, os.O_RDWR)
    for fd in (0, 1, 2):
        os.dup2(nothing, fd)  # the end of the node's output is the node's end
    os.close(nothing)
    while os.getppid() == node:
        message, descriptors, _, _ = socket.recv_fds(server, MAX_MESSAGE_BYTES, MAX_FDS)
        if not message:
            break
        is_shown, shows = os.pipe()
        pid = _libc().syscall(_SYS_CLONE, _CLONE_PARENT | signal.SIGCHLD, 0, 0, 0, 0)
        if pid == 0:
            ctypes.pythonapi.PyOS_AfterFork_Child()
            _guard(shows, descriptors, **json.loads(message))
        for fd in (shows, *descriptors):
            os.close(fd)
        os.read(is_shown, 1)  # its end: /proc has the fork's own marks, or there is no fork any more
        os.close(is_shown)
        server.send(str(pid).encode())
    os._exit(0)


def _guard(
    shows: int,
    descriptors: list[int],
    *,
    command: list[str],
    environment: dict[str, str],
    fds: list[int],
    folder: str,
    most_fds: tuple[int, int],
) -> NoReturn:
    """What subprocess.Popen and exec do, and then what child.py does. `shows` is closed once /proc has the command.
    Raises Becomes in what it guards."""
    from atoll.node.daemon import child

    os.setsid()
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    os.dup2(descriptors[0], 2)  # for errors
    resource.setrlimit(resource.RLIMIT_NOFILE, most_fds)
    above = max((2, *fds)) + 1
    shows, *high = (fcntl.fcntl(fd, fcntl.F_DUPFD, above) for fd in (shows, *descriptors))  # where no fd is wanted
    for given, wanted in zip((high[0], *high), (2, 1, *fds), strict=True):
        os.dup2(given, wanted)
    _close_all_but({0, 1, 2, shows, *fds})
    os.chdir(folder)
    os.environ.clear()  # nothing points to where /proc has them from here on
    os.environ.update(environment)
    _show(arguments=command, variables=os.environ)
    os.close(shows)
    os.execvp = _become  # type: ignore[assignment]
    try:
        child.main(command[command.index(child.__file__) + 1 :])
    except Becomes:
        raise
    except BaseException:
        traceback.print_exc()
    os._exit(1)


def _become(file: str, command: list[str]) -> NoReturn:
    os.execvp = _execvp
    raise Becomes(command)


def _close_all_but(kept: set[int]) -> None:
    for fd in map(int, os.listdir("/proc/self/fd")):
        if fd not in kept:
            with contextlib.suppress(OSError):  # that of the folder itself
                os.close(fd)


def _show(*, arguments: Sequence[str], variables: Mapping[str, str] | None = None) -> None:
    """In /proc. `variables`: once libc has none any more where /proc has them."""
    with open("/proc/self/stat", encoding="utf-8") as file:
        fields = file.read().rpartition(")")[2].split()
    arg_start, arg_end, env_start, env_end = map(int, fields[45:49])
    shown = [(arg_start, arg_end, list(arguments))]
    if variables is not None:
        shown.append((env_start, env_end, [f"{name}={value}" for name, value in variables.items()]))
    for start, end, words in shown:
        data = b"".join(os.fsencode(word) + b"\0" for word in words)
        assert len(data) <= end - start, f"{len(data)} bytes for /proc, and room for {end - start}"
        ctypes.memmove(start, data.ljust(end - start, b"\0"), end - start)


def become(command: list[str]) -> None:
    """Goes on as that Python command, up to its end."""
    _show(arguments=command, variables=os.environ)
    for number in signal.valid_signals():
        if callable(signal.getsignal(number)):
            signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for number in (signal.SIGPIPE, signal.SIGXFSZ):
        signal.signal(number, signal.SIG_IGN)
    is_safe = command[1] == "-P"
    words = command[2:] if is_safe else command[1:]
    main = types.ModuleType("__main__")
    sys.modules["__main__"] = main
    if words[0] == "-m":
        sys.argv = words[1:]
        sys.path[:1] = [] if is_safe else [os.getcwd()]
        runpy._run_module_as_main(words[1])  # type: ignore[attr-defined]
        return
    sys.argv = words
    sys.path[:1] = [] if is_safe else [os.path.dirname(os.path.realpath(words[0]))]
    main.__file__ = words[0]
    with open(words[0], "rb") as file:
        code = compile(file.read(), words[0], "exec")
    exec(code, main.__dict__)  # noqa: S102 -- the script


def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)
