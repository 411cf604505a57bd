"""Whether a model fits on this machine, and what the node may hold of others' contributions. Asked before the node
offers itself to the run: a site that cannot hold the model is no member of a sync."""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass
from pathlib import Path

from atoll.node.daemon.config import NodeConfig
from atoll.node.daemon.deposit_box import box_bytes, most_on_disk
from atoll.node.daemon.journal import MAX_JOURNAL_BYTES
from atoll.node.daemon.published import gains_in_place
from atoll.node.daemon.shared_memory import RESERVE_BYTES, MemoryLimit, memory_limit
from atoll.node.daemon.site_log import MAX_LOG_BYTES, NUM_OLD_LOGS
from atoll.node.dataplane.footprint import MAX_CHECKPOINTS, Footprint, footprint
from atoll.protocol import file_systems
from atoll.protocol.disk import Disk, disk_error
from atoll.protocol.errors import HostError
from atoll.protocol.layout import Layout, Manifest
from atoll.protocol.settings import RunSettings
from atoll.protocol.text import byte_count

log = logging.getLogger("atoll.node")

USUAL_BUFFER_BYTES = 1 << 30
"""In memory for contributions, where a quarter of the free memory is more."""
MEMORY_SHARE = 4
"""The part of the free memory (one in so many) that contributions may take: the workers' gradients and optimizer are
not there yet when it is asked for."""
DISK_SHARE = 8
"""The part of the free disk (one in so many) that contributions leave to others."""


BYTES_OF_ADAMW = 8
"""For each parameter, in fp32."""
LOG_BYTES = (NUM_OLD_LOGS + 1) * MAX_LOG_BYTES + 2 * MAX_JOURNAL_BYTES

Parts = tuple[tuple[str, int], ...]
"""Each in words, with its bytes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Free:
    """What is free on this machine."""

    memory: MemoryLimit
    disk_bytes: int
    home_bytes: int
    """What the node's home has already of what the model needs."""
    home_is_in_memory: bool = False
    """Its files are memory that the kernel cannot drop (tmpfs)."""

    def memory_for_files(self, model: Footprint) -> int:
        """That the home still takes; 0 where it is on a disk."""
        return max(0, model.disk_bytes - self.home_bytes) if self.home_is_in_memory else 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Room:
    """What a reducer here may hold."""

    max_retained_bytes: int
    """Of contributions and payloads, in memory and on the disk."""
    reduce_buffer_bytes: int
    """Of contributions, in memory."""

    def __str__(self) -> str:
        in_memory = byte_count(self.reduce_buffer_bytes)
        return f"at most {byte_count(self.max_retained_bytes)}, {in_memory} of contributions in memory"


