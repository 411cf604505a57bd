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


OF_A_THREAD = """
import asyncio, signal, sys, threading
from atoll.protocol.signals import Signals

ROUNDS = 50  # a signal may come just before the loop waits, which shows nothing

async def serve():
    heard, waits = asyncio.Event(), threading.Event()
    signals = Signals(lambda name: heard.set(), lambda name: None, 1e6)
    loop, select = asyncio.get_running_loop(), asyncio.get_running_loop()._selector.select
    thread = threading.Thread(target=threading.Event().wait, daemon=True)
    thread.start()

    def send():
        waits.wait()
        signal.pthread_kill(thread.ident, int(sys.argv[1]))

    def once(timeout):
        loop._selector.select = select
        waits.set()
        return select(timeout)

    for _ in range(ROUNDS):
        waits.clear()
        threading.Thread(target=send, daemon=True).start()
        loop._selector.select = once
        await heard.wait()
        heard.clear()
        signals.num_heard = 0
    signals.close()

asyncio.run(serve())
"""


@pytest.mark.parametrize("number", [SIGINT, SIGTERM])
def test_one_that_another_thread_has_got_is_heard_while_the_loop_waits_for_nothing(number: int) -> None:
    done = subprocess.run([sys.executable, "-c", OF_A_THREAD, str(number)], check=False, timeout=LIMIT_S)
    assert done.returncode == 0
