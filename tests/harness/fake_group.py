"""Ranks of a process group one after the other in one process: collectives do nothing, meshes and slices are right."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist
from torch.distributed.tensor.debug import _clear_sharding_prop_cache
from torch.testing._internal.distributed.fake_pg import FakeStore


@contextmanager
def fake_rank(rank: int, world: int) -> Iterator[None]:
    _clear_sharding_prop_cache()  # type: ignore[no-untyped-call]  # of another rank: its meshes compare equal
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world)
    try:
        yield
    finally:
        dist.destroy_process_group()
