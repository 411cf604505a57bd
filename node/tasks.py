"""Tasks: their errors are heard; several that run together; and their end."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterable
from typing import Any


def watched(work: Coroutine[Any, Any, None], failed: Callable[[BaseException], None]) -> asyncio.Task[None]:
    """Run it; `failed` hears of what it raises."""

    def ended(task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            failed(error)

    task = asyncio.get_running_loop().create_task(work)
    task.add_done_callback(ended)
    return task


class Tasks(set[asyncio.Task[None]]):
    """Those that have not ended, of one owner."""

    def __init__(self, failed: Callable[[BaseException], None]) -> None:
        super().__init__()
        self._failed = failed

    def spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = watched(work, self._failed)
        self.add(task)
        task.add_done_callback(self.discard)
        return task


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
