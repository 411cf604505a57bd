"""Where a rank computes, and with whom it talks."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist

from atoll.node.worker.connection import rank_and_world
from atoll.protocol.errors import ConfigError

BACKENDS_OF_OFFLOAD = "cpu:gloo,cuda:nccl"
"""The norm of gradients is summed over ranks where they are."""


@contextmanager
def device_of_rank(*, has_host_tensors: bool, collective_s: float | None) -> Iterator[torch.device]:
    """A GPU of its own if this host has any; with several ranks, a process group around it, for tensors in the host's
    memory too where there are any. `collective_s`: the limit of its collectives, if not torch's own."""
    rank, world = rank_and_world()
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    device = torch.device("cpu")
    if torch.cuda.is_available():
        if local_rank >= torch.cuda.device_count():
            raise ConfigError(
                f"rank {rank} has no GPU, of {torch.cuda.device_count()} here; lower --ranks or --parallel"
            )
        device = torch.device("cuda", local_rank)
        torch.cuda.set_device(device)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else f"{torch.get_num_threads()} threads"
    sys.stdout.write(f"rank {rank} trains on {device} ({name})\n")
    if world > 1:
        of_gpu = BACKENDS_OF_OFFLOAD if has_host_tensors else "nccl"
        backend = of_gpu if device.type == "cuda" else "gloo"
        limit = None if collective_s is None else timedelta(seconds=collective_s)
        dist.init_process_group(backend, timeout=limit)
    try:
        yield device
    finally:
        if world > 1:
            dist.destroy_process_group()
