"""torch's ZeroRedundancyOptimizer, and ranks to divide it among, in one process."""

from __future__ import annotations

import warnings
from contextlib import AbstractContextManager

from tests.harness.fake_group import fake_rank

with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)  # torch's own, at import
    from torch.distributed.optim import ZeroRedundancyOptimizer

__all__ = ["ZeroRedundancyOptimizer", "rank_of_two"]


def rank_of_two(rank: int) -> AbstractContextManager[None]:
    return fake_rank(rank, 2)
