"""A reducer's own error of a chunk, as it is given to an auditor, with what says so. Pure."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Given:
    """For an auditor: of one chunk."""

    error: bytes
    """What was added; empty if nothing was."""
    before_hash: bytes
    before_proof: bytes
    after_hash: bytes
    after_proof: bytes
    earlier_proof: bytes
    """That what was added is what the attempt before has left."""
