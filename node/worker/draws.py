"""Which samples this rank trains on: its share of the site's leased positions, in their order. No torch."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import KW_ONLY, InitVar, dataclass

import numpy as np
import numpy.typing as npt

from atoll.protocol.messages import DataRange
from atoll.protocol.sample_order import SampleOrder

PREPARED_POSITIONS = 4096
"""Of the site, whose samples are computed at once: numpy is quick for many."""

Draw = Callable[[int, int, int], tuple[DataRange, ...]]
"""`LocalClient.draw`: epoch, place in the site's queue, samples -> positions, at least so many."""


def samples_at(order: SampleOrder, positions: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """The samples at many positions."""
    passes, values = np.divmod(positions, order.num_samples)
    result = values.astype(np.uint64)
    for number in np.unique(passes):
        waiting = np.flatnonzero(passes == number)
        while len(waiting):
            result[waiting] = order.permuted(int(number), result[waiting])
            waiting = waiting[result[waiting] >= order.num_samples]
    return result.astype(np.int64)


@dataclass(eq=False)
class LeasedBatches:
    """Batches of sample numbers for one rank. They count when the training loop says so (`step`), in the order in which
    they were drawn; what was drawn and not counted is drawn again after `rewind`.

    `next_batch` may be called from one other thread than the rest.
    """

    draw: Draw
    order: SampleOrder
    batch_size: int
    _: KW_ONLY
    reader: int
    """Place of this rank's data rank among those of the site."""
    num_readers: int
    epoch: InitVar[int]

    def __post_init__(self, epoch: int) -> None:
        self._lock = threading.Lock()
        self._epoch = epoch
        self._drawn = 0  # batches in this epoch, counted or not
        self._used = 0  # batches counted
        self._given_out = 0  # to the training loop since the last step
        self._fetched: deque[tuple[int, int]] = deque()  # of batches drawn and not given out: epoch, pass
        self._known: deque[DataRange] = deque()  # positions from the place of the next batch on
        self._num_known = 0
        self._prepared: deque[tuple[int, npt.NDArray[np.int64]]] = deque()  # the batches before those: pass, samples

    @property
    def num_samples_used(self) -> int:
        """By this rank, since the epoch began."""
        return self._used * self.batch_size

    @property
    def num_given_out(self) -> int:
        """Batches since the last step."""
        return self._given_out

    def rewind(self) -> None:
        """The next batch is the one after those that are counted."""
        with self._lock:
            self._fetched.clear()
            self._given_out = 0
            self._go_to(self._used)

    def begin_epoch(self, epoch: int) -> None:
        """What was drawn before counts no longer."""
        with self._lock:
            if epoch != self._epoch:
                self._epoch, self._used, self._given_out = epoch, 0, 0
                self._go_to(0)

    def _go_to(self, batch: int) -> None:
        self._drawn = batch
        self._known.clear()
        self._num_known = 0
        self._prepared.clear()

    def __iter__(self) -> Iterator[list[int]]:
        """All batches from the next one on, without an end: what a DataLoader takes as its batch sampler."""
        while True:
            yield self.next_batch().tolist()

    def next_batch(self) -> npt.NDArray[np.int64]:
        """`batch_size` samples; waits until they are leased."""
        count = self.batch_size * self.num_readers
        while True:
            with self._lock:
                if not self._prepared and self._num_known >= count:
                    self._prepare(count)
                epoch, place = self._epoch, self._drawn * count
                if self._prepared:
                    self._drawn += 1
                    number_of_pass, samples = self._prepared.popleft()
                    self._fetched.append((epoch, number_of_pass))
                    return samples
            ranges = self.draw(epoch, place, count)
            with self._lock:
                if (self._epoch, self._drawn * count) == (epoch, place):
                    self._known = deque(ranges)
                    self._num_known = sum(r.num_samples for r in ranges)

    def _prepare(self, count: int) -> None:
        num_batches = min(self._num_known // count, max(1, PREPARED_POSITIONS // count))
        positions = self._take(num_batches * count).reshape(num_batches, count)
        mine = positions[:, self.reader :: self.num_readers]
        passes = (positions[:, 0] // self.order.num_samples).tolist()  # the same at all readers
        self._prepared.extend(zip(passes, samples_at(self.order, mine.ravel()).reshape(mine.shape), strict=True))

    def _take(self, count: int) -> npt.NDArray[np.int64]:
        parts = []
        self._num_known -= count
        while count:
            item = self._known.popleft()
            taken = min(count, item.num_samples)
            parts.append(np.arange(item.first, item.first + taken, dtype=np.int64))
            if taken < item.num_samples:
                self._known.appendleft(DataRange(first=item.first + taken, num_samples=item.num_samples - taken))
            count -= taken
        return np.concatenate(parts)

    @property
    def next_pass(self) -> int | None:
        """Of the run, counted from 0: the one in which the oldest batch that was drawn begins. None if that batch
        counts no longer."""
        with self._lock:
            epoch, number_of_pass = self._fetched[0]
            return number_of_pass if epoch == self._epoch else None

    def give_out(self) -> bool:
        """The oldest batch that was drawn comes to the training loop. False: it counts no longer, leave it out."""
        with self._lock:
            if self._fetched.popleft()[0] != self._epoch:
                return False
            self._given_out += 1
            return True

    def step(self) -> None:
        """The batches that were given out since the last step are trained on."""
        with self._lock:
            self._used += self._given_out
            self._given_out = 0
