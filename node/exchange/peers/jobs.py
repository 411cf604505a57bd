"""Tasks: work on what a stream brought, beside the reading of it; several that run together; and their end."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterable
from typing import Any, TypeVar

T = TypeVar("T")


class Jobs:
    """At most `limit` jobs at once; a job that fails ends the reading at once."""

    def __init__(self, limit: int) -> None:
        self._limit = asyncio.Semaphore(limit)
        self._jobs: set[asyncio.Task[None]] = set()
        self._failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._failed.add_done_callback(lambda f: f.cancelled() or f.exception())  # may be nobody's concern any more

    async def read(self, reading: Coroutine[Any, Any, T]) -> T:
        """The result of `reading`. Raises what a job raised meanwhile."""
        task = asyncio.ensure_future(reading)
        both: set[asyncio.Future[Any]] = {task, self._failed}
        try:
            await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
            if self._failed.done():
                self._failed.result()
            return await task
        finally:
            task.cancel()

    async def begin(self, job: Coroutine[Any, Any, None]) -> None:
        """Waits for a place."""
        await self._limit.acquire()
        task = asyncio.ensure_future(job)
        self._jobs.add(task)
        task.add_done_callback(self._ended)

    async def finish(self) -> None:
        """Waits for all jobs. None is ever cancelled: they are short, what a thread does cannot be stopped, and what it
        brings is not lost."""
        if self._jobs:
            await asyncio.wait(self._jobs)
        if self._failed.done():
            self._failed.result()

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._jobs.discard(task)
        self._limit.release()
        error = None if task.cancelled() else task.exception()
        if error is not None and not self._failed.done():
            self._failed.set_exception(error)


async def together(work: list[Coroutine[Any, Any, None]]) -> None:
    """Runs them together; the first error, or a cancellation, ends all. When this returns all have ended."""
    tasks = [asyncio.create_task(coroutine) for coroutine in work]
    try:
        await asyncio.gather(*tasks)
    finally:
        await end(tasks)


async def end(tasks: Iterable[asyncio.Task[Any]]) -> None:
    """Cancels them. When this returns all have ended."""
    ended = list(tasks)
    for task in ended:
        task.cancel()
    await asyncio.gather(*ended, return_exceptions=True)
