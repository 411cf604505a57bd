"""What was averaged here, for people who look at the run: no decision about bits hangs on it."""

from __future__ import annotations

import math
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field

from atoll.protocol.messages import Averaged


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """Of one chunk: all of it would take as long as the average does."""

    cosines: tuple[float, ...]
    """Of each contribution to the average."""
    average_share: float
    """The norm of the average over the mean of the contributions' norms."""
    last_cosine: tuple[float, ...]
    """Of the average to the one before; empty if that is not known."""


@dataclass(eq=False)
class Figures:
    """Threads note what they average. A sum for each contributor: there may be a million chunks."""

    sample: Sample | None = None
    codec_error: tuple[float, ...] = ()
    """What the codec loses of this site's contribution, relative to it, in one chunk; empty before that."""
    _lock: threading.Lock = field(default_factory=threading.Lock, init=False)
    _num_chunks: int = field(default=0, init=False)
    _squares: list[float] = field(default_factory=list, init=False)
    _num_high: list[int] = field(default_factory=list, init=False)

    def note(self, norms: Sequence[float], factors: Sequence[float]) -> None:
        """Of a chunk's contributions; the norms of those with a factor below 1 are high."""
        with self._lock:
            squares, high = self._squares or [0.0] * len(norms), self._num_high or [0] * len(norms)
            self._squares = [total + norm * norm for total, norm in zip(squares, norms, strict=True)]
            self._num_high = [number + (factor < 1) for number, factor in zip(high, factors, strict=True)]
            self._num_chunks += 1

    def as_message(self) -> Averaged | None:
        """None: nothing was averaged."""
        if not self._num_chunks:
            return None
        sample = self.sample
        return Averaged(
            num_chunks=self._num_chunks,
            norms=tuple(map(math.sqrt, self._squares)),
            num_high=tuple(self._num_high),
            cosines=sample.cosines if sample else (),
            average_share=sample.average_share if sample else 0.0,
            last_cosine=sample.last_cosine if sample else (),
            codec_error=self.codec_error,
        )
