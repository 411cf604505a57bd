"""A copy of the store, whole as of one moment. It is made beside the store while nothing is decided, and brought to its
place after that: a slow target holds up nobody."""

from __future__ import annotations

import asyncio
import logging
import os
import re
import shutil
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path

from atoll.coordinator.store import Store
from atoll.protocol.disk import PRIVATE_FILE, sync_folder
from atoll.protocol.errors import ConfigError, HostError
from atoll.protocol.threads import run_to_its_end

log = logging.getLogger("atoll.coordinator")

COPY = ".copy-"
"""In the name of a copy that is being made, behind that of the store."""
TOKEN_BYTES = 16
_LEFT_OVER = rf"[0-9a-f]{{{2 * TOKEN_BYTES}}}(-journal|-wal|-shm)?"
"""What follows: no name that a person gives to a copy of theirs."""


def place_of(beside: Path, token: bytes) -> Path:
    """Where a copy is made. `beside`: the store's file; `token`: TOKEN_BYTES, of this copy alone."""
    return beside.with_name(f"{beside.name}{COPY}{token.hex()}")


async def backup(store: Store, made: Path, to: Path, deciding: asyncio.Lock, last_commit: Callable[[], int]) -> int:
    """The newest commit that the copy has. `made`: its `place_of`; `last_commit`: of the run. Raises ConfigError and
    HostError; nothing has the name `to` then that had not before."""
    try:
        await asyncio.to_thread(_check, to)
        async with deciding:
            await run_to_its_end(partial(store.copy_to, made))
            commit = last_commit()
        await run_to_its_end(partial(_publish, made, to))
    except (OSError, ValueError) as error:
        raise HostError(
            f"no copy at {to}: {error}; the coordinator writes it: its user has to be let there, and its unit "
            "(ReadWritePaths=); the run goes on"
        ) from None
    finally:
        await asyncio.to_thread(made.unlink, missing_ok=True)
    return commit


def remove_left_over(beside: Path) -> None:
    """Copies that a coordinator had begun to make when it was killed, and nothing else. `beside`: the store's file,
    which is this process's."""
    begins = f"{beside.name}{COPY}"
    for path in beside.parent.iterdir():
        if path.name.startswith(begins) and re.fullmatch(_LEFT_OVER, path.name.removeprefix(begins)):
            try:
                path.unlink(missing_ok=True)
            except OSError as error:
                log.warning("%s, a copy that was not finished, cannot be removed: %s", path, error.strerror)


def _check(to: Path) -> None:
    if not to.is_absolute() or os.path.lexists(to):
        raise ConfigError(f"{to} is there already, or is no full path: name a new file for the copy")


def _publish(made: Path, to: Path) -> None:
    """Takes the name of nobody. Raises OSError."""
    part = to.with_name(f"{to.name[:64]}{made.suffix}")
    descriptor = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, PRIVATE_FILE)
    try:
        with made.open("rb") as source, open(descriptor, "wb") as target:
            shutil.copyfileobj(source, target, 1 << 20)
            target.flush()
            os.fsync(target.fileno())
        os.link(part, to)
    finally:
        with suppress(OSError):
            part.unlink()
    sync_folder(to.parent)
