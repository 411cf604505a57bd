"""Says what a process can see of how it was started, as JSON in a line, and trains nothing."""

from __future__ import annotations

import io
import json
import os
import resource
import signal
import sys
from pathlib import Path


def own() -> dict[str, object]:
    def words(name: str) -> list[str]:
        return Path(f"/proc/self/{name}").read_text().rstrip("\0").split("\0")

    fds = {fd: os.readlink(f"/proc/self/fd/{fd}") for fd in range(3)}
    return {
        "argv": sys.argv,
        "path": sys.path,
        "main": [__name__, __file__, sys.modules["__main__"].__dict__ is globals()],
        "command": words("cmdline"),
        "variables": sorted(words("environ")) == sorted(f"{k}={v}" for k, v in os.environ.items()),
        "names": sorted(set(os.environ)),
        "fds": [fds[0], fds[1] == fds[2], fds[1].rpartition("/")[2]],
        "more fds": sorted(fd for fd in os.listdir("/proc/self/fd") if int(fd) > 2)[1:],  # but for that of the folder
        "signals": [str(signal.getsignal(n)) for n in (signal.SIGINT, signal.SIGTERM, signal.SIGPIPE, signal.SIGXFSZ)],
        "blocked": [int(number) for number in signal.pthread_sigmask(signal.SIG_BLOCK, ())],
        "is parent": int(os.environ["ATOLL_PARENT_PID"]) == os.getpid(),
        "session": [os.getsid(0) == os.getppid(), os.getpgid(0) == os.getppid()],
        "threads": len(os.listdir("/proc/self/task")),
        "most files": resource.getrlimit(resource.RLIMIT_NOFILE),
        "is unbuffered": isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.write_through,
        "folder": os.getcwd(),
    }


if __name__ == "__main__":
    sys.stdout.write(f"{json.dumps({**own(), 'has torch': 'torch' in sys.modules})}\n")
    sys.exit(3)