def room_for(
    model: Footprint,
    free: Free,
    home: Path,
    *,
    max_retained_bytes: int | None,
    reduce_buffer_bytes: int | None,
    has_buffers: bool,
    max_disk_bytes: int = 0,
    beside: Parts = (),
) -> Room:
    """`max_retained_bytes`, `reduce_buffer_bytes`: as a person set them; None: as much as the machine has room for.
    `has_buffers`: SNAPSHOT and PUBLISH are allocated already. `max_disk_bytes`: that the home may have, with what is in
    it `beside` the model's; 0: as much as there is.

    Raises HostError with the figures if the model does not fit.
    """
    shared_bytes = 0 if has_buffers else model.shared_bytes
    files_bytes = free.memory_for_files(model)
    free_memory = free.memory.available_bytes - shared_bytes - files_bytes - RESERVE_BYTES
    if free_memory < 0:
        files = f"{byte_count(files_bytes)} for files of {home}, which is in memory (choose a disk with --home), "
        raise HostError(
            f"the model does not fit into this machine's memory: {byte_count(shared_bytes)} are needed to share "
            f"parameters with the workers, {files if files_bytes else ''}and {byte_count(RESERVE_BYTES)} to spare, "
            f"{byte_count(free.memory.available_bytes)} are free, limited by {free.memory.source}; free memory, raise "
            "that limit, or train a smaller model"
        )
    free_disk = free.disk_bytes + free.home_bytes - model.disk_bytes
    if free_disk < 0:
        raise HostError(
            f"the model does not fit on the disk of {home}: {_in_words(model.disk_parts)}, "
            f"{byte_count(free.disk_bytes)} are free beside the {byte_count(free.home_bytes)} that it has; make room, "
            "choose another folder with --home, or begin the run with few sync.log_commits and sync.snapshots, or "
            "without save_every"
        )
    buffer = reduce_buffer_bytes
    if buffer is None:
        buffer = min(free_memory // MEMORY_SHARE, max(USUAL_BUFFER_BYTES, 2 * model.sync_bytes))
    retained = max_retained_bytes
    if retained is None:
        retained = buffer + model.sync_bytes + free_disk - free_disk // DISK_SHARE
    if max_disk_bytes:
        left = max_disk_bytes - sum(num_bytes for _, num_bytes in (*model.disk_parts, *beside))
        if left < 0:
            raise HostError(
                f"--max-disk-gb {max_disk_bytes / 1e9:g}: {_in_words((*model.disk_parts, *beside))} at the most, in "
                f"{home}; raise it, or begin the run with few sync.log_commits and sync.snapshots, or without "
                "save_every"
            )
        if max_retained_bytes is not None and retained - buffer > left:
            raise HostError(
                f"--max-retained-mib {retained >> 20}: {byte_count(retained - buffer)} of it would be on the disk, and "
                f"--max-disk-gb {max_disk_bytes / 1e9:g} leaves {byte_count(left)} for it; lower the one or raise the "
                "other"
            )
        retained = min(retained, buffer + left)
    return Room(max_retained_bytes=retained, reduce_buffer_bytes=buffer)


def _in_words(parts: Parts) -> str:
    total = sum(num_bytes for _, num_bytes in parts)
    listed = ", ".join(f"{byte_count(num_bytes)} {what}" for what, num_bytes in parts)
    return f"{byte_count(total)} are needed ({listed})"


def beside(settings: RunSettings, manifest: Manifest, max_disk_bytes: int) -> Parts:
    """What a home has at the most beside the state; of checkpoints those of AdamW, which are the largest."""
    num_bytes = MAX_CHECKPOINTS * BYTES_OF_ADAMW * manifest.num_trainable if settings.checkpoint_every else 0
    deposits = most_on_disk(box_bytes(max_disk_bytes))
    return ("checkpoints of an AdamW", num_bytes), ("records kept for the coordinator", deposits), ("logs", LOG_BYTES)


def room_of(
    config: NodeConfig,
    settings: RunSettings,
    manifest: Manifest,
    home: Path,
    disk: Disk,
    *,
    has_buffers: bool,
    read_in_place: bool = False,
) -> Room:
    """In a thread: what there is on this machine for that model, as `room_for` says. The disk is tried, too: what is
    free says nothing of quotas. Raises HostError."""
    layout, free = Layout(manifest, settings.sync.chunk_elements), free_for(home, disk)
    read_in_place = read_in_place and gains_in_place(layout, settings.sync, home)
    needs = footprint(layout, settings, config.num_kernel_threads, read_in_place=read_in_place)
    room = room_for(
        needs,
        free,
        home,
        max_retained_bytes=config.max_retained_bytes,
        reduce_buffer_bytes=config.reduce_buffer_bytes,
        has_buffers=has_buffers,
        max_disk_bytes=config.max_disk_bytes,
        beside=beside(settings, manifest, config.max_disk_bytes),
    )
    kind = file_systems.kind_of(home)
    if kind in file_systems.NETWORK:
        log.warning(
            "%s is on a network file system (%s): each commit waits for it, and what it has left for this node was not "
            "tried; put --home on a local disk",
            home,
            kind,
        )
    # Where files are in memory, to try it would take the memory.
    elif kind not in file_systems.IN_MEMORY and not disk.try_room(_there(home), needs.disk_bytes - free.home_bytes):
        log.info("%s: what a quota leaves for this node cannot be tried on %s; free space is believed", home, kind)
    return room


def _there(home: Path) -> Path:
    """It, or the nearest folder above it that is there."""
    return next(folder for folder in (home, *home.absolute().parents) if folder.is_dir())


def free_for(home: Path, disk: Disk) -> Free:
    """In a thread. `home` need not be there yet: it has nothing then, on the disk of the nearest folder above it that
    is. Raises HostError."""
    try:
        there = _there(home)
        used = 0
        for folder, _, names in os.walk(home):
            for name in names:
                try:
                    used += os.lstat(os.path.join(folder, name)).st_blocks * 512
                except FileNotFoundError:
                    continue  # removed meanwhile
    except OSError as error:
        raise disk_error(error, home) from error
    return Free(
        memory=memory_limit(),
        disk_bytes=disk.free_bytes(there),
        home_bytes=used,
        home_is_in_memory=file_systems.kind_of(home) in file_systems.IN_MEMORY,
    )
