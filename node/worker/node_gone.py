"""The node has gone: the script's own clean-up runs for a bounded time, then this process ends, whatever hangs.

A signal raises NodeGone in the main thread, out of whatever Python or the kernel does there: `finally` blocks, `with`
blocks and `atexit` run. What hangs outside of Python (a driver, a collective) hears of no signal: the thread that saw
the node go ends the process, and where Python itself is already being taken apart the kernel's alarm does.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
from collections.abc import Callable
from types import FrameType

EXIT_NODE_GONE = 17
"""Exit code of a worker whose node went away."""
CLEAN_UP_S = 3.0
"""Of the script. `node/daemon/child.py` ends it a second later, with all that it started."""
ALARM_S = 4
"""The kernel's, in whole seconds."""
SIGNAL = signal.SIGRTMAX - 2
"""To the main thread; not one that scripts or schedulers use."""


class NodeGone(SystemExit):
    """Ends the script as `sys.exit` does: no handler of errors takes it for one."""

    def __init__(self, *_: object) -> None:
        super().__init__(EXIT_NODE_GONE)


def prepare() -> None:
    """Before the node can go. Elsewhere than in the main thread, only callers of the node hear of its end."""
    if threading.current_thread() is threading.main_thread() and signal.getsignal(SIGNAL) is signal.SIG_DFL:
        signal.signal(SIGNAL, _raise)


def end_process(line: str, wake_callers: Callable[[], None]) -> None:
    """In a thread that is not the main one; does not return. `wake_callers`: they raise NodeGone."""
    try:
        os.write(sys.__stderr__.fileno() if sys.__stderr__ else 2, line.encode())
    except OSError:
        pass  # the node read our output; nobody is left to read this line
    end_after(ALARM_S)
    main = threading.main_thread()
    if signal.getsignal(SIGNAL) is _raise and main.ident is not None and main.is_alive():
        signal.pthread_kill(main.ident, SIGNAL)
    wake_callers()  # after the signal: the main thread may be one of them, and is to raise once
    threading.Event().wait(CLEAN_UP_S)
    os._exit(EXIT_NODE_GONE)


def end_after(alarm_s: int) -> None:
    """The kernel ends this process then, without Python: a handler of the script's own is not asked."""
    libc = ctypes.CDLL(None)
    libc.signal(signal.SIGALRM, 0)
    libc.alarm(alarm_s)


def _raise(number: int, frame: FrameType | None) -> None:
    raise NodeGone
