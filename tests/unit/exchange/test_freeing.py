"""Memory of what is dropped is given back in a thread: the system needs long for much of it."""

from __future__ import annotations

import asyncio
import gc
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from atoll.node.exchange.peers.frames import Encoded
from atoll.node.exchange.sync.retained import Retained
from atoll.node.exchange.sync.spill import Spill

freed_in: list[str] = []


class Noted(bytes):
    def __del__(self) -> None:
        freed_in.append(threading.current_thread().name)


@pytest.mark.parametrize("kept", [None, 1])
def test_contributions_that_are_dropped_are_freed_in_a_thread(kept: int | None, tmp_path: Path) -> None:
    spill = Spill(tmp_path / "spill", 1 << 20)
    pool = ThreadPoolExecutor(1, thread_name_prefix="freeing")
    held = Retained(pool, spill)
    freed_in.clear()
    for chunk in range(3):
        for item in held.kept([Encoded(chunk, Noted(b"abcd"), b"h")]):
            held.add(1, 1, item)
        del item
    assert (held.num_bytes, spill.memory_bytes) == (12, 12)
    with pool:
        if kept is None:
            held.drop()
        else:
            asyncio.run(held.keep(lambda key: key[2] == kept))
    assert held.num_bytes == spill.memory_bytes == (0 if kept is None else 4)
    gc.collect()
    assert freed_in == ["freeing_0"] * (3 if kept is None else 2)
    held.drop()  # the pool is closed: then they are freed here
    assert held.num_bytes == 0
    assert len(freed_in) == 3
