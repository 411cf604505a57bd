"""torch's ZeroRedundancyOptimizer, and ranks to divide it among, in one process."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)  # torch's own, at import
    from torch.distributed.optim import ZeroRedundancyOptimizer

__all__ = ["ZeroRedundancyOptimizer", "rank_of_two"]


@contextmanager
def rank_of_two(rank: int) -> Iterator[None]:
    """In a group whose collectives do nothing."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=2)
    try:
        yield
    finally:
        dist.destroy_process_group()
