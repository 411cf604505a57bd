"""Work on what a stream brought, beside the reading of it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, TypeVar

from atoll.node.exchange.peers.frames import Encoded, PartAssembler
from atoll.protocol.v1 import peer_pb2

T = TypeVar("T")


JOBS_AHEAD = 4
"""Frames whose chunks wait for a thread or the disk before reading pauses."""


async def take_chunks(
    read: Callable[[], Coroutine[Any, Any, Sequence[peer_pb2.Part] | None]],
    expect: Callable[[int], int],
    keep: Callable[[list[Encoded]], Coroutine[Any, Any, None]],
) -> None:
    """What a stream brings: `read` gives the parts of a message, None at the end; `expect` is `PartAssembler`'s.

    Chunks are kept beside the reading, which ends at once if that fails. What arrived whole is kept whatever ends it.
    """
    assembler = PartAssembler(expect)
    jobs: set[asyncio.Task[None]] = set()
    try:
        while (parts := await _beside(jobs, read())) is not None:
            done = [item for part in parts if (item := assembler.add(part)) is not None]
            if done:
                if len(jobs) == JOBS_AHEAD:
                    await asyncio.wait(jobs, return_when=asyncio.FIRST_COMPLETED)
                job = asyncio.ensure_future(keep(done))
                job.add_done_callback(lambda f: f.cancelled() or f.exception())  # may be nobody's concern any more
                jobs.add(job)
    finally:
        # None is ever cancelled: they are short, what a thread does cannot be stopped, and what it brings is not lost.
        if jobs:
            await asyncio.wait(jobs)
        for job in jobs:
            job.result()


async def _beside(jobs: set[asyncio.Task[None]], reading: Coroutine[Any, Any, T]) -> T:
    """The result of `reading`. Raises what a job raised meanwhile; those that have ended are taken out."""
    task = asyncio.ensure_future(reading)
    try:
        while True:
            for job in [job for job in jobs if job.done()]:
                jobs.remove(job)
                job.result()
            if task.done():
                return task.result()
            await asyncio.wait({task, *jobs}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        task.cancel()
