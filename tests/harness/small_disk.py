"""File systems of a test's own, for root."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest


@contextmanager
def small_disk(folder: Path, size_bytes: int) -> Iterator[Callable[[], Path]]:
    """A file system of that size at `folder`, and what fills it with a file."""
    if os.geteuid() != 0:
        pytest.skip("mounting a file system needs root")
    folder.mkdir(parents=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size_bytes}", "tmpfs", str(folder)], check=True)

    def fill() -> Path:
        path = folder / "filler"
        with path.open("wb") as file:
            while (left := os.statvfs(folder).f_bavail * os.statvfs(folder).f_frsize) > 0:
                file.write(bytes(left))
                file.flush()
        return path

    try:
        yield fill
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


@contextmanager
def read_only(folder: Path) -> Iterator[None]:
    subprocess.run(["mount", "-o", "remount,ro", str(folder)], check=True)
    try:
        yield
    finally:
        subprocess.run(["mount", "-o", "remount,rw", str(folder)], check=True)
