"""Work of a node that computes in a thread of the disk's, of which there are many."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TypeVar

from atoll.protocol.codecs import scratch
from atoll.protocol.threads import run_to_its_end

T = TypeVar("T")


async def compute(work: Callable[[], T]) -> T:
    """As `run_to_its_end`. The arrays that the work computed in are free after it: else each of these threads would
    have some in the end, where one at a time needs them."""
    return await run_to_its_end(partial(scratch.freed, work))
