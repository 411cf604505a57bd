"""What ranks say that is more than a few numbers. See protocol/v1/local.proto."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, kw_only=True)
class PieceHash:
    """`piece_hash` of a shared piece."""

    piece: int
    """Index into the rank's pieces."""
    hash: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class SealedReport:
    """This rank's owned pieces are in SNAPSHOT (device copies synchronized)."""

    step: int
    seq: int
    fragment: int
    data_rank: int
    tokens: int
    """Of this rank's batches since the base."""
    loss_sum: float = field(metadata={"finite": False})
    """Over the `num_steps` steps since the last report."""
    num_steps: int
    """0: this rank has no loss (a pipeline stage before the last)."""
    train_s: float
    hashes: tuple[PieceHash, ...] = ()
    """Of each shared piece, in their order, if the SNAPSHOT says `hash_shared`."""
    num_samples_used: int = 0
    """Drawn by this rank and trained on, since the epoch began."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DataSet:
    """A rank will draw samples of it; the same at all ranks that do."""

    num_samples: int
    batch_size: int
    """Of this rank."""
    batches_ahead: int
    """How many it may fetch before they are trained on."""
