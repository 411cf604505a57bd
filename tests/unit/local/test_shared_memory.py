"""Rule 32: shared memory is allocated for real, and an error names what is needed and what the limit is."""

from __future__ import annotations

import mmap
import os
import resource
import signal
from pathlib import Path

import pytest

from atoll.node.daemon.shared_memory import RESERVE_BYTES, MemoryLimit, SharedBuffer, memory_limit
from atoll.protocol.errors import HostError


def test_real_memory_that_others_see_and_cannot_shrink() -> None:
    buffer = SharedBuffer(1 << 20, "SNAPSHOT")
    assert os.fstat(buffer.fd).st_blocks * 512 >= 1 << 20
    other = mmap.mmap(buffer.fd, 1 << 20)
    buffer.view[5:8] = b"abc"
    assert other[5:8] == b"abc"
    with pytest.raises(PermissionError):
        os.ftruncate(buffer.fd, 0)
    view = buffer.view[:8]
    buffer.close()
    buffer.close()
    assert bytes(view[5:8]) == b"abc"  # a view outlives close
    with pytest.raises(HostError, match="SNAPSHOT is closed"):
        _ = buffer.fd


def test_too_little_memory_names_both_sides() -> None:
    limit = MemoryLimit(RESERVE_BYTES + 4095, "/sys/fs/cgroup/memory.max, which is 100.0 MiB")
    with pytest.raises(HostError, match=r"PUBLISH needs 4096 bytes .* limited by /sys/fs/cgroup/memory.max, which is"):
        SharedBuffer(4096, "PUBLISH", limit)
    SharedBuffer(4095, "PUBLISH", limit).close()


def test_a_limit_of_the_process() -> None:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, before[1]))
    try:
        with pytest.raises(HostError, match="SNAPSHOT needs 2097152 bytes"):
            SharedBuffer(2 << 20, "SNAPSHOT")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)


def machine(folder: Path, groups: str) -> tuple[Path, Path]:
    proc, cgroups = folder / "proc", folder / "cgroup"
    (proc / "self").mkdir(parents=True)
    (proc / "meminfo").write_text("MemTotal: 9000 kB\nMemAvailable:    8000 kB\n")
    (proc / "self/cgroup").write_text(groups)
    return proc, cgroups


def group(folder: Path, names: tuple[str, str, str], limit: str, usage: int, cache: int) -> None:
    folder.mkdir(parents=True)
    (folder / names[0]).write_text(limit + "\n")
    (folder / names[1]).write_text(f"{usage}\n")
    (folder / "memory.stat").write_text(f"anon 1\n{names[2]} {cache}\n")


V2 = ("memory.max", "memory.current", "inactive_file")
V1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")


def test_the_tightest_group_above_counts(tmp_path: Path) -> None:
    proc, cgroups = machine(tmp_path, "0::/job/step\n")
    group(cgroups / "job", V2, "1000000", 700_000, 100_000)
    group(cgroups / "job/step", V2, "max", 600_000, 0)
    limit = memory_limit(proc, cgroups)
    assert limit.available_bytes == 400_000
    assert "job/memory.max" in limit.source


def test_version_1_and_a_group_that_is_not_seen_from_here(tmp_path: Path) -> None:
    proc, cgroups = machine(tmp_path, "4:memory:/outside/it\n1:cpu:/\n0::/\n")
    group(cgroups / "memory", V1, "2000000", 500_000, 0)
    assert memory_limit(proc, cgroups).available_bytes == 1_500_000


def test_no_group_limit(tmp_path: Path) -> None:
    proc, cgroups = machine(tmp_path, "4:memory:/\n")
    group(cgroups / "memory", V1, "9223372036854771712", 5, 0)
    limit = memory_limit(proc, cgroups)
    assert limit == MemoryLimit(8000 << 10, limit.source)
    assert "MemAvailable" in limit.source


def test_this_machine_has_memory() -> None:
    assert memory_limit().available_bytes > 0
