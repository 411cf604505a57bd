"""Work in threads: some that changes what a lock protects, and some that several threads share."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable, Iterable
from concurrent.futures import FIRST_EXCEPTION, Executor, ThreadPoolExecutor, wait
from contextlib import AbstractContextManager, nullcontext
from typing import TypeVar

log = logging.getLogger("atoll.node")
T = TypeVar("T")
Item = TypeVar("Item")


async def run_to_its_end(work: Callable[[], T], pool: Executor | None = None) -> T:
    """`work` in a thread, which cannot be stopped: who is cancelled waits for it, keeps its locks, and ends then."""
    working = asyncio.get_running_loop().run_in_executor(pool, work)
    try:
        return await asyncio.shield(working)
    except asyncio.CancelledError:
        while not working.done():
            try:
                await asyncio.wait([working])
            except asyncio.CancelledError:
                continue  # cancelled again: it is still writing
        if not working.cancelled() and (error := working.exception()) is not None:
            log.warning("cancelled, and failed: %s", error)
        raise


def giving_way(num_threads: int, name: str, nice: int) -> ThreadPoolExecutor:
    """Threads that get less of busy cores than this one, the less the larger `nice` is. So do threads that these
    start."""
    niceness = os.getpriority(os.PRIO_PROCESS, 0) + nice  # on Linux each thread has its own

    def give_way() -> None:
        os.setpriority(os.PRIO_PROCESS, 0, niceness)

    return ThreadPoolExecutor(num_threads, thread_name_prefix=name, initializer=give_way)


def pool_of(num_threads: int) -> AbstractContextManager[Executor | None]:
    """For `each`. None for one thread: the thread that has the work is enough."""
    return ThreadPoolExecutor(num_threads) if num_threads > 1 else nullcontext()


def each(work: Callable[[Item], T], items: Iterable[Item], pool: Executor | None) -> list[T]:
    """In a thread: `work` on each item, shared out to `pool`; without one it is done here, one item after the other.

    Raises what the first of them raises. None of them goes on after the end: the disk may be rolled back next.
    """
    if pool is None:
        return [work(item) for item in items]
    jobs = [pool.submit(work, item) for item in items]
    wait(jobs, return_when=FIRST_EXCEPTION)
    for job in jobs:
        job.cancel()
    wait(jobs)
    return [job.result() for job in jobs]  # in the order in which they were begun: those that were cancelled come last
