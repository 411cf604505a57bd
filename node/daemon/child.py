"""Run as a file, before each worker and launcher: `python -I -S child.py [--output FOLDER] -- COMMAND ...`.

It ties the process to its parent (SIGKILL when that dies, whatever this process is doing), sends its output to the pipe
of its rank in FOLDER, and becomes COMMAND. Standard library only, and little of it: this runs for every rank.
"""

import ctypes
import os
import signal
import sys

ENV_PARENT = "ATOLL_PARENT_PID"
_PR_SET_PDEATHSIG = 1


def main(arguments: list[str]) -> None:
    split = arguments.index("--")
    options, command = arguments[:split], arguments[split + 1 :]
    if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL) != 0:
        sys.exit(f"atoll: prctl(PR_SET_PDEATHSIG): {os.strerror(ctypes.get_errno())}")
    if os.getppid() != int(os.environ[ENV_PARENT]):
        sys.exit("atoll: the parent of this process is gone already")
    os.environ[ENV_PARENT] = str(os.getpid())  # of what COMMAND starts; exec keeps the id
    if options:
        path = f"{options[1]}/rank-{os.environ['LOCAL_RANK']}"
        pipe = os.open(path, os.O_WRONLY | os.O_NONBLOCK)  # does not wait for a reader: without one there is no node
        os.set_blocking(pipe, True)
        os.dup2(pipe, 1)
        os.dup2(pipe, 2)
        os.close(pipe)
    try:
        os.execvp(command[0], command)
    except OSError as error:
        sys.exit(f"atoll: cannot run {command[0]}: {error.strerror}")


if __name__ == "__main__":
    main(sys.argv[1:])
