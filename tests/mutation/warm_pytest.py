"""Runs of pytest, each in a fork of one process that has imported the libraries: a mutation's own tests take less time
than those imports.

A fork has memory, files, environment, working folder and a session of its own, and imports the project's code itself.
Started by its path, so that no module of the project is loaded here.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import importlib
import json
import os
import select
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

LIBRARIES = (
    "pytest", "hypothesis.strategies", "hypothesis.internal.conjecture.engine", "numpy", "numba", "grpc.aio",
    "google.protobuf.descriptor_pool", "torch.distributed.tensor",
)  # fmt: skip
"""What many tests import, directly or not. None of them starts a thread, which a fork would lack."""
READY = b"ready\n"
GARBAGE_THRESHOLD = 100_000
"""Until tests begin: what is loaded is no garbage."""


class WarmPytest:
    """The side of the runner: one run at a time."""

    def __init__(self) -> None:
        self._server = subprocess.Popen(
            [sys.executable, "-P", __file__],
            env={name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,
        )
        assert self._server.stdout is not None
        assert self._server.stdout.readline() == READY, "a library could not be imported"

    def run(self, tree: Path, arguments: Sequence[str], limit_s: float) -> tuple[int | None, str]:
        """Exit code and output of `pytest ARGUMENTS` in `tree`; the code is None if it took longer than the limit."""
        output = tree / "output"
        request = {"tree": str(tree), "arguments": list(arguments), "limit_s": limit_s, "output": str(output)}
        assert self._server.stdin is not None
        assert self._server.stdout is not None
        self._server.stdin.write(json.dumps(request).encode() + b"\n")
        self._server.stdin.flush()
        return json.loads(self._server.stdout.readline()), output.read_text(encoding="utf-8", errors="replace")

    def close(self) -> None:
        self._server.communicate()


# --- the process that is forked


def _serve() -> dict[str, Any] | None:
    """In each fork what it is to run; None at the end of the requests."""
    for line in iter(sys.stdin.buffer.readline, b""):
        request: dict[str, Any] = json.loads(line)
        pid = os.fork()
        if pid == 0:
            return request
        print(json.dumps(_ended(pid, request["limit_s"])), flush=True)
    return None


def _ended(pid: int, limit_s: float) -> int | None:
    descriptor = os.pidfd_open(pid)
    try:
        in_time = bool(select.select([descriptor], [], [], limit_s)[0])
    finally:
        os.close(descriptor)
    os.kill(pid, signal.SIGKILL)  # has no effect on one that has ended
    with contextlib.suppress(ProcessLookupError):  # before it had a group of its own
        os.killpg(pid, signal.SIGKILL)  # what it started, too
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    return code if in_time else None


def _become_pytest(tree: str, arguments: list[str], output: str) -> int:
    import pytest

    os.setsid()
    with open(os.devnull, "rb") as nothing, open(output, "wb") as file:
        os.dup2(nothing.fileno(), 0)
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    gc.set_threshold(GARBAGE_THRESHOLD)
    os.chdir(tree)
    sys.path[:0] = [tree, f"{tree}/src"]
    os.environ["PYTHONPATH"] = f"{tree}/src"
    return int(pytest.main(arguments))


@contextlib.contextmanager
def _one_thread() -> Iterator[None]:
    """Libraries for matrices start threads as they are loaded; what the tests start has them as ever."""
    before = os.environ.get("OPENBLAS_NUM_THREADS")
    os.environ["OPENBLAS_NUM_THREADS"] = "1"
    yield
    del os.environ["OPENBLAS_NUM_THREADS"]
    if before is not None:
        os.environ["OPENBLAS_NUM_THREADS"] = before


def _main() -> int:
    with _one_thread():
        for name in LIBRARIES:
            importlib.import_module(name)
        import numba

        numba.njit(lambda: 1)()  # type: ignore[call-arg]  # it loads more with the first function
    assert len(os.listdir("/proc/self/task")) == 1, "a thread would not be in the forks"
    gc.collect()
    gc.freeze()
    sys.stdout.buffer.write(READY)
    sys.stdout.flush()
    if (request := _serve()) is None:
        return 0
    code = _become_pytest(request["tree"], request["arguments"], request["output"])
    atexit._run_exitfuncs()  # they end what the tests have started
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # to take all modules apart takes longer than many a test


if __name__ == "__main__":
    sys.exit(_main())
