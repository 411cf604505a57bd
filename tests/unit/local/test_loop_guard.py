"""The guard of event loops sees what it is for, and nothing else."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from atoll.node.dataplane.disk import allocate, write_whole
from atoll.node.threads import run_to_its_end
from tests.harness.loop_guard import BlockingInLoop


def in_a_callback(work: Callable[[], object]) -> None:
    """Without a test among its callers, as an event of a node. Raises what it raises."""

    async def main() -> None:
        failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        done = asyncio.Event()
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(lambda _, context: failed.set_exception(context["exception"]))
        loop.call_soon(work)
        loop.call_soon(done.set)
        await done.wait()
        if failed.done():
            await failed

    asyncio.run(main())


@pytest.mark.parametrize("kind", ["posix_fallocate", "fsync", "unlink"])
def test_what_waits_for_a_disk_raises_in_a_loop_by_its_kind(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "large"
    path.touch()
    work: dict[str, Callable[[], object]] = {
        "posix_fallocate": partial(allocate, path, 10),
        "fsync": partial(write_whole, path, b"x", fsync=True),
        "unlink": partial(os.unlink, path),
    }
    with pytest.raises(BlockingInLoop, match=f"{kind} of "):
        in_a_callback(work[kind])
    assert path.exists()


def test_threads_small_files_and_tests_are_let_through(tmp_path: Path) -> None:
    async def main() -> None:
        await run_to_its_end(lambda: allocate(tmp_path / "large", 10))
        allocate(tmp_path / "own", 10)

    asyncio.run(main())
    in_a_callback(partial(write_whole, tmp_path / "branch", b"1", fsync=True))
    assert (tmp_path / "branch").read_bytes() == b"1"
