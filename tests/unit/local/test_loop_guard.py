"""The guard of event loops sees what it is for, and nothing else."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from atoll.coordinator.core.events import StopRecord
from atoll.coordinator.sqlite_store import SqliteStore
from atoll.protocol import wire
from atoll.protocol.digest import Digest
from atoll.protocol.disk import Disk
from atoll.protocol.layout import Layout
from atoll.protocol.threads import run_to_its_end
from tests.harness.coordinator_story import a_manifest, some_settings
from tests.harness.loop_guard import ENDED, MUCH_BYTES, BlockingInLoop


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
        "posix_fallocate": partial(Disk().allocate, path, 10),
        "fsync": partial(Disk().write_whole, path, b"x", fsync=True),
        "unlink": partial(os.unlink, path),
    }
    with pytest.raises(BlockingInLoop, match=f"{kind} of "):
        in_a_callback(work[kind])
    assert path.exists()


def test_what_grows_with_the_model_raises_in_a_loop_by_its_kind() -> None:
    manifest = a_manifest()
    Digest("small").data(bytes(MUCH_BYTES))
    work: dict[str, Callable[[], object]] = {
        "making of a Layout": partial(Layout, manifest),
        "encode of a manifest": partial(wire.encode, manifest),
        "hash of much": partial(Digest("large").data, bytes(MUCH_BYTES + 1)),
    }
    for kind, blocks in work.items():
        with pytest.raises(BlockingInLoop, match=kind):
            in_a_callback(blocks)


def test_a_commit_of_the_store_raises_in_a_loop(tmp_path: Path) -> None:
    store = SqliteStore(tmp_path / "run.db")
    store.begin(some_settings())
    with pytest.raises(BlockingInLoop, match="persist of 'SqliteStore'"):
        in_a_callback(partial(store.persist, 1, (StopRecord("enough"),), 1.0))
    asyncio.run(run_to_its_end(partial(store.persist, 1, (StopRecord("enough"),), 1.0)))
    store.close()


def test_a_process_that_the_harness_starts_ends_where_something_blocks_its_loop(tmp_path: Path) -> None:
    """Whatever would catch the error there."""
    (tmp_path / "large").touch()
    script = f"""
import asyncio, os
from tests.harness import loop_guard
loop_guard.install(node=False, coordinator=False, ends_process=True)
async def main():
    asyncio.get_running_loop().call_soon(os.unlink, {str(tmp_path / "large")!r})
    await asyncio.sleep(0)
    await asyncio.sleep(0)
asyncio.run(main())
"""
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert ended.returncode == ENDED, ended.stderr
    assert "BlockingInLoop: unlink of" in ended.stderr
    assert (tmp_path / "large").exists()


def test_threads_small_files_and_tests_are_let_through(tmp_path: Path) -> None:
    async def main() -> None:
        await run_to_its_end(lambda: Disk().allocate(tmp_path / "large", 10))
        Disk().allocate(tmp_path / "own", 10)

    asyncio.run(main())
    in_a_callback(partial(Disk().write_whole, tmp_path / "branch", b"1", fsync=True))
    assert (tmp_path / "branch").read_bytes() == b"1"
