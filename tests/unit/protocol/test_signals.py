"""Signals of a process that ends: the second one ends it, whenever it comes."""

from __future__ import annotations

import subprocess
import sys

import pytest

from atoll.protocol.exit_codes import ENDED_AT_ONCE

LIMIT_S = 60.0
PROGRAM = """
import asyncio, os, signal, sys, threading
from atoll.protocol.signals import Signals

async def serve():
    this = asyncio.current_task()
    signals = Signals(lambda name: this.cancel(), lambda name: None, 1e6)
    asyncio.get_running_loop().run_in_executor(None, threading.Event().wait)  # a disk that is stuck
    number = int(sys.argv[1])
    os.kill(os.getpid(), number)
    try:
        await asyncio.get_running_loop().create_future()
    finally:
        signals.close()
        os.kill(os.getpid(), number)

asyncio.run(serve())
"""
SIGINT, SIGTERM = 2, 15


@pytest.mark.parametrize("number", [SIGINT, SIGTERM])
def test_the_second_is_heard_when_all_is_closed_and_the_loop_waits_for_threads(number: int) -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM, str(number)], check=False, timeout=LIMIT_S)
    assert done.returncode == ENDED_AT_ONCE
