"""What a process uses of its machine, for people."""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass
from pathlib import Path

PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


@dataclass(frozen=True, slots=True, kw_only=True)
class Resources:
    memory_bytes: int = 0
    """Resident, of this process."""
    disk_free_bytes: int = 0
    disk_total_bytes: int = 0


def resident_bytes() -> int:
    with open("/proc/self/statm", "rb") as file:
        return int(file.read().split()[1]) * PAGE_BYTES


def measure(folder: Path) -> Resources:
    """Of this process, and of the disk of `folder`; that may be stuck, so in a thread. Zeros of what cannot be read."""
    try:
        disk = shutil.disk_usage(folder)
        return Resources(memory_bytes=resident_bytes(), disk_free_bytes=disk.free, disk_total_bytes=disk.total)
    except OSError:
        return Resources()
