"""A worker with a clean-up of its own, which its node leaves: `cleaning_worker.py FOLDER how`.

How it waits and ends: "sleeps" in the kernel; "takes-time" and "hangs" in its clean-up; "hangs-beside-python", where no
thread of Python runs meanwhile. It writes FOLDER/begun and FOLDER/ended in its clean-up.
"""

from __future__ import annotations

import atexit
import ctypes
import os
import sys
import threading
import time
from pathlib import Path

from atoll.node.worker import node_gone
from atoll.node.worker.client import LocalClient

LIMITS = {"sleeps": (60.0, 60), "takes-time": (60.0, 60), "hangs": (8.0, 60), "hangs-beside-python": (60.0, 8)}
"""Of the thread and of the kernel, in seconds: a busy machine comes to the clean-up before them, and which of them ends
it is told apart."""


def main(folder: Path, how: str) -> None:
    node_gone.CLEAN_UP_S, node_gone.ALARM_S = LIMITS[how]
    client = LocalClient.from_environment()
    assert client is not None

    def clean_up() -> None:
        (folder / "begun").touch()
        if how == "takes-time":
            time.sleep(0.5)  # of the four seconds that there are: whoever has none is ended before
        elif how == "hangs":
            threading.Event().wait()
        elif how == "hangs-beside-python":
            pipe, _ = os.pipe()
            ctypes.PyDLL(None).read(pipe, ctypes.create_string_buffer(1), 1)
        client.close()
        (folder / "ended").touch()

    atexit.register(clean_up)
    try:
        sys.stdout.write(f"pid {os.getpid()}\n")  # from here on its node may go
        sys.stdout.flush()
        time.sleep(1000)
    except Exception:  # of a script that goes on after an error
        time.sleep(1000)
    finally:
        (folder / "unwound").touch()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
