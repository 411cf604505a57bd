"""What ranks say that is more than a few numbers. See protocol/v1/local.proto."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class SealedReport:
    """See `LocalClient.sealed`."""

    step: int
    seq: int
    fragment: int
    data_rank: int
    tokens: int
    loss_sum: float
    num_steps: int
    train_s: float
    hashes: Mapping[int, bytes]
    num_samples_used: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class DataSet:
    """See `LocalClient.announce_data`."""

    num_samples: int
    batch_size: int
    batches_ahead: int
