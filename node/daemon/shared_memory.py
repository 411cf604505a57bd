"""Memory that the node shares with its workers: memfds, allocated for real, passed over the local socket.

A memfd has no name, needs no /dev/shm and dies with its last holder. It is filled when it is made, because a sparse
mapping kills by SIGBUS later.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
from dataclasses import dataclass
from pathlib import Path

from atoll.protocol.errors import HostError
from atoll.protocol.text import byte_count

RESERVE_BYTES = 32 << 20
"""Left free for everything else when a limit is near."""


@dataclass(frozen=True, slots=True)
class MemoryLimit:
    """What may still be allocated, and what sets the limit, in words."""

    available_bytes: int
    source: str


class SharedBuffer:
    """`num_bytes` of zeros that other processes can map through `fd`.

    Raises HostError if the memory is not there, naming what is needed and what the limit is.
    """

    def __init__(self, num_bytes: int, name: str, limit: MemoryLimit | None = None) -> None:
        self.num_bytes = num_bytes
        self.name = name
        limit = limit or memory_limit()
        # Asked beforehand, because going over a control group's limit ends in its out-of-memory killer, not an error.
        if num_bytes + RESERVE_BYTES > limit.available_bytes:
            raise HostError(_too_small(name, num_bytes, limit))
        self._fd = -1
        fd = os.memfd_create(f"atoll-{name}", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.posix_fallocate(fd, 0, num_bytes)
            # A worker that truncates it would kill the node by SIGBUS.
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
            self._map = mmap.mmap(fd, num_bytes)
        except OSError as error:
            os.close(fd)
            if error.errno in (errno.ENOMEM, errno.ENOSPC, errno.EFBIG):
                raise HostError(f"{_too_small(name, num_bytes, limit)} ({error.strerror})") from None
            raise HostError(f"{name}: {num_bytes} bytes of shared memory could not be mapped: {error}") from error
        self._fd = fd
        self.view = memoryview(self._map)

    @property
    def fd(self) -> int:
        if self._fd < 0:
            raise HostError(f"{self.name} is closed")
        return self._fd

    @property
    def fds(self) -> tuple[int, ...]:
        """What ranks are passed."""
        return (self.fd,)

    def close(self) -> None:
        """Idempotent. The memory is freed when the last view of it, here or in another process, is gone."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
            self.view = memoryview(b"")
            del self._map


def memory_limit(proc: Path = Path("/proc"), cgroups: Path = Path("/sys/fs/cgroup")) -> MemoryLimit:
    """The tightest of this host's free memory and the limits of this process's control groups (v1 and v2)."""
    limits = [_host_limit(proc)]
    for line in (proc / "self/cgroup").read_text().splitlines():
        number, controllers, path = line.split(":", 2)
        if number == "0":
            limits += _group_limits(cgroups, path, "memory.max", "memory.current", "inactive_file")
        elif "memory" in controllers.split(","):
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
            limits += _group_limits(cgroups / "memory", path, *names)
    return min(limits, key=lambda limit: limit.available_bytes)


def _host_limit(proc: Path) -> MemoryLimit:
    for line in (proc / "meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return MemoryLimit(int(line.split()[1]) << 10, "the free memory of this host (MemAvailable)")
    raise HostError(f"{proc / 'meminfo'} does not say MemAvailable; a Linux kernel of 3.14 or newer is needed")


def _group_limits(root: Path, path: str, limit_name: str, usage_name: str, reclaimable: str) -> list[MemoryLimit]:
    """Of a group and all groups above it. Inside a container the path may name groups that cannot be seen from it."""
    result = []
    group = root / path.lstrip("/")
    for folder in (group, *group.parents):
        if not folder.is_relative_to(root):
            break
        try:
            limit = (folder / limit_name).read_text().strip()
            usage = int((folder / usage_name).read_text())
            stat = (folder / "memory.stat").read_text()
        except (FileNotFoundError, PermissionError):
            continue  # the root group of v2 has no limit; groups outside a container are not there
        if limit == "max" or int(limit) >= 1 << 60:
            continue
        cache = next((int(v) for k, v in map(str.split, stat.splitlines()) if k == reclaimable), 0)
        available = max(0, int(limit) - usage + cache)
        result.append(MemoryLimit(available, f"{folder / limit_name}, which is {byte_count(int(limit))}"))
    return result


def _too_small(name: str, num_bytes: int, limit: MemoryLimit) -> str:
    return (
        f"{name} needs {num_bytes} bytes ({byte_count(num_bytes)}) of shared memory and {byte_count(RESERVE_BYTES)} to "
        f"spare; {limit.available_bytes} bytes ({byte_count(limit.available_bytes)}) are available, limited by "
        f"{limit.source}. Free memory, raise that limit, or train a smaller model"
    )
