"""Arrays that threads compute in: those of the disk keep none."""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from atoll.node.computing import compute
from atoll.protocol.codecs import scratch


def computes() -> weakref.ref[Any]:
    array = scratch.array("average", 64).base
    assert isinstance(array, np.ndarray)
    assert scratch.array("average", 16).base is array, "a thread uses it again"
    return weakref.ref(array)


def fails() -> None:
    failures.append(computes())
    raise ValueError("as it is")


failures: list[weakref.ref[Any]] = []


@pytest.mark.parametrize("work", [computes, fails])
def test_a_thread_of_the_disk_keeps_nothing_of_what_it_computed_in(work: Callable[[], Any]) -> None:
    async def run() -> bool:
        """While the thread is there."""
        try:
            kept = await compute(work)
        except ValueError:
            kept = failures.pop()
        return kept() is None

    assert asyncio.run(run())
