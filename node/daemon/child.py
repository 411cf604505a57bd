"""Run as a file, before each worker, store and torchrun: `python -I -S child.py [--output FOLDER] -- COMMAND ...`.

Without --output it guards COMMAND: it starts it, waits, kills what COMMAND left behind, and ends as it ended. When the
node dies, however suddenly, the guard kills COMMAND and everything that descends from it, after the seconds that a
script has for its own clean-up.
With --output it becomes COMMAND, with the pipe of its rank in FOLDER for its output; this is how torchrun starts ranks.
Either way COMMAND is killed with its parent, whatever it is doing. Standard library only, and little of it.
"""

import ctypes
import os
import resource
import signal
import sys

ENV_PARENT = "ATOLL_PARENT_PID"
_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_NODE_DIED = signal.SIGUSR1
_HEARD = {signal.SIGCHLD, signal.SIGALRM, _NODE_DIED}
CLEAN_UP_S = 4  # a second more than node/worker/node_gone.py takes


def main(arguments: list[str]) -> None:
    split = arguments.index("--")
    options, command = arguments[:split], arguments[split + 1 :]
    if options:
        _tie_to(int(os.environ[ENV_PARENT]), signal.SIGKILL)
        _print_into(f"{options[1]}/rank-{os.environ['LOCAL_RANK']}")
        _become(command)
    signal.pthread_sigmask(signal.SIG_BLOCK, _HEARD)
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)
    guard = os.getpid()
    child = os.fork()
    if child == 0:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _HEARD)
        _tie_to(guard, signal.SIGKILL)
        _become(command)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # COMMAND gets these too; the guard ends with it
    _tie_to(int(os.environ[ENV_PARENT]), _NODE_DIED)
    status = _guard(child)
    _kill_descendants()
    _end_as(status)


def _guard(child: int) -> int:
    """Waits until `child` ends and returns its wait status, or until its time after the death of the node is over, and
    returns SIGKILL's."""
    while True:
        number = signal.sigwait(_HEARD)
        if number == _NODE_DIED:
            signal.alarm(CLEAN_UP_S)
            continue
        if number == signal.SIGALRM:
            return int(signal.SIGKILL)
        while True:
            pid, status = os.waitpid(-1, os.WNOHANG)  # there is at least `child`
            if pid == child:
                return status
            if pid == 0:
                break


def _kill_descendants() -> None:
    """Orphans become children of this process, so killing children until there are none reaches everything."""
    while True:
        for entry in os.listdir("/proc"):
            if entry.isdigit() and _parent_of(entry) == os.getpid():
                try:
                    os.kill(int(entry), signal.SIGKILL)  # our own child: the number cannot be somebody else's
                except ProcessLookupError:
                    pass
        try:
            os.waitpid(-1, 0)
        except ChildProcessError:
            return


def _parent_of(pid: str) -> int:
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
            return int(file.read().rpartition(")")[2].split()[1])
    except OSError:
        return 0


def _end_as(status: int) -> None:
    code = os.waitstatus_to_exitcode(status)
    if code >= 0:
        os._exit(code)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # one core file is enough
    if -code not in (signal.SIGKILL, signal.SIGSTOP):
        signal.signal(-code, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {-code})
    os.kill(os.getpid(), -code)


def _tie_to(parent: int, number: int) -> None:
    """Get this signal when the parent dies."""
    _prctl(_PR_SET_PDEATHSIG, number)
    if os.getppid() != parent:
        os.kill(os.getpid(), number)  # it died before


def _prctl(option: int, value: int) -> None:
    if ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0) != 0:
        _fail(f"prctl({option}): {os.strerror(ctypes.get_errno())}")


def _print_into(path: str) -> None:
    pipe = os.open(path, os.O_WRONLY | os.O_NONBLOCK)  # does not wait for a reader: without one there is no node
    os.set_blocking(pipe, True)
    os.dup2(pipe, 1)
    os.dup2(pipe, 2)
    os.close(pipe)


def _become(command: list[str]) -> None:
    os.environ[ENV_PARENT] = str(os.getpid())  # of what COMMAND starts; exec keeps the number
    for number in (signal.SIGPIPE, signal.SIGXFSZ):  # Python ignores these, and exec would pass that on
        signal.signal(number, signal.SIG_DFL)
    try:
        os.execvp(command[0], command)
    except OSError as error:
        _fail(f"cannot run {command[0]}: {error.strerror}")


def _fail(text: str) -> None:
    os.write(2, f"atoll: {text}\n".encode())
    os._exit(127)


if __name__ == "__main__":
    main(sys.argv[1:])
