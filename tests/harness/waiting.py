"""A plugin of pytest: of a test that hangs, what each task of the event loop waits for. pytest-timeout shows threads,
and of a loop that waits for the network no more than that."""

from __future__ import annotations

import asyncio
import inspect
import signal
import sys
from collections.abc import Generator
from functools import partial
from typing import Any

import pytest


@pytest.hookimpl(wrapper=True)
def pytest_timeout_set_timer() -> Generator[None, object, object]:
    is_set = yield
    fail = signal.getsignal(signal.SIGALRM)
    if callable(fail):
        signal.signal(signal.SIGALRM, partial(_say_what_waits, fail))
    return is_set


def _say_what_waits(fail: Any, *signalled: Any) -> None:
    __tracebackhide__ = True
    loop = asyncio._get_running_loop()
    for task in asyncio.all_tasks(loop) if loop is not None else ():
        sys.stderr.write(f"{task.get_name()}, innermost last:\n")
        sys.stderr.writelines(f"  {line}\n" for line in awaited(task))
    fail(*signalled)


def awaited(task: asyncio.Task[Any]) -> list[str]:
    """The lines at which it waits, from its outermost coroutine to its innermost."""
    lines: list[str] = []
    waits: Any = task.get_coro()
    while inspect.iscoroutine(waits):
        line = waits.cr_frame.f_lineno if waits.cr_frame is not None else waits.cr_code.co_firstlineno
        lines.append(f"{waits.cr_code.co_filename}:{line} {waits.cr_code.co_qualname}")
        waits = waits.cr_await
    return lines
